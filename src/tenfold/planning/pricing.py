"""What the work of a pass takes on a cluster: runs of compute, exchanges, and conveyors, each with its seconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tenfold.parallel.mesh import Degrees
from tenfold.planning.cluster import Cluster
from tenfold.planning.passes import Conveyor, Item
from tenfold.planning.terms import Collective, Operation

Dtype = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class Compute:
    """Operations one after another."""

    seconds: float


@dataclass(frozen=True)
class Exchange:
    """A collective, over the links of `lane`."""

    name: str
    lane: str
    seconds: float


@dataclass(frozen=True)
class Belt:
    """A conveyor: `into`, `work` and `out` are of one portion of `count`, the rest of all."""

    count: int
    into: tuple[Exchange, ...]
    work: tuple[Compute | Exchange, ...]
    out: tuple[Exchange, ...]
    before: tuple[Compute | Exchange, ...]
    behind: tuple[Compute | Exchange, ...]


Priced = Compute | Exchange | Belt


class Prices:
    """The seconds of passes on a cluster, each list of items priced once."""

    def __init__(self, cluster: Cluster, degrees: Degrees, dtype: Dtype) -> None:
        self._cluster, self._degrees, self._dtype = cluster, degrees, dtype
        self._known: dict[int, tuple[Sequence[Item], tuple[Priced, ...]]] = {}
        self._each: dict[Operation | Collective, float] = {}
        self.together = cluster.accelerator.kind != "cpu"
        """Whether links work beside the device: ranks that are processes of a CPU send with the cores they compute
        with."""

    def of(self, items: Sequence[Item]) -> tuple[Priced, ...]:
        """The items of a pass."""
        known = self._known.get(id(items))
        if known is None:
            known = self._known[id(items)] = items, tuple(self._price(items))  # held here, so that none has its id
        return known[1]

    def priced(self, item: Item) -> Priced:
        """One of them."""
        return self.of((item,))[0] if isinstance(item, Conveyor) else self._one(item)

    def seconds(self, item: Operation | Collective) -> float:
        """Of one, all its times."""
        if item not in self._each:
            if isinstance(item, Operation):
                self._each[item] = self._cluster.seconds(item, self._dtype)
            else:
                self._each[item] = self._cluster.exchange_seconds(item, self._degrees)
        return self._each[item]

    def _price(self, items: Iterable[Item]) -> list[Priced]:
        found: list[Priced] = []
        for item in items:
            if isinstance(item, Conveyor):
                found.append(self._belt(item))
            else:
                _append(found, self._one(item))
        return found

    def _one(self, item: Operation | Collective) -> Compute | Exchange:
        seconds = self.seconds(item)
        if isinstance(item, Operation):
            return Compute(seconds)
        return Exchange(item.name, self._cluster.lane_of(item, self._degrees), seconds)

    def _belt(self, item: Conveyor) -> Belt:
        def each(items: Iterable[Operation | Collective]) -> tuple[Any, ...]:
            found: list[Any] = []
            for one in items:
                _append(found, self._one(one))
            return tuple(found)

        return Belt(item.count, each(item.into), each(item.work), each(item.out), each(item.before), each(item.behind))


def _append(found: list[Any], one: Compute | Exchange) -> None:
    if isinstance(one, Compute) and found and isinstance(found[-1], Compute):
        found[-1] = Compute(found[-1].seconds + one.seconds)
    else:
        found.append(one)


def in_line(priced: Iterable[Priced], together: bool) -> float:
    """Seconds that cannot be less, whatever goes on beside them: work, and exchanges that it waits for."""
    total = 0.0
    for one in priced:
        if isinstance(one, Belt):
            work = one.count * in_line(one.work, together) + in_line((*one.before, *one.behind), together)
            links = one.count * in_line((*one.into, *one.out), together)
            total += max(work, links) if together else work + links
        else:
            total += one.seconds
    return total
