"""How many tokens come to the experts of each layer, and in how many passes their gradients are not zero therefore."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HORIZON = 32
"""Steps over which tokens are averaged; all of them while there were fewer."""


class Loads:
    """What came to each of `experts` experts in each of `layers` layers, of late: tokens in a step, and the share of
    steps with any. Tokens are those of all ranks."""

    def __init__(self, layers: int, experts: int) -> None:
        self.steps = 0
        self._tokens_LE = torch.zeros(layers, experts)
        self._share_LE = torch.zeros(layers, experts)

    def saw(self, tokens_LE: Tensor) -> None:
        """Take in a step. One in which nothing was routed, as while experts share their weights, says nothing."""
        if not tokens_LE.any():
            return
        tokens_LE = tokens_LE.to("cpu", torch.float32)
        self.steps += 1
        weight = 1 / min(self.steps, HORIZON)
        self._tokens_LE.lerp_(tokens_LE, weight)
        self._share_LE.lerp_((tokens_LE > 0).float(), weight)

    def of(self, layers: Sequence[int]) -> Arrivals:
        """What came to experts that these layers use, one set of them for all."""
        mine = list(layers)
        missed = torch.log1p(-self._share_LE[mine].double()).sum(0)
        return Arrivals(self._tokens_LE[mine].sum(0).tolist(), missed.tolist())

    def seen(self, passes: int) -> float:
        """`Arrivals.seen` of each expert of each layer by itself, on the mean; of a step of so many passes."""
        layers, experts = self._tokens_LE.shape
        rows = [self.of([layer]) for layer in range(layers)]
        return sum(row.seen([each], passes) for row in rows for each in range(experts)) / (layers * experts)

    def dump(self) -> dict[str, Any]:
        """As JSON has it, to four digits."""
        rows = {"tokens": self._tokens_LE, "share": self._share_LE}
        told = {
            key: [[float(f"{each:.4g}") for each in row] for row in rows_LE.tolist()] for key, rows_LE in rows.items()
        }
        return {"steps": self.steps, **told}

    def load(self, dumped: dict[str, Any]) -> None:
        """Go on from what `dump` gave."""
        self.steps = dumped["steps"]
        self._tokens_LE, self._share_LE = torch.tensor(dumped["tokens"]), torch.tensor(dumped["share"])


@dataclass(frozen=True)
class Arrivals:
    """Of the experts of a unit, by their numbers: tokens in a step, and the logarithm of the share of steps without."""

    tokens: Sequence[float]
    missed: Sequence[float]

    def seen(self, experts: Iterable[int], passes: int) -> float:
        """Of the `passes` of a step the share behind which a gradient of these experts together is not zero.

        In a step that has tokens for them at all these are taken to come in any pass alike, and those of one expert
        whether others have some or not.
        """
        mine = list(experts)
        tokens = sum(self.tokens[each] for each in mine)
        any_in_step = -math.expm1(sum(self.missed[each] for each in mine))
        found = any_in_step
        for number in range(1, passes):
            so_far = -math.expm1(-tokens * number / passes)
            if so_far >= any_in_step:  # as in all passes behind this one
                return (found + (passes - number) * any_in_step) / passes
            found += so_far
        return found / passes
