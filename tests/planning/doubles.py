"""Clusters with prices that are told, in place of measured ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from tenfold.offload.forecast import Rates
from tenfold.parallel.mesh import Degrees
from tenfold.planning.terms import Collective, Operation


class Told:
    """`work` and `exchange` give the seconds of one, `lane` the links of a collective."""

    def __init__(
        self,
        work: Callable[[Operation], float],
        exchange: Callable[[Collective], float] = lambda _: 0.0,
        lane: Callable[[Collective], str] = lambda _: "network",
        kind: str = "cuda",
        rates: Mapping[str, float] | None = None,
    ) -> None:
        self._work, self._exchange, self._lane = work, exchange, lane
        self.accelerator = SimpleNamespace(kind=kind)
        self._rates: Any = rates or {}

    def seconds(self, operation: Operation, dtype: str) -> float:
        return operation.count * self._work(operation)

    def exchange_seconds(self, collective: Collective, degrees: Degrees) -> float:
        return collective.count * self._exchange(collective)

    def lane_of(self, collective: Collective, degrees: Degrees) -> str:
        return self._lane(collective)

    def rates(self, degrees: Degrees) -> Rates:
        return Rates(self._rates, self._rates)


def roofline(kind: str = "cuda") -> Told:
    """Some figures that let nothing be free."""
    return Told(
        lambda work: 1e-6 + work.flops / 1e12 + work.bytes / 1e11,
        lambda each: 5e-6 + each.bytes / 1e10,
        lambda each: "node" if each.axis in ("tensor", "row", "column") else "network",
        kind,
        {"host": 1e10, "disk": 1e9},
    )
