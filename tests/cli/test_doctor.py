"""The doctor as a person calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tenfold.cli.main import main
from tenfold.planning.cluster import load_cluster


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


def test_saving_does_not_overwrite_what_is_no_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[model]\n", encoding="utf-8")
    assert main(["doctor", "--save", str(path)]) == 2
    assert "no cluster" in capsys.readouterr().err
    assert path.read_text(encoding="utf-8") == "[model]\n"
    assert main(["doctor", "--quick", "--save", str(tmp_path / "here.toml")]) == 2
    assert list(tmp_path.iterdir()) == [path]


def test_a_saved_machine_is_told_in_short_and_can_be_planned_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tenfold.planning.here.measure_here", lambda *_: load_cluster("2:cpu"))
    path = tmp_path / "here.toml"
    assert main(["doctor", "--save", str(path)]) == 0
    assert "products, bf16" in capsys.readouterr().err
    assert load_cluster(str(path)).per_node == 2
