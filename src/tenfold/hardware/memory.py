"""How much memory a run may use, and how much it does use."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

from tenfold.hardware.cgroup import ROOT, memory_limit, read_text


def memory_limit_bytes(root: Path = ROOT) -> int:
    """Bytes of host memory this process may use: the machine's, or the control group's limit where that is smaller.

    `root` is where the file tree with /proc and /sys starts.
    """
    machine = kibibytes(root / "proc/meminfo", "MemTotal")
    if machine is None:
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    group = memory_limit(root)
    return machine if group is None else min(machine, group)


def memory_used_bytes(device: torch.device) -> int:
    """Bytes in use. CPU: resident set of this process now. CUDA: the most that tensors have held so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    resident = kibibytes(ROOT / "proc/self/status", "VmRSS")
    return resident if resident is not None else peak_memory_bytes(device)


def unnamed_memory_bytes() -> int:
    """Bytes of this process' resident set that are no file's: tensors, and what the C library keeps free for them."""
    status = ROOT / "proc/self/status"
    return (kibibytes(status, "VmRSS") or 0) - (kibibytes(status, "RssFile") or 0)


def peak_memory_bytes(device: torch.device) -> int:
    """The most bytes used so far: resident set of this process, or tensors on a CUDA device."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # ru_maxrss outlives exec, so a small process started by a large one would show the large one's.
    peak = kibibytes(ROOT / "proc/self/status", "VmHWM")
    if peak is not None:
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def forget_peak(device: torch.device) -> int:
    """Have `peak_memory_bytes` count from now on, where the system lets it; the bytes in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    with suppress(OSError):
        (ROOT / "proc/self/clear_refs").write_text("5")  # VmHWM is VmRSS again: proc(5)
    return memory_used_bytes(device)


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory ran out, of the machine or of a device."""
    # PyTorch has an error of its own for this on a device, and on the CPU only words.
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def kibibytes(path: Path, key: str) -> int | None:
    """The bytes of an entry such as "MemTotal: 16 kB", if the file has it."""
    match = re.search(rf"^{key}:\s+(\d+) kB", read_text(path), re.MULTILINE)
    return int(match[1]) * 1024 if match else None


# Options of glibc's mallopt, from its malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
_RETURNED = 2**20


def keep_freed_memory() -> bool:
    """Let the C library keep what tensors of this process free for the next ones; whether it will.

    glibc maps every block of more than 32 MB afresh and gives it back when it is freed. In training the same large
    blocks (gradients above all) come and go in every step, and a page fault for each 4 KiB of them can cost more than
    the product that fills them. From here on blocks are cut from one heap, which shrinks when more than 2 GiB at its
    end are free. Leaves alone a C library without `mallopt`, and one whose user has set MALLOC_MMAP_MAX_ or
    GLIBC_TUNABLES.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or "MALLOC_MMAP_MAX_" in os.environ or "GLIBC_TUNABLES" in os.environ:
        return False
    return bool(mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, 2**31 - 1))


def return_freed_memory() -> bool:
    """Have the C library give the memory of freed tensors of 1 MiB or more back at once; whether it will.

    For a process whose address space is limited (`address_space_is_limited`): there what is kept free counts. By itself
    glibc keeps blocks of up to 32 MiB for later, once it has seen one freed. See `keep_freed_memory` for what this
    costs, and for what is left alone.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or {"MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"} & os.environ.keys():
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, _RETURNED) and mallopt(M_TRIM_THRESHOLD, _RETURNED))


def return_free_memory() -> None:
    """Give back, once, all whole pages that the C library keeps free, if it knows how (glibc's malloc_trim)."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def address_space_is_limited() -> bool:
    """Whether this process has a limit (ulimit -v or -d) on memory that it has asked for, used or not."""
    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    return any(limit != resource.RLIM_INFINITY for limit in limits)
