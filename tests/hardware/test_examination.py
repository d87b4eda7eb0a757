"""The whole look at the machine, and accelerators as a made-up nvidia-smi tells of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tenfold.hardware import examination
from tenfold.hardware.accelerators import describe_accelerators
from tenfold.hardware.compiler import missing_for_compile
from tenfold.hardware.examination import examine

SMI = """#!/bin/sh
case "$1" in
topo) printf '\\tGPU0\\tGPU1\\nGPU0\\t X \\tNV18\\nGPU1\\tNV18\\t X \\n' ;;
*) printf 'Fast GPU, 81559, 550.54.15, 5, 16\\nOther GPU, [N/A], 550.54.15, [N/A], 8\\n' ;;
esac
"""


def test_a_quick_look_is_plain_data_and_measures_nothing(tmp_path: Path) -> None:
    facts = examine([tmp_path], quick=True)
    assert json.loads(json.dumps(facts)) == facts
    assert {"processor", "load", "memory", "limits", "disks", "accelerators", "torch"} == facts.keys()
    assert not any("unknown" in facts[name] for name in facts.keys() - {"disks"})
    assert "write_bytes_per_second" not in facts["disks"][0]
    assert "busy_cores" not in facts["load"]


def test_one_look_that_fails_spoils_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("strange file")

    for name in ("describe_processor", "describe_memory", "describe_torch"):
        monkeypatch.setattr(examination, name, broken)
    facts = examine([tmp_path / "absent", tmp_path], quick=True)
    assert facts["processor"] == facts["memory"] == facts["torch"] == {"unknown": "ValueError: strange file"}
    assert "open_files" in facts["limits"]
    assert "absent" in facts["disks"][0]["unknown"]
    assert facts["disks"][1]["free_bytes"] > 0


def test_nvidia_smi_tells_of_devices_and_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = describe_accelerators(tmp_path)
    fast = {"name": "Fast GPU", "memory_bytes": 81559 * 2**20, "driver": "550.54.15", "pcie": "5.0 x16"}
    other = {"name": "Other GPU", "memory_bytes": None, "driver": "550.54.15", "pcie": None}
    assert found["devices"] == [fast, other]
    assert found["nvlinks_between_two"] == 18


def test_a_broken_nvidia_smi_leaves_what_the_kernel_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (tmp_path / "proc/driver/nvidia/gpus/0000:17:00.0").mkdir(parents=True)
    found = describe_accelerators(tmp_path)
    assert found == {"devices": [{"name": "0000:17:00.0"}], "seen_by_torch": 0, "nvlinks_between_two": None}


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert "a C++ compiler (g++)" in missing_for_compile()
    for name in ("g++", "mine"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    assert "a C++ compiler (g++)" not in missing_for_compile()
