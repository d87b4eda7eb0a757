"""Time as transfers and compute share it: each way of a tier moves one thing at a time, while compute goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from tenfold.offload.tiers import Kind, TierName

What = tuple[str, Kind]
"""A part and a kind of its state."""
T = TypeVar("T")


class Clock(Protocol[T]):
    """What a rehearsal tells in the order in which it happens; a transfer is a `T`."""

    def forward(self, layer: int) -> None:
        """The device goes through a layer."""

    def backward(self, layer: int) -> None:
        """And back."""

    def update(self, share: float) -> None:
        """The optimizer steps so much of the weights."""

    def move(self, what: What, tier: TierName, way: str, size: float, behind: T | None = None) -> T:
        """A transfer is asked for, which begins not before another is done."""
        ...

    def wait(self, transfer: T) -> None:
        """The device stands still until it is done."""


@dataclass(eq=False)
class Transfer:
    """Of a lane, from `begin` to `end` in seconds."""

    lane: Lane
    what: What
    begin: float
    end: float


@dataclass(eq=False)
class Lane:
    """One way of a tier: one transfer at a time, in the order in which they are asked for, at `rate` bytes a second."""

    rate: float
    free: float = 0.0
    past: deque[Transfer] = field(default_factory=deque)
    moved: dict[What, float] = field(default_factory=dict)

    def busy(self, what: What) -> float:
        """Seconds in which it moved something of a part."""
        return self.moved.get(what, 0.0) / self.rate


class Timeline:
    """The clock that knows the time in seconds, and what is on its way.

    `rates`: bytes a second of each lane, (tier, "read" or "write"). `forward` and `backward` are each layer's seconds,
    `update` those of the optimizer's step.
    """

    def __init__(
        self,
        rates: Mapping[tuple[TierName, str], float],
        forward: Sequence[float],
        backward: Sequence[float],
        update: float,
    ) -> None:
        self.now = 0.0
        self.lanes = {lane: Lane(rate) for lane, rate in rates.items()}
        self.stalls: dict[What, float] = {}
        self._forward, self._backward, self._update = forward, backward, update

    def forward(self, layer: int) -> None:
        self.now += self._forward[layer]

    def backward(self, layer: int) -> None:
        self.now += self._backward[layer]

    def update(self, share: float) -> None:
        self.now += self._update * share

    def begin_step(self) -> float:
        """Count anew from here; the time."""
        for lane in self.lanes.values():
            lane.moved = {}
        self.stalls = {}
        return self.now

    def move(self, what: What, tier: TierName, way: str, size: float, behind: Transfer | None = None) -> Transfer:
        lane = self.lanes[tier, way]
        begin = max(lane.free, self.now, 0.0 if behind is None else behind.end)
        lane.free = begin + size / lane.rate
        lane.moved[what] = lane.moved.get(what, 0.0) + size
        lane.past.append(Transfer(lane, what, begin, lane.free))
        return lane.past[-1]

    def wait(self, transfer: Transfer) -> None:
        """The time counts for what the lane moves meanwhile."""
        left = transfer.end - self.now
        if left <= 0:
            return
        past = transfer.lane.past
        while past and past[0].end <= self.now:
            past.popleft()
        for each in past:
            if each.begin >= transfer.end:
                break
            shared = min(each.end, transfer.end) - max(each.begin, self.now)
            self.stalls[each.what] = self.stalls.get(each.what, 0.0) + shared
            left -= shared
        if left > 1e-12:  # the lane itself waited, for what had to be written first
            self.stalls[transfer.what] = self.stalls.get(transfer.what, 0.0) + left
        self.now = transfer.end


class Room(Generic[T]):
    """Working memory of `size` bytes that pieces pass through."""

    def __init__(self, clock: Clock[T], size: int) -> None:
        self._clock, self._free = clock, float(size)
        self._leaving: deque[tuple[float, list[T]]] = deque()

    def take(self, size: float) -> None:
        """Have so much, as soon as what leaves has made it free."""
        while self._leaving and self._free < size - 1e-6:
            room, transfers = self._leaving.popleft()
            for transfer in transfers:
                self._clock.wait(transfer)
            self._free += room
        self._free -= size

    def give(self, size: float, transfers: list[T]) -> None:
        """Give so much back, behind transfers."""
        self._leaving.append((size, transfers))
