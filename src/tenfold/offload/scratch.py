"""Files for bytes that need not outlive the process: in a directory of its own, and cleared away after a crash."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import shutil
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tenfold.errors import TenfoldError
from tenfold.hardware.disk import open_direct
from tenfold.offload.tiers import ALIGN

_HOST = re.sub(r"[^\w.-]", "_", socket.gethostname())
_FILE, _UNLOCKED = "data", "data.new"


@dataclass(frozen=True)
class ScratchFile:
    """A file for one process to read and write, empty at first."""

    path: Path
    descriptor: int
    direct: bool
    """Whether it is read and written past the page cache."""

    def close(self) -> None:
        """Close it and remove its directory."""
        os.close(self.descriptor)
        shutil.rmtree(self.path.parent, ignore_errors=True)


def open_scratch(folder: Path, rank: int) -> ScratchFile:
    """A new file in a new directory `tenfold-offload-<host>-<pid>-<rank>-<random>` in `folder`, which may be new too.

    It is locked (flock) for as long as it is open, and has its name only when it is. Raises TenfoldError.
    """
    directory = None
    try:
        folder.mkdir(exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix=f"tenfold-offload-{_HOST}-{os.getpid()}-{rank}-", dir=folder))
        (directory / _UNLOCKED).touch()
        with mmap.mmap(-1, ALIGN) as page:
            descriptor, direct = open_direct(directory / _UNLOCKED, page)
        with contextlib.suppress(OSError):  # a file system without locks: then the process's number must do
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (directory / _UNLOCKED).rename(directory / _FILE)
        return ScratchFile(directory / _FILE, descriptor, direct)
    except OSError as error:
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
        raise TenfoldError(
            f"offload to disk, rank {rank}: nothing can be written in {folder}: {error.strerror}. Name a folder for "
            "offload that is there and that this process may write to."
        ) from None


def remove_leftovers(folder: Path) -> tuple[int, int]:
    """Remove what processes of this host that are no more have left in `folder`: how many directories, their bytes."""
    count = size = 0
    for directory in folder.glob(f"tenfold-offload-{_HOST}-*"):
        number = re.fullmatch(rf"tenfold-offload-{re.escape(_HOST)}-(\d+)-\d+-\w+", directory.name)
        if number is None:
            continue
        with contextlib.ExitStack() as stack:
            held = None  # unknown
            try:
                descriptor = os.open(directory / _FILE, os.O_RDWR)
                stack.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = False
            except BlockingIOError:
                held = True
            except OSError:  # no file (yet), or a file system without locks
                pass
            if held or (held is None and _runs(int(number[1]))):
                continue
            with contextlib.suppress(OSError):  # another rank may be at it
                found = sum(path.stat().st_blocks * 512 for path in directory.glob("data*"))
                shutil.rmtree(directory)
                count, size = count + 1, size + found
    return count, size


def _runs(process: int) -> bool:
    """Whether this host has a process of that number."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    return True
