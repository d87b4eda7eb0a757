"""The search of a plan: for every stage the way to run it on a cluster that serves an objective best.

Ways (`candidates`) are looked at in the order of the least seconds that they can take, which is known better and
better: of a layout by what its state alone takes to come from below the device, then by its largest and smallest
passes; of passes with no recompute and weights never let go, which no other choice of these beats; of these choices,
once their memory is counted, with what does not fit on its way to and from the device. A step is played
(`step.play_step`) of those that are still ahead then, until the next could at best be `SLACK` slower than the best that
was found. Layouts beside another are looked at when that one's turn comes. So a way that is faster than what was found
is missed where what it stands beside is `SLACK` slower, or a layout's largest and smallest passes both are; or where
`MOST` were played.

Of recompute and resharding those are played than which none is faster that fits with all state on the device; where
none fits, state leaves it (`milp`). What a plan costs in energy and money is known for what was played.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from tenfold.config.run import RunConfig
from tenfold.errors import TenfoldError
from tenfold.parallel.mesh import Degrees
from tenfold.planning.candidates import RESHARDS, Choices, Reshard, beside, check_layout, layouts, ways
from tenfold.planning.cluster import Cluster
from tenfold.planning.delinked import delinking
from tenfold.planning.evaluating import Evaluator, Found
from tenfold.planning.plans import Alternative, Delinking, Objective, Plan, Rejected, StagePlan, Unfit
from tenfold.planning.stages import Stage, plan_stages
from tenfold.planning.terms import Candidate, Operation

SLACK = 1.2
"""How much slower than the best a way may be that is of interest, for the memory or the energy that it saves."""
MOST = 40
"""Ways of a stage that are played at most."""
ROWS = 10
"""Of the table, and of the ways that miss least."""

Note = Callable[[str], None]


def plan(config: RunConfig, cluster: Cluster, objective: Objective = "time", note: Note = lambda _: None) -> Plan:
    """The best way through all stages of a run whose vocabulary is known; the same for the same arguments.

    A stage's way is chosen with what it costs to come to it from that of the stage before. `note` is told how far the
    search is. Stages that fit in no way are in `Plan.unfit`. Raises TenfoldError where what the run file fixes cannot
    be on this cluster, and for an objective that the cluster does not say enough for.
    """
    config = settled(config, cluster, objective)
    stages, unfit = plan_stages(config), []
    found: list[tuple[Stage, list[Found], list[Rejected], dict[str, int]]] = []
    for number, stage in enumerate(stages):
        search = _Search(config, stage, cluster, objective, note)
        try:
            search.run()
        except TenfoldError as error:
            raise TenfoldError(f"stages.{number} ({stage.name}): {error}") from None
        if search.found:
            found.append((stage, search.found, search.rejected[:ROWS], search.counts))
        else:
            unfit.append(Unfit(stage, search.rejected[:ROWS], search.counts))
    chosen = _chain(config, cluster, objective, found)
    made = [
        _stage_plan(stage, one, played, rejected, counts, change, objective)
        for (stage, played, rejected, counts), (one, change) in zip(found, chosen, strict=True)
    ]
    return Plan(objective, made, unfit)


def settled(config: RunConfig, cluster: Cluster, objective: Objective) -> RunConfig:
    """The configuration with its precision decided, as training would on the cluster; checked for what a plan needs."""
    if config.model.vocab_size is None:
        raise TenfoldError(
            "a plan needs model.vocab_size, which the run file leaves to the tokenizer: set it, or --model.vocab-size"
        )
    if objective == "energy" and not cluster.accelerator.watts:
        raise TenfoldError(
            f"objective energy: cluster {cluster.name} does not say what power its accelerators take: add watts=N "
            "behind its name"
        )
    if objective == "cost" and cluster.accelerator.price_per_hour is None:
        raise TenfoldError(
            f"objective cost: cluster {cluster.name} has no price: add price=N, for an accelerator and hour, behind "
            "its name"
        )
    if config.training.precision != "auto":
        return config
    size = 2048
    product = Operation("product", "matrix", flops=2.0 * size**3, rows=size, inner=size, columns=size)
    faster = cluster.seconds(product, "bf16") < cluster.seconds(product, "fp32")
    training = config.training.model_copy(update={"precision": "bf16" if faster else "fp32"})
    return config.model_copy(update={"training": training})


def value(row: Alternative, objective: Objective) -> float:
    """What is to be small, of a step."""
    found = {"time": row.seconds, "energy": row.joules, "cost": row.cost}[objective]
    assert found is not None
    return found


class _Search:
    """The ways of one stage, in the order of the least seconds of a step."""

    def __init__(self, config: RunConfig, stage: Stage, cluster: Cluster, objective: Objective, note: Note) -> None:
        self.config, self.stage, self.cluster, self.objective, self.note = config, stage, cluster, objective, note
        self.choices = Choices.of(config, stage)
        self.evaluator = Evaluator(config, stage, cluster)
        self.found: list[Found] = []
        self.rejected: list[Rejected] = []
        self.ways = 0
        self._best, self._order = float("inf"), itertools.count()
        self._seen: set[Degrees] = set()
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []

    @property
    def counts(self) -> dict[str, int]:
        """How many ways there were in layouts that were looked into, and what was done with them."""
        return {"ways": self.ways, "counted": self.evaluator.counted, "played": self.evaluator.played}

    def run(self) -> None:
        """Look at them, until none is left that could be of interest."""
        for degrees in layouts(self.config, self.stage, self.choices, self.cluster.ranks, self.cluster.per_node):
            self._add_layout(degrees, 0.0, True)
        self.note(f"{self.stage.name}: {len(self._heap) + len(self.rejected)} layouts of {self.cluster.ranks} ranks")
        while self._heap and self.evaluator.played < MOST:
            least, _, look = heapq.heappop(self._heap)
            if least > SLACK * self._best:
                break
            look(least)
        if self.found:
            best = min(self.found, key=lambda each: value(each.row, self.objective))
            self.found += _fewer_layers(self.evaluator, self.choices, best)
        self.rejected.sort(key=lambda each: each.over)

    def _push(self, least: float, look: Callable[[float], None]) -> None:
        heapq.heappush(self._heap, (least, next(self._order), look))

    def _add_layout(self, degrees: Degrees, least: float, base: bool) -> None:
        if degrees in self._seen:
            return
        self._seen.add(degrees)
        lacks = self.evaluator.state_lacks(degrees)
        if lacks is not None:
            self.rejected.append(lacks)
            return
        self._push(least, lambda least: self._layout(degrees, least, base))

    def _layout(self, degrees: Degrees, least: float, base: bool) -> None:
        """Known by its largest and smallest passes."""
        by_size: dict[int, list[Candidate]] = {}
        for way in ways(self.config, self.stage, self.choices, degrees):
            by_size.setdefault(way.micro_batch_size, []).append(way)
        if not by_size:
            return
        self.ways += sum(len(each) for each in by_size.values())
        ends = [*by_size[max(by_size)], *by_size[min(by_size)]]
        bounds = min(self.evaluator.least_of_state(way) for way in ends)
        self._push(max(least, bounds), lambda least: self._passes(degrees, [*by_size.values()], least, base))

    def _passes(self, degrees: Degrees, by_size: Sequence[list[Candidate]], least: float, base: bool) -> None:
        for way in itertools.chain.from_iterable(by_size):
            self._push(self.evaluator.least_of_state(way), functools.partial(self._way, way))
        for other in beside(self.config, self.choices, degrees, self.cluster.per_node) if base else ():
            with suppress(TenfoldError):
                check_layout(self.config, self.stage, self.choices, other)
                self._add_layout(other, least, False)

    def _way(self, way: Candidate, _: float) -> None:
        """Passes and a schedule."""
        reshards = [reshard for reshard in RESHARDS if reshard in self.choices.reshards]
        if way.degrees.shard == 1:
            reshards = reshards[-1:]  # nothing is gathered, whatever it is called
        elif way.degrees.pipeline > 1 and len(reshards) > 1:
            reshards = ["step", "forward"]  # weights stay here through the step (`parallel.data`)
        modes = [
            replace(way, recompute=mode, recompute_layers=None if mode == "none" else self.choices.layers)
            for mode in self.choices.modes
        ]
        evaluator = self.evaluator
        if not evaluator.wanted.placement and evaluator.state_bytes(way.degrees) > evaluator.budgets(way).device:
            # State alone does not fit: what else there is need not be counted before it is a way's turn.
            for one in (replace(one, reshard=reshards[-1]) for one in modes):
                self._push(evaluator.least_of_state(one), functools.partial(self._option, one))
            return
        self._mode(modes, reshards, [], 0.0)

    def _mode(self, modes: list[Candidate], reshards: list[Reshard], tightest: list[Candidate], _: float) -> None:
        """The first of some choices of recompute, and then the others.

        Less recompute and fewer gathers are never slower and never need less memory: so of those that fit with all
        state on the device there is a frontier. Where none fits, any recompute may go with what is let go after every
        pass.
        """
        one, *others = modes
        for place, reshard in enumerate(reshards):
            candidate = replace(one, reshard=reshard)
            if self.evaluator.wanted.placement or self.evaluator.excess(candidate) <= 0:
                self._push(self.evaluator.bound(candidate), functools.partial(self._option, candidate))
                reshards, tightest = reshards[:place], []  # of the others those count that gather less
                others = others if reshards else []
                break
        else:
            tightest = [*tightest, replace(one, reshard=reshards[-1])]
        if others:
            least = self.evaluator.bound(replace(others[0], reshard=reshards[0]))
            self._push(least, functools.partial(self._mode, others, reshards, tightest))
        elif len(tightest) == len(self.choices.modes):
            if not self.evaluator.tiers:
                self.rejected.append(self.evaluator.misses(min(tightest, key=self.evaluator.excess)))
            for each in tightest if self.evaluator.tiers else ():
                self._push(self.evaluator.least(each), functools.partial(self._option, each))

    def _option(self, candidate: Candidate, least: float) -> None:
        known = self.evaluator.least(candidate)
        if known > least:  # now that its memory is counted
            self._push(known, functools.partial(self._option, candidate))
            return
        result = self.evaluator.evaluate(candidate)
        if isinstance(result, Rejected):
            self.rejected.append(result)
            return
        self.found.append(result)
        if result.step.seconds < self._best:
            self._best, counts = result.step.seconds, self.counts
            self.note(
                f"{self.stage.name}: {self._best:.3g} s a step ({', '.join(f'{n} {w}' for w, n in counts.items())})"
            )


def _fewer_layers(evaluator: Evaluator, choices: Choices, best: Found) -> Iterator[Found]:
    """The best way with no more layers recomputed than have to be."""
    candidate, depth = best.candidate, evaluator.config.model.layers
    if candidate.recompute == "none" or not choices.layers_open or best.row.host_bytes or best.row.disk_bytes:
        return
    low, high = 0, depth  # so many are too few, so many are enough
    while high - low > 1:
        middle = (low + high) // 2
        enough = evaluator.excess(replace(candidate, recompute_layers=middle)) <= 0
        low, high = (low, middle) if enough else (middle, high)
    if high < depth:
        result = evaluator.evaluate(replace(candidate, recompute_layers=high))
        if isinstance(result, Found):
            yield result


def _chain(
    config: RunConfig,
    cluster: Cluster,
    objective: Objective,
    stages: Sequence[tuple[Stage, list[Found], list[Rejected], dict[str, int]]],
) -> list[tuple[Found, Delinking | None]]:
    """For each stage the way with which all of them together come to least, with the delinkings between them."""
    # What each way comes to with all before it, the way before it, and the delinking.
    ends: list[list[tuple[float, int, Delinking | None]]] = []
    for number, (stage, played, _, _) in enumerate(stages):
        row: list[tuple[float, int, Delinking | None]] = []
        for one in played:
            own = stage.steps * value(one.row, objective)
            if number == 0:
                row.append((own, -1, None))
                continue
            before, others, _, _ = stages[number - 1]
            best: tuple[float, int, Delinking | None] = (float("inf"), -1, None)
            for at, other in enumerate(others):
                change = delinking(config, cluster, before, other, stage, one)
                costs = {"time": change.seconds, "energy": change.joules or 0.0, "cost": change.cost or 0.0}
                whole = ends[-1][at][0] + costs[objective] + own
                if whole < best[0]:
                    best = (whole, at, change)
            row.append(best)
        ends.append(row)
    chosen: list[tuple[Found, Delinking | None]] = []
    at = -1
    for number in reversed(range(len(stages))):
        row = ends[number]
        at = min(range(len(row)), key=lambda each: row[each][0]) if number == len(stages) - 1 else at
        chosen.append((stages[number][1][at], row[at][2]))
        at = row[at][1]
    return chosen[::-1]


def _stage_plan(
    stage: Stage,
    chosen: Found,
    played: Sequence[Found],
    rejected: list[Rejected],
    counts: dict[str, int],
    change: Delinking | None,
    objective: Objective,
) -> StagePlan:
    row = chosen.row
    return StagePlan(
        stage,
        chosen.candidate,
        chosen.memory,
        chosen.placements,
        chosen.step,
        stage.steps * row.seconds,
        None if row.joules is None else stage.steps * row.joules,
        None if row.cost is None else stage.steps * row.cost,
        row.tokens_per_second,
        [row, *(each for each in table([one.row for one in played], objective) if each != row)][:ROWS],
        rejected,
        change,
        counts,
    )


def table(rows: Sequence[Alternative], objective: Objective) -> list[Alternative]:
    """The `ROWS` best: first those than which no other is at least as good in time, energy and device memory, then
    others; each best first."""

    def measures(row: Alternative) -> tuple[float, float, int]:
        return row.seconds, row.joules or 0.0, row.device_bytes

    kept: list[Alternative] = []
    others: list[Alternative] = []
    for row in sorted(rows, key=lambda row: (value(row, objective), *measures(row))):
        beaten = any(
            all(mine >= theirs for mine, theirs in zip(measures(row), measures(other), strict=True)) for other in kept
        )
        (others if beaten else kept).append(row)
    return [*kept, *others][:ROWS]
