"""What is shown of a rule that ends a stage: its checks as plots and lines, its decisions in every curve."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tenfold.reporting.axes import mark_stages, new_figure
from tenfold.reporting.decisions import correlation_plot, returns_plot
from tenfold.reporting.display import Display
from tenfold.reporting.history import History
from tenfold.reporting.page import build_page


def check(step: int, rule: str, **more: Any) -> dict[str, Any]:
    where = {"step": step, "stage": "pseudo", "tokens": step * 16_384, "seconds": float(step), "joules": step * 2.0}
    pairs = [[0, 1], [1, 2]] if step < 160 else [[0, 1]]
    common = {"event": "check", **where, "rule": rule, "pairs": pairs, "checks": 3, "in_a_row": 1, "decision": None}
    return {**common, "correlations": [0.9 - step / 1000, 0.3][: len(pairs)], **more}


def checks() -> list[dict[str, Any]]:
    split = {"threshold": 0.5, "under": 1}
    return [
        check(80, "correlation", **split),
        check(120, "correlation", **split, in_a_row=3, decision="split", cut=[[1, 2]]),
        {
            "event": "split",
            **{key: check(120, "")[key] for key in ("step", "stage", "tokens", "seconds", "joules")},
            "stage_from": "pseudo",
            "stage_to": "pseudo",
            "pattern_from": "(0,0,0)",
            "pattern_to": "(0,0,1)",
            "moments": "measure",
            "logits_equal": True,
            "max_difference": 0.0,
            "stored_before": 4_390_144,
            "stored_after": 8_000_000,
        },
        check(240, "correlation", **split, in_a_row=3, decision="end"),
    ]


RETURNS = {"gain": 1.5, "step_seconds": 2.0, "next_step_seconds": 2.5}


@pytest.fixture
def history(example: SimpleNamespace, tmp_path: Path) -> Callable[[list[dict[str, Any]]], History]:
    return lambda more: History.read(example.write(tmp_path / "run", [*example.events(), *more]))


def test_each_pair_has_a_line_as_long_as_it_was_watched(history: Callable[..., History]) -> None:
    figure = correlation_plot(history(checks()))
    assert figure is not None
    lines = {line.get_label(): line for line in figure.axes[0].get_lines()}
    assert list(lines["layers 0 and 1"].get_ydata()) == pytest.approx([0.82, 0.78, 0.66])
    assert list(lines["layers 1 and 2"].get_xdata()) == [80 * 16_384, 120 * 16_384]
    assert list(lines["threshold"].get_ydata()) == [0.5, 0.5]


def test_of_many_pairs_the_mean_and_the_range_are_drawn(history: Callable[..., History]) -> None:
    pairs = [[layer, layer + 1] for layer in range(20)]
    values = [layer / 20 for layer in range(20)]
    figure = correlation_plot(history([check(s, "correlation", pairs=pairs, correlations=values) for s in (50, 100)]))
    assert figure is not None
    (line,) = [line for line in figure.axes[0].get_lines() if "pairs" in str(line.get_label())]
    assert list(line.get_ydata()) == pytest.approx([0.475, 0.475])
    assert len(figure.axes[0].collections) == 1


def test_returns_are_drawn_measured_beside_predicted(history: Callable[..., History]) -> None:
    told = [
        check(50, "returns", **RETURNS, loss_per_second=None, next_loss_per_second=None),
        check(100, "returns", **RETURNS, loss_per_second=0.02, next_loss_per_second=0.024),
    ]
    figure = returns_plot(history(told))
    assert figure is not None
    lines = {line.get_label(): list(line.get_ydata())[1:] for line in figure.axes[0].get_lines()}
    assert lines["measured"] == [0.02]
    assert lines["predicted when delinked"] == [0.024]


def test_a_run_without_rules_has_neither_plot(history: Callable[..., History]) -> None:
    plain = history([])
    assert correlation_plot(plain) is None
    assert returns_plot(plain) is None


@pytest.mark.parametrize("axis", ["tokens", "seconds", "joules"])
def test_a_split_is_a_line_in_every_curve(history: Callable[..., History], axis: str) -> None:
    told = checks()
    with_split, without = history(told), history([])
    _, axes = new_figure()
    mark_stages(axes, with_split, axis)
    _, others = new_figure()
    mark_stages(others, without, axis)
    assert len(axes.get_lines()) == len(others.get_lines()) + 1
    assert told[2][axis] in [line.get_xdata()[0] for line in axes.get_lines()]


def test_the_page_tells_every_decision_before_what_it_led_to(history: Callable[..., History]) -> None:
    page = build_page(history(checks()), [])
    told = page.split("What happened")[1]
    places = [told.index(text) for text in ("split between layers 1 and 2", "(0,0,1)", "stage pseudo ends here")]
    assert places == sorted(places)
    assert told.index("stage pseudo ends here") < told.index("pseudo → real")
    assert "correlate by 0.30 to 0.78" in told
    assert "0.30 to 0.82" not in told, "checks that decided nothing are for the plot"


def test_the_terminal_tells_every_check_with_its_numbers(example: SimpleNamespace) -> None:
    console = Console(file=io.StringIO(), force_terminal=False, width=300)
    told = [*checks(), check(100, "returns", **RETURNS, loss_per_second=0.02, next_loss_per_second=0.024)]
    with Display(1000, console=console) as display:
        display.event({"event": "start", "stages": [{**example.stages[0], "ends_by": "correlation"}]})
        for event in told:
            display.event(event)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for part in (
        "or less: it ends by correlation",
        "step 80: gradients of neighbouring layers correlate by 0.30 to 0.82, 1 of 2 under 0.5; 1 of 3 checks in a row",
        "split between layers 1 and 2",
        "pseudo now shares (0,0,1), stored parameters 4.39M -> 8M, optimizer moments: measure",
        "stage pseudo ends here",
        "loss falls 0.02 a second, delinked 0.024 predicted (gain 1.50 a step, 2.5 s for 2 s)",
    ):
        assert part in text, part
