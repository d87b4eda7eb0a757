"""What context ranks do in `test_context`; every function runs on each of them."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tenfold.config.model import ModelConfig
from tenfold.nn.attend import Context
from tenfold.nn.decoder import Decoder
from tenfold.nn.documents import document_mask, documents_of
from tenfold.nn.init import initialize
from tenfold.nn.moe import Z_LOSS
from tenfold.nn.objective import loss_sum, make_example
from tenfold.nn.ranks import ALONE, Ranks
from tenfold.nn.recompute import Mode, Recompute
from tenfold.parallel.context import SplitSequences
from tenfold.sharing.patterns import Pattern
from tenfold.sharing.tying import PARTS, Sharing, tie

LENGTH, END = 24, 7
MODES: tuple[Mode, ...] = ("none", "selective", "full")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2}


class Rings:
    """Counts how often something is sent to the next rank."""

    def __init__(self) -> None:
        self.sent, self._real = 0, dist.batch_isend_irecv

    def __enter__(self) -> Rings:
        dist.batch_isend_irecv = self._count
        return self

    def __exit__(self, *_: object) -> None:
        dist.batch_isend_irecv = self._real

    def _count(self, operations: list[Any]) -> list[Any]:
        assert len(operations) == 2
        self.sent += 1
        return self._real(operations)


def ring() -> SplitSequences:
    """All ranks of the test split sequences."""
    assert dist.group.WORLD is not None
    return SplitSequences(dist.group.WORLD)


def text(seed: int, rows: int = 3) -> Tensor:
    """Tokens in which documents end anywhere: often, seldom and never."""
    tokens = torch.randint(8, 50, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))
    ends = torch.rand(rows, LENGTH, generator=torch.Generator().manual_seed(seed + 1))
    return tokens.where(ends > torch.tensor([0.4, 0.1, 0.0])[:rows, None], END)


def attention() -> None:
    """Output and gradients of attention alone, against plain softmax of whole sequences in float64."""
    context = ring()
    for number, (causal, documents, key_heads, dtype) in enumerate(
        itertools.product([True, False], [True, False], [4, 2], TOLERANCE)
    ):
        generator = torch.Generator().manual_seed(number)

        def sample(heads: int, generator: torch.Generator = generator, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(3, LENGTH, heads, 8, generator=generator).to(dtype).transpose(1, 2)

        whole = [sample(heads).requires_grad_() for heads in (4, key_heads, key_heads)]
        weights = sample(4)
        starts = documents_of(text(number), END).starts if documents else None
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
        if starts is not None:
            mask = document_mask(starts, 3, LENGTH, causal)
        elif causal:
            mask = mask.tril()
        q, k, v = (x.double() if x.shape[1] == 4 else x.double().repeat_interleave(2, dim=1) for x in whole)
        expected = (q @ k.transpose(2, 3) / 8**0.5).masked_fill(~mask, -torch.inf).softmax(-1) @ v
        expected_grads = torch.autograd.grad((expected * weights).sum(), whole)

        def part(x: Tensor) -> Tensor:
            return context.own(x.transpose(1, 2)).transpose(1, 2)

        mine = [part(x.detach()).requires_grad_() for x in whole]
        with Rings() as rings:
            found = context.attend(*mine, Context(None, (), causal, starts))
            assert rings.sent == context.size - 1
            grads = torch.autograd.grad((found * part(weights)).sum(), mine)
            assert rings.sent == 3 * (context.size - 1)
        assert found.dtype == dtype
        close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype], "msg": f"{causal} {documents} {key_heads} {dtype}"}
        torch.testing.assert_close(found.double(), part(expected), **close)
        for grad, expected_grad in zip(grads, expected_grads, strict=True):
            assert grad.dtype == dtype
            torch.testing.assert_close(grad.double(), part(expected_grad).double(), **close)


SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"positions": "rotary", "heads": 4, "kv_heads": 2, "qk_norm": True},
    "gpt": {"positions": "learned", "bias": True, "norm": "layernorm"},
    "documents": {"positions": "rotary", "heads": 4, "kv_heads": 1, "document_end": END},
    "learned documents": {"positions": "learned", "document_end": END},
    "mixture": {"positions": "rotary", "moe": {"experts": 4, "ffn": 8, "prototypes": 2}},
    "encoder": {"positions": "learned", "objective": "masked", "mask_token": 49, "norm_position": "post"},
    "encoder of documents": {"positions": "rotary", "objective": "masked", "mask_token": 49, "document_end": END},
}


def build(shape: str, ranks: Ranks = ALONE, dtype: torch.dtype = torch.float64, recompute: Mode = "none") -> Decoder:
    """A tiny model; layers 0 and 3 are one, and 1 and 2."""
    fields = {"vocab_size": 50, "layers": 4, "hidden": 16, "heads": 2, "ffn": 24, "init_std": 0.2, **SHAPES[shape]}
    config = ModelConfig(**fields)
    model = Decoder(config, LENGTH, dtype, Recompute(recompute), ranks)
    tie(model.layers, Sharing(Pattern.parse("sandwich", config.layers), PARTS))
    initialize(model, 0)
    return model.double() if dtype == torch.float64 else model


def models(dtype: torch.dtype, tolerance: float, recomputes: list[Mode], shapes: list[str]) -> None:
    """Hidden states, loss and gradients of whole models against the same model on one rank."""
    ranks = Ranks(ALONE.tensor, ring(), ALONE.expert)
    for shape, recompute in itertools.product(shapes, recomputes):
        alone, split = build(shape, dtype=dtype), build(shape, ranks, dtype, recompute)
        tokens = torch.cat((text(5), torch.full((3, 1), 9)), 1)
        example = make_example(tokens, alone.config, 1, 0)
        expected_hidden, expected_statistics = alone(example.inputs)
        expected = loss_sum(alone, expected_hidden, example, 8)
        expected.backward()
        hidden, statistics = split(example.inputs)
        loss = loss_sum(split, hidden, example, 8)
        loss.backward()
        close = {"rtol": tolerance, "atol": tolerance}
        torch.testing.assert_close(
            hidden, ranks.context.own(expected_hidden), **close, msg=lambda it, at=shape: at + it
        )
        total = loss.detach().clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total, expected.detach(), rtol=tolerance, atol=tolerance)
        dist.all_reduce(statistics := statistics.detach())  # balance is of whole sequences: `nn.ranks.ExpertRanks`
        torch.testing.assert_close(
            statistics[:, Z_LOSS:], expected_statistics.detach()[:, Z_LOSS:], rtol=max(tolerance, 1e-6), atol=tolerance
        )
        for (name, mine), theirs in zip(split.named_parameters(), alone.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None), name
            if mine.grad is None or theirs.grad is None:
                continue
            assert theirs.grad.any() or "output_bias" in name, name
            dist.all_reduce(mine.grad)
            scale = max(1.0, theirs.grad.abs().max().item())
            torch.testing.assert_close(
                mine.grad / scale, theirs.grad / scale, **close, msg=lambda it, at=f"{shape} {name}": at + it
            )
        with torch.no_grad():  # whole sequences, on every rank, of any length
            short = example.inputs[:, :7]
            torch.testing.assert_close(split(short)[0], alone(short)[0], rtol=0, atol=0)


def operator() -> None:
    """Fake tensors, autograd and tracing agree with the real thing."""
    name = ring()._name
    generator = torch.Generator().manual_seed(0)
    starts = documents_of(text(0), END).starts
    q, k, v = (
        torch.randn(3, LENGTH // dist.get_world_size(), heads, 8, generator=generator).transpose(1, 2).requires_grad_()
        for heads in (4, 2, 2)
    )
    for each in (starts, None):
        arguments = (q, k, v, each, True, name)
        torch.library.opcheck(torch.ops.tenfold.ring_attention.default, arguments)


def compiled() -> None:
    """Compiled blocks, recomputed and not, give the gradients of plain ones."""
    ranks = Ranks(ALONE.tensor, ring(), ALONE.expert)
    for recompute in MODES:
        tokens = text(3)
        plain, fast = build("documents", ranks), build("documents", ranks, recompute=recompute)
        for block in fast.layers[:1]:
            block.compile(backend="aot_eager_decomp_partition", fullgraph=True)
        for model in (plain, fast):
            model(tokens)[0].square().sum().backward()
        for mine, theirs in zip(fast.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-5)
