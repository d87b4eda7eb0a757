"""Accelerators and the PyTorch that is to use them."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from tenfold.hardware.cgroup import ROOT
from tenfold.hardware.compiler import compiler, missing_for_compile
from tenfold.hardware.device import matrix_rate

_QUERY = ["name", "memory.total", "driver_version", "pcie.link.gen.max", "pcie.link.width.max"]


def describe_accelerators(root: Path = ROOT) -> dict[str, Any]:
    """The NVIDIA devices that nvidia-smi (or the kernel) tells of, their links, and how many PyTorch sees."""
    devices = [_device(line) for line in _ask("--query-gpu=" + ",".join(_QUERY), "--format=csv,noheader,nounits")]
    links = [int(number) for line in _ask("topo", "-m") for number in re.findall(r"\bNV(\d+)\b", line)]
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not devices:
        devices = [
            {"name": torch.cuda.get_device_name(index), "memory_bytes": torch.cuda.mem_get_info(index)[1]}
            for index in range(seen)
        ] or [{"name": path.name} for path in sorted((root / "proc/driver/nvidia/gpus").glob("*"))]
    return {"devices": devices, "seen_by_torch": seen, "nvlinks_between_two": max(links, default=None)}


def _ask(*arguments: str) -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=10)
    return done.stdout.splitlines() if done.returncode == 0 else []


def _device(line: str) -> dict[str, Any]:
    name, memory, driver, generation, width = ([part.strip() for part in line.split(",")] + [""] * 5)[:5]
    return {
        "name": name,
        "memory_bytes": int(memory) * 2**20 if memory.isdigit() else None,
        "driver": driver or None,
        "pcie": f"{generation}.0 x{width}" if generation.isdigit() and width.isdigit() else None,
    }


def describe_torch() -> dict[str, Any]:
    """This build of PyTorch and what it would do here."""
    return {
        "version": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "mkl": torch.backends.mkl.is_available(),
        "onednn": torch.backends.mkldnn.is_available(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "compiler": compiler(),
        "missing_for_compile": missing_for_compile(),
    }


def measure_products(seconds: float = 0.4) -> dict[str, Any]:
    """FLOP/s of matrix products on each kind of device, by dtype; about `seconds` each."""
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    devices = [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]
    return {
        device.type: {name: matrix_rate(device, dtype, seconds) for name, dtype in kinds.items()} for device in devices
    }
