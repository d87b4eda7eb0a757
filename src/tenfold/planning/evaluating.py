"""One way to run a stage, looked into: whether it fits, with what below the device, and how long a step takes."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property

from tenfold.config.offload import OffloadConfig, staying
from tenfold.config.run import RunConfig
from tenfold.config.units import budget_bytes
from tenfold.offload.budget import Budgets
from tenfold.offload.codec import bytes_of
from tenfold.offload.placement import Part, Placement, explicit
from tenfold.offload.tiers import TierName
from tenfold.parallel.mesh import Degrees
from tenfold.planning.cluster import Cluster
from tenfold.planning.holdings import whole_of
from tenfold.planning.memory import RankMemory, memory_of, usable
from tenfold.planning.milp import Lacking, place
from tenfold.planning.parts import lots_of
from tenfold.planning.plans import Alternative, Rejected
from tenfold.planning.stages import Stage
from tenfold.planning.step import StepForecast, bound, play_step
from tenfold.planning.terms import Candidate, Operation
from tenfold.planning.traffic import Hiding, Traffic

GIB = 2**30
_TIMES = 3
"""How often a placement is asked for anew where what it leaves on the device is more than was counted before."""


@dataclass(frozen=True)
class Found:
    """A way that fits, played."""

    candidate: Candidate
    memory: list[RankMemory]
    placements: list[Placement]
    step: StepForecast
    row: Alternative


class Evaluator:
    """Looks into ways to run one stage of a resolved configuration on a cluster. What was counted once is kept."""

    def __init__(self, config: RunConfig, stage: Stage, cluster: Cluster) -> None:
        self.config, self.stage, self.cluster = config, stage, cluster
        self.wanted: OffloadConfig = config.offload.of_stage(stage.config.offload)
        self.off = stage.config.offload == "off"
        self.counted, self.played = 0, 0
        self._memory: dict[Candidate, list[RankMemory]] = {}
        self._bounds: dict[Candidate, float] = {}

    def bound(self, candidate: Candidate) -> float:
        """Seconds that a step takes at least."""
        if candidate not in self._bounds:
            self._bounds[candidate] = bound(self.config, self.stage, candidate, self.cluster)
        return self._bounds[candidate]

    def memory(self, candidate: Candidate) -> list[RankMemory]:
        """With all state on the device."""
        if candidate not in self._memory:
            self.counted += 1
            self._memory[candidate] = self._count(candidate, None)
        return self._memory[candidate]

    def _count(self, candidate: Candidate, placements: Sequence[Placement] | None) -> list[RankMemory]:
        kind, lots = self.cluster.accelerator.kind, lots_of(self.config, self.stage, candidate.degrees)
        return memory_of(self.config, self.stage, candidate, placements, kind, lots=lots)

    def budgets(self, candidate: Candidate) -> Budgets:
        """Bytes of each tier for a rank: the cluster's, or less where the run file says so."""
        there, wanted = self.cluster.budgets(candidate.degrees), self.wanted
        device, host, disk = there.device, there.host, there.disk
        if self.off:
            return Budgets(device)
        if wanted.device_budget is not None:
            device = min(device, budget_bytes(wanted.device_budget, self.cluster.accelerator.memory_bytes))
        if wanted.host_budget is not None:
            host = min(host, wanted.host_budget)
        return Budgets(device, host, disk)

    def excess(self, candidate: Candidate) -> int:
        """Bytes that the fullest device would be over its budget with all state on it."""
        return max(each.needed for each in self.memory(candidate)) - self.budgets(candidate).device

    def least(self, candidate: Candidate) -> float:
        """Seconds that a step takes at least, with what does not fit on its way, now that memory is counted."""
        if self.wanted.placement or (over := self.excess(candidate)) <= 0:
            return self.bound(candidate)
        memory = max(self.memory(candidate), key=lambda each: each.needed)
        movable = sum(part.bytes.get("activations", 0) for part in memory.parts)
        return self._with_below(candidate, over - movable)

    def least_of_state(self, candidate: Candidate) -> float:
        """The same from state alone, with nothing counted."""
        if self.wanted.placement:
            return self.bound(candidate)
        return self._with_below(candidate, self.state_bytes(candidate.degrees) - self.budgets(candidate).device)

    def _with_below(self, candidate: Candidate, below: int) -> float:
        """The bound where so many bytes of state are below the device.

        All of it is read in the optimizer's step, beside which nothing but that is computed; in the passes weights are,
        forward and backward, and gradients to add to. So moments are the first to leave, and weights the last. What the
        host has no room for comes from the disk, and goes back there.
        """
        bound = self.bound(candidate)
        if below <= 0:
            return bound
        rate = self._read_rate(candidate)
        if not rate:
            return float("inf")
        mine = self.stage.batch_size // candidate.degrees.data
        passes = -(-mine // min(candidate.micro_batch_size, mine))
        weights = self._stored_bytes(candidate.degrees)
        beyond = max(0.0, below - weights * self._moments)
        gradients = min(beyond, weights * self._gradients)
        in_passes = (passes - 1) * gradients + 2 * passes * (beyond - gradients)
        if self.wanted.step_in_backward:
            return max(bound, (in_passes + below) / rate)
        update = self.cluster.seconds(Operation(self.config.optim.name, "update", bytes=weights), "fp32")
        rates, at_step, written = self.cluster.rates(candidate.degrees), below / rate, 0.0
        if (on_disk := below - self.budgets(candidate).host) > 0 and "disk" in rates.read:
            at_step, written = max(at_step, on_disk / rates.read["disk"]), on_disk / rates.write["disk"]
        return max(max(bound - update, in_passes / rate) + max(update, at_step), written)

    def _read_rate(self, candidate: Candidate) -> float:
        """Bytes a second from all tiers below the device."""
        budgets, rates = self.budgets(candidate), self.cluster.rates(candidate.degrees)
        there: Mapping[TierName, int] = {"host": budgets.host, "disk": budgets.disk}
        return sum(each for tier, each in rates.read.items() if there[tier])

    @cached_property
    def tiers(self) -> bool:
        """Whether anything may leave the device."""
        return self._read_rate(Candidate()) > 0

    def state_bytes(self, degrees: Degrees) -> int:
        """Of weights, gradients and moments: of the rank that has most, no less than this."""
        return int(self._stored_bytes(degrees) * (1 + self._gradients + self._moments))

    @property
    def _moments(self) -> float:
        """Bytes of moments for each of weights."""
        optim = self.config.optim
        return {"adamw": 2, "muon": 1, "adafactor": 0}[optim.name] * bytes_of(optim.state) / 4

    @property
    def _gradients(self) -> int:
        return 0 if self.wanted.step_in_backward else 1

    def _stored_bytes(self, degrees: Degrees) -> float:
        """Of weights, likewise."""
        whole = whole_of(self.config.model, self.config.data.sequence_length, self.stage.sharing)
        stored = sum(math.prod(shape) for shape in whole.shapes.values())
        return 4.0 * stored / (degrees.shard * degrees.tensor * degrees.pipeline)

    def state_lacks(self, degrees: Degrees) -> Rejected | None:
        """That state alone does not fit all tiers, or what cannot leave the device that, if it does not."""
        candidate, needed = Candidate(degrees), self.state_bytes(degrees)
        budgets = self.budgets(candidate)
        there = budgets.device + (budgets.host + budgets.disk if self.tiers else 0)
        if needed > there:
            tiers = "device, host and disk" if self.tiers else "device"
            return lacking(candidate, Lacking("device", needed, there), f"{tiers} memory, for state alone")
        each = {"weights": 1.0, "gradients": self._gradients, "moments": self._moments}
        stay = self._staying(candidate)
        kept = int(self._stored_bytes(degrees) * sum(each[kind] for kind in stay))
        if kept > budgets.device:
            what = f"device memory, for {' and '.join(stay)}, which cannot leave it ({next(iter(stay.values()))})"
            return lacking(candidate, Lacking("device", kept, budgets.device), what)
        return None

    def _staying(self, candidate: Candidate) -> dict[str, str]:
        """Kinds of state that cannot leave the device, with what keeps them."""
        degrees = asdict(candidate.degrees)
        return staying(self.config.optim.name, self.config.training.compile, candidate.schedule, degrees)

    def misses(self, candidate: Candidate) -> Rejected:
        """That it does not fit as it is."""
        budget = self.budgets(candidate).device
        return lacking(candidate, Lacking("device", budget + self.excess(candidate), budget))

    def evaluate(self, candidate: Candidate) -> Found | Rejected:
        """A step of it played, with what has to leave the device below it; or what it lacks."""
        memory = self.memory(candidate)
        base: StepForecast | None = None
        placements = [nothing_below(each.parts) for each in memory]
        if self.wanted.placement:
            depth, experts = self.config.model.layers, self.config.model.moe.experts
            placements = [explicit(self.wanted.placement, each.parts, depth, experts) for each in memory]
            memory = self._count(candidate, placements)
            if (over := max(each.needed for each in memory) - (budget := self.budgets(candidate).device)) > 0:
                return lacking(candidate, Lacking("device", budget + over, budget))
        elif (over := self.excess(candidate)) > 0:
            there = self.budgets(candidate)
            if over > there.host + there.disk:
                tier: TierName = "disk" if there.disk else "host" if there.host else "device"
                needed = {"disk": over - there.host, "host": over, "device": there.device + over}[tier]
                return lacking(candidate, Lacking(tier, needed, getattr(there, tier)))
            stay, most = self._staying(candidate), self._usable(there.device)
            kept = max(each.other + _bytes_of(stay, each.parts) for each in memory)
            if kept > most:
                return lacking(candidate, Lacking("device", kept, most))
            base = self._play(candidate, memory, None)
            placed = self._placed(candidate, memory, base)
            if isinstance(placed, Lacking):
                return lacking(candidate, placed)
            memory, placements = placed
        below = any(part_is_below(each.parts, one) for each, one in zip(memory, placements, strict=True))
        step = base if base is not None and not below else self._play(candidate, memory, placements if below else None)
        return Found(candidate, memory, placements, step, self._row(candidate, memory, step))

    def _usable(self, budget: int) -> int:
        return usable(budget, self.cluster.accelerator.kind)

    def _play(
        self, candidate: Candidate, memory: Sequence[RankMemory], placements: Sequence[Placement] | None
    ) -> StepForecast:
        self.played += 1
        return play_step(self.config, self.stage, candidate, self.cluster, memory, placements)

    def _placed(
        self, candidate: Candidate, memory: list[RankMemory], base: StepForecast
    ) -> tuple[list[RankMemory], list[Placement]] | Lacking:
        """Placements with which every rank keeps within its budgets, and what it then needs."""
        budgets, optimizer = self.budgets(candidate), base.shares.get("optimizer", 0.0)
        within = replace(budgets, device=self._usable(budgets.device))
        mine = self.stage.batch_size // candidate.degrees.data
        micro_batches = -(-mine // min(candidate.micro_batch_size, mine))
        in_backward = self.wanted.step_in_backward and micro_batches == 1
        hiding = Hiding(max(0.0, base.busy("compute") - optimizer), optimizer)
        asked = Traffic(self.cluster.rates(candidate.degrees), micro_batches, hiding, in_backward)
        stays = self._staying(candidate)
        # What of several micro-batches is kept at once cannot leave (`memory_of`); of one it may, unless a budget of
        # the run file is for state alone.
        activations = candidate.degrees.pipeline == 1 and (
            self.wanted.activations or "activations" not in self.wanted.model_fields_set
        )
        known: dict[object, Placement | Lacking] = {}
        others = [each.other for each in memory]
        for _ in range(_TIMES):
            placements = []
            for each, other in zip(memory, others, strict=True):
                key = (_alike(each.parts), other)
                if key not in known:
                    known[key] = place(each.parts, within, asked, other, activations=activations, staying=[*stays])
                found = known[key]
                if isinstance(found, Lacking):
                    return found
                placements.append(_renamed(found, each.parts))
            counted = self._count(candidate, placements)
            over = [each.needed - budgets.device for each in counted]
            if max(over) <= 0:
                return counted, placements
            others = [other + max(0, more) for other, more in zip(others, over, strict=True)]
        return Lacking("device", budgets.device + max(over), budgets.device)

    def _row(self, candidate: Candidate, memory: Sequence[RankMemory], step: StepForecast) -> Alternative:
        accelerator, ranks = self.cluster.accelerator, self.cluster.ranks
        joules = cost = None
        if accelerator.watts:
            busy = min(1.0, (step.shares.get("compute", 0.0) + step.shares.get("optimizer", 0.0)) / step.seconds)
            idle = min(accelerator.idle_watts, accelerator.watts)
            joules = ranks * step.seconds * (idle + busy * (accelerator.watts - idle))
        if accelerator.price_per_hour is not None:
            cost = ranks * step.seconds / 3600 * accelerator.price_per_hour
        return Alternative(
            candidate,
            step.seconds,
            joules,
            cost,
            self.stage.tokens_per_step / step.seconds,
            max(each.needed for each in memory),
            max(each.tiers["host"] for each in memory),
            max(each.tiers["disk"] for each in memory),
        )


def _bytes_of(kinds: Container[str], parts: Sequence[Part]) -> int:
    return sum(size for part in parts for kind, size in part.bytes.items() if kind in kinds)


def lacking(candidate: Candidate, lacks: Lacking, what: str = "") -> Rejected:
    """A way that lacks memory, in words."""
    needed, there = lacks.needed / GIB, lacks.there / GIB
    digits = 1 if max(needed, there) >= 1 else 4
    what = what or ("disk" if lacks.tier == "disk" else f"{lacks.tier} memory")
    why = f"{what}: needs {needed:.{digits}f} of {there:.{digits}f} GiB"
    return Rejected(candidate, why, lacks.needed / max(1, lacks.there))


def nothing_below(parts: Sequence[Part]) -> Placement:
    """All on the device."""
    return Placement.of({part.name: dict.fromkeys(part.bytes, "device") for part in parts})


def part_is_below(parts: Sequence[Part], placement: Placement) -> bool:
    """Whether anything is below the device."""
    return any(placement.below(part) for part in parts)


def _alike(parts: Sequence[Part]) -> tuple[object, ...]:
    """What is equal for parts that are placed alike, as those of pipeline ranks are that differ by their layers'
    numbers alone."""
    first = min((layer for part in parts for layer in part.layers), default=0)
    units = {name: number for number, name in enumerate(dict.fromkeys(part.unit or part.name for part in parts))}
    return tuple(
        (
            *sorted(part.bytes.items()),
            *sorted(part.piece.items()),
            tuple(layer - first for layer in part.layers),
            part.ends,
            units[part.unit or part.name],
            part.added,
        )
        for part in parts
    )


def _renamed(placement: Placement, parts: Sequence[Part]) -> Placement:
    """A placement of parts that are alike, one by one, with the names of these."""
    return Placement(tuple((part.name, kinds) for part, (_, kinds) in zip(parts, placement.tiers, strict=True)))
