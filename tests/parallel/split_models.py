"""Models of which every rank has its part, beside the whole model that it holds too: what these tests share.

A shape is what a model has otherwise than `BASE`; "pattern", "parts", "rank" and "sets" are of the sharing, "recompute"
and "dtype" of how it is made, and "worlds" of the test.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tenfold.config.model import ModelConfig
from tenfold.config.parallel import ParallelConfig
from tenfold.nn.decoder import Decoder
from tenfold.nn.loss import IGNORE
from tenfold.nn.objective import Example, loss_sum, masked_example
from tenfold.nn.ranks import ALONE, Ranks
from tenfold.nn.recompute import Recompute
from tenfold.parallel.layout import Layout
from tenfold.parallel.mesh import Degrees, Mesh, check
from tenfold.parallel.splits import Split, cut
from tenfold.sharing.patterns import Pattern
from tenfold.sharing.tying import PARTS, Sharing, materialize, tie

Shape = dict[str, Any]
CPU = torch.device("cpu")
BATCH, LENGTH, CHUNK = 4, 24, 41  # sequences, over all data ranks; tokens; tokens whose logits are made at once

BASE: dict[str, Any] = {
    "vocab_size": 34, "vocab_multiple": 1, "layers": 2, "hidden": 20, "heads": 5, "head_dim": 4, "ffn": 13
}  # fmt: skip


def configured(shape: Shape) -> ModelConfig:
    mine = ("pattern", "parts", "rank", "sets", "recompute", "worlds", "dtype")
    return ModelConfig(**{**BASE, **{key: value for key, value in shape.items() if key not in mine}})


def sharing_of(shape: Shape, config: ModelConfig) -> Sharing:
    pattern = Pattern.parse(shape.get("pattern", "none"), config.layers)
    return Sharing(pattern, shape.get("parts", PARTS), shape.get("rank", 0), shape.get("sets", "free"))


def on_meta(shape: Shape, ranks: Ranks = ALONE) -> Decoder:
    config, dtype = configured(shape), shape.get("dtype", torch.float64)
    with torch.device("meta"):
        model = Decoder(config, LENGTH, dtype, Recompute(shape.get("recompute", "none")), ranks)
    tie(model.layers, sharing_of(shape, config))
    return model.double() if dtype == torch.float64 else model


def whole_model(shape: Shape, seed: int = 0) -> Decoder:
    """On one rank, every parameter random."""
    model = on_meta(shape)
    materialize(model, CPU)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return model


@functools.cache
def mesh_of(degrees: Degrees) -> Mesh:
    """The mesh of this rank's process."""
    return Mesh(degrees, "cpu")


def split_model(shape: Shape, whole: nn.Module, degrees: Degrees) -> tuple[Decoder, dict[str, Split]]:
    """This rank's part, which no data ranks split further, with the weights of `whole`; and what it holds."""
    config = configured(shape)
    check(degrees, config, BATCH, BATCH // degrees.data, [LENGTH])
    layout = Layout(mesh_of(degrees), ParallelConfig(), config, sharing_of(shape, config), LENGTH, CPU)
    model = on_meta(shape, layout.others)
    cut(model, layout.splits)
    materialize(model, CPU)
    of_whole = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        parameter.data.copy_(layout.splits[name].take(of_whole[name].data))
    return model, layout.splits


def example_of(config: ModelConfig, seed: int = 1) -> Example:
    """Random tokens, half of them from a few, so that documents end."""
    generator = torch.Generator().manual_seed(seed)
    assert config.vocab_size is not None
    tokens = torch.randint(0, config.vocab_size, (BATCH, LENGTH + 1), generator=generator)
    few = torch.randint(0, 6, tokens.shape, generator=generator)
    tokens = few.where(torch.rand(tokens.shape, generator=generator) < 0.5, tokens)
    if config.objective == "masked":
        return masked_example(tokens, config, 5, 0)
    targets = tokens[:, 1:].masked_fill(torch.rand(BATCH, LENGTH, generator=generator) < 0.2, IGNORE)
    return Example(tokens[:, :-1], targets)


def loss_of(model: Decoder, example: Example) -> Tensor:
    return loss_sum(model, model(example.inputs)[0], example, CHUNK)


def summed_gradients(model: nn.Module, splits: dict[str, Split]) -> dict[str, Tensor]:
    """The gradient of each parameter of this rank: the sum over the ranks that hold the same part."""
    mine = {
        name: (splits[name].held, parameter.grad)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    out = {}
    for name, (held, _) in mine.items():
        grads = [theirs[name][1] for theirs in everyone if theirs[name][0] == held]
        out[name] = torch.stack([grad for grad in grads if grad is not None]).sum(0)
    return out


def assert_gradients_equal(model: Decoder, splits: dict[str, Split], whole: nn.Module, tolerance: float) -> None:
    """Of every parameter, and each is there to compare: but for the bias of keys, of which nothing depends."""
    of_whole = {name: each.grad for name, each in whole.named_parameters() if each.requires_grad}
    grads = summed_gradients(model, splits)
    assert grads.keys() == of_whole.keys()
    for name, grad in grads.items():
        theirs = of_whole[name]
        assert theirs is not None, name
        assert name.endswith("wk.bias") or theirs.abs().max() > 1e-3, f"{name} has no gradient to compare"
        scale = theirs.abs().max().clamp(min=1)
        torch.testing.assert_close(
            grad / scale,
            splits[name].take(theirs) / scale,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda told, name=name: f"{name}: {told}",
        )
