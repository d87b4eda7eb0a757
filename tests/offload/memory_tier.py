"""A tier for tests: bytes in memory, moved when the test says so, with everything counted and every promise checked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tenfold.errors import TenfoldError
from tenfold.offload.tiers import ALIGN, Extent, TierName


@dataclass(eq=False)
class Moving:
    """A transfer of a `MemoryTier`; `number` counts from 1, reads and writes together."""

    tier: MemoryTier
    number: int
    writes: bool
    store: Tensor
    """The extent's bytes that it is about."""
    outside: Tensor
    written: Tensor
    """[pages] bool: those of them that have been written."""
    asked: int
    """The tier's clock when it was asked for."""
    moved: bool = False
    failed: bool = False

    def wait(self) -> None:
        self.tier.waits += not self.moved
        self.tier.move_until(self)
        if self.failed:
            kind = "writing" if self.writes else "reading"
            raise TenfoldError(f"memory tier: {kind} {len(self.outside)} bytes failed, transfer {self.number}")

    @property
    def done(self) -> bool:
        self.tier.tick()
        return self.moved

    def move(self) -> None:
        assert not self.moved
        self.moved, self.failed = True, self.number in self.tier.failing
        if self.failed:
            return
        if self.writes:
            self.store.copy_(self.outside)
            self.written.fill_(True)
            self.tier.bytes_written += len(self.outside)
        else:
            self.outside.copy_(self.store)
            self.tier.bytes_read += len(self.outside)


class MemoryTier:
    """Implements `tiers.Tier`. Transfers are done one after another in the order they were asked for.

    `delay`: 0, a transfer is done when it is asked for; n, when the tier was asked n things more (transfers, or whether
    one is done); None, when it or a later one is waited for, or the test calls `step`. Until then the source of a write
    is not looked at, and what a read is to fill holds 0xFF (NaN as any float): to use either too early shows.
    `failing`: the numbers of transfers that fail, see `fail_next`. `calls` has one entry for each call: "reserve",
    "release", "read", "write", "close".
    """

    def __init__(self, room: int = 1 << 40, name: TierName = "disk", delay: int | None = 0) -> None:
        self.name: TierName = name
        self.room, self.delay = room, delay
        self.held = self.most_held = self.bytes_read = self.bytes_written = 0
        self.calls: list[str] = []
        self.failing: set[int] = set()
        self.asked = self.waits = self.clock = 0
        self.queue: list[Moving] = []
        self.extents: set[Extent] = set()

    def reserve(self, size: int) -> Extent:
        self._called("reserve")
        assert size > 0, size
        assert size % ALIGN == 0, size
        if self.held + size > self.room:
            raise TenfoldError(f"memory tier: {size:,} bytes asked for, {self.room - self.held:,} free")
        self.held += size
        self.most_held = max(self.most_held, self.held)
        pages = torch.zeros(size // ALIGN, dtype=torch.bool)
        extent = Extent(size, (torch.empty(size, dtype=torch.uint8).fill_(0xFF), pages))
        self.extents.add(extent)
        return extent

    def release(self, extent: Extent) -> None:
        self._called("release")
        assert extent in self.extents, "an extent that was released, or is of another tier"
        self.extents.remove(extent)
        self.held -= extent.size

    def read(self, extent: Extent, into: Tensor, begin: int = 0) -> Moving:
        moving = self._ask("read", extent, into, begin)
        behind = any(each.writes and _overlap(each.written, moving.written) for each in self.queue)
        assert behind or bool(moving.written.all()), "bytes are read that were never written"
        into.fill_(0xFF)
        return self._begin(moving)

    def write(self, extent: Extent, source: Tensor, begin: int = 0) -> Moving:
        return self._begin(self._ask("write", extent, source, begin))

    def close(self) -> None:
        self._called("close")
        self.step(len(self.queue))

    def step(self, count: int = 1) -> None:
        """Do the next `count` transfers."""
        for _ in range(min(count, len(self.queue))):
            self.queue.pop(0).move()

    def fail_next(self, nth: int = 1) -> None:
        """The `nth` transfer from now, 1 being the next that is asked for, is to fail."""
        self.failing.add(self.asked + nth)

    def count(self, call: str) -> int:
        return self.calls.count(call)

    def move_until(self, last: Moving) -> None:
        while not last.moved:
            self.step()

    def tick(self) -> None:
        self.clock += 1
        while self.delay is not None and self.queue and self.queue[0].asked + self.delay <= self.clock:
            self.step()

    def _called(self, call: str) -> None:
        assert "close" not in self.calls, f"{call} of a tier that is closed"
        self.calls.append(call)

    def _ask(self, call: str, extent: Extent, outside: Tensor, begin: int) -> Moving:
        self._called(call)
        size = len(outside)
        assert outside.dtype == torch.uint8, outside.dtype
        assert outside.dim() == 1, outside.shape
        assert outside.is_contiguous()
        assert not outside.requires_grad
        assert size > 0, "nothing to move"
        assert (outside.data_ptr() | size | begin) % ALIGN == 0, (outside.data_ptr(), size, begin)
        assert extent in self.extents, "an extent that was released, or is of another tier"
        assert begin + size <= extent.size, (begin, size, extent.size)
        self.asked += 1
        store, written = extent.place
        pages = written[begin // ALIGN : (begin + size) // ALIGN]
        return Moving(self, self.asked, call == "write", store[begin : begin + size], outside, pages, self.clock + 1)

    def _begin(self, moving: Moving) -> Moving:
        self.queue.append(moving)
        self.tick()
        return moving


def _overlap(one: Tensor, other: Tensor) -> bool:
    a, b = one.data_ptr(), other.data_ptr()
    return a < b + len(other) and b < a + len(one)
