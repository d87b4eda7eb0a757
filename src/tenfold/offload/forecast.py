"""What a placement will cost, before the run: a step played through, with each transfer at the rate of its tier.

There is one lane for compute, and one to read and one to write for each tier. What is done when is as in the engine:
weights fetched one unit ahead, forward and backward, and let go when their room is wanted; gradients leaving behind the
layer that made them whole; the optimizer's step streaming through working memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tenfold.offload.placement import Part, Placement, kind_bytes, tier_bytes, working_bytes
from tenfold.offload.rehearsal import Rehearsal
from tenfold.offload.tiers import Kind, TierName
from tenfold.offload.timeline import Timeline

STEPS = 3
"""Steps that are played: the last begins as any later one does."""


@dataclass(frozen=True)
class Rates:
    """Bytes a second that tiers below the device are read and written, by this rank alone."""

    read: Mapping[TierName, float]
    write: Mapping[TierName, float]

    @classmethod
    def of(cls, disks: Sequence[Mapping[str, Any]], host: float | None = None, ranks: int = 1) -> Rates:
        """From measured disks (`hardware.disk.measure_disk`), used side by side and shared by `ranks`, and the rate of
        this rank's link to pinned memory, each way; None: there is none."""
        read: dict[TierName, float] = {} if host is None else {"host": host}
        write = dict(read)
        if disks:
            read["disk"] = sum(disk["read_bytes_per_second"] for disk in disks) / ranks
            write["disk"] = sum(disk["write_bytes_per_second"] for disk in disks) / ranks
        return cls(read, write)


@dataclass(frozen=True)
class Compute:
    """Seconds of compute: of each layer, forward and backward, for a micro-batch, and of the optimizer's whole step."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    step: float = 0.0

    @classmethod
    def of(
        cls, costs: Sequence[float], recomputed: Sequence[bool], tokens: int, flops: float, step: float = 0.0
    ) -> Compute:
        """From multiply-adds of a token in each layer, both passes (`nn.counting.layer_costs`), the tokens of a
        micro-batch, and operations a second."""
        seconds = [2 * cost * tokens / flops for cost in costs]
        forward = [each / (4 if again else 3) for each, again in zip(seconds, recomputed, strict=True)]
        backward = tuple(each - part for each, part in zip(seconds, forward, strict=True))
        return cls(tuple(forward), backward, step)


@dataclass(frozen=True)
class Row:
    """What one kind of a part's state below the device costs in a step.

    `bytes` lie in its tier; `read` and `written` are moved, in `seconds`, of which compute waits `stalled`.
    """

    part: str
    kind: Kind
    tier: TierName
    bytes: int
    read: int
    written: int
    seconds: float
    stalled: float

    @property
    def hidden(self) -> float:
        """Seconds of transfer beside which something was computed."""
        return max(0.0, self.seconds - self.stalled)


@dataclass(frozen=True)
class Forecast:
    """A step: `seconds` in all, of which `compute`, and a row for all that is below the device."""

    seconds: float
    compute: float
    rows: tuple[Row, ...]
    lanes: Mapping[str, float]
    """Seconds in which each lane moves something: "disk read"."""

    @property
    def floor(self) -> float:
        """Seconds in which no order of the same transfers would be done."""
        return max(self.compute, *self.lanes.values()) if self.lanes else self.compute

    def dump(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "seconds": self.seconds,
            "compute_seconds": self.compute,
            "lane_seconds": dict(self.lanes),
            "rows": [
                {
                    "part": row.part,
                    "kind": row.kind,
                    "tier": row.tier,
                    "bytes": row.bytes,
                    "bytes_read": row.read,
                    "bytes_written": row.written,
                    "seconds_hidden": row.hidden,
                    "seconds_stalled": row.stalled,
                }
                for row in self.rows
            ],
        }


def forecast(
    parts: Sequence[Part],
    placement: Placement,
    rates: Rates,
    compute: Compute,
    micro_batches: int = 1,
    step_in_backward: bool = False,
) -> Forecast:
    """What a step with `placement` costs at these rates."""
    by_lane = {(tier, "read"): rate for tier, rate in rates.read.items()}
    by_lane |= {(tier, "write"): rate for tier, rate in rates.write.items()}
    time = Timeline(by_lane, compute.forward, compute.backward, compute.step)
    play = Rehearsal(parts, placement, time, len(compute.forward), step_in_backward)
    begin = 0.0
    for _ in range(STEPS):
        begin = time.begin_step()
        play.step(micro_batches)
    lanes = time.lanes
    rows = []
    for part in parts:
        for kind in placement.below(part):
            tier, what = placement.tier(part.name, kind), (part.name, kind)
            reading, writing = lanes[tier, "read"], lanes[tier, "write"]
            rows.append(
                Row(
                    part.name,
                    kind,
                    tier,
                    part.bytes[kind],
                    round(reading.moved.get(what, 0)),
                    round(writing.moved.get(what, 0)),
                    reading.busy(what) + writing.busy(what),
                    time.stalls.get(what, 0.0),
                )
            )
    whole = sum(compute.forward) + sum(compute.backward)
    return Forecast(
        time.now - begin,
        micro_batches * whole + compute.step,
        tuple(rows),
        {f"{tier} {way}": sum(lane.moved.values()) / lane.rate for (tier, way), lane in lanes.items() if lane.moved},
    )


def describe(
    parts: Sequence[Part], placement: Placement, cost: Forecast, other: int = 0, in_backward: bool = False
) -> dict[str, Any]:
    """A placement and what it will cost, as the event `placement` in metrics.jsonl has it. `other` bytes of the device
    are for activations that stay and for temporaries; `in_backward`: see `placement.kind_bytes`."""
    return {
        "placement": placement.dump(),
        "tier_bytes": tier_bytes(parts, placement, in_backward),
        "kind_bytes": kind_bytes(parts, placement, in_backward),
        "working_bytes": working_bytes(parts, placement),
        "other_bytes": other,
        "forecast": cost.dump(),
    }
