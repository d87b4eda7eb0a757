"""tenfold report."""

from __future__ import annotations

from pathlib import Path

import pytest

from tenfold.cli.report import main
from tenfold.errors import TenfoldError

STEP = '{"event": "step", "step": 1, "stage": "real", "tokens": 64, "seconds": 0.5, "loss": 9.0}\n'


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with the least that a report needs."""
    (tmp_path / "config.toml").write_text("[training]\nsteps = 1\n")
    (tmp_path / "metrics.jsonl").write_text(STEP)
    return tmp_path


def test_it_writes_the_report_into_the_run_and_prints_where(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert (run / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_out_says_where_to_write(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--out", str(run / "there.html")]) == 0
    assert capsys.readouterr().out.strip() == str(run / "there.html")
    assert not (run / "report.html").exists()


def test_no_run_there_is_for_the_dispatcher_to_tell(tmp_path: Path) -> None:
    with pytest.raises(TenfoldError, match="absent"):
        main([str(tmp_path / "absent")])


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    assert "tenfold report runs/demo" in capsys.readouterr().out
