"""Ranks that nobody started, for a model that is run on tensors without memory: all shapes are those of a real rank.

The classes of `parallel` are what they are; of a group these ask its size and its name. Rows of experts, whose number
depends on data, are sent evenly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tenfold.config.model import ModelConfig
from tenfold.nn.grouped import Rows
from tenfold.nn.ranks import ALONE, Ranks
from tenfold.parallel.context import SplitSequences
from tenfold.parallel.exchange import Exchange, Plan
from tenfold.parallel.expert import ExpertGroup
from tenfold.parallel.grid import tensor_ranks
from tenfold.parallel.mesh import Degrees


@dataclass(frozen=True)
class _Group:
    """A process group, as far as a fake collective asks it."""

    group_name: str
    members: int

    def size(self) -> int:
        return self.members

    def rank(self) -> int:
        return 0


class _Mesh:
    """The mesh of a first rank, but along tensor."""

    def __init__(self, degrees: Degrees, tensor: int) -> None:
        self.degrees = degrees
        self.place = {"tensor": tensor, "context": 0, "expert": 0}

    def group(self, axis: str) -> Any:
        return _Group(f"planned {axis}", getattr(self.degrees, axis))

    def part(self, axis: str, places: tuple[int, ...]) -> Any:
        return _Group(f"planned {axis} {places}", len(places))


def stand_ins(degrees: Degrees, config: ModelConfig, rank: int = 0) -> Ranks:
    """What a model of `config` on tensor rank `rank` is given to talk to the other ranks, of which there are none."""
    mesh: Any = _Mesh(degrees, rank)
    tensor, context, expert = tensor_ranks(mesh, config), ALONE.context, ALONE.expert
    if degrees.context > 1:
        context = SplitSequences(mesh.group("context"))
    if config.moe.experts and degrees.tensor * degrees.context * degrees.expert > 1:
        expert = _Experts(mesh, config, tensor)
    return Ranks(tensor, context, expert)


class _Flown:
    """Rows that are where they are to go: the memory of an exchange under way."""

    def __init__(self, x: Tensor, buffer: Tensor) -> None:
        self._going, self.coming = x, buffer

    def wait(self) -> Tensor:
        return self.coming


class _Still(Exchange):
    """An exchange in which nothing moves."""

    def send(self, name: str, number: int, x: Tensor) -> Tensor:
        buffer = x.new_empty(sum(self.plans[number].into), x.shape[1])
        self.flights[name, number] = _Flown(x, buffer)  # type: ignore[assignment]
        return x.new_empty(0)

    def return_(self, name: str, number: int, x: Tensor) -> Tensor:
        if name not in self.buffers:
            self.buffers[name] = x.new_empty(self.plans[-1].rows.stop, x.shape[1])
        buffer = self.buffers[name][self.plans[number].rows]
        self.flights[name, number] = _Flown(x, buffer)  # type: ignore[assignment]
        return x.new_empty(0)

    def scatter(self, x_AD: Tensor, plan: Plan) -> Tensor:
        if self.tensor is None:
            return super().scatter(x_AD, plan)
        padded = x_AD.new_zeros(self.tensor.size() * plan.most, *x_AD.shape[1:]).index_copy_(0, plan.order, x_AD)
        del padded
        return x_AD.new_empty(plan.most, *x_AD.shape[1:])[: sum(plan.into)]


class _Experts(ExpertGroup):
    """Every expert rank gets as many rows as it sends."""

    exchange = _Still
    _rows = 0

    def _tell_counts(self, rows: Rows, group: Any) -> Tensor:
        self._rows = len(rows.choices)
        over_tensor = self._over_tensor()
        ranks = 1 if over_tensor is None else over_tensor.size()
        moe = self._config
        held = moe.experts // moe.prototypes // self.size
        return rows.per_expert.new_empty(1 + ranks, self.size, moe.prototypes, held)

    def _plans(self, told: Tensor, tensor: int, device: torch.device) -> list[Plan]:
        tensors, (prototypes, held) = len(told) - 1, told.shape[2:]
        each = self._rows // prototypes
        share = [each // self.size] * (self.size - 1)
        share.append(each - sum(share))
        return [
            Plan(
                slice(number * each, (number + 1) * each),
                share,
                share,
                each,
                told.new_empty(each * tensors, dtype=torch.int64),
                told.new_empty(held),
            )
            for number in range(prototypes)
        ]
