"""tenfold report."""

from __future__ import annotations

import shutil
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


def test_several_runs_make_a_comparison_where_the_command_is_given(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other, here = tmp_path / "other", tmp_path / "here"
    for folder in (other, here):
        folder.mkdir()
    for name in ("config.toml", "metrics.jsonl"):
        shutil.copy(run / name, other / name)
    monkeypatch.chdir(here)
    assert main([str(run), str(other), "--images", "figures"]) == 0
    assert capsys.readouterr().out.strip() == "comparison.html"
    assert (here / "comparison.html").read_text().startswith("<!DOCTYPE html>")
    assert (here / "figures" / "loss-tokens.png").is_file()


@pytest.mark.parametrize(("given", "says"), [([], "needs a run directory"), (["a", "b", "./a"], "a is given twice")])
def test_what_cannot_be_compared_is_told(given: list[str], says: str) -> None:
    with pytest.raises(TenfoldError, match=says):
        main(given)


def test_images_that_cannot_be_written_are_told(run: Path) -> None:
    with pytest.raises(TenfoldError, match="cannot write the images"):
        main([str(run), "--images", str(run / "config.toml")])


def test_no_run_there_is_for_the_dispatcher_to_tell(tmp_path: Path) -> None:
    with pytest.raises(TenfoldError, match="absent"):
        main([str(tmp_path / "absent")])


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    assert "tenfold report runs/demo" in capsys.readouterr().out
