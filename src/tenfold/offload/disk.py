"""The disk tier: bytes in files on one or several fast disks, moved past the page cache by threads of its own."""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from tenfold.errors import TenfoldError
from tenfold.hardware.disk import describe_disk
from tenfold.offload.lane import BLOCK, DiskTransfer, Lane, Piece, Shared
from tenfold.offload.scratch import open_scratch, remove_leftovers
from tenfold.offload.tiers import ALIGN, Emit, Extent, TierName

THREADS = 4
"""Of each folder."""


def _quiet(_: str) -> None:
    pass


class Disk:
    """A tier in `folders`, one file in each, in a directory of this process's own (`scratch.py`).

    An extent is cut into pieces of at most `BLOCK` bytes, each in the file that holds least, so that a long one lies
    on all disks. What is written is checked when it is read. After an error (a full or failing disk, a file that was
    removed, bytes that changed) nothing more is moved, and every transfer that was not done, and whatever is asked
    later, raises it. `note` is told of leftovers that were removed and of folders that are no fast disks. It has to be
    closed; at the latest that is done when the process ends.
    """

    name: TierName = "disk"

    def __init__(
        self,
        folders: Sequence[Path],
        rank: int = 0,
        note: Emit = _quiet,
        threads_per_folder: int = THREADS,
    ) -> None:
        if not folders:
            raise TenfoldError("offload to disk needs a folder: none was named")
        self._shared, self._lanes = Shared(rank), list[Lane]()
        self._owner, self._closed = os.getpid(), False
        atexit.register(self.close)
        try:
            for folder in dict.fromkeys(Path(folder).absolute() for folder in folders):
                count, size = remove_leftovers(folder)
                if count:
                    note(f"{folder}: removed {size:,} bytes left there by processes that are no more: {count}")
                file = open_scratch(folder, rank)
                self._lanes.append(Lane(file, self._shared, threads_per_folder))
                filesystem = describe_disk(folder, measure=False)["filesystem"]
                if filesystem in ("tmpfs", "ramfs"):
                    note(f"{folder} is no disk: its file system, {filesystem}, keeps files in memory")
                elif not file.direct:
                    note(
                        f"{folder}: its file system ({filesystem}) knows no direct access; bytes go through the page "
                        "cache and are flushed, which is slower"
                    )
        except BaseException:
            self.close()
            raise

    @property
    def held(self) -> int:
        """Bytes that extents have reserved."""
        return sum(lane.held for lane in self._lanes)

    @property
    def bytes_read(self) -> int:
        """Moved so far."""
        return self._shared.bytes_read

    @property
    def bytes_written(self) -> int:
        """Moved so far."""
        return self._shared.bytes_written

    def reserve(self, size: int) -> Extent:
        """Room for `size` bytes, kept free on the disk where its file system can. Raises TenfoldError without."""
        assert size % ALIGN == 0, size
        pieces: list[Piece] = []
        with self._shared.lock:
            self._check()
            try:
                for begin in range(0, size, BLOCK):
                    lane = min(self._lanes, key=lambda lane: lane.held)
                    pieces.append(lane.reserve(min(BLOCK, size - begin)))
            except TenfoldError:
                for piece in pieces:
                    piece.lane.release(piece)
                for lane in self._lanes:
                    lane.trim()
                raise
        return Extent(size, pieces)

    def release(self, extent: Extent) -> None:
        """Give room back, with transfers of it under way or not."""
        with self._shared.lock:
            for piece in cast(list[Piece], extent.place):
                piece.lane.release(piece)

    def read(self, extent: Extent, into: Tensor, begin: int = 0) -> DiskTransfer:
        """Have the bytes from `begin` of an extent brought into all of `into`. It sees every write asked for before."""
        return self._ask(extent, into, begin, writing=False)

    def write(self, extent: Extent, source: Tensor, begin: int = 0) -> DiskTransfer:
        """Have all of `source` brought to `begin` of an extent; it must stay as it is until then."""
        return self._ask(extent, source, begin, writing=True)

    def _ask(self, extent: Extent, memory: Tensor, begin: int, writing: bool) -> DiskTransfer:
        end = begin + len(memory)
        assert (memory.dtype, memory.shape, memory.stride()) == (torch.uint8, (memory.numel(),), (1,))
        assert begin % ALIGN == end % ALIGN == 0, (begin, end)
        assert 0 <= begin <= end <= extent.size, (begin, end, extent.size)
        after = torch.cuda.current_stream(memory.device).record_event() if memory.is_cuda else None
        pieces: list[Piece] = extent.place
        numbers = range(begin // BLOCK, -(-end // BLOCK)) if end > begin else range(0)
        transfer = DiskTransfer(self._shared, len(numbers))
        with self._shared.lock:
            self._check()
            for number in numbers:
                piece, first = pieces[number], number * BLOCK
                assert not piece.released, "an extent was used after its release"
                low, high = max(begin, first), min(end, first + piece.size)
                part = memory[low - begin : high - begin]
                piece.lane.put(piece, low - first, part, writing, transfer, after)
        return transfer

    def _check(self) -> None:
        if self._shared.failure is not None:
            raise TenfoldError(self._shared.failure)

    def close(self) -> None:
        """End the threads and remove the files. Transfers that are not done raise."""
        if self._closed or os.getpid() != self._owner:  # a forked process has none of the threads, and removes nothing
            return
        self._closed = True
        atexit.unregister(self.close)
        with self._shared.lock:
            self._shared.fail(f"offload to disk, rank {self._shared.rank}: it was closed")
        for lane in self._lanes:
            lane.close()
