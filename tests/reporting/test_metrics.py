"""metrics.jsonl: events come back as they were written, and each step stands once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tenfold.errors import TenfoldError
from tenfold.reporting.metrics import MetricsWriter, load_imbalance, read_metrics


def step(number: int, **more: Any) -> dict[str, Any]:
    return {"event": "step", "step": number, "stage": "real", "loss": 1.0 / number, **more}


def write(run: Path, events: list[dict[str, Any]], resume_step: int | None = None) -> None:
    writer = MetricsWriter(run, resume_step)
    for event in events:
        writer.write(event)
    writer.close()


def test_events_come_back_as_they_were_written(tmp_path: Path) -> None:
    events = [{"event": "start", "run": "ünï"}, step(1, expert_load=[[0.25, 0.75]]), {"event": "stop", "step": 1}]
    write(tmp_path / "run", events)
    assert read_metrics(tmp_path / "run") == events


def test_a_line_is_in_the_file_as_soon_as_it_is_written(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write(step(1))
    assert read_metrics(tmp_path) == [step(1)]
    writer.close()


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    write(tmp_path, [step(1, lr=float("nan"), expert_load=[[float("inf"), 0.5]])])
    (event,) = read_metrics(tmp_path)
    assert event["lr"] is None
    assert event["expert_load"] == [[None, 0.5]]
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_tensors_and_numpy_numbers_become_plain(tmp_path: Path) -> None:
    write(tmp_path, [step(1, a=torch.tensor(2.0), b=np.float32(0.5), c=np.arange(2), d=Path("x"))])
    (event,) = read_metrics(tmp_path)
    assert (event["a"], event["b"], event["c"], event["d"]) == (2.0, 0.5, [0, 1], "x")


def test_resume_drops_later_lines_so_each_step_stands_once(tmp_path: Path) -> None:
    write(tmp_path, [{"event": "start"}, *(step(n) for n in (10, 20, 30)), {"event": "end", "step": 30}])
    write(tmp_path, [{"event": "resume", "step": 20}, step(30, loss=9.0)], resume_step=20)
    events = read_metrics(tmp_path)
    assert [(e["event"], e.get("step")) for e in events] == [
        ("start", None),
        ("step", 10),
        ("step", 20),
        ("resume", 20),
        ("step", 30),
    ]
    assert events[-1]["loss"] == 9.0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "tensorboard"]


def test_resume_at_the_end_takes_the_end_out(tmp_path: Path) -> None:
    write(tmp_path, [step(10), {"event": "end", "step": 10}])
    write(tmp_path, [], resume_step=10)
    assert read_metrics(tmp_path) == [step(10)]


def test_resume_at_a_stage_end_drops_the_delinking_that_is_done_again(tmp_path: Path) -> None:
    validation, delink = {"event": "validation", "step": 20}, {"event": "delink", "step": 20}
    similarity, note = {"event": "similarity", "step": 20}, {"event": "note", "step": 20, "text": "x"}
    write(tmp_path, [step(20), similarity, validation, delink, similarity, note, step(21)])
    write(tmp_path, [], resume_step=20)
    assert read_metrics(tmp_path) == [step(20), similarity, validation, note]


def test_resume_forgets_a_half_written_line(tmp_path: Path) -> None:
    write(tmp_path, [step(10)])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"event": "step", "step": 1')
    write(tmp_path, [step(20)], resume_step=10)
    assert read_metrics(tmp_path) == [step(10), step(20)]


def test_resume_without_a_file_begins_one(tmp_path: Path) -> None:
    write(tmp_path / "run", [step(1)], resume_step=0)
    assert read_metrics(tmp_path / "run") == [step(1)]


def test_a_second_run_in_the_same_place_is_refused(tmp_path: Path) -> None:
    write(tmp_path, [step(1)])
    with pytest.raises(TenfoldError, match="--resume"):
        MetricsWriter(tmp_path)
    assert read_metrics(tmp_path) == [step(1)]


@pytest.mark.parametrize("half", [b'{"event": "st', b'{"event": "st\n', '{"a": "ü'.encode()[:-1], b"\0\0\0\0"])
def test_reading_leaves_out_a_half_written_last_line(tmp_path: Path, half: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(json.dumps(step(1)).encode() + b"\n" + half)
    assert read_metrics(tmp_path) == [step(1)]


def test_damage_in_the_middle_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"event": "start"}\n{"event"\n{"event": "stop"}\n')
    with pytest.raises(TenfoldError, match="line 2"):
        read_metrics(tmp_path)


def test_no_run_there_is_an_error_that_names_the_place(tmp_path: Path) -> None:
    with pytest.raises(TenfoldError, match="no run directory"):
        read_metrics(tmp_path / "absent")
    with pytest.raises(TenfoldError, match=r"no metrics\.jsonl"):
        read_metrics(tmp_path)


def test_tensorboard_has_the_scalars_and_forgets_what_a_resume_undid(tmp_path: Path) -> None:
    write(tmp_path, [step(n, expert_load=[[0.75, 0.25]]) for n in (10, 20, 30)])
    write(tmp_path, [step(30, loss=9.0)], resume_step=20)
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(s.step, s.value) for s in board.Scalars("training/loss")][-1] == (30, 9.0)
    assert [s.step for s in board.Scalars("training/loss")] == [10, 20, 30]
    assert board.Scalars("experts/layer_0_largest_over_mean_load")[0].value == pytest.approx(1.5)


def test_imbalance_is_the_busiest_expert_over_the_mean() -> None:
    event = {"expert_load": [[0.25] * 4, [1.0, 0, 0, 0], [0, 0], [None, None]]}
    assert load_imbalance(event) == [1.0, 4.0, None, None]
    assert load_imbalance({}) == []


def test_importing_reporting_loads_neither_plots_nor_tensorboard() -> None:
    code = (
        "import sys, tenfold.reporting.display, tenfold.reporting.metrics, tenfold.cli.report\n"
        "sys.exit(any(name.split('.')[0] in ('matplotlib', 'tensorboard', 'torch') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
