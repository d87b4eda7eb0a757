"""What a dry run counted (`fake_ranks`) beside what the planner says by arithmetic, and where the two disagree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from tenfold.config.run import RunConfig
from tenfold.offload.placement import Part, Placement, tier_bytes
from tenfold.offload.tiers import Kind, TierName
from tenfold.planning.memory import Device, RankMemory, memory_of
from tenfold.planning.parts import lots_of
from tenfold.planning.stages import Stage
from tenfold.planning.terms import Candidate, Collective, group_of
from tenfold.planning.work import RankWork, work_of
from tenfold.training.fake_ranks import Counted, rehearse

TOLERANCE = 0.03
NOTHING = 2**16
"""Bytes that are no matter: a sum of losses, counts of tokens."""
KINDS = ("weights", "gradients", "moments", "activations")


@dataclass(frozen=True)
class Row:
    """One quantity of one rank of a stage, counted and planned."""

    stage: str
    pipeline_rank: int
    what: str
    counted: float
    planned: float
    unit: Literal["bytes", "calls"] = "bytes"

    @property
    def agrees(self) -> bool:
        """Within 3%, or by a few bytes."""
        apart, most = abs(self.counted - self.planned), max(self.counted, self.planned)
        return apart <= TOLERANCE * most or (self.unit == "bytes" and apart <= NOTHING)


def rows_of(counted: Counted, memory: RankMemory, work: RankWork, candidate: Candidate) -> list[Row]:
    """What can be compared of one rank: state, what is kept for backward passes, peaks, and the exchanges of a step by
    kind and group."""

    def row(what: str, one: float, other: float, unit: Literal["bytes", "calls"] = "bytes") -> Row:
        return Row(counted.stage, counted.pipeline_rank, what, one, other, unit)

    rows = [row(kind, counted.items[kind], memory.items[kind]) for kind in KINDS]
    # What an allocator leaves unused is of no tensor.
    spared = memory.items.get("reserve", 0)
    rows += [
        row(f"peak, {moment}", most, memory.peaks[moment] - spared)
        for moment, most in counted.peaks.items()
        if moment in memory.peaks
    ]
    sent: dict[tuple[str, int, int], list[float]] = {}
    for exchange, count in counted.exchanges.items():
        told = sent.setdefault((exchange.kind, exchange.ranks, exchange.apart), [0.0] * 4)
        told[0], told[1] = told[0] + exchange.bytes * count, told[1] + count
    for item, count in work.items():
        if isinstance(item, Collective) and (group := group_of(item.axis, candidate.degrees))[0] > 1:
            told = sent.setdefault((item.kind, *group), [0.0] * 4)
            told[2], told[3] = told[2] + item.bytes * count, told[3] + count
    for (kind, ranks, apart), (bytes_, calls, planned, planned_calls) in sorted(sent.items()):
        every = "" if apart == 1 else f", every {_th(apart)}"
        rows.append(row(f"{kind} over {ranks} ranks{every}", bytes_, planned))
        if max(bytes_, planned) > NOTHING:
            rows.append(row(f"calls of {kind} over {ranks} ranks{every}", calls, planned_calls, "calls"))
    return rows


def _th(number: int) -> str:
    return {2: "2nd", 3: "3rd"}.get(number, f"{number}th")


@dataclass(frozen=True)
class DryRun:
    """All that was counted, of the ranks that were counted of `world`, and every comparison."""

    world: int
    counted: list[Counted]
    rows: list[Row]

    def told(self) -> dict[str, Any]:
        """For reports and `--json`."""
        return {
            "world": self.world,
            "ranks": len({each.rank for each in self.counted}),
            "seconds": sum(each.seconds for each in self.counted),
            "rows": [{**asdict(row), "agrees": row.agrees} for row in self.rows],
            "delinkings": [
                {"stage": each.stage, "rank": each.rank, "bytes": each.peaks["delinking"]}
                for each in self.counted
                if "delinking" in each.peaks
            ],
        }


def dry_run(
    config: RunConfig,
    stages: Sequence[Stage],
    candidates: Sequence[Candidate],
    device: Device = "cuda",
    placements: Sequence[Sequence[Placement | None]] | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> DryRun:
    """Count the stages of a resolved configuration, run as planned, and compare. It takes minutes: `note` is told of
    what goes on.

    `placements` has for each stage one of each pipeline rank: of what these put below the device the bytes are compared
    by tier, as the parts of the real model add up to them; nothing is moved. Raises TenfoldError for what a run would
    refuse.
    """
    counted = rehearse(config, stages, candidates, device, parts=placements is not None, note=note)
    rows: list[Row] = []
    for number, (stage, candidate) in enumerate(zip(stages, candidates, strict=True)):
        lots = lots_of(config, stage, candidate.degrees)
        memory, work = memory_of(config, stage, candidate, device=device, lots=lots), work_of(config, stage, candidate)
        for each in counted:
            if each.number != number:
                continue
            rank = each.pipeline_rank
            rows += rows_of(each, memory[rank], work[rank], candidate)
            if placements is not None and (placement := placements[number][rank]) is not None:
                rows += _below(each, memory[rank], placement)
    return DryRun(candidates[0].degrees.ranks, counted, rows)


def _below(counted: Counted, memory: RankMemory, placement: Placement) -> list[Row]:
    """What a placement makes of the real model's parts, tier by tier, activations apart."""

    def state(parts: Sequence[Part]) -> dict[TierName, int]:
        kinds: tuple[Kind, ...] = ("weights", "gradients", "moments")
        return tier_bytes([replace(part, bytes={k: part.bytes[k] for k in kinds}) for part in parts], placement)

    real, planned = state(counted.parts), state(memory.parts)
    return [
        Row(counted.stage, counted.pipeline_rank, f"state on {tier}", real[tier], planned[tier])
        for tier in planned
        if real[tier] or planned[tier]
    ]
