"""What hurts is told with its remedy, and a good machine is left in peace."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from rich.console import Console

from tenfold.reporting.advice import advise
from tenfold.reporting.machine import machine_report

GIB = 2**30
GOOD: dict[str, Any] = {
    "processor": {"name": "Chip", "cores": 8, "usable_cores": 8, "core_quota": None, "clock_governor": "performance"},
    "load": {"runnable_last_minute": 0.1, "busy_cores": 0.05, "busiest": []},
    "memory": {
        "machine_bytes": 64 * GIB,
        "usable_bytes": 64 * GIB,
        "free_bytes": 60 * GIB,
        "swap_bytes": 0,
        "swap_used_bytes": 0,
        "shared_memory_bytes": 32 * GIB,
    },
    "limits": {"locked_memory_bytes": "unlimited", "open_files": 65536, "processes": "unlimited"},
    "accelerators": {"devices": [{"name": "GPU"}], "seen_by_torch": 1, "nvlinks_between_two": None},
    "torch": {
        "version": "2.13.0",
        "cuda": "12.8",
        "threads": 8,
        "OMP_NUM_THREADS": None,
        "CUDA_VISIBLE_DEVICES": None,
        "missing_for_compile": [],
    },
    "products": {"cpu": {"fp32": 1e11, "bf16": 5e11, "fp16": 1e11}},
    "disks": [
        {
            "folder": "/runs",
            "filesystem": "ext4",
            "total_bytes": 500 * GIB,
            "free_bytes": 300 * GIB,
            "write_bytes_per_second": 2e9,
            "read_bytes_per_second": 2e9,
            "direct": True,
        }
    ],
}


def test_a_good_machine_needs_no_advice() -> None:
    assert advise(GOOD) == []


@pytest.mark.parametrize(
    ("place", "changes", "what", "remedy"),
    [
        (("products", "cpu"), {"bf16": 1e10}, "bf16 is 10 times slower than fp32", "training.precision"),
        (("torch",), {"threads": 16}, "16 threads on 8 usable cores", "OMP_NUM_THREADS=8"),
        (("torch",), {"threads": 1, "OMP_NUM_THREADS": "1"}, "7 of 8 usable cores idle", "unset"),
        (("torch",), {"OMP_NUM_THREADS": "many"}, "'many' is no number", "OMP_NUM_THREADS=8"),
        (
            ("load",),
            {"busy_cores": 2.5, "busiest": [{"process": 7, "name": "game", "cores": 2.4}]},
            "2.5 cores busy just now: game (7): 2.4",
            "stop them",
        ),
        (("load",), {"busy_cores": None, "runnable_last_minute": 6.0}, "over the last minute", "stop them"),
        (("memory",), {"usable_bytes": 8 * GIB, "free_bytes": 7 * GIB}, "8 GiB of the machine's 64 GiB", "limit"),
        (("memory",), {"free_bytes": 10 * GIB}, "only 10 GiB of 64 GiB", "top"),
        (("memory",), {"swap_used_bytes": GIB}, "1 GiB are swapped out", "swapoff"),
        (("memory",), {"shared_memory_bytes": 64 * 2**20}, "/dev/shm has 64 MiB", "--shm-size"),
        (("torch",), {"missing_for_compile": ["a C++ compiler (g++)"]}, "no a C++ compiler", "apt-get install"),
        (("limits",), {"locked_memory_bytes": 65536}, "lock 64 KiB", "ulimit -l"),
        (("limits",), {"open_files": 1024}, "open 1024 files", "ulimit -n"),
        (("processor",), {"clock_governor": "powersave"}, "powersave", "performance"),
        (("processor",), {"usable_cores": 2, "core_quota": 1.5}, "1.5 of the machine's 8 cores", "share"),
        (("accelerators",), {"devices": [], "seen_by_torch": 0}, "there is no accelerator", "CPU build"),
        (("accelerators",), {"seen_by_torch": 0}, "does not see GPU", "driver"),
        (("disks", 0), {"write_bytes_per_second": 1e8}, "/runs writes 95.37 MiB a second", "--out"),
        (("disks", 0), {"read_bytes_per_second": 1e8}, "/runs reads", "--out"),
        (("disks", 0), {"free_bytes": GIB}, "1 GiB free of 500 GiB", "free space"),
        (("disks", 0), {"filesystem": "tmpfs"}, "held in memory", "disk"),
        (("disks", 0), {"unknown": "no such folder"}, "no such folder", "folder"),
    ],
)
def test_each_fault_is_told_with_its_remedy(
    place: tuple[Any, ...], changes: dict[str, Any], what: str, remedy: str
) -> None:
    facts = copy.deepcopy(GOOD)
    section: Any = facts
    for key in place:
        section = section[key]
    section |= changes
    told = [entry for entry in advise(facts) if what in entry.what]
    assert len(told) == 1, advise(facts)
    assert remedy in told[0].remedy


@pytest.mark.parametrize(
    ("torch", "what", "remedy"),
    [
        ({"cuda": None}, "is built without CUDA", "install a CUDA build"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES hides GPU", "unset"),
    ],
)
def test_a_device_that_torch_does_not_see_is_told_with_the_reason(
    torch: dict[str, Any], what: str, remedy: str
) -> None:
    facts = copy.deepcopy(GOOD)
    facts["accelerators"]["seen_by_torch"] = 0
    facts["torch"] |= torch
    (told,) = advise(facts)
    assert what in told.what
    assert remedy in told.remedy


def test_of_what_is_unknown_nothing_is_said() -> None:
    assert advise({name: {"unknown": "failed"} for name in GOOD if name != "disks"}) == []
    assert advise({}) == []


@pytest.mark.parametrize("width", [60, 80])
def test_facts_and_advice_stay_inside_the_terminal(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    facts = copy.deepcopy(GOOD)
    facts["products"]["cpu"]["bf16"] = 1e9
    facts["disks"][0] |= {"folder": "/a" * 60, "free_bytes": GIB}
    Console(width=width).print(machine_report(facts, advise(facts)))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    assert "what will hurt (2)" in text
    assert "fp32 100 GFLOP/s" in text
