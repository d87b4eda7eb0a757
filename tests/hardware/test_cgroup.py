"""Limits of control groups, read from a file tree made for the test."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from tenfold.hardware.cgroup import cpu_limit, memory_limit
from tenfold.hardware.cores import usable_cores
from tenfold.hardware.device import describe_machine
from tenfold.hardware.memory import memory_limit_bytes, memory_used_bytes, peak_memory_bytes

GIB = 2**30


def tree(root: Path, files: dict[str, str]) -> Path:
    """A fake root of the file system of a machine with 16 GiB, with `files` besides."""
    for name, text in {"proc/meminfo": f"MemTotal:       {16 * GIB // 1024} kB\nMemFree: 1 kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = {"proc/self/cgroup": "0::/jobs/seven\n"}
V1 = {"proc/self/cgroup": "4:memory:/jobs/seven\n3:cpu,cpuacct:/jobs/seven\n0::/\n"}


def test_a_v2_limit_below_the_machine_is_the_limit(tmp_path: Path) -> None:
    root = tree(tmp_path, {**V2, "sys/fs/cgroup/jobs/seven/memory.max": f"{4 * GIB}\n"})
    assert memory_limit_bytes(root) == 4 * GIB


def test_the_limit_of_a_group_above_binds_too(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/jobs/seven/memory.max": "max\n", "sys/fs/cgroup/jobs/memory.max": f"{2 * GIB}\n"}
    assert memory_limit_bytes(tree(tmp_path, {**V2, **files})) == 2 * GIB


def test_the_path_of_the_host_falls_back_to_what_the_container_sees(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/../host/only\n", "sys/fs/cgroup/memory.max": f"{3 * GIB}\n"}
    assert memory_limit_bytes(tree(tmp_path, files)) == 3 * GIB


def test_max_means_no_limit(tmp_path: Path) -> None:
    root = tree(tmp_path, {**V2, "sys/fs/cgroup/jobs/seven/memory.max": "max\n"})
    assert memory_limit(root) is None
    assert memory_limit_bytes(root) == 16 * GIB


def test_a_v1_limit_is_read(tmp_path: Path) -> None:
    root = tree(tmp_path, {**V1, "sys/fs/cgroup/memory/jobs/seven/memory.limit_in_bytes": f"{5 * GIB}\n"})
    assert memory_limit_bytes(root) == 5 * GIB


def test_a_v1_group_without_limit_leaves_the_machine(tmp_path: Path) -> None:
    root = tree(tmp_path, {**V1, "sys/fs/cgroup/memory/jobs/seven/memory.limit_in_bytes": "9223372036854771712\n"})
    assert memory_limit_bytes(root) == 16 * GIB


def test_a_limit_above_the_machine_changes_nothing(tmp_path: Path) -> None:
    root = tree(tmp_path, {**V2, "sys/fs/cgroup/jobs/seven/memory.max": f"{64 * GIB}\n"})
    assert memory_limit_bytes(root) == 16 * GIB


def test_a_machine_without_control_groups_has_its_own_memory(tmp_path: Path) -> None:
    assert memory_limit_bytes(tree(tmp_path, {})) == 16 * GIB


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({**V2, "sys/fs/cgroup/jobs/seven/cpu.max": "150000 100000\n"}, 1.5),
        ({**V2, "sys/fs/cgroup/jobs/seven/cpu.max": "max 100000\n"}, None),
        (
            {
                **V1,
                "sys/fs/cgroup/cpu,cpuacct/jobs/seven/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu,cpuacct/jobs/seven/cpu.cfs_period_us": "100000\n",
            },
            0.5,
        ),
        (
            {
                **V1,
                "sys/fs/cgroup/cpu/jobs/seven/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/jobs/seven/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
    ],
)
def test_cpu_quotas_are_cores(tmp_path: Path, files: dict[str, str], cores: float | None) -> None:
    assert cpu_limit(tree(tmp_path, files)) == cores


def test_a_quota_below_one_core_still_leaves_one(tmp_path: Path) -> None:
    root = tree(tmp_path, {**V2, "sys/fs/cgroup/jobs/seven/cpu.max": "20000 100000\n"})
    assert usable_cores(root) == 1


def test_the_machine_is_described_under_its_group_limits(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/jobs/seven/memory.max": f"{GIB}\n",
        "proc/cpuinfo": "model name\t: Fast Chip 9\nflags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16\n",
    }
    machine = describe_machine(torch.device("cpu"), tree(tmp_path, {**V2, **files}))
    assert machine["memory_limit_bytes"] == GIB
    assert machine["processor"] == "Fast Chip 9"
    assert machine["vector_features"] == "AVX2, AVX-512, AVX-512 bf16, AMX bf16"


def test_used_memory_grows_with_what_is_held_and_the_peak_stays() -> None:
    cpu = torch.device("cpu")
    before = memory_used_bytes(cpu)
    held = mmap.mmap(-1, 64 * 2**20)  # not of the heap, which may have room for it
    torch.frombuffer(held, dtype=torch.uint8).fill_(1)
    assert memory_used_bytes(cpu) - before > 32 * 2**20
    peak = peak_memory_bytes(cpu)
    assert peak >= memory_used_bytes(cpu) - 2**20
    del held
    assert peak_memory_bytes(cpu) >= peak - 2**20  # the kernel counts pages in batches
