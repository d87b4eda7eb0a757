"""What a machine is, read from file trees made for the test."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from tenfold.hardware.cgroup import memory_room
from tenfold.hardware.host import describe_limits, describe_load, describe_memory, describe_processor

GIB = 2**30


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_processor_is_told_with_caches_governor_and_quota(tmp_path: Path) -> None:
    cpu = "sys/devices/system/cpu"
    files = {
        "proc/cpuinfo": "".join(
            f"processor\t: {core}\nmodel name\t: Fast Chip 9\nflags\t\t: avx2 amx_bf16\n\n" for core in range(8)
        ),
        "proc/self/cgroup": "0::/job\n",
        "sys/fs/cgroup/job/cpu.max": "100000 100000\n",
        "sys/devices/system/node/node0/x": "",
        "sys/devices/system/node/node1/x": "",
        f"{cpu}/cpu0/cpufreq/scaling_governor": "powersave\n",
        f"{cpu}/cpu1/cpufreq/scaling_governor": "powersave\n",
    }
    caches = [("1", "Data", "48K"), ("1", "Instruction", "32K"), ("2", "Unified", "2048K"), ("3", "Unified", "32M")]
    for index, values in enumerate(caches):
        for name, value in zip(("level", "type", "size"), values, strict=True):
            files[f"{cpu}/cpu0/cache/index{index}/{name}"] = f"{value}\n"
    found = describe_processor(tree(tmp_path, files))
    assert found == {
        "name": "Fast Chip 9",
        "vector_units": "AVX2, AMX bf16",
        "cores": 8,
        "usable_cores": 1,
        "core_quota": 1.0,
        "numa_nodes": 2,
        "cache_bytes": {"L1d": 48 * 2**10, "L2": 2 * 2**20, "L3": 32 * 2**20},
        "clock_governor": "powersave",
    }


def test_a_machine_without_proc_and_sys_is_unknown_and_no_error(tmp_path: Path) -> None:
    processor, load, memory = (look(tmp_path) for look in (describe_processor, describe_load, describe_memory))
    assert processor["cache_bytes"] is processor["clock_governor"] is processor["numa_nodes"] is None
    assert load == {"runnable_last_minute": None, "busy_cores": None, "busiest": []}
    assert memory["machine_bytes"] is memory["free_bytes"] is memory["shared_memory_bytes"] is None
    assert memory["usable_bytes"] > 0


def stat(name: str, ticks: int) -> str:
    """/proc/PID/stat of a process that spent `ticks` on users' work and twice that on the system's."""
    return f"7 ({name}) S 1 7 7 0 -1 0 0 0 0 0 {ticks} {2 * ticks} 0 0 20 0 1 0 5 0 0\n"


def test_busy_cores_and_the_busiest_processes_are_the_difference_over_time(tmp_path: Path) -> None:
    hertz = os.sysconf("SC_CLK_TCK")

    def at(idle: int, busy: int, one: int, two: int) -> dict[str, str]:
        cores = "".join(f"cpu{core} 0 0 0 0\n" for core in range(4))
        return {
            "proc/loadavg": "1.50 0.70 0.50 2/345 6789\n",
            "proc/stat": f"cpu  {busy} 0 0 {idle} 0 0 0 0 99999 0\n{cores}intr 5\n",
            "proc/41/stat": stat("a (b) c", one),
            "proc/42/stat": stat("other", two),
            "proc/43/stat": "broken",
        }

    tree(tmp_path, at(1000, 500, 10, 10))
    slept = []

    def wait(seconds: float) -> None:
        slept.append(seconds)
        tree(tmp_path, at(1000 + 300, 500 + 100, 10 + hertz, 10))

    found = describe_load(tmp_path, 2.0, wait)
    assert slept == [2.0]
    assert found["runnable_last_minute"] == 1.5
    assert found["busy_cores"] == 1.0  # a quarter of four cores
    assert found["busiest"] == [{"process": 41, "name": "a (b) c", "cores": 1.5}]  # 3 x hertz ticks in 2 seconds
    assert describe_load(tmp_path, 0.0) == {"runnable_last_minute": 1.5}


def test_memory_is_told_in_bytes_and_free_memory_keeps_to_the_limit(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": f"MemTotal: {16 * 2**20} kB\nMemAvailable: {9 * 2**20} kB\nSwapTotal: 2048 kB\n"
        "SwapFree: 1024 kB\nHugePages_Total:      12\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        "proc/self/cgroup": "0::/job\n",
        "sys/fs/cgroup/job/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/job/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/job/memory.stat": f"anon 5\ninactive_file {GIB}\n",
    }
    (tmp_path / "dev/shm").mkdir(parents=True)
    found = describe_memory(tree(tmp_path, files))
    assert found["machine_bytes"] == 16 * GIB
    assert found["usable_bytes"] == 4 * GIB
    assert found["free_bytes"] == 2 * GIB
    assert (found["swap_bytes"], found["swap_used_bytes"]) == (2 * 2**20, 2**20)
    assert (found["transparent_huge_pages"], found["huge_pages"]) == ("madvise", 12)
    assert found["shared_memory_bytes"] >= found["shared_memory_free_bytes"] > 0


def test_a_v1_group_has_room_too_and_no_limit_is_no_bound(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/job"
    files = {
        "proc/self/cgroup": "4:memory:/job\n",
        f"{group}/memory.limit_in_bytes": "1000\n",
        f"{group}/memory.usage_in_bytes": "700\n",
        f"{group}/memory.stat": "total_inactive_file 200\n",
    }
    assert memory_room(tree(tmp_path, files)) == 500
    (tmp_path / group / "memory.limit_in_bytes").write_text("max\n")
    assert memory_room(tmp_path) is None


def test_limits_are_those_of_this_process() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
        assert describe_limits()["open_files"] == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert set(describe_limits()) == {"locked_memory_bytes", "open_files", "processes"}
