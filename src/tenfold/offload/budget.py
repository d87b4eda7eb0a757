"""What has to lie below the device for a run to keep within budgets of memory, at the least traffic."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from tenfold.config.depth import is_chosen
from tenfold.errors import TenfoldError
from tenfold.offload.placement import Part, Placement, Working, tier_bytes, together, traffic, working_bytes
from tenfold.offload.tiers import Kind, TierName

ORDER: tuple[Kind, ...] = ("moments", "gradients", "activations", "weights")
"""Which kind goes first, of those whose bytes are moved equally often."""
_OUTLIERS = 3
"""So many of the largest sizes of parts are tried as the largest that may leave."""


@dataclass(frozen=True)
class Budgets:
    """Bytes of each tier; 0 below the device: there is none."""

    device: int
    host: int = 0
    disk: int = 0


class _Group(NamedTuple):
    """State that is alike: of one kind, as large and moved as often, in the order of the depth."""

    kind: Kind
    lots: tuple[tuple[Part, ...], ...]
    """Of parts each that leave together: one, or for weights all that are of one unit."""
    size: int
    moved: int
    """Bytes a step, for each lot."""

    @property
    def piece(self) -> int:
        """Bytes of working memory that one of these parts may take on its way."""
        return max(sum(part.piece.values()) for part in self.lots[0])


class _Plan(NamedTuple):
    """So many lots of each group below the device; of one of them, of weights, the parts `spared` of a lot stay."""

    moved: int
    counts: tuple[tuple[_Group, int], ...]
    spared: tuple[_Group, tuple[int, ...]] | None = None


def choose(
    parts: Sequence[Part],
    budgets: Budgets,
    other: int = 0,
    *,
    micro_batches: int = 1,
    activations: bool = False,
    step_in_backward: bool = False,
    staying: Mapping[str, str] = MappingProxyType({}),
    key: Callable[[str], str] = "offload.{}".format,
    remedies: str = "",
) -> Placement:
    """A placement with which the device needs at most its budget, and little is moved in a step.

    What the device needs is `device_bytes`, of which `other` is for activations that stay and for temporaries. Kinds
    are let go in the order of bytes moved for each byte freed; of parts that are alike those leave that lie evenly over
    the depth, so that each transfer has most to hide behind. The host takes what is moved most, the disk the rest.
    `activations`: whether they may leave; with `step_in_backward` gradients go nowhere. Kinds that are `staying` do not
    leave, for the reason it has (`config.offload.staying`).

    The traffic is at most that of one (part, kind) more than the least that there is, and a smaller budget never means
    less of it. What is left of a budget is less than the last (part, kind) that left; of weights it is used for lots of
    experts of one layer, though the rest of these leave.

    Raises TenfoldError where a budget is too small, with the bytes needed and `remedies`, unset those of a run file.
    `key` gives a key of [offload] its path.
    """
    in_backward = step_in_backward and micro_batches == 1
    stays = {*staying, *(["gradients"] if step_in_backward else []), *([] if activations else ["activations"])}
    allowed = [kind for kind in ORDER if kind not in stays]
    nothing = _placement(parts, {})
    all_here = device_bytes(parts, nothing, other, in_backward)
    if all_here <= budgets.device:
        return nothing
    best: _Plan | None = None
    least = all_here
    for groups in _orders(parts, allowed, micro_batches):
        for plan, needed in _plans(parts, groups, all_here, budgets.device):
            least = min(least, needed)
            if needed <= budgets.device:
                plan = _spare(plan, budgets.device - needed)
                if best is None or plan.moved < best.moved:
                    best = plan
    if best is None:
        remedies = remedies or (
            f"{'' if activations else ', set ' + key('activations') + ' = true'}, or take a smaller "
            "training.micro_batch_size or training.recompute"
        )
        raise TenfoldError(
            f"{key('device_budget')} allows {budgets.device:,} bytes, and this model needs at least {least:,} on the "
            f"device, {other:,} of them for activations and temporaries: raise it to that{remedies}"
            + "".join(f"; {kind} have to stay: {why}" for kind, why in staying.items())
        )
    return _placement(parts, _tiers(best, budgets, key))


def device_bytes(parts: Sequence[Part], placement: Placement, other: int = 0, in_backward: bool = False) -> int:
    """What the device needs: state that lies there, working memory, and `other`; see `placement.tier_bytes`."""
    return tier_bytes(parts, placement, in_backward)["device"] + working_bytes(parts, placement) + other


def _placement(parts: Sequence[Part], below: dict[tuple[str, Kind], TierName]) -> Placement:
    return Placement.of(
        {part.name: {kind: below.get((part.name, kind), "device") for kind in part.bytes} for part in parts}
    )


def _groups(parts: Sequence[Part], kind: Kind, micro_batches: int) -> list[_Group]:
    """A kind's groups, those moved least first, then those of most bytes."""
    alike: dict[tuple[object, ...], list[tuple[Part, ...]]] = {}
    by_depth = sorted(parts, key=lambda part: ("embedding" not in part.ends, not part.layers, part.layers))
    for lot in together(by_depth) if kind == "weights" else [(part,) for part in by_depth]:
        if all(part.may_leave(kind) for part in lot):
            like = [(part.bytes[kind], *sorted(part.piece.items())) for part in lot]
            alike.setdefault((_moved(lot, kind, micro_batches), *like), []).append(lot)
    groups = [
        _Group(kind, tuple(lots), sum(part.bytes[kind] for part in lots[0]), _moved(lots[0], kind, micro_batches))
        for lots in alike.values()
    ]
    return sorted(groups, key=lambda group: (group.moved / group.size, -group.size * len(group.lots)))


def _moved(lot: Sequence[Part], kind: Kind, micro_batches: int) -> int:
    return sum(sum(traffic(part, kind, micro_batches)) for part in lot)


def _orders(parts: Sequence[Part], allowed: Sequence[Kind], micro_batches: int) -> Iterator[tuple[_Group, ...]]:
    """Orders in which groups may be let go.

    One is of all groups. But the first part of a kind that leaves asks for working memory, and a large one for more
    than a small one: so there is an order for every choice of kinds, without the parts of the largest sizes.
    """
    by_kind = {kind: _groups(parts, kind, micro_batches) for kind in allowed}

    def most(sizes: set[int]) -> list[int]:
        return sorted(sizes, reverse=True)[: _OUTLIERS + 1]

    pieces = most({sum(part.piece.values()) for part in parts})
    weights = most({group.size for group in by_kind["weights"]}) or [0]
    seen = set()
    for count in range(1, len(allowed) + 1):
        for kinds in itertools.combinations(allowed, count):
            for piece, weight in itertools.product(pieces, weights if "weights" in kinds else weights[:1]):
                groups = [
                    group
                    for kind in kinds
                    for group in by_kind[kind]
                    if (kind != "weights" or group.size <= weight) and group.piece <= piece
                ]
                order = tuple(sorted(groups, key=lambda group: group.moved / group.size))
                name = tuple(id(group) for group in order)
                if order and name not in seen:
                    seen.add(name)
                    yield order


def _plans(parts: Sequence[Part], groups: Sequence[_Group], all_here: int, budget: int) -> Iterator[tuple[_Plan, int]]:
    """Plans that let groups go in order, with the bytes that the device then needs.

    Before each group the others are gone, of the one before it so many parts as make a plan that fits, or all.
    """
    freed = moved = 0
    gone: list[tuple[_Group, int]] = []
    working = Working(parts)  # counted as if all of a group had left of which some have
    for group in groups:
        for part in itertools.chain.from_iterable(group.lots):
            working.add(part, group.kind)
        before = gone[-1:]
        for fewer in range(before[0][1] + 1 if before else 1):
            needed = all_here - freed + (fewer * before[0][0].size if before else 0) + working.bytes
            count = min(max(1, -(-(needed - budget) // group.size)), len(group.lots))
            counts = [*gone[:-1], *((each, all_of - fewer) for each, all_of in before), (group, count)]
            less = fewer * before[0][0].moved if before else 0
            yield _Plan(moved - less + count * group.moved, tuple(counts)), needed - count * group.size
        gone.append((group, len(group.lots)))
        freed, moved = freed + len(group.lots) * group.size, moved + len(group.lots) * group.moved


def _spare(plan: _Plan, left: int) -> _Plan:
    """The plan in which so many bytes that are left of a budget are used: some weights of a lot that leaves stay beside
    the copy that they are used in."""
    best = plan
    for group, count in plan.counts:
        if group.kind != "weights" or not count or len(group.lots[0]) == 1:
            continue
        room, moved, stay = left, plan.moved, list[int]()
        sizes = [part.bytes["weights"] for part in group.lots[0]]
        for number in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
            if sizes[number] <= room:
                room -= sizes[number]
                moved -= group.moved * sizes[number] // group.size
                stay.append(number)
        if moved < best.moved:
            best = plan._replace(moved=moved, spared=(group, tuple(stay)))
    return best


def _spread(lots: Sequence[tuple[Part, ...]], count: int) -> tuple[tuple[Part, ...], ...]:
    return tuple(lot for number, lot in enumerate(lots) if is_chosen(number, count, len(lots)))


def _tiers(plan: _Plan, budgets: Budgets, key: Callable[[str], str]) -> dict[tuple[str, Kind], TierName]:
    """To each (part, kind) that leaves its tier."""
    found: dict[tuple[str, Kind], TierName] = {}
    host, disk = budgets.host, 0
    for group, away in sorted(plan.counts, key=lambda each: -each[0].moved / each[0].size):
        lots = _spread(group.lots, away)
        count = min(len(lots), host // group.size)
        held = {part.name for lot in _spread(lots, count) for part in lot}
        host -= count * group.size
        disk += (len(lots) - count) * group.size
        found |= {(part.name, group.kind): "host" if part.name in held else "disk" for lot in lots for part in lot}
        if plan.spared is not None and plan.spared[0] is group:
            for part in (lots[-1][number] for number in plan.spared[1]):
                on_host = found.pop((part.name, group.kind)) == "host"
                host += part.bytes["weights"] if on_host else 0
                disk -= 0 if on_host else part.bytes["weights"]
    if disk > budgets.disk:
        room = f", and {budgets.host:,} of them fit {key('host_budget')}" if budgets.host else ""
        there = f"in the folders of {key('disk')} are {budgets.disk:,}" if budgets.disk else f"{key('disk')} is not set"
        raise TenfoldError(
            f"{key('device_budget')} = {budgets.device:,} sends {disk + budgets.host - host:,} bytes of state below "
            f"the device{room}; {there}: name folders with {disk:,} bytes free there, or raise the budget"
        )
    return found
