"""What a step moves of state that lies below the device, when, and what is computed meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field

from tenfold.offload.forecast import Rates
from tenfold.offload.placement import Part
from tenfold.offload.tiers import Kind, TierName


@dataclass(frozen=True)
class Hiding:
    """Seconds of a step beside which transfers go on: of compute in all forward and backward passes, and of the
    optimizer's."""

    passes: float = 0.0
    update: float = 0.0


@dataclass(frozen=True)
class Traffic:
    """What is asked of a placement: transfers of so many micro-batches in a step, at these rates."""

    rates: Rates
    micro_batches: int = 1
    hiding: Hiding = field(default_factory=Hiding)
    in_backward: bool = False
    """Whether the optimizer steps in the one backward pass: then all transfers are beside all of compute."""

    def bytes_of(self, part: Part, kind: Kind) -> dict[tuple[str, str], int]:
        """Bytes of a part's state of a kind below the device that a step moves, by ("passes" or "update", "read" or
        "write"); in all those of `offload.placement.traffic`."""
        size, count, added = part.bytes[kind], self.micro_batches, 0
        if kind == "gradients":
            size, added = round(size * part.seen), round(part.added * part.seen)
        found = {
            "weights": {
                ("passes", "read"): size * 2 * part.runs * count,
                ("update", "read"): size,
                ("update", "write"): size,
            },
            "gradients": {
                ("passes", "read"): size * (count - 1),
                ("passes", "write"): size * count,
                ("update", "read"): size + added,
                ("update", "write"): added,
            },
            "moments": {("update", "read"): size, ("update", "write"): size},
            "activations": {("passes", "read"): size * count, ("passes", "write"): size * count},
        }[kind]
        if self.in_backward:
            found = {("passes", way): sum(n for (_, w), n in found.items() if w == way) for way in ("read", "write")}
        return found

    def hidden(self, moment: str) -> float:
        """Seconds of compute in a moment of the step."""
        if self.in_backward:
            return self.hiding.passes + self.hiding.update
        return self.hiding.passes if moment == "passes" else self.hiding.update

    def rate(self, tier: TierName, way: str) -> float:
        """Bytes a second; 0: there is no such tier."""
        return (self.rates.read if way == "read" else self.rates.write).get(tier, 0.0)
