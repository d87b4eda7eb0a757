"""What the search of plans (`planning.search`) finds: for each stage a way to run it, and what else there was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tenfold.offload.placement import Placement
from tenfold.planning.stages import Stage
from tenfold.planning.terms import Candidate

Objective = Literal["time", "energy", "cost"]


@dataclass(frozen=True)
class Rejected:
    """A way to run a stage that was not taken up, and what it lacked: "device memory: needs 35.1 of 31.0 GiB"."""

    candidate: Candidate
    why: str
    over: float = 1.0
    """What it needs over what there is, of the resource that it lacks most."""


@dataclass(frozen=True)
class Alternative:
    """A way to run a stage that fits: what a step of it takes, on the cluster and on the rank that holds most."""

    candidate: Candidate
    seconds: float
    joules: float | None
    """Of all accelerators in a step; None: the cluster does not say what power they take."""
    cost: float | None
    tokens_per_second: float
    device_bytes: int
    host_bytes: int = 0
    disk_bytes: int = 0
    """Of a rank, below its device."""


@dataclass(frozen=True)
class Delinking:
    """What it takes to come from the stage before to this one, by what for: "copying", "exchange", "host", "disk"."""

    seconds: float
    shares: Mapping[str, float] = field(default_factory=dict)
    bytes: Mapping[str, int] = field(default_factory=dict)
    """Those that are moved, of the rank that moves most."""
    joules: float | None = None
    cost: float | None = None


@dataclass(frozen=True)
class StagePlan:
    """The way in which a stage is to run. `memory` and `placements` have one of each pipeline rank; see `memory_of`."""

    stage: Stage
    candidate: Candidate
    memory: Sequence[Any]
    placements: Sequence[Placement]
    step: Any
    """Its forecast, of `planning.step.play_step`."""
    seconds: float
    """Of all its steps, without the delinking that it begins with."""
    joules: float | None
    cost: float | None
    tokens_per_second: float
    table: list[Alternative]
    """The ten best, this one first: those than which none is better in time, energy and device memory at once, and
    then, if they are fewer, the next ones."""
    rejected: list[Rejected]
    """Those that missed least."""
    delinking: Delinking | None = None
    """None: it is the run's first."""
    looked_at: Mapping[str, int] = field(default_factory=dict)
    """How many ways there were, and how many of them had their memory counted and a step played."""


@dataclass(frozen=True)
class Unfit:
    """A stage that fits in no way: what those ways lacked that missed least."""

    stage: Stage
    rejected: list[Rejected]
    looked_at: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """A way through all stages of a run. `seconds`, `joules` and `cost` are those of the stages and of delinking."""

    objective: Objective
    stages: list[StagePlan]
    unfit: list[Unfit] = field(default_factory=list)
    """Stages that are not in `stages`, since nothing fits. With any of them, sums are not of the whole run."""

    @property
    def seconds(self) -> float:
        """Of the run."""
        return sum(each.seconds + (each.delinking.seconds if each.delinking else 0.0) for each in self.stages)

    @property
    def joules(self) -> float | None:
        """Of the run."""
        return _sum([each.joules for each in self._all])

    @property
    def cost(self) -> float | None:
        """Of the run, in the currency of the cluster's price."""
        return _sum([each.cost for each in self._all])

    @property
    def _all(self) -> list[StagePlan | Delinking]:
        return [*self.stages, *(each.delinking for each in self.stages if each.delinking is not None)]


def _sum(each: Sequence[float | None]) -> float | None:
    known = [one for one in each if one is not None]
    return sum(known) if len(known) == len(each) else None
