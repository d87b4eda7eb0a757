"""Lots of a layer's experts, so that some experts' state may lie elsewhere than that of others.

What is apart is on pages of its own, also in the bytes of a unit's weights, which are one run: so a lot begins where
whole pages end. Experts of a lot need not be neighbours.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence

from tenfold.config.depth import experts_of, places_of
from tenfold.config.offload import PlacementRule
from tenfold.errors import TenfoldError
from tenfold.offload import units
from tenfold.offload.loads import Loads
from tenfold.offload.tiers import ALIGN
from tenfold.offload.units import Entry, Unit

Lots = Callable[[Unit], Sequence[int]]
"""For a unit the number of the lot that each expert is in, by the experts' numbers; none: they are not told apart."""

MOST = 8
"""Lots into which a budget cuts the experts of a layer."""
_RUNS = 16
"""A piece of a stack may be of so many runs of experts that are no neighbours: below that moving it takes longer."""
_STEPS = 16
"""Experts whose gradients are seen equally often, to so many steps from never to always, stay in their order."""


def by_rules(rules: Sequence[PlacementRule], depth: int, experts: int, key: Callable[[int], str]) -> Lots:
    """As rules name experts, in a model of `depth` layers of so many. `key` gives a rule's number its path."""

    def lots(unit: Unit) -> Sequence[int]:
        found: Sequence[int] = ()
        for number, rule in enumerate(rules):
            if rule.experts is not None:
                found = lots_by_rules(rules[: number + 1], depth, experts, unit.layers)
                for entry in unit.entries if found else ():
                    _check(entry, found, key(number))
        return found

    return lots


def lots_by_rules(rules: Sequence[PlacementRule], depth: int, experts: int, layers: Sequence[int]) -> Sequence[int]:
    """For each expert of a unit of `layers` the number of its lot, another one wherever one that rules name begins, or
    one that they do not; none: no rule names experts of these layers."""
    begins: set[int] = set()
    for rule in rules:
        if rule.experts is not None and not places_of(rule.layers, depth).isdisjoint(layers):
            numbers = experts_of(rule.experts, experts)
            begins |= {each for each in numbers if each - 1 not in numbers}
            begins |= {each + 1 for each in numbers if each + 1 not in numbers}
    ordered = sorted(begins)
    return [bisect_right(ordered, expert) for expert in range(experts)] if ordered else ()


def by_rows(of_rows: Callable[[tuple[int, ...], Sequence[Entry]], Sequence[int]]) -> Lots:
    """Those that `of_rows` says, for the layers and the stacks of a unit, of each row."""

    def lots(unit: Unit) -> Sequence[int]:
        stacks = _stacks(unit)
        told = of_rows(unit.layers, stacks) if stacks else ()
        return _numbered(stacks, told) if told else ()

    return lots


def evenly(unit: Unit) -> Sequence[int]:
    """In at most `MOST` lots of neighbours, none of which has less of a stack than a piece."""
    stacks = _stacks(unit)
    rows, each = _rows_of_lots(stacks)
    return _numbered(stacks, [row // each for row in range(rows)]) if each < rows else ()


def by_load(loads: Loads, passes: int) -> Lots:
    """As many lots as `evenly` makes, those experts together whose gradients are seldom seen in the `passes` of a
    step."""

    def lots(unit: Unit) -> Sequence[int]:
        stacks = _stacks(unit)
        rows, each = _rows_of_lots(stacks)
        if each >= rows:
            return ()
        row = min(entry.numel // len(entry.experts) for entry in stacks)
        apart = _rows_apart(stacks)
        run = -(-max(-(-units.PIECE // _RUNS // row), 1) // apart) * apart
        arrivals = loads.of(unit.layers)

        def seen(begin: int) -> int:
            mine = [expert for experts in stacks[0].experts[begin : begin + run] for expert in experts]
            return round(_STEPS * arrivals.seen(mine, passes))

        runs = sorted(range(0, rows, run), key=seen)
        of_row, full = [0] * rows, -(-each // run)
        for number, begin in enumerate(runs):
            for at in range(begin, min(begin + run, rows)):
                of_row[at] = number // full
        return _numbered(stacks, of_row)

    return lots


def _stacks(unit: Unit) -> list[Entry]:
    return [entry for entry in unit.entries if entry.experts]


def _rows_of_lots(stacks: Sequence[Entry]) -> tuple[int, int]:
    """The rows of stacks, and how many of them are a lot of a budget."""
    if not stacks:
        return 0, 0
    rows = len(stacks[0].experts)
    return rows, rows_of_lot(rows, [entry.numel // rows for entry in stacks], stacks[0].dtype.itemsize)


def rows_of_lot(rows: int, elements: Sequence[int], itemsize: int, most: int | None = None) -> int:
    """How many of the `rows` of stacks, of so many elements in each, are one of at most `most` lots (unset: `MOST`)."""
    apart = math.lcm(*(ALIGN // math.gcd(ALIGN, each * itemsize) for each in elements))
    least = max(-(-units.PIECE // each) for each in elements)
    return -(-max(least, -(-rows // (most or MOST))) // apart) * apart


def _numbered(stacks: Sequence[Entry], of_row: Sequence[int]) -> list[int]:
    """The lot of each expert, from that of each row; those that are not here are in none that is told of."""
    found = [-1] * max(experts.stop for experts in stacks[0].experts)
    for experts, lot in zip(stacks[0].experts, of_row, strict=True):
        for expert in experts:
            found[expert] = lot
    return found


def _rows_apart(stacks: Sequence[Entry]) -> int:
    """Rows of stacks that fill whole pages."""
    return math.lcm(*(ALIGN // math.gcd(ALIGN, _row_bytes(entry)) for entry in stacks))


def _row_bytes(entry: Entry) -> int:
    return entry.numel // len(entry.experts) * entry.dtype.itemsize


def _check(entry: Entry, lots: Sequence[int], path: str) -> None:
    if not entry.experts:
        return
    for _, experts, begin, _ in entry.runs(lots):
        if begin * entry.dtype.itemsize % ALIGN:
            raise TenfoldError(
                f"{path}.experts: in {entry.name} an expert has {_row_bytes(entry):,} bytes of weights, and what "
                f"begins with expert {experts[0]} is not on pages of {ALIGN:,} bytes of its own: name experts in runs "
                f"of {_rows_apart([entry])}"
            )
