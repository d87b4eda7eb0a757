"""Very long metrics: a report reads the steps that matter, in little memory."""

from __future__ import annotations

import json
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tenfold.errors import TenfoldError
from tenfold.reporting.history import History
from tenfold.reporting.metrics import read_metrics
from tenfold.reporting.reading import read_events
from tenfold.reporting.report import write_report


def step(number: int, **more: Any) -> dict[str, Any]:
    where = {"step": number, "stage": "a" if number <= 3000 else "b", "tokens": number * 64, "seconds": number / 10}
    return {"event": "step", **where, "loss": 3.0, "lr": 0.1, "grad_norm": 1.0, **more}


def lines(run: Path, events: list[dict[str, Any]], tail: str = "") -> Path:
    (run / "config.toml").write_text("")
    (run / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events) + tail)
    return run


def test_a_short_file_is_read_whole(tmp_path: Path) -> None:
    run = lines(tmp_path, [step(number) for number in range(1, 400)])
    assert read_events(run, most_steps=400) == read_metrics(run)


def test_of_a_long_file_spikes_ends_and_all_other_events_stay(tmp_path: Path) -> None:
    events = [step(number) for number in range(1, 6001)]
    events[1233]["loss"] = 9.0
    events[2233]["loss"] = 1.0
    events[4567]["grad_norm"] = 50.0
    other = [{"event": "delink", "step": 3000}, {"event": "validation", "step": 3000, "validation_loss": 2.0}]
    events[3000:3000] = other
    read = read_events(lines(tmp_path, events, '{"event": "ste'), most_steps=200)
    steps = [event for event in read if event["event"] == "step"]
    assert len(steps) <= 210
    assert [event for event in read if event["event"] != "step"] == other
    numbers = [event["step"] for event in steps]
    assert numbers == sorted(set(numbers))
    assert {1234, 2234, 3000, 4568, 6000} <= set(numbers)
    assert all(event == step(event["step"]) for event in steps if event["loss"] == 3.0 and event["grad_norm"] == 1.0)
    assert read.index(other[0]) == next(index for index, event in enumerate(read) if event["step"] > 3000) - 2


def test_damage_in_a_long_file_names_the_line(tmp_path: Path) -> None:
    run = lines(tmp_path, [step(number) for number in range(1, 500)])
    text = (run / "metrics.jsonl").read_text().split("\n")
    text[250] = text[250][:40]
    (run / "metrics.jsonl").write_text("\n".join(text))
    with pytest.raises(TenfoldError, match="line 251 is damaged"):
        read_events(run, most_steps=100)


@pytest.mark.slow
@pytest.mark.report
def test_a_million_lines_make_a_small_page_in_little_memory(tmp_path: Path, example: SimpleNamespace) -> None:
    start, *_ = example.events()
    (tmp_path / "config.toml").write_text("")
    with (tmp_path / "metrics.jsonl").open("w") as file:
        file.write(json.dumps(start) + "\n")
        pattern = json.dumps(step(1, loss=-1.0, expert_load=[[0.25] * 4] * 2)).replace('"tokens": 64', '"tokens": %d')
        pattern = pattern.replace('"step": 1,', '"step": %d,').replace('"seconds": 0.1', '"seconds": %d')
        pattern = pattern.replace("-1.0", "%.3f") + "\n"
        for number in range(1, 1_000_001):
            file.write(pattern % (number, number * 64, number, 2 + number % 97 / 97))
    tracemalloc.start()
    History.read(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100e6
    began = time.perf_counter()
    page = write_report(tmp_path)
    print(f"{time.perf_counter() - began:.1f} s, {page.stat().st_size:,} bytes, {peak / 1e6:.0f} MB")
    assert page.stat().st_size < 2_000_000
