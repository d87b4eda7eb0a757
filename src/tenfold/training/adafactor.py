"""Adafactor (arXiv 1804.04235, as `torch.optim.Adafactor` has it) of parameters of which ranks have pieces.

Its means over rows and columns, and its norms of weights and updates, are of whole parameters. Each rank adds up what
it has, and at most three exchanges make it whole for several parameters at once (`parallel.sums`): squares of gradients
and weights; means over rows, added up; squares of updates. Of stacks, whose matrices data and expert ranks have whole,
these are norms alone. The state of a piece is its rows' means, and its columns', which all have that split its rows.

On one rank of a CPU its updates are PyTorch's to the last bit. On many they differ by the order of sums. (PyTorch's own
refuses DTensors: it squares in place what is a part of a norm. Pieces of tensor and expert ranks are none anyway.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tenfold.parallel.pieces import local_of
from tenfold.parallel.sums import Span, Spread, Sums, summed_together


class Adafactor(torch.optim.Adafactor):
    """Steps `groups` of parameters, whose sums over ranks are made whole by `sums`."""

    def __init__(self, groups: Iterable[Any], lr: float = 1e-2, sums: Sums | None = None) -> None:
        super().__init__(groups, lr=lr)
        self._sums = Sums() if sums is None else sums

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of all parameters that have a gradient. All ranks must take it, with the same parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parts = [
            _Part(local_of(each), local_of(each.grad), self.state[each], group, self._sums.spread(each))
            for group in self.param_groups
            for each in group["params"]
            if each.grad is not None
        ]
        for run in summed_together([each.spread.elements for each in parts]):
            self._step(parts[run])
        return loss

    def _step(self, parts: Sequence[_Part]) -> None:
        terms: list[tuple[Tensor, Span]] = []
        for each in parts:
            each.begin()
            terms.append((_square(each.weight), each.spread.all))
            if each.factored:
                terms.append((torch.norm(each.gradient, dim=-1, keepdim=True).square_(), each.spread.row))
                terms.append((torch.norm(each.gradient, dim=-2, keepdim=True).square_(), each.spread.column))
        sums = iter(self._sums.whole(terms))
        squares, terms = [], []
        for each in parts:
            squares.append(next(sums))
            if each.factored:
                each.take_in(next(sums), next(sums))
                terms.append((each.kept("row_var").sum(dim=-2, keepdim=True), each.spread.column))
        sizes = [each.size_of_step(norm) for each, norm in zip(parts, _norms(squares), strict=True)]
        sums = iter(self._sums.whole(terms))
        updates = [each.update(next(sums) if each.factored else None) for each in parts]
        squares = self._sums.whole(
            [(_square(update), each.spread.all) for each, update in zip(parts, updates, strict=True)]
        )
        for each, size, update, norm in zip(parts, sizes, updates, _norms(squares), strict=True):
            denominator = max(1.0, norm / (each.count**0.5 * each.group["d"]))
            each.weight.add_(update, alpha=-size / denominator)


@dataclass
class _Part:
    """What a rank has of a parameter that is to be stepped."""

    weight: Tensor
    gradient: Tensor
    state: dict[str, Any]
    group: dict[str, Any]
    spread: Spread

    @property
    def factored(self) -> bool:
        return self.gradient.dim() > 1

    @property
    def count(self) -> int:
        """Numbers of the whole parameter."""
        return math.prod(self.spread.shape)

    def kept(self, key: str) -> Tensor:
        """What of a tensor of state is this rank's."""
        return local_of(self.state[key])

    def begin(self) -> None:
        """Have state, and count the step."""
        state, shape = self.state, self.gradient.shape
        if not state:
            state["step"] = torch.tensor(0.0)
            if self.factored:
                state["row_var"] = self.gradient.new_zeros(*shape[:-1], 1)
                state["col_var"] = self.gradient.new_zeros(*shape[:-2], 1, shape[-1])
            else:
                state["variance"] = torch.zeros_like(self.gradient)
        state["step"] += 1
        self._steps: float = state["step"].item()
        self._newest: float = self._steps ** self.group["beta2_decay"]

    def take_in(self, rows: Tensor, columns: Tensor) -> None:
        """Squares of the gradient summed over rows and over columns."""
        self.kept("row_var").lerp_(rows.div_(self.spread.shape[-1]), self._newest)
        self.kept("col_var").lerp_(columns.div_(self.spread.shape[-2]), self._newest)

    def size_of_step(self, norm: float) -> float:
        """By the norm of the weight, which decays here."""
        lr, decay = self.group["lr"], self.group["weight_decay"]
        rate = min(lr, 1 / self._steps**0.5)
        size: float = max(self.group["eps"][1], norm / self.count**0.5) * rate
        if decay != 0:
            self.weight.mul_(1 - lr * decay)
        return size

    def update(self, rows: Tensor | None) -> Tensor:
        """Of the weight, of size 1 as far as is known; `rows` are the means over rows, summed over all of them."""
        eps = self.group["eps"][0]
        eps = torch.finfo(self.weight.dtype).eps if eps is None else eps
        if rows is None:
            variance = self.kept("variance").lerp_(self.gradient * self.gradient, self._newest)
            estimate = variance.clone()
        else:
            estimate = self.kept("row_var") @ self.kept("col_var")
            estimate.div_(rows.div_(self.spread.shape[-2]).clamp_(min=eps))
        return estimate.clamp_(min=eps * eps).rsqrt_().mul_(self.gradient)


def _square(tensor: Tensor) -> Tensor:
    return tensor.norm(2).double().square()


def _norms(squares: Sequence[Tensor]) -> list[float]:
    found: list[float] = torch.stack(list(squares)).sqrt().tolist()
    return found
