"""What this machine is, besides its speed: processor, load, memory, limits. Read from /proc and /sys under `root`.

What cannot be found out is None; a limit that is not set is "unlimited".
"""

from __future__ import annotations

import os
import re
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tenfold.hardware.cgroup import ROOT, cpu_limit, memory_room, read_text
from tenfold.hardware.cores import usable_cores
from tenfold.hardware.device import processor
from tenfold.hardware.memory import kibibytes, memory_limit_bytes

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def describe_processor(root: Path = ROOT) -> dict[str, Any]:
    """Name, vector units, cores, caches in bytes (those of core 0) and clock governor."""
    name, vector_units = processor(root)
    cores = len(re.findall(r"^processor\s*:", read_text(root / "proc/cpuinfo"), re.MULTILINE))
    cpus = root / "sys/devices/system/cpu"
    governors = {read_text(path).strip() for path in cpus.glob("cpu[0-9]*/cpufreq/scaling_governor")} - {""}
    return {
        "name": name,
        "vector_units": vector_units or None,
        "cores": cores or os.cpu_count(),
        "usable_cores": usable_cores(root),
        "core_quota": cpu_limit(root),
        "numa_nodes": len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) or None,
        "cache_bytes": _caches(cpus / "cpu0/cache") or None,
        "clock_governor": ", ".join(sorted(governors)) or None,
    }


def _caches(folder: Path) -> dict[str, int]:
    caches = {}
    for index in sorted(folder.glob("index[0-9]*")):
        level, kind = (read_text(index / name).strip() for name in ("level", "type"))
        size = re.fullmatch(r"(\d+)([KMG]?)", read_text(index / "size").strip())
        if level and size and kind != "Instruction":
            caches[f"L{level}{'d' if kind == 'Data' else ''}"] = int(size[1]) * _UNITS[size[2]]
    return caches


def describe_load(
    root: Path = ROOT, seconds: float = 0.5, wait: Callable[[float], None] = time.sleep
) -> dict[str, Any]:
    """What the cores do without us: mean runnable processes of the last minute and, measured over `seconds` (0: not),
    how many cores are busy and which processes keep them so."""
    average = re.match(r"[\d.]+", read_text(root / "proc/loadavg"))
    found: dict[str, Any] = {"runnable_last_minute": float(average[0]) if average else None}
    if not seconds:
        return found
    idle, total, cores = _ticks(root)
    before = _process_ticks(root)
    wait(seconds)
    idle_after, total_after, _ = _ticks(root)
    passed = total_after - total
    found["busy_cores"] = round((1 - (idle_after - idle) / passed) * cores, 2) if passed > 0 else None
    each = os.sysconf("SC_CLK_TCK") * seconds
    spent: list[dict[str, Any]] = [
        {"process": pid, "name": name, "cores": round((ticks - before[pid][1]) / each, 2)}
        for pid, (name, ticks) in _process_ticks(root).items()
        if pid in before and pid != os.getpid()
    ]
    busiest = sorted(spent, key=lambda entry: -entry["cores"])[:3]
    found["busiest"] = [entry for entry in busiest if entry["cores"] >= 0.1]
    return found


def _ticks(root: Path) -> tuple[int, int, int]:
    """Idle ticks, all ticks, and cores, since the machine started."""
    text = read_text(root / "proc/stat")
    line = re.search(r"^cpu +(.+)$", text, re.MULTILINE)
    counts = [int(count) for count in line[1].split()[:8]] if line else []  # guests' time is in the user's already
    return sum(counts[3:5]), sum(counts), len(re.findall(r"^cpu\d", text, re.MULTILINE))


def _process_ticks(root: Path) -> dict[int, tuple[str, int]]:
    """Name and processor time, in ticks, of every process to be seen."""
    found = {}
    for path in (root / "proc").glob("[0-9]*/stat"):
        # "pid (name) state ppid ...": the name may hold anything, brackets too.
        head, _, rest = read_text(path).rpartition(")")
        fields = rest.split()
        if len(fields) > 12:
            found[int(path.parent.name)] = (head.partition("(")[2], int(fields[11]) + int(fields[12]))
    return found


def describe_memory(root: Path = ROOT) -> dict[str, Any]:
    """Bytes of memory: the machine's, what this process may use, what is free of that, swap, shared memory."""
    info = root / "proc/meminfo"
    available, room = kibibytes(info, "MemAvailable"), memory_room(root)
    known = [amount for amount in (available, room) if amount is not None]
    swap, swap_free = kibibytes(info, "SwapTotal"), kibibytes(info, "SwapFree")
    thp = re.search(r"\[(\w+)\]", read_text(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    pages = re.search(r"^HugePages_Total:\s+(\d+)", read_text(info), re.MULTILINE)
    shared = shared_free = None
    if (root / "dev/shm").is_dir():
        system = os.statvfs(root / "dev/shm")
        shared, shared_free = system.f_blocks * system.f_frsize, system.f_bavail * system.f_frsize
    return {
        "machine_bytes": kibibytes(info, "MemTotal"),
        "usable_bytes": memory_limit_bytes(root),
        "free_bytes": min(known, default=None),
        "swap_bytes": swap,
        "swap_used_bytes": None if swap is None or swap_free is None else swap - swap_free,
        "shared_memory_bytes": shared,
        "shared_memory_free_bytes": shared_free,
        "transparent_huge_pages": thp[1] if thp else None,
        "huge_pages": int(pages[1]) if pages else None,
    }


def describe_limits() -> dict[str, Any]:
    """What this process may lock, open and start."""
    names = {"locked_memory_bytes": "RLIMIT_MEMLOCK", "open_files": "RLIMIT_NOFILE", "processes": "RLIMIT_NPROC"}
    found: dict[str, Any] = {}
    for key, name in names.items():
        number = getattr(resource, name, None)
        soft = None if number is None else resource.getrlimit(number)[0]
        found[key] = "unlimited" if soft == resource.RLIM_INFINITY else soft
    return found
