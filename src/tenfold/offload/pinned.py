"""Pinned memory: pages that stay in RAM, near a device, for it to read and write by itself."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import threading
from pathlib import Path

import torch
from torch import Tensor

from tenfold.errors import TenfoldError
from tenfold.hardware.cgroup import ROOT, memory_room, read_text
from tenfold.hardware.memory import kibibytes, memory_limit_bytes

_IPC_LOCK = 1 << 14
"""The capability to lock memory beyond the limit (capabilities(7))."""
_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device."""
_MOST_THREADS = 8


def pinnable_bytes(root: Path = ROOT) -> tuple[int, str]:
    """How much memory may be pinned now, and what sets that limit.

    The limit of locked memory is not among what is looked at: NVIDIA's driver does not ask for it. Where a driver does,
    `pin` says so. `root` is where the file tree with /proc and /sys starts.
    """
    machine = kibibytes(root / "proc/meminfo", "MemAvailable")
    limits = [(memory_limit_bytes(root) if machine is None else machine, "the memory that the machine has free")]
    room = memory_room(root)
    if room is not None:
        limits.append((room, "what the control group's memory limit (container, batch job) leaves"))
    return min(limits)


def check_pinnable(size: int, root: Path = ROOT) -> None:
    """Raise TenfoldError where `size` bytes cannot be pinned."""
    most, why = pinnable_bytes(root)
    if size > most:
        raise TenfoldError(
            f"offload: {size:,} bytes of host memory were asked for, and {most:,} can be pinned: {why}. Give the tier "
            '"host" less, and put more on "disk"; or raise that limit'
        )


def locked_limit(root: Path = ROOT) -> int | None:
    """The limit of locked memory in bytes (RLIMIT_MEMLOCK), or None where this process has none."""
    capabilities = re.search(r"^CapEff:\s+([0-9a-f]+)", read_text(root / "proc/self/status"), re.MULTILINE)
    if capabilities and int(capabilities[1], 16) & _IPC_LOCK:
        return None
    limit = re.search(r"^Max locked memory\s+(\d+)", read_text(root / "proc/self/limits"), re.MULTILINE)
    return int(limit[1]) if limit else None  # "unlimited"


def pin(memory: Tensor, device: torch.device, root: Path = ROOT) -> None:
    """Pin memory of the CPU that begins at a page, for a CUDA device. Raises TenfoldError where the driver will not."""
    with torch.cuda.device(device):  # a thread's first call would else open the first of them
        status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE))
    if status != 0:
        locked = locked_limit(root)
        why = "" if locked is None else f", and the limit of locked memory (ulimit -l) is {locked:,} bytes: raise it"
        raise TenfoldError(
            f"offload: the driver refuses to pin {memory.nbytes:,} bytes of RAM (CUDA error {status}){why}, or give "
            'the tier "host" less'
        )


def unpin(memory: Tensor, device: torch.device) -> None:
    """Undo `pin`."""
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def near_cpus(device: torch.device, root: Path = ROOT) -> set[int]:
    """The CPUs of the NUMA node that a CUDA device hangs on; none where PyTorch or the kernel does not say."""
    properties = torch.cuda.get_device_properties(device)
    domain, bus, slot = (getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device"))
    if domain is None or bus is None or slot is None:
        return set()
    return pci_cpus(f"{domain:04x}:{bus:02x}:{slot:02x}.0", root)


def pci_cpus(address: str, root: Path = ROOT) -> set[int]:
    """The CPUs of the NUMA node that a PCI device (such as "0000:3b:00.0") hangs on; none where that is not known."""
    node = read_text(root / "sys/bus/pci/devices" / address / "numa_node").strip()
    if not node.isdigit():  # -1: none
        return set()
    cpus: set[int] = set()
    for run in read_text(root / f"sys/devices/system/node/node{node}/cpulist").strip().split(","):
        first, _, last = run.partition("-")
        if first.isdigit():
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def touch_near(memory: Tensor, cpus: set[int]) -> None:
    """Have the pages of memory that was never touched made on the node of these CPUs: they are zeroed by threads there.

    Nothing happens without CPUs that this process may use.
    """
    usable = cpus & os.sched_getaffinity(0)
    if not usable:
        return

    def touch(begin: int, size: int) -> None:
        with contextlib.suppress(OSError):  # then it is only not near
            os.sched_setaffinity(0, usable)  # of this thread
        ctypes.memset(memory.data_ptr() + begin, 0, size)

    count = min(len(usable), _MOST_THREADS)
    part = -(-memory.nbytes // count)
    threads = [
        threading.Thread(target=touch, args=(begin, min(part, memory.nbytes - begin)))
        for begin in range(0, memory.nbytes, part)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
