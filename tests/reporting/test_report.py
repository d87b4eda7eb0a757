"""The report: one well-formed page, made from the run directory alone, in every state a run can be in."""

from __future__ import annotations

import html.parser
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tenfold.errors import TenfoldError
from tenfold.reporting.history import History
from tenfold.reporting.report import write_report

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(html.parser.HTMLParser):
    """Checks that tags close in order, and keeps what a browser would load, the ids and the visible text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for key, value in attrs if key in ("src", "href", "xlink:href", "srcset", "action")]
        self.ids += [value or "" for key, value in attrs if key == "id"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def report(tmp_path: Path, example: SimpleNamespace) -> Callable[..., Page]:
    """The page of a run with the given events and config."""

    def make(**run: Any) -> Page:
        return Page(write_report(example.write(tmp_path / "run", **run)).read_text(encoding="utf-8"))

    return make


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, example: SimpleNamespace) -> tuple[Page, str]:
    """The page of the whole run with all its plots, and its text."""
    text = write_report(example.write(tmp_path_factory.mktemp("whole"))).read_text(encoding="utf-8")
    return Page(text), text


@pytest.mark.report
def test_a_finished_run_has_its_numbers_and_all_its_plots(whole: tuple[Page, str]) -> None:
    page, _ = whole
    assert page.tags.count("svg") == 3 + 1 + 2 + 1 + 1 + 1 + 2 + 1 + 1 + 4 + 2 + 4  # panels, their views, evaluations
    for part in ("finished", "Final validation loss", "2.4578", "equal to the last bit", "unigram", "6.4120", "4.3180"):
        assert part in page.text
    for part in ("interrupted (Ctrl-C)", "Example Processor 9", "412 GFLOP/s, measured", "return '<600>'"):
        assert part in page.text


@pytest.mark.report
def test_the_page_loads_nothing_and_runs_nothing(whole: tuple[Page, str]) -> None:
    page, text = whole
    assert all(load.startswith(("#", "data:image/png;base64,")) for load in page.loads)
    assert not {"script", "link", "iframe"} & set(page.tags)
    assert "http://" not in text
    assert "https://" not in text
    assert "@import" not in text


@pytest.mark.report
def test_every_id_stands_once_and_every_reference_has_its_id(whole: tuple[Page, str]) -> None:
    page, _ = whole
    assert len(page.ids) == len(set(page.ids))
    assert {load[1:] for load in page.loads if load.startswith("#")} <= set(page.ids)


@pytest.mark.report
def test_the_page_is_small(report: Callable[..., Page], example: SimpleNamespace, tmp_path: Path) -> None:
    report(events=example.events(log_every=1))
    assert (tmp_path / "run" / "report.html").stat().st_size < 1_200_000


@pytest.mark.report
def test_what_comes_from_outside_is_escaped(report: Callable[..., Page], example: SimpleNamespace) -> None:
    evil = "</pre><script>alert(1)</script>"
    start, *others = example.events()
    start = {**start, "run": evil, "machine": {"processor": evil}}
    for event in others:
        if event["event"] == "stop":
            event["reason"] = evil
        if event["event"] in ("note", "sample"):
            event["text"] = evil
        if event["event"] == "evaluation":
            event["name"] = event["task"] = evil
    samples = 8
    page = report(events=[start, *others], config=f'[data]\npath = "{evil}"\n')
    assert "script" not in page.tags
    fixed = 6  # title, heading, reason, note, machine, configuration
    plots = 4  # heading and explanation of each of two values that are left, of one name and task
    assert page.text.count(evil) >= fixed + samples + plots


@pytest.mark.report
def test_stage_names_with_signs_do_not_break_the_plots(report: Callable[..., Page], example: SimpleNamespace) -> None:
    events = example.events()
    for event in events:
        if event.get("stage") == "real":
            event["stage"] = "<b>$\\frac$ & real"
    page = report(events=events)
    assert "b" not in page.tags
    assert "<b>$\\frac$ & real" in page.text


@pytest.mark.report
def test_a_run_that_still_goes_on_has_a_report(report: Callable[..., Page], example: SimpleNamespace) -> None:
    page = report(events=[event for event in example.events() if event.get("step", 0) <= 150])
    assert "not finished" in page.text
    assert "Latest validation loss" in page.text


def test_a_stopped_run_says_so(report: Callable[..., Page], example: SimpleNamespace) -> None:
    events = example.events()
    page = report(events=events[: 1 + next(index for index, e in enumerate(events) if e["event"] == "stop")])
    assert "stopped: interrupted (Ctrl-C)" in page.text


def test_a_run_that_was_resumed_is_no_longer_stopped(tmp_path: Path, example: SimpleNamespace) -> None:
    events = example.events()
    upto = next(index for index, event in enumerate(events) if event["event"] == "resume")
    assert History.read(example.write(tmp_path, events[: upto + 1])).status == "not finished"


@pytest.mark.report
def test_a_dense_run_of_one_stage_has_a_report(report: Callable[..., Page]) -> None:
    page = report(events=[{"event": "step", "step": 1, "stage": "real", "tokens": 64, "seconds": 0.5, "loss": 9.0}])
    assert page.tags.count("svg") == 2
    assert "Nothing went wrong." in page.text
    assert "9.0000" in page.text


@pytest.mark.report
def test_missing_numbers_are_gaps_and_dashes(report: Callable[..., Page], example: SimpleNamespace) -> None:
    events = example.events()
    for event in events:
        for key in ("loss", "grad_norm", "validation_loss", "memory_bytes"):
            if key in event:
                event[key] = None
        if event.get("expert_load"):
            event["expert_load"][0] = [None] * 8
    page = report(events=events)
    assert "–" in page.text


def test_everything_that_went_wrong_is_told(report: Callable[..., Page], example: SimpleNamespace) -> None:
    events = example.events()
    events[3]["loss"] = None
    events.insert(-1, {"event": "skip", "step": 500, "reason": "gradient not finite"})
    events.insert(-1, {"event": "error", "step": 510, "text": "step 511: loss nan"})
    text = report(events=events).text
    for part in (
        "interrupted (Ctrl-C)",
        "weights.safetensors is damaged",
        "and 2h 00m of rest; steps 396 to 400 were trained again",
        "step skippedgradient not finite",
        "step 511: loss nan",
        "not finiteloss, at 1 of the logged steps",
    ):
        assert part in text
    assert "Nothing went wrong" not in text


def test_a_remark_that_every_process_makes_is_told_once(report: Callable[..., Page], example: SimpleNamespace) -> None:
    events = example.events()
    events[1:1] = [{"event": "note", "step": step, "text": "no validation: too short"} for step in (0, 3)]
    assert report(events=events).text.count("no validation: too short") == 1


def test_a_run_that_failed_says_so(report: Callable[..., Page], example: SimpleNamespace) -> None:
    page = report(events=[*example.events()[:40], {"event": "error", "step": 40, "text": "out of memory"}])
    assert "failed" in page.text
    assert "out of memory" in page.text


def test_energy_is_shown_with_how_it_was_counted(report: Callable[..., Page], example: SimpleNamespace) -> None:
    text = report().text
    for part in ("estimate from stated watts", "6 g", "at 380 g a kWh", "each token"):
        assert part in text
    for event in (events := example.events()):
        for key in ("joules", "joules_per_token", "co2_kg", "energy_source"):
            event.pop(key, None)
        for stage in event.get("stages") or []:
            stage.pop("joules", None)
    assert "estimate" not in (text := report(events=events).text)
    assert "Energy" not in text


@pytest.mark.report
def test_views_of_a_panel_are_chosen_without_script(whole: tuple[Page, str]) -> None:
    page, _ = whole
    assert page.tags.count("fieldset") == 3
    assert page.tags.count("input") == page.tags.count("label") == 3 + 2 + 2


def test_samples_stand_by_step(report: Callable[..., Page]) -> None:
    text = report().text
    assert "step 60pseudodef step_60(self)" in text
    assert "step 600realdef step_600(self)" in text


@pytest.mark.parametrize("more", ["", " of attention, ffn", " + rank 4"])
def test_similarity_is_of_the_layers_that_once_shared(tmp_path: Path, example: SimpleNamespace, more: str) -> None:
    events = [
        {**event, "pattern_from": f"(0,0,0,1,1,1){more}"} if event["event"] == "delink" else event
        for event in example.events()
    ]
    history = History.read(example.write(tmp_path, events))
    assert history.shared_pairs == [(0, 1), (0, 2), (1, 2), (3, 4), (3, 5), (4, 5)]
    told = history.similarity("attention")
    assert [event["stage"] for event, _ in told if event["step"] == 240] == ["pseudo", "real"]
    assert told[-1][1] == pytest.approx([1 - 0.2 * distance for distance in (1, 2, 1, 1, 2, 1)])


def test_unequal_logits_stand_out(report: Callable[..., Page], example: SimpleNamespace) -> None:
    events = example.events()
    changed = {"logits_equal": False, "max_difference": 0.25}
    page = report(events=[{**e, **changed} if e["event"] == "delink" else e for e in events])
    assert "DIFFERENT, by up to 0.25" in page.text


def test_of_a_step_that_stands_twice_the_later_counts(tmp_path: Path, example: SimpleNamespace) -> None:
    twice = [{"event": "step", "step": 1, "stage": "a", "tokens": 8, "seconds": 1, "loss": loss} for loss in (9, 7)]
    history = History.read(example.write(tmp_path, twice))
    assert history.series("loss", "tokens") == ([8], [7])


def test_stages_are_bounded_where_their_last_numbers_stand(tmp_path: Path, example: SimpleNamespace) -> None:
    history = History.read(example.write(tmp_path))
    assert history.spans("step") == [("pseudo", 0, 240), ("real", 240, 600)]


def test_the_stages_before_the_end_are_those_the_end_tells(tmp_path: Path, example: SimpleNamespace) -> None:
    told = History.read(example.write(tmp_path / "a")).stage_rows()
    read = History.read(example.write(tmp_path / "b", example.events()[:-1])).stage_rows()
    for one, other in zip(told, read, strict=True):
        counted = ("seconds", "tokens_per_second", "joules", "joules_per_token")
        assert {k: v for k, v in one.items() if k not in counted} == {
            k: v for k, v in other.items() if k not in counted
        }
        assert [one[key] for key in counted] == [pytest.approx(other[key]) for key in counted]


@pytest.mark.report
def test_the_same_run_gives_the_same_page(tmp_path: Path, example: SimpleNamespace, whole: tuple[Page, str]) -> None:
    run = example.write(tmp_path / "run")
    page = write_report(run, out=tmp_path / "deep" / "two.html")
    assert page.read_text(encoding="utf-8") == whole[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "run"]


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (lambda run: None, "no run directory"),
        (lambda run: run.mkdir(), "no metrics.jsonl"),
        (lambda run: (run.mkdir(), (run / "metrics.jsonl").touch()), "there is no .*config.toml"),
        (
            lambda run: (run.mkdir(), (run / "metrics.jsonl").touch(), (run / "config.toml").write_text("[a")),
            "cannot read .*config.toml",
        ),
        (
            lambda run: (run.mkdir(), (run / "metrics.jsonl").touch(), (run / "config.toml").touch()),
            "no metrics yet",
        ),
    ],
)
def test_what_is_no_run_is_a_clear_error(tmp_path: Path, prepare: Callable[[Path], Any], says: str) -> None:
    prepare(tmp_path / "run")
    with pytest.raises(TenfoldError, match=says):
        write_report(tmp_path / "run")


def test_a_place_that_cannot_be_written_is_a_clear_error(tmp_path: Path, example: SimpleNamespace) -> None:
    run = example.write(tmp_path / "run")
    with pytest.raises(TenfoldError, match="cannot write the report"):
        write_report(run, out=run)
    os.mkfifo(tmp_path / "device")
    with pytest.raises(TenfoldError, match="no regular file"):
        write_report(run, out=tmp_path / "device")
    assert (tmp_path / "device").is_fifo()
    assert sorted(path.name for path in run.iterdir()) == ["config.toml", "metrics.jsonl"]


@pytest.mark.report
def test_what_was_foreseen_stands_beside_what_was_measured(
    tmp_path: Path, example: SimpleNamespace, whole: tuple[Page, str]
) -> None:
    events = example.offloaded()
    events.insert(1, {"event": "plan", "step": 0, "lines": ["planned: real: data_shard 2: 1.9 s a step"]})
    text = write_report(example.write(tmp_path / "run", events)).read_text(encoding="utf-8")
    section = text.split("<h2>Foreseen and measured</h2>")[1].split("<h2>")[0]
    for part in ("real", "1.9 s", "2 s", "+5.3%", "232 MiB", "400 MiB", "+72.4%", "offload"):
        assert f">{part}<" in section
    assert "planned: real: data_shard 2" in text.split("<h2>What happened</h2>")[1]
    assert "<h2>Foreseen and measured</h2>" not in whole[1]


@pytest.mark.report
def test_an_offloaded_run_has_a_section_on_where_its_state_lies(
    tmp_path: Path, example: SimpleNamespace, whole: tuple[Page, str]
) -> None:
    text = write_report(example.write(tmp_path / "run", example.offloaded())).read_text(encoding="utf-8")
    for part in ("<h2>Where state lies</h2>", "State by tier", "Waiting for transfers", "Bytes moved", "real, disk"):
        assert part in text
        assert part not in whole[1]
