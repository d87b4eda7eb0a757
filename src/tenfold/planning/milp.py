"""What of a rank's state is to lie below the device, exactly: the least waiting for transfers within budgets.

A mixed-integer linear program, solved by HiGHS (`scipy.optimize.milp`). Parts that are alike are one class: how many of
them have which kinds below the device is a whole number for each set of kinds, and so is how many of those of a kind
are on the host; the rest is on disk. 48 layers that are alike take no more variables than one. Weights of parts that
come and go as one (`Part.unit`), as those of the lots of a layer's experts do, leave together: of units that are alike
how many do is a number, too.

Working memory is that of `offload.placement.Working`, whose maxima are linear where they are to be small: a maximum is
at least each of its terms. Of a class what counts is whether any of it is below, which a variable of 0 or 1 says.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from tenfold.config.depth import is_chosen
from tenfold.offload.budget import Budgets, device_bytes
from tenfold.offload.placement import COPIES, IN_PASSING, Part, Placement
from tenfold.offload.tiers import ALIGN, KINDS, Kind, TierName
from tenfold.planning.alike import Below, classes_of
from tenfold.planning.traffic import Traffic

SLIGHT = 0.01
"""What a second of a transfer counts beside which something is computed: of placements that wait alike, that which
moves least is taken."""

_SCALE = 1e5
"""What all transfers that could be count in the program, in whose tolerances 1e-6 is nothing."""

_BELOW: tuple[TierName, ...] = ("host", "disk")

T = TypeVar("T")


@dataclass(frozen=True)
class Lacking:
    """That no placement keeps within budgets, and of what there is too little: "device", "host" or "disk"."""

    tier: TierName
    needed: int
    there: int


def place(
    parts: Sequence[Part],
    budgets: Budgets,
    asked: Traffic,
    other: int = 0,
    *,
    activations: bool = False,
    staying: Collection[str] = (),
) -> Placement | Lacking:
    """A placement with which the device needs at most its budget, of which `other` is for all but state, and for which
    a step waits least: the sum of the seconds that each moment's busiest lane takes beyond compute, and slightly those
    of all others. Tiers are read and written at the same time.

    What is alike leaves so that what is left lies evenly over the depth. `activations`: whether they may leave; kinds
    that are `staying` do not. Tiers without a rate, or with a budget of 0, take nothing.
    """
    everything = _of({}, parts)
    all_here = device_bytes(parts, everything, other, asked.in_backward)
    if all_here <= budgets.device:
        return everything
    stays = {*staying, *([] if activations else ["activations"]), *(["gradients"] if asked.in_backward else [])}
    program = _Program(parts, [kind for kind in KINDS if kind not in stays], asked, all_here)
    below: dict[TierName, int] = {"host": budgets.host, "disk": budgets.disk}
    room = {
        tier: each for tier, each in below.items() if each and asked.rate(tier, "read") and asked.rate(tier, "write")
    }
    allowed = budgets.device
    for _ in range(4):  # what rounding in the solver costs is a few bytes, and is asked for once more
        found = program.solve(allowed, room)
        if found is None:
            break
        placement = _of(found, parts)
        over = device_bytes(parts, placement, other, asked.in_backward) - budgets.device
        if over <= 0:
            return placement
        allowed -= over
    return program.lacking(budgets, room)


def _of(below: Mapping[tuple[str, Kind], TierName], parts: Sequence[Part]) -> Placement:
    return Placement.of(
        {part.name: {kind: below.get((part.name, kind), "device") for kind in part.bytes} for part in parts}
    )


class _Program:
    """The variables and constraints for some parts; bytes are in units in which HiGHS' tolerance is below one byte."""

    def __init__(self, parts: Sequence[Part], allowed: Sequence[Kind], asked: Traffic, all_here: int) -> None:
        self.parts, self.asked, self.all_here = parts, asked, all_here
        self.classes, self.unions = classes_of(parts, allowed)
        self.unit = max(1.0, all_here / 2**20)
        self._names: dict[object, int] = {}
        self._upper: list[float] = []
        self._whole: list[int] = []
        self._rows: list[tuple[dict[int, float], float, float]] = []  # coefficients, least, most
        self._count()
        self._working()

    def _variable(self, name: object, upper: float = np.inf, whole: bool = False) -> int:
        self._names[name] = len(self._names)
        self._upper.append(upper)
        self._whole.append(int(whole))
        return self._names[name]

    def _row(self, terms: Mapping[int, float], least: float = -np.inf, most: float = np.inf) -> None:
        self._rows.append((dict(terms), least, most))

    def _below(self, number: int, kind: Kind) -> list[int]:
        """The variables that count the parts of a class with a kind below."""
        return [self._names["set", number, each] for each in self.classes[number].sets if kind in each]

    def _count(self) -> None:
        for number, each in enumerate(self.classes):
            size = len(each.parts)
            sets = [self._variable(("set", number, chosen), size, True) for chosen in each.sets]
            self._row(dict.fromkeys(sets, 1.0), size, size)
            for kind in each.kinds:
                host = self._variable(("host", number, kind), size, True)
                self._row({**dict.fromkeys(self._below(number, kind), 1.0), host: -1.0}, 0.0)
        for number, union in enumerate(self.unions):
            away = self._variable(("away", number), len(union.units), True)
            held = self._variable(("held", number), len(union.units), True)
            for member, times in union.members.items():
                self._row({**dict.fromkeys(self._below(member, "weights"), 1.0), away: -float(times)}, 0.0, 0.0)
                self._row({self._names["host", member, "weights"]: 1.0, held: -float(times)}, 0.0, 0.0)

    def _any(self, number: int, name: object, counted: Sequence[int]) -> int:
        """A variable that is 1 where any part of a class is counted by these variables."""
        size = len(self.classes[number].parts)
        found = self._variable(("any", number, name), 1, True)
        self._row({**dict.fromkeys(counted, 1.0), found: -float(size)}, most=0.0)
        return found

    def _working(self) -> None:
        """`offload.placement.Working`, in bytes / unit: weights of a layer, a piece, the activations of two layers."""
        weights = self._variable("weights")
        piece = self._variable("piece")
        pair = self._variable("pair")
        pages = self._variable("pages", whole=True)
        some: dict[str, tuple[int, int]] = {}  # part -> any of its class has weights below, and the class
        held: list[tuple[int, int, int]] = []  # of activations: a layer's bytes, any, two
        for number, each in enumerate(self.classes):
            for chosen in each.sets:
                size = sum(each.one.piece.get(kind, 0) for kind in chosen if kind != "activations")
                if size:
                    there = self._any(number, chosen, [self._names["set", number, chosen]])
                    self._row({piece: 1.0, there: -size / self.unit}, 0.0)
            if "weights" in each.kinds:
                there = self._any(number, "weights", self._below(number, "weights"))
                some |= {part.name: (there, number) for part in each.parts}
            if "activations" in each.kinds:
                counted, layers = self._below(number, "activations"), len(each.one.layers)
                size = -(-each.one.bytes["activations"] // layers)
                there = self._any(number, "activations", counted)
                two = there
                if layers == 1:
                    two = self._variable(("two", number), 1, True)
                    self._row({**dict.fromkeys(counted, 1.0), two: -float(len(each.parts))}, most=1.0)
                held.append((size, there, two))
        by_layer: dict[int, list[Part]] = {}
        for part in self.parts:
            for layer in part.layers if part.name in some else ():
                by_layer.setdefault(layer, []).append(part)
        for terms in {tuple(sorted((some[p.name][0], p.bytes["weights"]) for p in each)) for each in by_layer.values()}:
            row = Counter[int]()
            for there, size in terms:
                row[there] += size
            self._row({weights: 1.0, **{there: -size / self.unit for there, size in row.items()}}, 0.0)
        for size, there, two in held:
            row = Counter({there: size})
            row[two] += size
            self._row({pair: 1.0, **{at: -each / self.unit for at, each in row.items()}}, 0.0)
        for (size, there, _), (more, also, _) in itertools.combinations(held, 2):
            self._row({pair: 1.0, there: -size / self.unit, also: -more / self.unit}, 0.0)
        # 9 / 8 of the pair in whole pages.
        self._row({pages: ALIGN / self.unit, pair: -9 / 8}, -7 / 8 / self.unit)

    def _device(self) -> dict[int, float]:
        """What the device needs beyond all that is there anyway, in bytes / unit."""
        found = {
            self._names["weights"]: float(COPIES),
            self._names["piece"]: float(IN_PASSING),
            self._names["pages"]: ALIGN / self.unit,
        }
        for number, each in enumerate(self.classes):
            for chosen in each.sets:
                size = sum(each.one.bytes[kind] for kind in chosen)
                found[self._names["set", number, chosen]] = -size / self.unit
        return found

    def _away(self, tier: TierName | None) -> dict[int, float]:
        """Bytes / unit in a tier; None: in both below the device."""
        found: dict[int, float] = {}
        for number, each in enumerate(self.classes):
            for kind in each.kinds:
                size = each.one.bytes[kind] / self.unit
                if tier != "host":
                    for counted in self._below(number, kind):
                        found[counted] = found.get(counted, 0.0) + size
                if tier is not None:
                    host = self._names["host", number, kind]
                    found[host] = found.get(host, 0.0) + (size if tier == "host" else -size)
        return found

    def _waiting(self, tiers: Collection[TierName]) -> tuple[dict[int, float], list[tuple[dict[int, float], float]]]:
        """The cost of a placement, and rows (terms, least) that bound its waiting from below."""
        cost: dict[int, float] = {}
        rows = []
        most = sum(
            len(each.parts) * moved / self.asked.rate(tier, way)
            for each in self.classes
            for kind in each.kinds
            for (_, way), moved in self.asked.bytes_of(each.one, kind).items()
            for tier in tiers
        )
        scale = _SCALE / max(most, 1e-9)
        for moment in ("passes", "update"):
            wait, hidden = self._names["wait", moment], self.asked.hidden(moment)
            cost[wait] = 1.0
            for tier, way in itertools.product(tiers, ("read", "write")):
                busy: dict[int, float] = {}
                for number, each in enumerate(self.classes):
                    for kind in each.kinds:
                        moved = self.asked.bytes_of(each.one, kind).get((moment, way), 0)
                        taken = scale * moved / self.asked.rate(tier, way)
                        host = self._names["host", number, kind]
                        if tier == "host":
                            busy[host] = busy.get(host, 0.0) + taken
                        else:
                            busy[host] = busy.get(host, 0.0) - taken
                            for counted in self._below(number, kind):
                                busy[counted] = busy.get(counted, 0.0) + taken
                for variable, taken in busy.items():
                    cost[variable] = cost.get(variable, 0.0) + SLIGHT * taken
                rows.append(({wait: 1.0, **{name: -taken for name, taken in busy.items()}}, -scale * hidden))
        return cost, rows

    def solve(self, allowed: int, room: Mapping[TierName, int]) -> dict[tuple[str, Kind], TierName] | None:
        """The tier of each (part, kind) that leaves, with at most `allowed` bytes on the device and `room` below."""
        for moment in ("passes", "update"):
            if ("wait", moment) not in self._names:
                self._variable(("wait", moment))
        cost, waiting = self._waiting([*room])
        limits = [(self._device(), -np.inf, (allowed - self.all_here) / self.unit)]
        limits += [(terms, least, np.inf) for terms, least in waiting]
        limits += [(self._away(tier), -np.inf, room.get(tier, 0) / self.unit) for tier in _BELOW]
        found = self._optimum(cost, limits)
        return None if found is None else dict(self._tiers(found))

    def lacking(self, budgets: Budgets, room: Mapping[TierName, int]) -> Lacking:
        """What there is too little of: of the device with all room below it, else of what is below."""
        limits = [(self._away(tier), -np.inf, room.get(tier, 0) / self.unit) for tier in _BELOW]
        least = self._least(self._device(), limits)
        without = self._least(self._device(), [])
        device = [(self._device(), -np.inf, (budgets.device - self.all_here) / self.unit)]
        if without is None or without + self.all_here > budgets.device or not room:
            least = without if room and without is not None else least
            return Lacking("device", self.all_here + (least or 0), budgets.device)
        below = self._least(self._away(None), device)
        tier: TierName = "disk" if "disk" in room else "host"
        spare = budgets.host if "disk" in room and "host" in room else 0
        assert below is not None
        return Lacking(tier, below - spare, room[tier])

    def _least(self, terms: Mapping[int, float], limits: Sequence[tuple[dict[int, float], float, float]]) -> int | None:
        """The least bytes that `terms` can come to."""
        found = self._optimum(terms, limits)
        return None if found is None else round(sum(found[at] * value for at, value in terms.items()) * self.unit)

    def _optimum(
        self, cost: Mapping[int, float], limits: Sequence[tuple[dict[int, float], float, float]]
    ) -> np.ndarray | None:
        from scipy.optimize import Bounds, LinearConstraint, milp  # here: most plans place nothing, and it takes long
        from scipy.sparse import coo_array

        rows, size = [*self._rows, *limits], len(self._names)
        entries = [(row, at, value) for row, (terms, _, _) in enumerate(rows) for at, value in terms.items()]
        numbers, columns, values = zip(*entries, strict=True)
        matrix = coo_array((values, (numbers, columns)), shape=(len(rows), size)).tocsr()
        weights = np.zeros(size)
        for at, value in cost.items():
            weights[at] = value
        found = milp(
            weights,
            integrality=np.array(self._whole),
            bounds=Bounds(0, np.array(self._upper)),
            constraints=LinearConstraint(matrix, [row[1] for row in rows], [row[2] for row in rows]),
            options={"mip_rel_gap": 1e-6, "node_limit": 20_000},
        )
        if found.x is None:
            return None
        solution = np.array(found.x)
        whole = np.array(self._whole, dtype=bool)
        solution[whole] = np.round(solution[whole])
        return solution

    def _tiers(self, solution: np.ndarray) -> Iterator[tuple[tuple[str, Kind], TierName]]:
        gone: dict[int, tuple[set[str], set[str]]] = {}  # by class: units whose weights are below, and on the host
        for number, union in enumerate(self.unions):
            away = _spread(union.units, int(solution[self._names["away", number]]))
            held = _spread(away, int(solution[self._names["held", number]]))
            gone |= dict.fromkeys(union.members, (set(away), set(held)))
        for number, each in enumerate(self.classes):
            counts = {chosen: int(solution[self._names["set", number, chosen]]) for chosen in each.sets if chosen}
            below: dict[str, Below] = {}
            if number in gone:
                for there in (True, False):
                    mine = [part for part in each.parts if (part.unit in gone[number][0]) == there]
                    below |= _spread_sets(mine, {one: n for one, n in counts.items() if ("weights" in one) == there})
            else:
                below = _spread_sets(each.parts, counts)
            for kind in each.kinds:
                some = [part for part in each.parts if kind in below.get(part.name, ())]
                on_host = {part.name for part in _spread(some, int(solution[self._names["host", number, kind]]))}
                if number in gone and kind == "weights":
                    on_host = {part.name for part in some if part.unit in gone[number][1]}
                for part in some:
                    yield (part.name, kind), "host" if part.name in on_host else "disk"


def _spread(some: Sequence[T], count: int) -> list[T]:
    """So many of them, as evenly as can be."""
    return [each for at, each in enumerate(some) if is_chosen(at, count, len(some))]


def _spread_sets(parts: Sequence[Part], counts: Mapping[Below, int]) -> dict[str, Below]:
    """To so many parts each set of kinds."""
    left, found = _spread(parts, sum(counts.values())), dict[str, Below]()
    for chosen, count in counts.items():
        taken = _spread(left, count)
        found |= {part.name: chosen for part in taken}
        left = [part for part in left if part.name not in found]
    return found
