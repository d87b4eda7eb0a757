"""What training asks of all ranks together, and the answers of one that is alone. `layout.Layout` answers for many."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import TypeVar

import torch
from torch import Tensor, nn

from tenfold.nn.decoder import Decoder
from tenfold.nn.objective import Example, backward
from tenfold.parallel.pieces import local_of
from tenfold.parallel.sums import Sums
from tenfold.sharing.tying import users

T = TypeVar("T")
Borrow = Callable[[Sequence[nn.Parameter]], AbstractContextManager[object]]
"""Within it the gradients of these parameters are here, wherever they lie, and what is changed in them is kept."""


class Rank:
    """One rank that has the whole model to itself."""

    alone = True
    number = 0
    """This rank's; rank 0 writes and tells."""
    ranks = 1
    data = 1
    """Ranks that have samples of their own."""
    tensor = 1
    """Ranks that split every layer."""

    def __init__(self) -> None:
        self.before_pass: Callable[[bool], None] = lambda _: None
        """Told before a micro-batch whether it is the last of its step."""
        self.before_schedule: Callable[[Mapping[nn.Parameter, int]], None] = lambda _: None
        """Told in its place, before all passes of a pipeline's schedule, in how many of them each parameter gets a
        gradient."""

    def run_passes(
        self, model: Decoder, micro_batches: Sequence[Example], valid_tokens: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        """Forward and backward of a step's micro-batches: this rank's part of the summed loss, and of statistics
        [L, columns of `nn.moe`]. Gradients are those of the mean over `valid_tokens`, the whole step's."""
        loss_parts = statistics_parts_LS = torch.zeros((), device=valid_tokens.device)
        for number, part in enumerate(micro_batches, start=1):
            last = number == len(micro_batches)
            self.begin_pass(model, last)
            self.before_pass(last)
            loss, statistics_LS = backward(model, part, valid_tokens, chunk)
            loss_parts = loss_parts + loss
            statistics_parts_LS = statistics_parts_LS + statistics_LS
        return loss_parts, statistics_parts_LS

    def begin_pass(self, model: Decoder, last: bool) -> None:
        """Before a micro-batch, the `last` of a step or not."""

    def users(self, model: Decoder) -> Mapping[nn.Parameter, Sequence[int]]:
        """Which layers, of all ranks, use each parameter of layers."""
        return users(model.layers)

    def add_gradients(self, model: Decoder, borrow: Borrow = nullcontext) -> None:
        """Make gradients whole that several ranks have parts of, after the last pass of a step. `borrow` is given those
        that are needed at once."""

    def added(self, model: Decoder) -> set[nn.Parameter]:
        """The parameters whose gradients `add_gradients` makes whole."""
        return set()

    def copies(self, model: Decoder) -> Mapping[nn.Parameter, int]:
        """How many ranks hold the same numbers of each parameter; those of one alone may be left out."""
        return {}

    def total(self, *tensors: Tensor) -> list[Tensor]:
        """The sum over all ranks of each of `tensors`, in one exchange."""
        return list(tensors)

    def largest(self, tensor: Tensor) -> Tensor:
        """The maximum over all ranks."""
        return tensor

    def of_all(self, value: T) -> list[T]:
        """Every rank's `value`."""
        return [value]

    def sums(self, model: Decoder) -> Sums:
        """What makes sums over parameters whole of which ranks have pieces. Every rank must call it."""
        return Sums()

    def let_go(self, model: Decoder) -> None:
        """Have each rank hold its own share of the weights alone: before they change, are looked at, or saved."""


ALONE = Rank()


@torch.no_grad()
def gradient_norm(
    model: Decoder, rank: Rank, kind: float = 2.0, away: Mapping[nn.Parameter, Tensor] = MappingProxyType({})
) -> Tensor:
    """The norm (2 or infinity) of the gradient of all stored parameters of all ranks, each once.

    `away` has the norms of gradients that are not here.
    """
    copies = rank.copies(model)
    here = {each: local_of(each.grad) for each in model.parameters() if each.grad is not None}
    norms = dict(zip(here, torch._foreach_norm(list(here.values()), kind), strict=True)) if here else {}
    norms |= away
    if not norms:
        raise ValueError("no parameter has a gradient")
    trained = [parameter for parameter in model.parameters() if parameter in norms]
    stacked = torch.stack([norms[parameter] for parameter in trained])
    if rank.alone:
        return torch.linalg.vector_norm(stacked, kind)
    if kind == math.inf:
        return rank.largest(stacked.max())
    shares = torch.tensor([1 / copies.get(parameter, 1) for parameter in trained], device=stacked.device)
    (total,) = rank.total((stacked.double().square() * shares).sum())
    return total.sqrt().to(stacked.dtype)


@torch.no_grad()
def clip_gradients(parameters: Sequence[nn.Parameter], largest: float, norm: Tensor) -> Tensor:
    """Scale gradients so that their `norm` is at most `largest`; by what."""
    factor = (largest / (norm + 1e-6)).clamp(max=1.0)
    if here := [local_of(each.grad) for each in parameters if each.grad is not None]:
        torch._foreach_mul_(here, factor)
    return factor
