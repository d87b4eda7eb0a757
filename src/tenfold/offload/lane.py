"""One file of the disk tier, and the threads that move bytes between it and memory.

Bytes go in jobs, each within one piece of the file. A job waits for those before it that touch the same bytes, unless
both read; else jobs of a file are begun in the order in which they were asked for, by as many threads as it has.

Every page that is written has a sum kept in memory: of its 512 words of 64 bits, modulo 2^32 - 1, so 4 bytes a page.
No single flipped bit, nor a page that is another's, gets past it unseen.
"""

from __future__ import annotations

import errno
import heapq
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tenfold.errors import TenfoldError
from tenfold.offload.pinned import pin, unpin
from tenfold.offload.scratch import ScratchFile
from tenfold.offload.slab import Runs, Slab
from tenfold.offload.tiers import ALIGN

BLOCK = 8 * 2**20
"""Bytes: the longest piece, and the most that one thread moves at a time."""

_RESUME = "The last checkpoint is whole: resume from it."


class Shared:
    """What the lanes of a tier and all its transfers share. `lock` guards it, and all that lanes keep."""

    def __init__(self, rank: int) -> None:
        self.rank, self.lock = rank, threading.Lock()
        self.finished = threading.Condition(self.lock)
        self.failure: str | None = None
        """The first error: nothing is moved after it."""
        self.bytes_read = self.bytes_written = 0

    def fail(self, why: str) -> None:
        """End all (with the lock held)."""
        self.failure = self.failure or why
        self.finished.notify_all()


class DiskTransfer:
    """Bytes on their way between memory and a disk, in `left` jobs."""

    def __init__(self, shared: Shared, left: int) -> None:
        self._shared, self.left = shared, left

    def wait(self) -> None:
        """Come back when the bytes are there. Raises TenfoldError where they did not get there."""
        with self._shared.lock:
            while self.left and self._shared.failure is None:
                self._shared.finished.wait()
            if self.left:
                raise TenfoldError(self._shared.failure)

    @property
    def done(self) -> bool:
        """Whether `wait` would come back at once, with an error too."""
        return not self.left or self._shared.failure is not None


@dataclass(eq=False)
class Piece:
    """`size` bytes of a lane's file, at most `BLOCK`, from `begin`."""

    lane: Lane
    begin: int
    size: int
    sums: NDArray[np.uint32]
    """Of each page, as last written."""
    unfinished: list[Job] = field(default_factory=list)
    released: bool = False


@dataclass(eq=False, slots=True)
class Job:
    """Bytes to move between memory and a piece, from its byte `begin`; `number` is its place in the lane's order."""

    number: int
    piece: Piece
    begin: int
    memory: Tensor
    writing: bool
    transfer: DiskTransfer
    after: torch.cuda.Event | None
    """What the copy from or to a device must come behind."""
    blockers: int = 0
    """Jobs before it that touch the same bytes and are not done."""
    blocks: list[Job] = field(default_factory=list)

    def keeps_waiting(self, later: Job) -> bool:
        """Whether a later job of the same piece has to wait for this one."""
        apart = self.begin + len(self.memory) <= later.begin or later.begin + len(later.memory) <= self.begin
        return not apart and (self.writing or later.writing)


class Lane:
    """The file, which of its bytes are free, the jobs that wait, and the threads. Methods: with the lock held."""

    def __init__(self, file: ScratchFile, shared: Shared, threads: int) -> None:
        self.file, self.shared = file, shared
        self.held = 0
        """Bytes of pieces that are not released."""
        self._size, self._runs = 0, Runs()
        self._ready: list[tuple[int, Job]] = []  # a heap, by number
        self._count = 0
        self._more = threading.Condition(shared.lock)
        self._threads = [
            threading.Thread(target=self._work, name=f"tenfold-disk-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def reserve(self, size: int) -> Piece:
        """A piece of the file, which grows where none is free. Raises TenfoldError where it cannot."""
        begin = self._runs.take(size)
        if begin is None:
            self._grow(size)
            begin = self._runs.take(size)
            assert begin is not None
        self.held += size
        return Piece(self, begin, size, np.zeros(size // ALIGN, dtype=np.uint32))

    def _grow(self, size: int) -> None:
        descriptor = self.file.descriptor
        # The end may be free: only what is missing is added to it.
        size -= self._size - self._runs.free[-1][0] if self._runs.free and self._runs.free[-1][1] == self._size else 0
        try:
            system = os.fstatvfs(descriptor)
            free = system.f_bavail * system.f_frsize
            if free < size:
                raise OSError(errno.ENOSPC, f"only {free:,} bytes are free there")
            try:
                os.posix_fallocate(descriptor, self._size, size)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    raise
                os.ftruncate(descriptor, self._size + size)  # a file system that cannot keep room free
        except OSError as error:
            raise self._error(error, f"room for {size:,} more bytes could not be had") from None
        self._runs.give(self._size, self._size + size)
        self._size += size

    def release(self, piece: Piece) -> None:
        """Give a piece back: at once, or when the last job on it is done."""
        assert not piece.released, "an extent was released twice"
        piece.released = True
        self.held -= piece.size
        if not piece.unfinished:
            self._runs.give(piece.begin, piece.begin + piece.size)

    def trim(self) -> None:
        """Give what is free at the end of the file back to the file system."""
        if self._runs.free and self._runs.free[-1][1] == self._size:
            self._size = self._runs.free.pop()[0]
            os.ftruncate(self.file.descriptor, self._size)

    def put(
        self,
        piece: Piece,
        begin: int,
        memory: Tensor,
        writing: bool,
        transfer: DiskTransfer,
        after: torch.cuda.Event | None,
    ) -> None:
        """Have a job done."""
        self._count += 1
        job = Job(self._count, piece, begin, memory, writing, transfer, after)
        for earlier in piece.unfinished:
            if earlier.keeps_waiting(job):
                earlier.blocks.append(job)
                job.blockers += 1
        piece.unfinished.append(job)
        if not job.blockers:
            self._make_ready(job)

    def _make_ready(self, job: Job) -> None:
        heapq.heappush(self._ready, (job.number, job))
        self._more.notify()

    def close(self) -> None:
        """Wait for the threads, which end after a failure, and remove the file (without the lock)."""
        with self.shared.lock:
            self._ready.clear()
            self._more.notify_all()
        for thread in self._threads:
            thread.join()
        self.file.close()

    def _work(self) -> None:
        staging = _Staging()
        try:
            while (job := self._next()) is not None:
                self._move(job, staging)
                self._finish(job)
                del job  # and with it memory that is no more ours
        except Exception as error:  # of whatever kind: those who wait are to hear of it
            why = f"offload to disk, rank {self.shared.rank}: {type(error).__name__}: {error}. {_RESUME}"
            with self.shared.lock:
                self.shared.fail(str(error) if isinstance(error, TenfoldError) else why)
        finally:
            staging.close()

    def _next(self) -> Job | None:
        with self.shared.lock:
            while not self._ready and self.shared.failure is None:
                self._more.wait()
            if self.shared.failure is not None:
                return None
            return heapq.heappop(self._ready)[1]

    def _finish(self, job: Job) -> None:
        with self.shared.lock:
            if job.writing:
                self.shared.bytes_written += len(job.memory)
            else:
                self.shared.bytes_read += len(job.memory)
            job.piece.unfinished.remove(job)
            for later in job.blocks:
                later.blockers -= 1
                if not later.blockers:
                    self._make_ready(later)
            if job.piece.released and not job.piece.unfinished:
                self._runs.give(job.piece.begin, job.piece.begin + job.piece.size)
            job.transfer.left -= 1
            if not job.transfer.left:
                self.shared.finished.notify_all()

    def _move(self, job: Job, staging: _Staging) -> None:
        descriptor, size, sums = self.file.descriptor, len(job.memory), job.piece.sums
        place, pages = job.piece.begin + job.begin, slice(job.begin // ALIGN, (job.begin + size) // ALIGN)
        # A file without a name still takes and gives bytes; but whoever removed it wants its room back.
        if os.fstat(descriptor).st_nlink == 0:
            raise self._error(FileNotFoundError(errno.ENOENT, "it was removed"), f"{size:,} bytes are lost")
        staged = job.memory.device.type != "cpu" or job.memory.data_ptr() % ALIGN != 0
        memory = staging.room(job.memory) if staged else job.memory
        bytes_here = memory.numpy()
        if job.writing:
            if staged:
                staging.copy(memory, job.memory, job.after)
            found = page_sums(bytes_here)
            self._all(os.pwritev, bytes_here, place, "written")
            sums[pages] = found
            if not self.file.direct:
                try:
                    os.fdatasync(descriptor)  # only what is on the disk can be dropped from the cache
                except OSError as error:
                    raise self._error(error, _lost(size, place, "written")) from None
        else:
            self._all(os.preadv, bytes_here, place, "read")
            found = page_sums(bytes_here)
            if not np.array_equal(found, sums[pages]):
                first = int(np.flatnonzero(found != sums[pages])[0])
                raise TenfoldError(
                    f"offload to disk, rank {self.shared.rank}: {self.file.path} does not give back what was written: "
                    f"the sum of the {ALIGN} bytes at byte {place + first * ALIGN:,} was "
                    f"{sums[pages][first]:08x} and is {found[first]:08x}. The disk or the way to it changes bytes: "
                    f"look at the kernel's log, or name another folder for offload. {_RESUME}"
                )
            if staged:
                staging.copy(job.memory, memory, job.after)
        if not self.file.direct:
            os.posix_fadvise(descriptor, place, size, os.POSIX_FADV_DONTNEED)

    def _all(self, move: Callable[..., int], memory: NDArray[np.uint8], place: int, doing: str) -> None:
        """Move all bytes, however few the system moves at a time."""
        done, idle, descriptor = 0, False, self.file.descriptor
        while done < len(memory):
            left, at = memory[done:], place + done
            try:
                count = move(descriptor, [left], at)
            except OSError as error:
                raise self._error(error, _lost(len(left), at, doing)) from None
            count = count // ALIGN * ALIGN  # the rest again: direct access knows only whole pages
            if not count and idle:  # had it a reason, it would have told it the second time
                end = os.fstat(descriptor).st_size
                why = f"the file ends at byte {end:,}" if end < place + len(memory) else "nothing was moved"
                raise self._error(OSError(errno.EIO, why), _lost(len(left), at, doing))
            done, idle = done + count, not count

    def _error(self, error: OSError, what: str) -> TenfoldError:
        remedy = {
            errno.ENOSPC: "Make room there, or name other or more folders for offload.",
            errno.EDQUOT: "Your quota there is used up: make room, or name other folders for offload.",
            errno.EFBIG: "The limit of a file's size (ulimit -f) is too small: raise it.",
            errno.ENOENT: "Leave the folder as it is while the run goes on.",
        }.get(error.errno or 0, "Look at the kernel's log, or name another folder for offload.")
        why = f"{self.file.path}: {error.strerror}. {remedy} {_RESUME}"
        return TenfoldError(f"offload to disk, rank {self.shared.rank}: {what}, in {why}")


def _lost(size: int, place: int, doing: str) -> str:
    return f"{size:,} bytes at byte {place:,} could not be {doing}"


def page_sums(memory: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Of each whole page (the length is a multiple of it). It lets go of the interpreter."""
    sums = memory.view(np.uint64).reshape(-1, ALIGN // 8).sum(axis=1)
    return (sums % np.uint64(2**32 - 1)).astype(np.uint32)


class _Staging:
    """A thread's own page-aligned memory, for bytes that the disk cannot read or write where they are.

    It is made when it is first needed; pinned, and with a stream of the thread's own, where they are on a device.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._stream: torch.cuda.Stream | None = None

    def room(self, memory: Tensor) -> Tensor:
        """As many bytes as `memory` has."""
        if self._memory is None:
            block = Slab(BLOCK, torch.device("cpu")).take(BLOCK)
            assert block is not None
            self._memory = block.bytes
        if memory.is_cuda and self._stream is None:
            pin(self._memory, memory.device)
            self._stream = torch.cuda.Stream(memory.device)
        return self._memory[: len(memory)]

    def copy(self, into: Tensor, source: Tensor, after: torch.cuda.Event | None) -> None:
        """Copy, and come back when it is done."""
        if self._stream is None:
            np.copyto(into.numpy(), source.numpy())  # PyTorch would start OpenMP threads for each of ours
            return
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            into.copy_(source, non_blocking=True)
        self._stream.synchronize()

    def close(self) -> None:
        if self._stream is not None and self._memory is not None:
            unpin(self._memory, self._stream.device)
