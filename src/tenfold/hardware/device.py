"""Which device a run computes on, what machine that is, and how fast it multiplies matrices."""

from __future__ import annotations

import functools
import math
import platform
import re
import time
from pathlib import Path

import torch

from tenfold.errors import TenfoldError
from tenfold.hardware.cgroup import ROOT, read_text
from tenfold.hardware.cores import usable_cores
from tenfold.hardware.memory import memory_limit_bytes

# Flags of /proc/cpuinfo that decide how fast fp32 and bf16 products are (x86, then Arm).
_FEATURES = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_bf16": "AVX-512 bf16",
    "amx_bf16": "AMX bf16",
    "asimd": "NEON",
    "sve": "SVE",
    "bf16": "bf16",
}


def pick_device(name: str) -> torch.device:
    """The device that `name` ("auto", "cpu" or "cuda") stands for; auto takes CUDA where there is one."""
    if name not in ("auto", "cpu", "cuda"):
        raise TenfoldError(f"training.device = {name!r} is no device; write auto, cpu or cuda")
    if name == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if name == "auto":
        return torch.device("cpu")
    if torch.version.cuda is None:
        reason = f"this PyTorch ({torch.__version__}) is built without CUDA; install a CUDA build"
    else:
        reason = f"PyTorch ({torch.__version__}) finds no CUDA device; see what nvidia-smi says"
    raise TenfoldError(f'training.device = "cuda": {reason}, or set it to "cpu"')


def processor(root: Path = ROOT) -> tuple[str, str]:
    """The processor's name, and those of its vector features that matter to matrix products ("AVX2, AVX-512")."""
    info = read_text(root / "proc/cpuinfo")
    name = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", info, re.MULTILINE)
    have = set(flags[1].split()) if flags else set()
    features = ", ".join(shown for flag, shown in _FEATURES.items() if flag in have)
    return (name[1].strip() if name else platform.processor() or platform.machine()), features


@functools.cache
def has_bf16_unit(root: Path = ROOT) -> bool:
    """Whether the processor multiplies bf16 matrices itself (AMX, AVX-512 bf16, Arm bf16).

    Told by its flags and not by a measurement, so that a run computes the same whenever it is repeated.
    """
    return "bf16" in processor(root)[1]


def describe_machine(device: torch.device, root: Path = ROOT) -> dict[str, str | int | float]:
    """What a reader of the numbers must know of the machine they were measured on."""
    name, features = processor(root)
    machine: dict[str, str | int | float] = {
        "device": str(device),
        "processor": name,
        "vector_features": features or torch.backends.cpu.get_cpu_capability(),
        "cores": usable_cores(root),
        "threads": torch.get_num_threads(),
        "memory_limit_bytes": memory_limit_bytes(root),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        machine["accelerators"] = ", ".join(f"{names.count(one)} x {one}" for one in dict.fromkeys(names))
        machine["accelerator_memory_bytes"] = torch.cuda.get_device_properties(device.index or 0).total_memory
    return machine


def matrix_rate(device: torch.device, dtype: torch.dtype, seconds: float = 0.3) -> float:
    """The measured matrix rate: FLOP/s of the fastest square product found within about `seconds`.

    It is what this machine gave just now with the present thread count, not a datasheet's peak, and is the
    denominator of every "share of the measured matrix rate".
    """
    deadline = time.perf_counter() + seconds
    largest = 4096 if device.type == "cuda" else 1024
    size, best = 128, 0.0
    while True:
        taken = _fastest_product(size, device, dtype, repeats=4)
        best = max(best, 2 * size**3 / taken)
        size *= 2
        # The next size costs eight times as much, five times over (warm-up and repeats).
        if size > largest or time.perf_counter() + 5 * 8 * taken > deadline:
            return best


def _fastest_product(size: int, device: torch.device, dtype: torch.dtype, repeats: int) -> float:
    """Seconds of the fastest of `repeats` products of two size x size matrices, after one to warm up."""
    left, right = (torch.full((size, size), 0.5, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    fastest = math.inf
    for turn in range(repeats + 1):
        _wait(device)
        begin = time.perf_counter()
        torch.matmul(left, right, out=out)
        _wait(device)
        if turn:
            fastest = min(fastest, time.perf_counter() - begin)
    return max(fastest, 1e-9)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
