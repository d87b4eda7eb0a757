"""Choosing the device, describing the machine, measuring its matrix rate."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch

from tenfold.errors import TenfoldError
from tenfold.hardware.device import describe_machine, has_bf16_unit, matrix_rate, pick_device


def test_auto_takes_the_cpu_where_there_is_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == torch.device("cpu")


def test_auto_takes_cuda_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device("auto").type == "cuda"
    assert pick_device("cpu").type == "cpu"


@pytest.mark.parametrize(("built", "says"), [(None, "built without CUDA"), ("12.8", "finds no CUDA device")])
def test_cuda_that_is_absent_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, built: str | None, says: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built)
    with pytest.raises(TenfoldError, match=says):
        pick_device("cuda")


def test_an_unknown_device_is_told_what_there_is() -> None:
    with pytest.raises(TenfoldError, match="auto, cpu or cuda"):
        pick_device("tpu")


def test_the_description_is_plain_data_about_this_machine() -> None:
    machine = describe_machine(torch.device("cpu"))
    assert json.loads(json.dumps(machine)) == machine
    assert 1 <= machine["cores"] <= (os.cpu_count() or 1)
    assert machine["torch"] == torch.__version__
    assert machine["memory_limit_bytes"] > 2**20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_matrix_rate_is_a_positive_number(dtype: torch.dtype) -> None:
    rate = matrix_rate(torch.device("cpu"), dtype, seconds=0.05)
    assert math.isfinite(rate)
    assert rate > 1e6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_is_described_and_measured() -> None:
    device = pick_device("cuda")
    assert describe_machine(device)["accelerators"]
    assert matrix_rate(device, torch.bfloat16) > 1e11


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("flags\t: fma avx2", False),
        ("flags\t: avx2 avx512f", False),
        ("flags\t: avx512f avx512_bf16", True),
        ("flags\t: amx_bf16", True),
        ("Features\t: asimd bf16", True),
    ],
)
def test_a_bf16_unit_is_told_by_the_processors_flags(tmp_path: Path, flags: str, expected: bool) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(flags + "\n")
    assert has_bf16_unit(tmp_path) is expected
