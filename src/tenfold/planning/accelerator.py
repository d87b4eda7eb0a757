"""How fast one rank's device does each kind of work: measured rates by size, or a peak and the share of it reached."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from tenfold.config.base import Section
from tenfold.planning.terms import Operation, Way

Dtype = Literal["fp32", "bf16"]
ELEMENT_BYTES: dict[Dtype, int] = {"fp32": 4, "bf16": 2}
MEMORY_WORK = ("softmax", "gradient", "norm", "activation", "residual", "rotary", "cast", "rows")
"""Passes over memory that are as fast as each other: of the loss over logits, of sums of gradients, of norms, of
feed-forwards' activations, of sums of hidden states, of rotary turns, of changes of dtype, of experts' rows."""

_TILE = 64  # rows that a kernel for grouped products takes at once: fewer cost as much
_MUON_PRODUCTS = 5 * 6  # multiply-adds, twice: five iterations of three products (torch.optim.Muon's default)


class Grid(Section):
    """Rates at every combination of some sizes: between them interpolated in logarithms, beyond the ends flat."""

    sizes: list[list[PositiveFloat]]
    """By axis, ascending."""
    rates: list[PositiveFloat]
    """The last axis goes fastest."""

    @model_validator(mode="after")
    def _fits(self) -> Grid:
        if any(not axis or axis != sorted(set(axis)) for axis in self.sizes):
            raise ValueError(f"sizes of an axis have to ascend, and these do not: {self.sizes}")
        if math.prod(len(axis) for axis in self.sizes) != len(self.rates):
            raise ValueError(f"{' x '.join(str(len(axis)) for axis in self.sizes)} sizes have {len(self.rates)} rates")
        return self

    def at(self, *place: float) -> float:
        """The rate at one size for each axis."""
        corners = []
        for axis, size in zip(self.sizes, place, strict=True):
            size = min(max(size, axis[0]), axis[-1])
            low = min(bisect_right(axis, size), len(axis) - 1) - 1 if len(axis) > 1 else 0
            if len(axis) == 1:
                corners.append([(0, 1.0)])
                continue
            share = math.log(size / axis[low]) / math.log(axis[low + 1] / axis[low])
            corners.append([(low, 1 - share), (low + 1, share)])
        total = 0.0
        for corner in itertools.product(*corners):
            index = 0
            for axis, (at, _) in zip(self.sizes, corner, strict=True):
                index = index * len(axis) + at
            total += math.prod(weight for _, weight in corner) * math.log(self.rates[index])
        return math.exp(total)


class Speed(Section):
    """The rate of one kind of work in one dtype, in FLOP or bytes a second: measured, where it was; else `peak` times
    the share of it that is assumed to be reached."""

    peak: PositiveFloat
    share: float = Field(1.0, gt=0, le=1)
    backward_share: float | None = Field(None, gt=0, le=1)
    """Of backward passes; None: as `share`."""
    measured: dict[Way, Grid] = Field({})

    def at(self, way: Way, *sizes: float) -> float:
        """The rate of work of these sizes."""
        grid = self.measured.get(way) or self.measured.get("input" if way == "weight" else "forward")
        grid = grid or self.measured.get("forward")
        if grid is not None:
            return grid.at(*sizes)
        share = self.share if way == "forward" or self.backward_share is None else self.backward_share
        return self.peak * share


class Accelerator(Section):
    """One rank's device: an accelerator, or a process's share of a CPU."""

    name: str
    kind: Literal["cuda", "cpu"]
    """What PyTorch calls it ("cuda" is AMD's too). An accelerator is told its work ahead of time, so that starting it
    costs nothing as long as there is more to do; a CPU starts each operation when the one before it is done."""
    memory_bytes: PositiveInt
    reserve_bytes: int = Field(0, ge=0)
    """Of the memory: what the driver and communication libraries hold."""
    reserve_share: float = Field(0.0, ge=0, lt=1)
    """Of the rest: what is lost to fragmentation."""
    memory_rate: Speed
    """Bytes a second of large passes over memory."""
    matrix: dict[Dtype, Speed]
    """By rows, inner and columns of a product."""
    attention: dict[Dtype, Speed]
    """By positions of a sequence and width of a head. Of `Operation.flops`, as counted there."""
    grouped: dict[Dtype, Speed]
    """By rows per group and the geometric mean of inner and columns."""
    groups_by_turns: bool = False
    """Whether each group's product is an operation by itself."""
    memory: dict[Dtype, dict[str, Speed]] = Field({})
    """Bytes a second of `MEMORY_WORK`, by bytes of the operation; what is not here goes at `memory_rate`."""
    update: dict[str, Speed]
    """Bytes of fp32 weights a second by optimizer; Muon's by the smaller side of its matrices, others by bytes."""
    launch_seconds: float = Field(0.0, ge=0)
    """Of starting an operation, with what Python and autograd do for it."""
    watts: float = Field(0.0, ge=0)
    """Drawn under load, with its share of what its node draws besides."""
    idle_watts: float = Field(0.0, ge=0)
    price_per_hour: float | None = Field(None, ge=0)

    def seconds(self, operation: Operation, dtype: Dtype) -> float:
        """Of doing it `count` times."""
        each, starts = self._work(operation, dtype)
        launch = starts * self.launch_seconds
        return operation.count * (max(each, launch) if self.kind == "cuda" else each + launch)

    def _work(self, operation: Operation, dtype: Dtype) -> tuple[float, int]:
        """Seconds of work, and how many operations are started for it."""
        dtype = "fp32" if operation.wide else dtype
        size = ELEMENT_BYTES[dtype]
        rows, inner, columns, groups = operation.rows, operation.inner, operation.columns, operation.groups
        if operation.kind == "matrix":
            speed = self.matrix[dtype]
            moved = operation.bytes or size * (rows * inner + inner * columns + rows * columns)
            flops = operation.flops or 2.0 * rows * inner * columns
            rate = speed.at(operation.way, max(rows, 1), max(inner, 1), max(columns, 1))
            return max(flops / rate, 0.0 if speed.measured else moved / self._memory_rate), 1
        if operation.kind == "grouped":
            speed, each = self.grouped[dtype], rows / groups
            moved = operation.bytes or size * (rows * inner + groups * inner * columns + rows * columns)
            flops = operation.flops or 2.0 * rows * inner * columns
            rate = speed.at(operation.way, max(each, 1), max(math.sqrt(inner * columns), 1))
            if not speed.measured:
                rate *= each / (math.ceil(each / _TILE) * _TILE) if each > 0 else 1.0
            starts = groups if self.groups_by_turns else 1
            return max(flops / rate, 0.0 if speed.measured else moved / self._memory_rate), starts
        if operation.kind == "attention":
            speed = self.attention[dtype]
            flops = operation.flops / speed.at(operation.way, max(rows, 1), max(inner, 1))
            return max(flops, 0.0 if speed.measured else operation.bytes / self._memory_rate), 1
        if operation.kind == "update":
            return self._update_seconds(operation), 1
        known = self.memory.get(dtype, {})
        what = next((word for word in MEMORY_WORK if word in operation.name), "residual")
        if what not in known:
            return operation.bytes / self._memory_rate, 1
        return operation.bytes / known[what].at(operation.way, max(operation.bytes, 1)), 1

    @property
    def _memory_rate(self) -> float:
        return self.memory_rate.at("forward", 2**30)

    def _update_seconds(self, operation: Operation) -> float:
        name = next((each for each in self.update if each in operation.name), "adamw")
        speed, smaller = self.update[name], operation.inner or 1024
        seconds = operation.bytes / speed.at("forward", max(smaller if name == "muon" else operation.bytes, 1))
        if name == "muon" and speed.measured:  # a weight costs as many operations as a side is long
            return seconds * max(1.0, smaller / speed.measured["forward"].sizes[0][-1])
        if name == "muon":
            flops = operation.flops or _MUON_PRODUCTS * smaller * operation.bytes / 4
            seconds += flops / self.matrix["bf16"].at("forward", smaller, smaller, smaller)
        return seconds
