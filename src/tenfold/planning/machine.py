"""The cluster that a run is on: what its run file names, else what its first rank's machine is, without a measurement.

Figures are a preset's (`presets`), but for memory, which is this machine's own: so the same ranks on the same machines
are always planned alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tenfold.errors import TenfoldError
from tenfold.hardware.memory import memory_limit_bytes
from tenfold.planning.accelerator import Dtype, Speed
from tenfold.planning.cluster import Cluster, load_cluster
from tenfold.planning.presets import PRESETS

_CORES = 8
"""Of a rank, for which the preset "cpu" stands."""


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run: so many of each of some nodes, all with one kind of device."""

    nodes: int
    per_node: int
    device: str
    """ "cpu" or "cuda"."""
    accelerator: str = ""
    """The GPU's name, as its driver says it."""
    memory_bytes: int = 0
    """Of one GPU."""
    host_bytes: int = 0
    """Of a machine's own memory."""
    threads: int = 1
    """Of a rank that computes on a CPU."""

    @property
    def count(self) -> int:
        """All of them."""
        return self.nodes * self.per_node

    @classmethod
    def here(cls, size: int, per_node: int, device: torch.device) -> Ranks:
        """`size` ranks as this one is, `per_node` of them on each machine."""
        nodes, host = size // per_node, memory_limit_bytes()
        if device.type != "cuda":
            return cls(nodes, per_node, "cpu", host_bytes=host, threads=torch.get_num_threads())
        properties = torch.cuda.get_device_properties(device)
        return cls(nodes, per_node, "cuda", properties.name, properties.total_memory, host)


def cluster_of(named: str | None, ranks: Ranks) -> Cluster:
    """The cluster that `parallel.cluster` names, which must have as many ranks; None: that of the presets which the
    ranks are like, with the memory that they have.

    Raises TenfoldError for names that there are not, and for other numbers of ranks.
    """
    if named is None:
        return _like(ranks)
    if named.split(",")[0].rpartition(":")[2].strip() == "here":
        raise TenfoldError(
            f'parallel.cluster = "{named}" would be measured before every run: measure once, by `tenfold doctor --save '
            "here.toml`, and name that file"
        )
    try:
        cluster = load_cluster(named, shape=(ranks.nodes, ranks.per_node))
    except TenfoldError as error:
        raise TenfoldError(f"parallel.cluster: {error}") from None
    if cluster.ranks != ranks.count:
        raise TenfoldError(
            f'parallel.cluster = "{named}" has {cluster.ranks} ranks, and {ranks.count} were started (torchrun\'s '
            "--nproc-per-node x --nnodes): change one of them, or leave the numbers out of the cluster"
        )
    if cluster.accelerator.kind != ranks.device:
        raise TenfoldError(
            f'parallel.cluster = "{named}" is of {_kind(cluster.accelerator.kind)}, and ranks compute on '
            f"{_kind(ranks.device)}: name another, or set training.device"
        )
    return cluster


def _kind(device: str) -> str:
    return "CPUs" if device == "cpu" else "GPUs"


def _like(ranks: Ranks) -> Cluster:
    name, known = ("cpu", True) if ranks.device == "cpu" else preset_of(ranks.accelerator, ranks.memory_bytes)
    there = load_cluster(f"{ranks.nodes}x{ranks.per_node}:{name},host_memory={ranks.host_bytes}")
    device, changes = there.accelerator, dict[str, Any]()
    if ranks.device == "cpu":
        # A node's memory is divided over its ranks already; products are as fast as a rank has threads.
        for work in ("matrix", "attention", "grouped"):
            speeds: Mapping[Dtype, Speed] = getattr(device, work)
            changes[work] = {
                dtype: speed.model_copy(update={"peak": speed.peak * ranks.threads / _CORES})
                for dtype, speed in speeds.items()
            }
        told = f"the preset cpu, with the memory of this machine and {ranks.threads} threads a rank"
    else:
        changes = {"memory_bytes": ranks.memory_bytes, "name": ranks.accelerator}
        told = f"the preset {name}, with the memory that {ranks.accelerator} has"
        if not known:
            told += "; no preset is of this GPU, and of all of them this one's memory is likest"
    notes = [f"{told}. `tenfold doctor --save here.toml` measures this machine, and parallel.cluster names the file"]
    return there.model_copy(update={"accelerator": device.model_copy(update=changes), "notes": notes})


def preset_of(accelerator: str, memory_bytes: int) -> tuple[str, bool]:
    """The preset of a GPU of this name and memory, and whether it is of that GPU, or just has the likest memory."""
    gpus = {name: raw["accelerator"]["memory_bytes"] for name, raw in PRESETS.items() if name != "cpu"}
    words = accelerator.lower().replace("-", " ").split()
    mine = {name: memory for name, memory in gpus.items() if _model(name) <= {*words}}

    def apart(name: str) -> float:
        return abs(math.log(gpus[name] / max(memory_bytes, 1)))

    return min(mine or gpus, key=apart), bool(mine)


def _model(preset: str) -> set[str]:
    """The words of a preset's name that a GPU's name has, too: {"rtx", "4090"}."""
    return {word for word in preset.split("-") if not word.endswith("gb")}
