"""The doctor as a person calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tenfold.cli.main import main


def test_a_whole_examination_measures_products_and_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "fp32" in shown
    assert "GFLOP/s" in shown
    assert "write" in shown
    assert max(len(line) for line in shown.splitlines()) <= 80
    assert list(tmp_path.iterdir()) == []


def test_json_holds_facts_and_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--quick", "--json", "--disks", str(tmp_path), str(tmp_path / "absent")]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["disks"][0]["folder"] == str(tmp_path)
    assert any("absent" in entry["what"] and entry["remedy"] for entry in facts["advice"])
    assert "products" not in facts
