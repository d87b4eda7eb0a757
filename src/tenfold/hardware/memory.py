"""How much memory a run may use, and how much it does use."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import sys
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


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory ran out, of the machine or of a device."""
    # PyTorch has an error of its own for this on a device, and on the CPU only words.
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def kibibytes(path: Path, key: str) -> int | None:
    """The bytes of an entry such as "MemTotal: 16 kB", if the file has it."""
    match = re.search(rf"^{key}:\s+(\d+) kB", read_text(path), re.MULTILINE)
    return int(match[1]) * 1024 if match else None


# Options of glibc's mallopt, from its malloc.h.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4


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
