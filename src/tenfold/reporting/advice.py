"""What on a machine will hurt training, and what to do about it, from the facts of `hardware.examination`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from tenfold.reporting.format import format_bytes, format_flops

GIB = 2**30


class Advice(NamedTuple):
    """A fault, and its remedy."""

    what: str
    remedy: str


def advise(facts: dict[str, Any]) -> list[Advice]:
    """Everything worth a word; nothing is said of what is not known."""
    # A look that failed has none of its keys, and no rule speaks.
    processor, load, memory, limits, torch, accelerators = (
        facts.get(name) or {} for name in ("processor", "load", "memory", "limits", "torch", "accelerators")
    )
    found = [
        *_threads(torch, processor),
        *_company(load, processor),
        *_clock(processor),
        *_products(facts.get("products") or {}),
        *_memory(memory),
        *_limits(limits, accelerators),
        *_build(torch, accelerators),
    ]
    for disk in facts.get("disks") or []:
        found += _disk(disk)
    return found


def _threads(torch: dict[str, Any], processor: dict[str, Any]) -> Iterator[Advice]:
    threads, cores, given = torch.get("threads"), processor.get("usable_cores"), torch.get("OMP_NUM_THREADS")
    if cores and (quota := processor.get("core_quota")) and processor.get("cores") and cores < processor["cores"]:
        yield Advice(
            f"the control group gives this process {quota:g} of the machine's {processor['cores']} cores",
            "raise the container's or job's share of the processor if more is yours",
        )
    if given is not None and not given.split(",")[0].strip().isdigit():
        yield Advice(
            f"OMP_NUM_THREADS = {given!r} is no number of threads", f"export OMP_NUM_THREADS={cores or 1}, or unset it"
        )
    elif threads and cores and threads > cores:
        yield Advice(
            f"PyTorch takes {threads} threads on {cores} usable cores, and products of matrices collapse",
            f"export OMP_NUM_THREADS={cores} (tenfold train takes no more than there are cores)",
        )
    elif given is not None and threads and cores and threads < cores:
        yield Advice(
            f"OMP_NUM_THREADS = {given} leaves {cores - threads} of {cores} usable cores idle",
            "unset it, unless several processes are to share the cores",
        )


def _company(load: dict[str, Any], processor: dict[str, Any]) -> Iterator[Advice]:
    cores = processor.get("usable_cores") or 1
    busy = load.get("busy_cores")
    if busy is None and load.get("runnable_last_minute") is not None:
        busy, how = load["runnable_last_minute"], "on average over the last minute"
    else:
        how = "just now"
    if busy is not None and busy >= max(0.3, 0.1 * cores):
        names = ", ".join(
            f"{entry['name']} ({entry['process']}): {entry['cores']:g}" for entry in load.get("busiest") or []
        )
        yield Advice(
            f"others keep {busy:g} cores busy {how}" + (f": {names}" if names else ""),
            "stop them, or expect slower steps and figures that do not repeat",
        )


def _clock(processor: dict[str, Any]) -> Iterator[Advice]:
    if "powersave" in (processor.get("clock_governor") or ""):
        yield Advice(
            "the clock governor is powersave: cores may stay below their full clock",
            "sudo cpupower frequency-set --governor performance",
        )


def _products(products: dict[str, Any]) -> Iterator[Advice]:
    for device, rates in products.items():
        if not isinstance(rates, dict):
            continue
        fp32, bf16 = rates.get("fp32"), rates.get("bf16")
        if fp32 and bf16 and bf16 < fp32:
            yield Advice(
                f"bf16 is {fp32 / bf16:.3g} times slower than fp32 on this {device.upper()} "
                f"({format_flops(bf16)} against {format_flops(fp32)})",
                'leave training.precision at "auto", which takes fp32 here, or set it to "fp32"',
            )


def _memory(memory: dict[str, Any]) -> Iterator[Advice]:
    machine, usable, free = (memory.get(f"{name}_bytes") for name in ("machine", "usable", "free"))
    if machine and usable and usable < machine:
        yield Advice(
            f"this process may use {format_bytes(usable)} of the machine's {format_bytes(machine)} of memory",
            "raise the memory limit of the container or job if more is yours; Tenfold keeps to the limit",
        )
    if usable and free is not None and free < usable / 4:
        yield Advice(
            f"only {format_bytes(free)} of {format_bytes(usable)} of memory are free",
            "see what holds the rest (top, ordered by %MEM), and end it",
        )
    if (swapped := memory.get("swap_used_bytes")) and swapped > 2**26:
        yield Advice(
            f"{format_bytes(swapped)} are swapped out to disk: memory was short",
            "free memory; what training touches must not be swapped (swapoff -a brings it back)",
        )
    shared = memory.get("shared_memory_bytes")
    if shared is not None and shared < GIB:
        yield Advice(
            f"/dev/shm has {format_bytes(shared)}, too little for processes that share batches or gradients",
            "docker run --shm-size=8g (or --ipc=host); elsewhere: mount -o remount,size=8G /dev/shm",
        )


def _limits(limits: dict[str, Any], accelerators: dict[str, Any]) -> Iterator[Advice]:
    locked, files = limits.get("locked_memory_bytes"), limits.get("open_files")
    if isinstance(locked, int) and locked < GIB and accelerators.get("devices"):
        yield Advice(
            f"a process may lock {format_bytes(locked)} of memory: pinned buffers and RDMA may be refused",
            "ulimit -l unlimited (docker run --ulimit memlock=-1; memlock in limits.conf)",
        )
    if isinstance(files, int) and files < 4096:
        yield Advice(f"a process may open {files} files; many shards and checkpoints need more", "ulimit -n 65536")


def _build(torch: dict[str, Any], accelerators: dict[str, Any]) -> Iterator[Advice]:
    devices, seen = accelerators.get("devices"), accelerators.get("seen_by_torch")
    if devices and seen == 0 and torch.get("version"):
        names = ", ".join(dict.fromkeys(str(device.get("name")) for device in devices))
        if torch.get("cuda") is None:
            yield Advice(
                f"there is an accelerator ({names}), and this PyTorch ({torch['version']}) is built without CUDA",
                "install a CUDA build: pip install torch --index-url https://download.pytorch.org/whl/cu128",
            )
        elif torch.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
            yield Advice(f"CUDA_VISIBLE_DEVICES hides {names} from PyTorch", "unset CUDA_VISIBLE_DEVICES")
        else:
            yield Advice(
                f"PyTorch does not see {names}: the driver may be older than CUDA {torch['cuda']} needs",
                "compare with the CUDA version in nvidia-smi, then update the driver or take an older CUDA build",
            )
    elif devices == [] and seen == 0 and torch.get("cuda"):
        yield Advice(
            f"this PyTorch is built for CUDA {torch['cuda']}, and there is no accelerator",
            "nothing is wrong; the CPU build is gigabytes smaller (--index-url https://download.pytorch.org/whl/cpu)",
        )
    if missing := torch.get("missing_for_compile"):
        yield Advice(f"training.compile has no {' and no '.join(missing)}", "apt-get install g++ python3-dev")


def _disk(disk: dict[str, Any]) -> Iterator[Advice]:
    folder, free, total = disk.get("folder"), disk.get("free_bytes"), disk.get("total_bytes")
    if "unknown" in disk:
        yield Advice(
            f"{folder} could not be looked at ({disk['unknown']})", "name a folder that is there and yours to write"
        )
    if free is not None and total and (free < 10 * GIB or free < total / 50):
        yield Advice(
            f"{folder} has {format_bytes(free)} free of {format_bytes(total)}",
            "a checkpoint takes 12 bytes a parameter; free space, or name another place (--out, data.cache)",
        )
    if disk.get("filesystem") in ("tmpfs", "ramfs"):
        yield Advice(
            f"{folder} is held in memory: what is written there takes memory from training, and is lost on restart",
            "keep runs and data on a disk (--out, data.cache)",
        )
    for way in ("write", "read"):
        speed = disk.get(f"{way}_bytes_per_second")
        if speed is not None and speed < 200e6:
            kind = "writes" if way == "write" else "reads"
            yield Advice(
                f"{folder} {kind} {format_bytes(speed)} a second: a billion parameters take "
                f"{12e9 / speed / 60:.3g} minutes",
                "put runs and data on a faster disk (--out, data.cache), or save less often (checkpoint.every)",
            )
