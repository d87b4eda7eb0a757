"""This machine as a cluster, measured: what `tenfold doctor --save` writes and `load_cluster` reads."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tenfold.errors import TenfoldError
from tenfold.hardware.cores import usable_cores
from tenfold.hardware.device import describe_machine, processor
from tenfold.hardware.disk import describe_disk, measure_disk
from tenfold.hardware.energy import open_meter
from tenfold.hardware.host import describe_load
from tenfold.hardware.memory import memory_limit_bytes
from tenfold.offload.host import link_rate
from tenfold.planning.accelerator import Accelerator, Dtype, Speed
from tenfold.planning.cluster import Cluster, Link, Pace, is_cluster_file
from tenfold.planning.probing import Probe, Sizes
from tenfold.planning.probing_ranks import Between, RankSizes, measure_between

_PROCESS_BYTES = 2**28  # Python with PyTorch in it: 217 MiB
_NCCL_BYTES = 2**29
_DISK_BYTES = 2**30

Say = Callable[[str], None]


def measure_here(
    folder: Path,
    say: Say = lambda _: None,
    sizes: Sizes | None = None,
    rank_sizes: RankSizes | None = None,
    disk_bytes: int = _DISK_BYTES,
    seconds: float = 1.0,
) -> Cluster:
    """One node, this one, with a rank for each GPU; or one rank on the CPU, with the OpenMP threads that it has now.

    `folder` is on the disk that is measured, with a file of at most `disk_bytes`. Sizes are by default those of models
    for such a device; `seconds` is how long the energy meter, if there is one, is watched.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    say("disk")
    disk = measure_disk(folder, min(disk_bytes, describe_disk(folder, measure=False)["free_bytes"] // 20))
    disk["free_bytes"] = describe_disk(folder, measure=False)["free_bytes"]
    notes: list[str] = []
    busy = describe_load(seconds=min(0.5, seconds)).get("busy_cores") or 0.0
    if busy > 0.2:
        notes.append(f"other processes kept {busy:.1f} cores busy when it was measured: do it again when they are done")
    accelerator = _accelerator(device, sizes or Sizes.of(device), say, notes, seconds)
    ranks = torch.cuda.device_count() if device.type == "cuda" else 2
    between = None
    if ranks > 1:
        threads = max(1, min(torch.get_num_threads(), usable_cores() // ranks)) if device.type == "cpu" else 1
        between = measure_between(ranks, device.type, threads, rank_sizes or RankSizes.of(device), say)
    read = write = 0.0
    if device.type == "cuda":
        say("copies from and to the host's memory")
        read, write = link_rate(device), link_rate(device, reading=False)
        notes.append("copies from and to the host's memory were measured on one GPU while the others did not copy")
    notes.append("the network between nodes is not measured: assumed, as are watts of 0")
    machine = describe_machine(device)
    notes.insert(0, ", ".join(f"{key} {machine[key]}" for key in ("processor", "cores", "threads", "torch", "system")))
    return Cluster(
        name="here",
        per_node=ranks if device.type == "cuda" else 1,
        accelerator=accelerator,
        node_link=_node_link(between),
        network=_network(device),
        host_read_bytes_per_second=read,
        host_write_bytes_per_second=write,
        host_memory_bytes=memory_limit_bytes(),
        host_reserve_share=0.03 if device.type == "cpu" else 0.1,
        disk_bytes=disk["free_bytes"],
        disk_read_bytes_per_second=disk["read_bytes_per_second"],
        disk_write_bytes_per_second=disk["write_bytes_per_second"],
        crowding={} if between is None or device.type == "cuda" else _rounded(between.crowding),
        threads=torch.get_num_threads() if device.type == "cpu" else 0,
        notes=notes,
    )


def _accelerator(device: torch.device, sizes: Sizes, say: Say, notes: list[str], seconds: float) -> Accelerator:
    probe = Probe(device, sizes, say)
    dtypes: tuple[Dtype, ...] = ("fp32", "bf16")
    memory = {dtype: probe.memory(dtype) for dtype in dtypes}
    matrix = {dtype: probe.products(dtype) for dtype in dtypes}
    attention = {dtype: probe.attention(dtype) for dtype in dtypes}
    grouped = {dtype: probe.grouped(dtype, memory[dtype]["activation"]) for dtype in dtypes}
    updates = probe.updates()
    probe.close()
    idle, load = _watts(device, seconds, say, notes)
    cuda = device.type == "cuda"
    held = 0
    if cuda:
        free, total = torch.cuda.mem_get_info(device)
        held = total - free - torch.cuda.memory_reserved(device) + _NCCL_BYTES
    large = memory["fp32"]["residual"].measured["forward"].rates[-1]
    return Accelerator(
        name=torch.cuda.get_device_name(device) if cuda else processor()[0],
        kind="cuda" if cuda else "cpu",
        memory_bytes=torch.cuda.mem_get_info(device)[1] if cuda else memory_limit_bytes(),
        reserve_bytes=max(held, 0) if cuda else _PROCESS_BYTES,
        reserve_share=0.04 if cuda else 0.02,
        memory_rate=Speed(peak=large),
        matrix=matrix,
        attention=attention,
        grouped=grouped,
        memory=memory,
        update=updates,
        launch_seconds=probe.launch,
        watts=load,
        idle_watts=idle,
    )


def _watts(device: torch.device, seconds: float, say: Say, notes: list[str]) -> tuple[float, float]:
    """Drawn when idle and under products, by the machine's meter; zeros where there is none that can be read."""
    meter = open_meter(device, None, notes.append)
    if meter is None:
        return 0.0, 0.0
    say("watts")
    try:
        x = torch.randn(1024, 1024, device=device)
        found = []
        for work in (lambda: time.sleep(0.01), lambda: x @ x):
            before, begin = meter.joules(), time.perf_counter()
            while time.perf_counter() - begin < seconds:
                work()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
            found.append(max(0.0, (meter.joules() - before) / (time.perf_counter() - begin)))
        return found[0], found[1]
    finally:
        meter.close()


def _node_link(between: Between | None) -> Link:
    if between is None:
        return Link(latency_seconds=1e-5, bytes_per_second=16e9, share=0.6)  # a PCIe 4.0 x16 slot's, unmeasured
    kinds = {
        kind: Pace(latency_seconds=float(f"{latency:.4g}"), bytes_per_second=float(f"{rate:.4g}"))
        for kind, (latency, rate) in between.paces.items()
    }
    usual = kinds["all_gather"]
    return Link(latency_seconds=usual.latency_seconds, bytes_per_second=usual.bytes_per_second, kinds=kinds)


def _network(device: torch.device) -> Link:
    if device.type == "cuda":
        return Link(latency_seconds=12e-6, bytes_per_second=12.5e9, share=0.85, all_to_all_share=0.6)
    return Link(latency_seconds=1e-4, bytes_per_second=1.25e9, share=0.8, all_to_all_share=0.6)


def _rounded(factors: dict[Any, float]) -> dict[Any, float]:
    return {kind: round(factor, 3) for kind, factor in factors.items()}


def check_savable(path: Path) -> None:
    """Raise TenfoldError where a cluster cannot be saved at `path`: there is something that is none, or no folder."""
    if path.suffix != ".toml":
        raise TenfoldError(f"--save {path}: a cluster is saved as a .toml file, such as {path.with_suffix('.toml')}")
    if path.exists() and not is_cluster_file(path):
        raise TenfoldError(f"--save {path}: this file is there and is no cluster: name another, or take it away")
    if not path.absolute().parent.is_dir():
        raise TenfoldError(f"--save {path}: there is no folder {path.absolute().parent}")


def save_cluster(cluster: Cluster, path: Path) -> None:
    """Write a cluster whole, or not at all; one that is there is replaced, anything else is not."""
    check_savable(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(cluster.dump(), encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
