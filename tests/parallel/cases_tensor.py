"""What tensor ranks do, each beside the whole model that it holds too. Run by `test_tensor.py`."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tenfold.config.model import ModelConfig
from tenfold.evaluation.generation import generate_batch
from tenfold.nn.decoder import Decoder
from tenfold.nn.layers import Linear, Norm
from tenfold.nn.loss import IGNORE, cross_entropy_sum
from tenfold.nn.objective import Example, loss_sum, masked_example
from tenfold.nn.ranks import ALONE, Ranks
from tenfold.nn.recompute import Mode, Recompute
from tenfold.parallel.context import SplitSequences
from tenfold.parallel.grid import tensor_ranks
from tenfold.parallel.mesh import Degrees, Mesh, check
from tenfold.parallel.splits import Split, cut, splits_of, vocabulary_of
from tenfold.parallel.tensor import TensorGroup
from tenfold.parallel.traffic import Collectives
from tenfold.sharing.patterns import Pattern
from tenfold.sharing.tying import PARTS, Sharing, materialize, tie

BASE: dict[str, Any] = {
    "vocab_size": 34, "vocab_multiple": 1, "layers": 2, "hidden": 20, "heads": 5, "head_dim": 4, "ffn": 13
}  # fmt: skip
BIASED = {"bias": True, "norm": "layernorm"}
GPT = {"positions": "learned", "activation": "gelu", **BIASED}
ENCODER = {"objective": "masked", "mask_token": 33, "norm_position": "post", "embedding_norm": True, **GPT}
SHARED = {"experts": 6, "prototypes": 2, "ffn": 7, "shared_experts": 1}
BATCH, LENGTH, CHUNK = 4, 24, 41

# Of the model; "pattern", "parts", "rank" and "sets" are of the sharing, "recompute" and "worlds" (all) of the test.
SHAPES: dict[str, dict[str, Any]] = {
    "llama, heads and widths uneven": {},
    "gpt2, biases, learned positions": {**GPT, "worlds": (2, 4)},
    "untied head, padded rows fill whole ranks": {"tie_embeddings": False, "vocab_size": 17, "vocab_multiple": 64},
    "grouped, key heads uneven": {"heads": 6, "kv_heads": 3, "qk_norm": True, "worlds": (2, 3)},
    "grouped, fewer key heads than ranks": {"heads": 12, "kv_heads": 2, "qk_norm": True, "bias": True, "worlds": (4,)},
    "multi-query": {"heads": 12, "kv_heads": 1, "qk_norm": True, "worlds": (2, 3)},
    "documents, grouped": {"document_end": 3, "heads": 8, "kv_heads": 4, "worlds": (2, 4)},
    "documents, learned positions": {"document_end": 3, **GPT, "worlds": (2, 4)},
    "factorised": {"embedding_width": 5, "bias": True},
    "encoder": {**ENCODER, "worlds": (2, 4)},
    "encoder, factorised, documents": {**ENCODER, "embedding_width": 6, "document_end": 3},
    "recompute": {"recompute": "full", "worlds": (2, 4)},
    "selective recompute": {"recompute": "selective", "worlds": (2, 4)},
    "selective recompute, norms last": {"recompute": "selective", **ENCODER},
    "pseudo": {"layers": 4, "pattern": {"cycle": 2}},
    "pseudo, attention alone": {"layers": 4, "pattern": "all", "parts": ("attention",), **GPT, "worlds": (2, 4)},
    "relaxed": {"layers": 3, "pattern": "all", "rank": 2, "heads": 8, "kv_heads": 2, "worlds": (2, 4)},
    "experts that share, prototypes": {"moe": SHARED, "sets": "prototype"},
    "experts that share, layer, relaxed": {"moe": SHARED, "sets": "layer", "pattern": "all", "rank": 2},
}


def configured(shape: dict[str, Any]) -> ModelConfig:
    mine = ("pattern", "parts", "rank", "sets", "recompute", "worlds", "dtype")
    return ModelConfig(**{**BASE, **{key: value for key, value in shape.items() if key not in mine}})


def on_meta(shape: dict[str, Any], ranks: Ranks = ALONE) -> Decoder:
    config = configured(shape)
    pattern = Pattern.parse(shape.get("pattern", "none"), config.layers)
    sharing = Sharing(pattern, shape.get("parts", PARTS), shape.get("rank", 0), shape.get("sets", "free"))
    dtype = shape.get("dtype", torch.float64)
    with torch.device("meta"):
        model = Decoder(config, LENGTH, dtype, Recompute(shape.get("recompute", "none")), ranks)
    tie(model.layers, sharing)
    return model.double() if dtype == torch.float64 else model


def whole_model(shape: dict[str, Any], seed: int = 0) -> Decoder:
    """On one rank, every parameter random."""
    model = on_meta(shape)
    materialize(model, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return model


@functools.cache
def mesh_of(context: int = 1, grid: bool = False) -> Mesh:
    """All ranks but for these of the context are tensor ranks."""
    return Mesh(Degrees(tensor=dist.get_world_size() // context, context=context, grid=grid), "cpu")


def split_model(shape: dict[str, Any], whole: nn.Module, **layout: Any) -> tuple[Decoder, dict[str, Split]]:
    """This rank's part, with the weights of `whole`, in a `layout` of `mesh_of`; and what it holds."""
    config, mesh = configured(shape), mesh_of(**layout)
    check(mesh.degrees, config, BATCH, BATCH, [LENGTH])
    sequences = SplitSequences(mesh.group("context")) if mesh.degrees.context > 1 else ALONE.context
    ranks = Ranks(tensor_ranks(mesh, config), sequences, ALONE.expert)
    model = on_meta(shape, ranks)
    splits = splits_of(model, config, mesh.degrees, mesh.place["tensor"], 0)
    cut(model, splits)
    materialize(model, torch.device("cpu"))
    of_whole = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        parameter.data.copy_(splits[name].take(of_whole[name].data))
    return model, splits


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


def summed_gradients(model: nn.Module, splits: dict[str, Split], context: int = 1) -> dict[str, Tensor]:
    """The gradient of each parameter of this rank: the sum over the ranks that hold the same part."""
    mine = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    out = {}
    for name in mine:
        size = len(everyone) // context
        grads = [grad[name] for rank, grad in enumerate(everyone) if rank % size in splits[name].tensor_copies]
        out[name] = torch.stack([grad for grad in grads if grad is not None]).sum(0)
    return out


def equal_to_one_rank(names: list[str], layout: dict[str, Any]) -> None:
    """Loss, every gradient, hidden states and logits without gradients."""
    for name in names:
        try:
            _compare(SHAPES[name], 1e-10, **layout)
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error


def _compare(shape: dict[str, Any], tolerance: float, **layout: Any) -> None:
    whole = whole_model(shape)
    model, splits = split_model(shape, whole, **layout)
    example = example_of(whole.config)
    expected, loss = loss_of(whole, example), loss_of(model, example)
    expected.backward()
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(total, expected.detach(), **close)
    of_whole = dict(whole.named_parameters())
    grads = summed_gradients(model, splits, layout.get("context", 1))
    assert grads.keys() == of_whole.keys()
    for each, grad in grads.items():
        theirs = of_whole[each].grad
        assert theirs is not None, each
        scale = theirs.abs().max().clamp(min=1)
        assert each.endswith("wk.bias") or theirs.abs().max() > 1e-3, f"{each} has no gradient to compare"
        torch.testing.assert_close(
            grad / scale, splits[each].take(theirs) / scale, **close, msg=lambda told, each=each: f"{each}: {told}"
        )
    with torch.no_grad():  # whole sequences on every rank, of any length
        for length in (1, LENGTH - 1):
            tokens = example.inputs[:, :length]
            hidden, theirs = model(tokens)[0], whole(tokens)[0]
            torch.testing.assert_close(hidden, theirs, **close)
            torch.testing.assert_close(model.logits(hidden), whole.logits(theirs), **close)
        torch.testing.assert_close(loss_of(model, example), expected.detach(), **close)


def single_precision(names: list[str], **layout: Any) -> None:
    """In fp32 as on one rank; in bf16 within what rounding does."""
    for name in names:
        _compare({**SHAPES[name], "dtype": torch.float32}, 2e-5, **layout)
        shape = {**SHAPES[name], "dtype": torch.bfloat16}
        whole = whole_model(shape)
        model, splits = split_model(shape, whole, **layout)
        example = example_of(whole.config)
        loss_of(whole, example).backward()
        loss_of(model, example).backward()
        of_whole = dict(whole.named_parameters())
        for each, grad in summed_gradients(model, splits).items():
            theirs = splits[each].take(of_whole[each].grad)
            assert grad.dtype == torch.float32
            assert (grad - theirs).norm() < 0.05 * theirs.norm() + 0.05, (name, each)


def counted_collectives(recompute: Mode) -> list[Counter[str]]:
    """Calls of the layers and embedding, the loss, the backward pass, and of a pass without gradients, with logits."""
    shape = {"layers": 3, "recompute": recompute}
    world = dist.get_world_size()
    model, _ = split_model(shape, whole_model(shape))
    seen_by: dict[str, set[int]] = {"norm": set(), "linear": set()}

    def look(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen_by["norm" if isinstance(module, Norm) else "linear"].add(inputs[0].shape[1])

    for module in model.modules():
        if isinstance(module, Norm | Linear):
            module.register_forward_pre_hook(look)
    example = example_of(model.config)
    found = []
    with Collectives() as seen:
        hidden = model(example.inputs)[0]
    assert hidden.shape[1] == LENGTH // world
    assert seen_by == {"norm": {LENGTH // world}, "linear": {LENGTH}}
    assert {size for name, size in seen.calls if name == "all_gather_into_tensor"} == {hidden.numel()}
    assert {size for name, size in seen.calls if name == "reduce_scatter_tensor"} == {hidden.numel() * world}
    found.append(seen.counts)
    with Collectives() as seen:
        loss = loss_sum(model, hidden, example, CHUNK)
    # Of the logits two numbers a token go round, and before them the largest.
    assert max(size for name, size in seen.calls if name == "all_reduce") == 2 * CHUNK
    assert {size for name, size in seen.calls if name != "all_reduce"} == {hidden.numel()}
    found.append(seen.counts)
    with Collectives() as seen:
        loss.backward()
    found.append(seen.counts)
    with Collectives() as seen, torch.no_grad():
        model.logits(model(example.inputs)[0])
    found.append(seen.counts)
    return found


def cross_entropies() -> None:
    """`cross_entropy_sum` itself: rows uneven, some ranks with nothing but padding, all targets on one rank, none."""
    world, rank = dist.get_world_size(), dist.get_rank()
    for vocab, padded in ((51, 64), (17, 64), (34, 34), (5, 5)):
        config = ModelConfig(vocab_size=vocab, vocab_multiple=padded)
        ranks = TensorGroup(mesh_of().group("tensor"), world, rank, config)
        rows = vocabulary_of(config, world, rank)
        generator = torch.Generator().manual_seed(vocab)
        hidden, weight, bias = (
            torch.randn(size, generator=generator, dtype=torch.float64) for size in ((22, 6), (padded, 6), (padded,))
        )
        drawn = torch.randint(vocab, (22,), generator=generator)
        drawn[[3, 20]] = IGNORE
        for targets in (drawn, torch.full_like(drawn, vocab - 1), torch.full_like(drawn, IGNORE)):
            for chunk, with_bias in ((5, True), (100, False)):
                whole = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
                part = [hidden.clone().requires_grad_(), weight[rows.start : rows.stop].clone().requires_grad_()]
                if with_bias:
                    whole.append(bias.clone().requires_grad_())
                    part.append(bias[rows.start : rows.stop].clone().requires_grad_())
                counted = torch.arange(22) % world == rank
                biases = (whole[2], part[2]) if with_bias else (None, None)
                ours = cross_entropy_sum(part[0], part[1], targets, vocab, chunk, biases[1], ranks, counted)
                theirs = cross_entropy_sum(whole[0], whole[1], targets, vocab, chunk, biases[0])
                (3 * ours).backward()
                (3 * theirs).backward()
                for each in (ours := ours.detach(), part[0].grad):
                    dist.all_reduce(each)
                torch.testing.assert_close(ours, theirs.detach())
                torch.testing.assert_close(part[0].grad, whole[0].grad)
                for mine, its in zip(part[1:], whole[1:], strict=True):
                    torch.testing.assert_close(mine.grad, its.grad[rows.start : rows.stop])


def generated() -> None:
    """Text from a cache of this rank's key heads alone, past the window too."""
    for name in (
        "grouped, fewer key heads than ranks",
        "llama, heads and widths uneven",
        "documents, learned positions",
    ):
        shape = SHAPES[name]
        whole = whole_model(shape)
        model, splits = split_model(shape, whole)
        rows = splits["layers.0.attention.wk.weight"].local_shape[0]
        assert model.new_cache(2, 4)._keys[0].shape[1] == rows // whole.config.head_width < whole.config.key_heads
        prompts = [[5, 1, 3, 8], [2], [9] * 20]
        for temperature in (0.0, 1.0):
            ours, theirs = (
                list(generate_batch(each, prompts, 8, temperature, top_k=20, batch_size=2)) for each in (model, whole)
            )
            assert ours == theirs, name
            assert len(theirs) == 24


def compiled() -> None:
    """Layers compiled as training does it, each in one graph, its collectives too."""
    shape = {"dtype": torch.float32, "recompute": "selective", "bias": True}
    whole = whole_model(shape)
    model, splits = split_model(shape, whole)
    for layer in model.layers:
        layer.compile(fullgraph=True)
    example = example_of(whole.config)
    loss_of(whole, example).backward()
    loss_of(model, example).backward()
    of_whole = dict(whole.named_parameters())
    for each, grad in summed_gradients(model, splits).items():
        theirs = splits[each].take(of_whole[each].grad)
        assert (grad - theirs).norm() < 1e-5 * theirs.norm() + 1e-4, each
    with torch.no_grad():
        torch.testing.assert_close(model(example.inputs)[0], whole(example.inputs)[0], rtol=1e-5, atol=1e-5)
