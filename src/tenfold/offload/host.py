"""The host tier: pinned RAM beside an accelerator, one piece of exact size, copied to and from on two streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tenfold.errors import TenfoldError
from tenfold.offload.pinned import check_pinnable, near_cpus, pin, touch_near, unpin
from tenfold.offload.slab import Block, Slab
from tenfold.offload.tiers import ALIGN, Extent, TierName, Transfer


class Copies(Protocol):
    """How bytes get from RAM to a device and back: copies of one direction come one behind another."""

    def prepare(self, memory: Tensor) -> None:
        """Make RAM ready for it."""

    def start(self, into: Tensor, source: Tensor, reading: bool, after: list[Transfer]) -> Transfer:
        """Begin a copy (`reading`: to the device), behind others and behind what the current stream was told."""

    def finish(self, memory: Tensor) -> None:
        """Wait for all copies, and let the RAM go."""


class CudaCopies:
    """Copies on two streams of a CUDA device, one a direction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {reading: torch.cuda.Stream(device) for reading in (True, False)}

    def prepare(self, memory: Tensor) -> None:
        """Have its pages made near the device, and pin them."""
        touch_near(memory, near_cpus(self._device))
        pin(memory, self._device)

    def start(self, into: Tensor, source: Tensor, reading: bool, after: list[Transfer]) -> Transfer:
        """Begin a copy behind others and behind what the current stream was told."""
        stream = self._streams[reading]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for earlier in after:
                earlier.wait()  # the current stream is now this one
            into.copy_(source, non_blocking=True)
            return CudaTransfer(stream.record_event(), self._device)

    def finish(self, memory: Tensor) -> None:
        """Wait for all copies, and unpin."""
        for stream in self._streams.values():
            stream.synchronize()
        unpin(memory, self._device)


class CudaTransfer:
    """A copy on a stream."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def wait(self) -> None:
        """Have what the current stream is told next come behind it."""
        torch.cuda.current_stream(self._device).wait_event(self._event)

    @property
    def done(self) -> bool:
        """Whether it is done."""
        return self._event.query()


@dataclass(eq=False)
class _Room:
    """An extent's place: its RAM, and the last copies to and from it."""

    block: Block | None
    written: Transfer | None = None
    read: Transfer | None = None


class Host:
    """A tier of `size_limit` bytes of RAM, had, and pinned, at once.

    Raises TenfoldError where there is no accelerator, or where the machine, the control group or the driver does not
    let as much be pinned. `copies` is by default those of the device.
    """

    name: TierName = "host"

    def __init__(self, size_limit: int, device: torch.device, copies: Copies | None = None) -> None:
        if copies is None:
            if device.type != "cuda":
                raise TenfoldError(
                    f'offload: the tier "host" is RAM beside an accelerator, and the device is "{device}": use "disk"'
                )
            copies = CudaCopies(device)
        check_pinnable(size_limit)
        self._slab = Slab(size_limit, torch.device("cpu"))
        self._copies, self._device, self._closed = copies, device, False
        self._last_reads: list[Transfer] = []  # of extents that were released: whatever is written next waits for them
        self.bytes_read = self.bytes_written = 0
        if self._slab.size:
            copies.prepare(self._slab.memory)

    @property
    def held(self) -> int:
        """Bytes that extents have reserved."""
        return self._slab.taken

    def reserve(self, size: int) -> Extent:
        """Room for `size` bytes. Raises TenfoldError where there is none."""
        assert size % ALIGN == 0, size
        block = self._slab.take(size) if size else Block(0, self._slab.memory[:0])
        if block is None:
            free = self._slab.size - self._slab.taken
            raise TenfoldError(
                f"offload: no {size:,} bytes in one piece are left in the host tier, which has {self._slab.size:,} "
                f'bytes, {free:,} of them free: give the tier "host" more, or put less there'
            )
        return Extent(size, _Room(block))

    def release(self, extent: Extent) -> None:
        """Give room back, with transfers of it under way or not."""
        room: _Room = extent.place
        assert room.block is not None, "an extent was released twice"
        if room.read is not None:
            self._last_reads.append(room.read)
        if extent.size:
            self._slab.give(room.block)
        room.block = None

    def read(self, extent: Extent, into: Tensor, begin: int = 0) -> Transfer:
        """Have the bytes from `begin` of an extent brought into all of `into`. It sees every write asked for before."""
        room: _Room = extent.place
        source = self._bytes(extent, into, begin)
        room.read = self._copies.start(into, source, True, [] if room.written is None else [room.written])
        self.bytes_read += len(into)
        return room.read

    def write(self, extent: Extent, source: Tensor, begin: int = 0) -> Transfer:
        """Have all of `source` brought to `begin` of an extent; it must stay as it is until then."""
        room: _Room = extent.place
        into = self._bytes(extent, source, begin)
        self._last_reads = [read for read in self._last_reads if not read.done]
        after = [*self._last_reads] if room.read is None else [*self._last_reads, room.read]
        room.written = self._copies.start(into, source, False, after)
        self.bytes_written += len(source)
        return room.written

    def _bytes(self, extent: Extent, outside: Tensor, begin: int) -> Tensor:
        assert not self._closed, "the host tier was closed"
        block = extent.place.block
        assert block is not None, "an extent was used after its release"
        assert (outside.dtype, outside.device.type) == (torch.uint8, self._device.type)
        assert begin + len(outside) <= extent.size, (begin, len(outside), extent.size)
        return block.bytes[begin : begin + len(outside)]

    def close(self) -> None:
        """Unpin the RAM and let it go, when all copies are done."""
        if self._closed:
            return
        self._closed = True
        if self._slab.size:
            self._copies.finish(self._slab.memory)
        self._slab = Slab(0, torch.device("cpu"))


def link_rate(device: torch.device, size: int = 2**28, reading: bool = True) -> float:
    """Bytes a second from pinned RAM to `device`, or (not `reading`) back, measured with a copy of `size` bytes."""
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(size, dtype=torch.uint8, device=device)
    into, source = (there, pinned) if reading else (pinned, there)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    into.copy_(source, non_blocking=True)  # the first copy also readies the device
    begin.record()
    into.copy_(source, non_blocking=True)
    end.record()
    end.synchronize()
    return size / (begin.elapsed_time(end) / 1000)
