"""`tenfold eval` on a trained run, and evaluations while it trains."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from runs import of_kind
from tenfold.cli.main import main


def measured(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["eval", *map(str, argv), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "asked.txt"
    path.write_text("abc dde fgh\nij abc abc dde\nfgh ij ij abc\n" * 4)
    return path


def test_without_data_it_gives_the_runs_own_validation_loss_to_the_last_bit(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for event in of_kind(trained, "validation"):
        found = measured(capsys, trained, "--checkpoint", event["step"], "--batch-size", 4)
        assert found["values"]["loss"] == event["validation_loss"]
        assert found["values"]["bits_per_byte"] == event["bits_per_byte"]


def test_a_saved_run_gives_the_numbers_of_the_live_one(
    trained: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenfold.reporting.report.write_report", lambda run: run / "report.html")
    run_file = tmp_path / "run.toml"
    tasks = {"loss": "", "strided": "stride = 5\nlimit = 90", "cloze": "every = 2"}
    asked = "".join(
        f'\n[[evaluations]]\nname = "text"\ntask = "{task}"\ndata = "{text}"\n{more}\n' for task, more in tasks.items()
    )
    run_file.write_text((trained.parent / "run.toml").read_text() + asked)
    run = tmp_path / "run"
    flags = ["--evaluations.0.limit", "80", "--checkpoint.every", "2"]
    assert main(["train", str(run_file), "--out", str(run), *flags]) == 0
    events = of_kind(run, "evaluation")
    assert [(event["step"], event["task"]) for event in events] == [
        (2, "cloze"),
        *((3, task) for task in tasks),
        (4, "cloze"),
        *((6, task) for task in tasks),
    ]
    for event in events[-3:]:
        more = {"loss": ["--limit", 80], "strided": ["--stride", 5, "--limit", 90], "cloze": []}[event["task"]]
        for batch_size in (1, 4):
            found = measured(capsys, run, text, "--task", event["task"], *more, "--batch-size", batch_size)
            assert found["step"] == event["step"] == 6
            assert found["values"] == pytest.approx(event["values"], rel=1e-5)
    assert [event["name"] for event in events] == ["text"] * 8
    # What is asked may change on the way: it is no part of the training.
    assert main(["train", str(run_file), "--out", str(run), "--resume", "--evaluations.0.every", "1"]) == 0


def test_every_task_is_shown_and_recorded(trained: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (trained / "evals.jsonl").read_text().splitlines() if (trained / "evals.jsonl").exists() else []
    assert main(["eval", str(trained), str(text)]) == 0
    shown = capsys.readouterr().out
    assert "step 6" in shown
    assert "word perplexity" in shown
    assert "nats per token" in shown
    assert main(["eval", str(trained), str(text), "--task", "cloze", "--passages", "lines"]) == 0
    assert "passages                    12" in capsys.readouterr().out
    lines = (trained / "evals.jsonl").read_text().splitlines()
    assert [json.loads(line)["task"] for line in lines[len(before) :]] == ["loss", "cloze"]


def test_a_run_directory_that_cannot_be_written_is_told_and_no_failure(
    trained: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained, tmp_path / "run", ignore=shutil.ignore_patterns("evals.jsonl"))
    (tmp_path / "run" / "evals.jsonl").mkdir()
    assert main(["eval", str(tmp_path / "run"), str(text)]) == 0
    assert "not added to" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["nowhere.txt"], "there is no file or folder nowhere.txt"),
        (["--checkpoint", "5"], "no whole checkpoint of step 5: there are 3, 6"),
        (["--window", "33"], "the model sees 1 to 32 tokens"),
        (["--batch-size", "0"], "at least one window"),
        (["--task", "strided", "--stride", "40"], "stride = 40 is more than the window of 32"),
        (["--limit", "0"], "limit"),
        (["--device", "tpu"], "tpu"),
    ],
)
def test_what_cannot_be_done_is_one_message(
    trained: Path, text: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = [] if flags[0].startswith("nowhere") else [str(text)]
    assert main(["eval", str(trained), *data, *flags]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert "Traceback" not in told


def test_what_is_no_run_directory_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(tmp_path)]) == 2
    assert "no run directory" in capsys.readouterr().err


def test_data_that_changed_since_is_not_the_runs_own(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained.parent / "corpus", tmp_path / "corpus")
    (tmp_path / "corpus" / "new.txt").write_text("some more text " * 50)
    shutil.copytree(trained, tmp_path / "run")
    config = (tmp_path / "run" / "config.toml").read_text()
    changed = config.replace(str(trained.parent / "corpus"), str(tmp_path / "corpus"))
    (tmp_path / "run" / "config.toml").write_text(changed)
    assert main(["eval", str(tmp_path / "run")]) == 2
    assert "has changed since" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ('name = "a"\n', "`evaluations.0.data` is missing"),
        ('name = "a"\ndata = "x"\ntask = "lambada"\n', "task"),
        ('name = "a"\ndata = "x"\n[[evaluations]]\nname = "a"\ndata = "y"\n', "different names"),
        ('name = "a"\ndata = "x"\ntask = "strided"\nstride = 99\n', "evaluations.0.stride = 99"),
        ('name = "a"\ndata = "nowhere"\n', "there is no file or folder"),
    ],
)
def test_a_run_file_that_asks_wrongly_is_refused_before_anything_is_written(
    trained: Path, tmp_path: Path, asked: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(f"{(trained.parent / 'run.toml').read_text()}\n[[evaluations]]\n{asked}")
    assert main(["train", str(run_file), "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
