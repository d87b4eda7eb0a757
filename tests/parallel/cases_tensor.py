"""What tensor ranks do, each beside the whole model that it holds too. Run by `test_tensor.py`."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.split_models import (
    CHUNK,
    LENGTH,
    Shape,
    assert_gradients_equal,
    example_of,
    loss_of,
    mesh_of,
    split_model,
    summed_gradients,
    whole_model,
)
from tenfold.config.model import ModelConfig
from tenfold.evaluation.generation import generate_batch
from tenfold.nn.decoder import Decoder
from tenfold.nn.layers import Linear, Norm
from tenfold.nn.loss import IGNORE, cross_entropy_sum
from tenfold.nn.objective import Example, loss_sum
from tenfold.nn.recompute import Mode
from tenfold.parallel.mesh import Degrees
from tenfold.parallel.splits import vocabulary_of
from tenfold.parallel.tensor import TensorGroup
from tenfold.parallel.traffic import Collectives

BIASED = {"bias": True, "norm": "layernorm"}
GPT = {"positions": "learned", "activation": "gelu", **BIASED}
ENCODER = {"objective": "masked", "mask_token": 33, "norm_position": "post", "embedding_norm": True, **GPT}
SHARED = {"experts": 6, "prototypes": 2, "ffn": 7, "shared_experts": 1}

SHAPES: dict[str, Shape] = {
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


def equal_to_one_rank(degrees: Degrees, names: list[str]) -> None:
    """Loss, every gradient, hidden states and logits without gradients."""
    for name in names:
        try:
            _compare(SHAPES[name], degrees, 1e-10)
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error


def _compare(shape: Shape, degrees: Degrees, tolerance: float) -> None:
    whole = whole_model(shape)
    model, splits = split_model(shape, whole, degrees)
    example = example_of(whole.config)
    expected, loss = loss_of(whole, example), loss_of(model, example)
    expected.backward()
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(total, expected.detach(), **close)
    assert_gradients_equal(model, splits, whole, tolerance)
    with torch.no_grad():  # whole sequences on every rank, of any length
        for length in (1, LENGTH - 1):
            tokens = example.inputs[:, :length]
            hidden, theirs = model(tokens)[0], whole(tokens)[0]
            torch.testing.assert_close(hidden, theirs, **close)
            torch.testing.assert_close(model.logits(hidden), whole.logits(theirs), **close)
        torch.testing.assert_close(loss_of(model, example), expected.detach(), **close)


def single_precision(degrees: Degrees, names: list[str]) -> None:
    """In fp32 as on one rank; in bf16 within what rounding does."""
    for name in names:
        _compare({**SHAPES[name], "dtype": torch.float32}, degrees, 2e-5)
        shape = {**SHAPES[name], "dtype": torch.bfloat16}
        whole = whole_model(shape)
        model, splits = split_model(shape, whole, degrees)
        example = example_of(whole.config)
        loss_of(whole, example).backward()
        loss_of(model, example).backward()
        of_whole = dict(whole.named_parameters())
        for each, grad in summed_gradients(model, splits).items():
            theirs = splits[each].take(of_whole[each].grad)
            assert grad.dtype == torch.float32
            assert (grad - theirs).norm() < 0.05 * theirs.norm() + 0.05, (name, each)


def counted_collectives(degrees: Degrees, recompute: Mode) -> list[Counter[str]]:
    """Calls of the layers and embedding, the loss, the backward pass, and of a pass without gradients, with logits."""
    shape = {"layers": 3, "recompute": recompute}
    world = degrees.tensor
    model, _ = split_model(shape, whole_model(shape), degrees)
    seen_by: dict[str, set[int]] = {"norm": set(), "linear": set()}

    def look(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen_by["norm" if isinstance(module, Norm) else "linear"].add(inputs[0].shape[1])

    for module in model.modules():
        if isinstance(module, Norm | Linear):
            module.register_forward_pre_hook(look)
    example = example_of(model.config)
    with Collectives() as seen:
        hidden = model(example.inputs)[0]
    assert hidden.shape[1] == LENGTH // world
    assert seen_by == {"norm": {LENGTH // world}, "linear": {LENGTH}}
    assert {size for name, size in seen.calls if name == "all_gather_into_tensor"} == {hidden.numel()}
    assert {size for name, size in seen.calls if name == "reduce_scatter_tensor"} == {hidden.numel() * world}
    calls, found = counted_behind(model, hidden, example)
    assert {size for name, size in calls if name != "all_reduce"} == {hidden.numel()}
    return [seen.counts, *found]


def counted_behind(
    model: Decoder, hidden: Tensor, example: Example
) -> tuple[list[tuple[str, int]], list[Counter[str]]]:
    """Calls of the loss, with their sizes, and counts of those of loss, backward pass, and a pass without gradients."""
    with Collectives() as of_loss:
        loss = loss_sum(model, hidden, example, CHUNK)
    # Of the logits two numbers a token go round, and before them the largest.
    assert max(size for name, size in of_loss.calls if name == "all_reduce") == 2 * CHUNK
    with Collectives() as of_backward:
        loss.backward()
    with Collectives() as without, torch.no_grad():
        model.logits(model(example.inputs)[0])
    return of_loss.calls, [of_loss.counts, of_backward.counts, without.counts]


def cross_entropies() -> None:
    """`cross_entropy_sum` itself: rows uneven, some ranks with nothing but padding, all targets on one rank, none."""
    world, rank = dist.get_world_size(), dist.get_rank()
    for vocab, padded in ((51, 64), (17, 64), (34, 34), (5, 5)):
        config = ModelConfig(vocab_size=vocab, vocab_multiple=padded)
        ranks = TensorGroup(mesh_of(Degrees(tensor=world)).group("tensor"), world, rank, config)
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


def generated(degrees: Degrees) -> None:
    """Text from a cache of this rank's key heads alone, past the window too."""
    for name in (
        "grouped, fewer key heads than ranks",
        "llama, heads and widths uneven",
        "documents, learned positions",
    ):
        shape = SHAPES[name]
        whole = whole_model(shape)
        model, splits = split_model(shape, whole, degrees)
        rows = splits["layers.0.attention.wk.weight"].local_shape[0]
        assert model.new_cache(2, 4)._keys[0].shape[1] == rows // whole.config.head_width < whole.config.key_heads
        prompts = [[5, 1, 3, 8], [2], [9] * 20]
        for temperature in (0.0, 1.0):
            ours, theirs = (
                list(generate_batch(each, prompts, 8, temperature, top_k=20, batch_size=2)) for each in (model, whole)
            )
            assert ours == theirs, name
            assert len(theirs) == 24


def compiled(degrees: Degrees, shape: Shape, fullgraph: bool) -> None:
    """Layers compiled as training does it, with their collectives: where `fullgraph`, each in one graph."""
    shape = {"dtype": torch.float32, "bias": True, **shape}
    whole = whole_model(shape)
    model, splits = split_model(shape, whole, degrees)
    for layer in model.layers:
        layer.compile(fullgraph=fullgraph)
    example = example_of(whole.config)
    loss_of(whole, example).backward()
    loss_of(model, example).backward()
    of_whole = dict(whole.named_parameters())
    for each, grad in summed_gradients(model, splits).items():
        theirs = splits[each].take(of_whole[each].grad)
        assert (grad - theirs).norm() < 1e-5 * theirs.norm() + 1e-4, each
    if fullgraph:  # layers of several graphs take half a minute to be compiled for this too
        with torch.no_grad():
            torch.testing.assert_close(model(example.inputs)[0], whole(example.inputs)[0], rtol=1e-5, atol=1e-5)
