"""How much memory a run may use, and how much it does use."""

from __future__ import annotations

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
