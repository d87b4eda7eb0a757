"""Where files go: file system, free space, and measured sequential speed past the page cache."""

from __future__ import annotations

import mmap
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

from tenfold.hardware.cgroup import ROOT, read_text

_BLOCK = 8 * 2**20


def describe_disk(folder: Path, measure: bool = True, root: Path = ROOT) -> dict[str, Any]:
    """The disk that holds `folder`, in bytes and bytes a second."""
    folder = folder.absolute()
    system = os.statvfs(folder)
    free = system.f_bavail * system.f_frsize
    device, filesystem = _mount(folder.resolve(), root)
    found: dict[str, Any] = {
        "folder": str(folder),
        "device": device,
        "filesystem": filesystem,
        "total_bytes": system.f_blocks * system.f_frsize,
        "free_bytes": free,
    }
    return found | (measure_disk(folder, min(2**30, free // 20)) if measure else {})


def _mount(folder: Path, root: Path) -> tuple[str | None, str | None]:
    """Device and type of the file system that `folder` is on."""
    best: tuple[int, str | None, str | None] = (-1, None, None)
    for line in read_text(root / "proc/self/mounts").splitlines():
        fields = [re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), field) for field in line.split()]
        if len(fields) > 2 and folder.is_relative_to(fields[1]) and len(Path(fields[1]).parts) >= best[0]:
            best = (len(Path(fields[1]).parts), fields[0], fields[2])  # a later mount lies over an earlier
    return best[1], best[2]


def measure_disk(folder: Path, most_bytes: int, seconds: float = 1.5) -> dict[str, Any]:
    """Write and read a nameless file from end to end, one block at a time, each for at most `seconds`.

    `direct` tells whether the kernel's page cache was passed by (O_DIRECT); where the file system does not let it, the
    written pages are flushed, and dropped before reading. Raises OSError when the folder cannot be written.
    """
    blocks = max(1, most_bytes // _BLOCK)
    # Page-aligned, as O_DIRECT wants it, and random, so that nothing on the way compresses it.
    buffer = mmap.mmap(-1, _BLOCK)
    buffer.write(os.urandom(_BLOCK))
    number, name = tempfile.mkstemp(prefix=".tenfold-doctor-", dir=folder)
    try:
        os.close(number)
        descriptor, direct = open_direct(name, buffer)
    finally:
        os.unlink(name)  # while it is open: nothing is left behind, however this ends
    try:
        written, write_seconds = _timed(lambda place: os.pwritev(descriptor, [buffer], place), blocks, seconds)
        begin = time.perf_counter()
        os.fsync(descriptor)
        write_seconds += time.perf_counter() - begin
        if not direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        read, read_seconds = _timed(lambda place: os.preadv(descriptor, [buffer], place), written // _BLOCK, seconds)
    finally:
        os.close(descriptor)
    return {
        "write_bytes_per_second": written / write_seconds,
        "read_bytes_per_second": read / read_seconds,
        "direct": direct,
    }


def open_direct(name: str | Path, buffer: mmap.mmap) -> tuple[int, bool]:
    """A file that is there, opened past the page cache if its file system can do that; whether it can.

    Some say so only when written to: the buffer, page-aligned, is written to its begin.
    """
    flag = getattr(os, "O_DIRECT", 0)
    if flag:
        try:
            descriptor = os.open(name, os.O_RDWR | flag)
        except OSError:
            return os.open(name, os.O_RDWR), False
        try:
            os.pwritev(descriptor, [buffer], 0)
            return descriptor, True
        except OSError:
            os.close(descriptor)
    return os.open(name, os.O_RDWR), False


def _timed(move: Any, blocks: int, seconds: float) -> tuple[int, float]:
    """Bytes that `move` moved, block by block, and the seconds it took."""
    begin = time.perf_counter()
    moved = 0
    for block in range(blocks):
        if (count := move(block * _BLOCK)) != _BLOCK:
            raise OSError(f"only {count} of {_BLOCK} bytes were moved")
        moved += count
        if time.perf_counter() - begin > seconds:
            break
    return moved, max(time.perf_counter() - begin, 1e-9)
