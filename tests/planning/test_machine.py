"""The cluster of a run: what its file names, or what its ranks are like."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tenfold.errors import TenfoldError
from tenfold.hardware.memory import memory_limit_bytes
from tenfold.planning.cluster import load_cluster
from tenfold.planning.machine import Ranks, cluster_of, preset_of

GIB = 2**30
CPUS = Ranks(1, 4, "cpu", host_bytes=32 * GIB, threads=2)
GPUS = Ranks(2, 8, "cuda", "NVIDIA H100 80GB HBM3", 79 * GIB, 1000 * GIB)


@pytest.mark.parametrize(
    ("name", "memory", "preset"),
    [
        ("Tesla V100-SXM2-32GB", 32, "v100-32gb"),
        ("NVIDIA A100-SXM4-40GB", 39, "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", 79, "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", 79, "h100"),
        ("NVIDIA H200", 140, "h200"),
        ("NVIDIA B200", 178, "b200"),
        ("AMD Instinct MI300X", 191, "mi300x"),
        ("NVIDIA GeForce RTX 4090", 24, "rtx-4090"),
    ],
)
def test_a_gpu_is_known_by_its_name(name: str, memory: int, preset: str) -> None:
    """Names as torch.cuda.get_device_name tells them."""
    assert preset_of(name, memory * GIB) == (preset, True)


def test_an_unknown_gpu_is_like_that_of_the_likest_memory_and_is_told_of() -> None:
    assert preset_of("NVIDIA L40S", 45 * GIB) == ("a100-40gb", False)
    there = cluster_of(None, Ranks(1, 2, "cuda", "NVIDIA L40S", 45 * GIB, 500 * GIB))
    assert there.accelerator.memory_bytes == 45 * GIB
    assert "no preset is of this GPU" in " ".join(there.notes)
    assert "tenfold doctor --save" in " ".join(there.notes)


def test_ranks_on_gpus_are_the_preset_with_their_own_memory() -> None:
    there, preset = cluster_of(None, GPUS), load_cluster("2x8:h100")
    assert (there.nodes, there.per_node) == (2, 8)
    assert there.accelerator.memory_bytes == 79 * GIB
    assert there.host_memory_bytes == 1000 * GIB
    assert there.accelerator.matrix == preset.accelerator.matrix
    assert there.network == preset.network


def test_ranks_on_a_cpu_share_its_memory_and_are_as_fast_as_they_have_threads() -> None:
    there, preset = cluster_of(None, CPUS), load_cluster("4:cpu")
    assert there.accelerator.memory_bytes == 8 * GIB
    assert there.budgets().device <= 8 * GIB
    for work in ("matrix", "attention", "grouped"):
        for dtype, speed in getattr(there.accelerator, work).items():
            assert speed.peak == getattr(preset.accelerator, work)[dtype].peak * 2 / 8
    here = Ranks.here(6, 3, torch.device("cpu"))
    assert here == Ranks(2, 3, "cpu", host_bytes=memory_limit_bytes(), threads=torch.get_num_threads())


def test_a_cluster_that_is_named_has_the_ranks_that_were_started(tmp_path: Path) -> None:
    file = tmp_path / "here.toml"
    file.write_text(load_cluster("1:cpu,host_memory=8GiB").dump(), encoding="utf-8")
    there = cluster_of(str(file), CPUS)
    assert (there.nodes, there.per_node) == (1, 4)
    assert there.accelerator.memory_bytes == 2 * GIB
    assert cluster_of("h100,host_memory=64GiB", GPUS).ranks == 16
    assert cluster_of("2x8:h100", GPUS) == load_cluster("2x8:h100")
    assert cluster_of("16:h100", GPUS).nodes == 1  # whoever names the numbers knows


@pytest.mark.parametrize(
    ("named", "ranks", "message"),
    [
        ("8:cpu", CPUS, r'parallel.cluster = "8:cpu" has 8 ranks, and 4 were started .*--nproc-per-node'),
        ("8:h100", GPUS, "has 8 ranks, and 16 were started"),
        ("h100", CPUS, "is of GPUs, and ranks compute on CPUs: name another, or set training.device"),
        ("cpu", GPUS, "is of CPUs, and ranks compute on GPUs"),
        ("here", CPUS, "would be measured before every run: measure once, by `tenfold doctor --save here.toml`"),
        ("4:here,price=2", CPUS, "would be measured before every run"),
        ("h1000", GPUS, "parallel.cluster: .* there are no accelerators named 'h1000'"),
        ("nowhere.toml", GPUS, "parallel.cluster: there is no cluster file nowhere.toml; tenfold doctor --save"),
    ],
)
def test_what_cannot_be_the_cluster_of_a_run_is_told(named: str, ranks: Ranks, message: str) -> None:
    with pytest.raises(TenfoldError, match=message):
        cluster_of(named, ranks)
