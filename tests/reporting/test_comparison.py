"""Several runs on one page, and plots as files."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace

import pytest

from tenfold.reporting.comparison import name_runs
from tenfold.reporting.history import History
from tenfold.reporting.report import write_report
from tenfold.reporting.svg import COLOURS, drawing, light_colours


@pytest.fixture
def pair(tmp_path: Path, example: SimpleNamespace) -> list[Path]:
    """Two runs of one name, the second with other settings, without energy, and cut off at step 150."""
    first = example.write(tmp_path / "a" / "demo")
    events = [event for event in example.events() if event.get("step", 0) <= 150]
    for event in events:
        for key in ("joules", "energy_source", "joules_per_token", "co2_kg"):
            event.pop(key, None)
    config = (
        (first / "config.toml")
        .read_text()
        .replace("batch_size = 16", "batch_size = 32\nseed = 7")
        .replace('"all"', "{groups = 2}")
    )
    return [first, example.write(tmp_path / "b" / "demo", events, config)]


@pytest.mark.report
def test_runs_stand_side_by_side(pair: list[Path], tmp_path: Path) -> None:
    page = write_report(*pair, out=tmp_path / "both.html")
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    for part in (
        "<title>a/demo and b/demo",
        '<th scope="row">training.batch_size</th><td>16</td><td>32</td>',
        '<th scope="row">training.seed</th><td>–</td><td>7</td>',
        '<th scope="row">stages.0.sharing</th><td>all</td><td>groups=2</td>',
        '<th scope="row">status</th><td>finished</td><td>not finished</td>',
        '<th scope="row">validation loss</th><td>2.4578</td>',
        '<th scope="row">steps</th><td>600</td><td>150</td>',
        '<th scope="row">energy by</th><td>estimate</td><td>–</td>',
        '<th scope="row">went wrong</th><td>3</td><td>nothing</td>',
        "weights.safetensors is damaged",
    ):
        assert part in text
    assert "training.steps" not in text
    assert text.count("<svg") == 3 + 8 + 4
    assert "<script" not in text
    assert not (pair[0] / "report.html").exists()


def test_the_same_configuration_is_told_so(tmp_path: Path, example: SimpleNamespace) -> None:
    paths = [example.write(tmp_path / name) for name in "ab"]
    text = write_report(*paths, out=tmp_path / "both.html").read_text(encoding="utf-8")
    assert "Nothing: the configurations are the same." in text


def test_runs_of_one_name_go_by_as_much_of_their_path_as_tells_them_apart(
    tmp_path: Path, example: SimpleNamespace
) -> None:
    events = [{"event": "step", "step": 1, "stage": "a", "tokens": 1, "seconds": 1, "loss": 1.0}]
    paths = [example.write(tmp_path / folder / "run", events) for folder in ("a/x", "b/x", "b/y")]
    paths.append(example.write(tmp_path / "other", events))
    named = name_runs(paths, [History.read(path) for path in paths])
    assert [name for name, _ in named] == ["a/x/run", "b/x/run", "y/run", "other"]


def test_runs_by_themselves_can_be_many(tmp_path: Path, example: SimpleNamespace) -> None:
    step = {"event": "step", "step": 1, "stage": "a", "tokens": 1, "seconds": 1, "loss": 1.0}
    paths = [example.write(tmp_path / f"run-{number}", [step]) for number in range(11)]
    assert "11 runs: run-0, run-1" in write_report(*paths, out=tmp_path / "all.html").read_text(encoding="utf-8")


@pytest.mark.report
def test_plots_become_files_that_stand_alone(tmp_path: Path, example: SimpleNamespace) -> None:
    run, images = example.write(tmp_path / "run"), tmp_path / "deep" / "images"
    write_report(run, images=images)
    names = sorted(path.stem for path in images.glob("*.svg"))
    assert names == sorted(path.stem for path in images.glob("*.png"))
    assert {"loss-tokens", "loss-time", "loss-energy", "experts", "similarity", "drift", "evaluation-0"} <= set(names)
    for name in names:
        text = (images / f"{name}.svg").read_text(encoding="utf-8")
        assert "var(--" not in text
        assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
        assert (images / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_colours_of_files_are_the_light_themes_and_only_while_they_are_drawn() -> None:
    before = dict(COLOURS)
    with drawing(light_colours()):
        assert COLOURS["training"] == "#2563c9"
    assert before == COLOURS
