"""What the plots draw: the numbers of the run, by a reckoning of the test's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tenfold.reporting.heatmaps import busiest_expert, each_expert, similarity_maps
from tenfold.reporting.history import History
from tenfold.reporting.lying import bytes_moved_plot, state_plot, waiting_plot
from tenfold.reporting.overlays import drifts_plot, losses_plot
from tenfold.reporting.plots import (
    accuracy_plot,
    drift_plot,
    evaluation_plots,
    line_plot,
    loss_plot,
    mixture_plot,
    source_losses_plot,
)


@pytest.fixture
def history(tmp_path: Path, example: SimpleNamespace) -> Callable[..., History]:
    """The history of the made-up run, with its events changed by `change`."""

    def read(change: Callable[[dict[str, Any]], Any] = lambda event: None) -> History:
        events = example.events()
        for event in events:
            change(event)
        return History.read(example.write(tmp_path / "run", events))

    return read


def axes_of(figure: Figure | None) -> Axes:
    assert figure is not None
    return figure.axes[0]


def line(axes: Axes, label: str) -> tuple[list[float], list[float]]:
    (found,) = [line for line in axes.get_lines() if line.get_label() == label]
    return list(found.get_xdata()), list(found.get_ydata())  # type: ignore[arg-type]


@pytest.mark.parametrize("axis", ["tokens", "seconds", "joules"])
def test_validation_loss_stands_where_it_was_measured(history: Callable[..., History], axis: str) -> None:
    told = history()
    expected = [(event[axis], event["validation_loss"]) for event in told.validations]
    axes = axes_of(loss_plot(told, axis))
    assert list(zip(*line(axes, "validation"), strict=True)) == expected
    delinked = next(event[axis] for event in told.validations if event["step"] == 240)
    upright = [shown.get_xdata()[0] for shown in axes.get_lines() if shown.get_linestyle() == "--"]  # type: ignore[index]
    assert delinked in upright


def test_without_joules_there_is_no_loss_by_energy(history: Callable[..., History]) -> None:
    told = history(lambda event: event.pop("joules", None))
    assert loss_plot(told, "joules") is None
    assert line_plot(told, {"joules": "energy"}, "energy") is None
    assert losses_plot([("a", told)], "joules") is None


def test_each_experts_load_is_drawn_over_its_layers_mean(history: Callable[..., History]) -> None:
    told = history()
    figure = each_expert(told)
    assert figure is not None
    shown = [axes for axes in figure.axes if axes.get_title().startswith("layer")]
    assert [axes.get_title() for axes in shown] == [f"layer {layer}" for layer in range(6)]
    grid = shown[3].images[0].get_array()
    first, last = told.steps[0]["expert_load"][3], told.steps[-1]["expert_load"][3]
    for expert in range(8):
        assert grid[expert][0] == pytest.approx(first[expert] / (sum(first) / 8))
        assert grid[expert][-1] == pytest.approx(last[expert] / (sum(last) / 8))


def test_of_many_layers_a_dozen_have_their_experts_drawn(history: Callable[..., History]) -> None:
    told = history(lambda event: event.update(expert_load=[[0.5, 0.5]] * 40) if "expert_load" in event else None)
    figure = each_expert(told)
    assert figure is not None
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert (len(titles), titles[0], titles[-1]) == (12, "layer 0", "layer 39")


def test_a_layer_without_loads_is_a_gap(history: Callable[..., History]) -> None:
    told = history(lambda event: event["expert_load"].__setitem__(2, None) if "expert_load" in event else None)
    figure = each_expert(told)
    assert figure is not None
    grid = figure.axes[2].images[0].get_array()
    assert grid.mask.all() if hasattr(grid, "mask") else all(math.isnan(value) for value in grid.flat)
    assert busiest_expert(told) is not None


def test_similarity_is_shown_before_and_after_delinking_on_the_way_and_at_the_end(
    history: Callable[..., History],
) -> None:
    figure = similarity_maps(history())
    assert figure is not None
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert titles == ["step 240\nshared", "step 240\njust delinked", "step 420", "step 600\nend"]
    before, just, _, end = (axes.images[0].get_array() for axes in figure.axes[:4])
    assert before.min() == just.min() == 1.0
    assert end[0][5] == pytest.approx(1 - 5 * 0.2)


def test_freed_layers_drift_apart_by_the_mean_of_their_pairs(history: Callable[..., History]) -> None:
    pairs = [abs(one - other) for one in range(6) for other in range(one + 1, 6)]
    mean = sum(1 - 0.2 * distance for distance in pairs) / len(pairs)
    told = history()
    axes = axes_of(drift_plot(told))
    assert line(axes, "attention")[1][-1] == pytest.approx(mean)
    squares = sum((1 - 0.2 * distance) ** 2 for distance in pairs) / len(pairs)
    assert line(axes, "feed-forward")[1][-1] == pytest.approx(squares)
    assert line(axes_of(drifts_plot([("a", told)])), "a")[1][-1] == pytest.approx((mean + squares) / 2)


def test_evaluations_have_a_panel_for_each_value(history: Callable[..., History]) -> None:
    plots = evaluation_plots(history())
    assert [plot.title for plot in plots] == [
        "loss: perplexity",
        "loss: bits per byte",
        "cloze: accuracy",
        "cloze: words",
    ]
    x, y = line(axes_of(plots[2].views[0][1]()), "stories")
    assert list(zip(x, y, strict=True)) == [(step * 16_384, step / 2000) for step in range(60, 601, 60)]


def test_an_encoders_accuracy_is_of_its_validations(history: Callable[..., History]) -> None:
    assert accuracy_plot(history()) is None
    told = history(lambda event: event.update(masked_accuracy=0.25) if event["event"] == "validation" else None)
    assert set(line(axes_of(accuracy_plot(told)), "found")[1]) == {0.25}


def test_shares_and_losses_of_sources_are_drawn_by_name(history: Callable[..., History]) -> None:
    axes = axes_of(mixture_plot(history()))
    assert [line(axes, name)[1][index] for name in ("web", "code") for index in (0, -1)] == [0.7, 0.5, 0.3, 0.5]
    assert source_losses_plot(history()) is None
    losses = {"web": 2.0, "code": None}
    told = history(lambda event: event.update(source_losses=losses) if event["event"] == "validation" else None)
    axes = axes_of(source_losses_plot(told))
    assert set(line(axes, "web")[1]) == {2.0}
    assert [shown.get_label() for shown in axes.get_lines() if not str(shown.get_label()).startswith("_")] == ["web"]


@pytest.fixture
def offloaded(tmp_path: Path, example: SimpleNamespace) -> History:
    return History.read(example.write(tmp_path / "run", example.offloaded()))


def test_state_has_a_bar_for_each_tier_of_each_stage(offloaded: History) -> None:
    axes = axes_of(state_plot(offloaded))
    assert [label.get_text() for label in axes.get_yticklabels()] == ["pseudo, device", "real, device", "real, disk"]
    ends: dict[str, list[float]] = {}
    for bars in axes.containers:
        ends[str(bars.get_label())] = [(bar.get_x(), bar.get_width()) for bar in bars]  # type: ignore[attr-defined]
    mib = 2**20
    assert ends["weights"] == [(0, 60 * mib), (0, 60 * mib), (0, 0)]
    assert ends["gradients"] == [(60 * mib, 60 * mib), (60 * mib, 60 * mib), (0, 0)]
    assert ends["moments"] == [(120 * mib, 120 * mib), (120 * mib, 0), (0, 120 * mib)]
    assert ends["activations"] == [(240 * mib, 100 * mib), (120 * mib, 100 * mib), (120 * mib, 0)]
    assert ends["working memory"] == [(340 * mib, 0), (220 * mib, 12 * mib), (120 * mib, 0)]


def test_a_stage_is_drawn_as_it_was_placed_last(tmp_path: Path, example: SimpleNamespace) -> None:
    events = example.offloaded()
    placement = next(event for event in events if event["event"] == "placement" and event["stage"] == "real")
    events.insert(-1, {**placement, "step": 300, "kind_bytes": {"device": {"weights": 7}, "host": {}, "disk": {}}})
    axes = axes_of(state_plot(History.read(example.write(tmp_path / "run", events))))
    assert [label.get_text() for label in axes.get_yticklabels()] == ["pseudo, device", "real, device"]


def test_waiting_and_traffic_are_those_of_the_steps(offloaded: History) -> None:
    axes = axes_of(waiting_plot(offloaded))
    assert [str(shown.get_label()) for shown in axes.get_lines() if shown.get_label() == "gradients"] == []
    x, y = line(axes, "moments")
    waited = {tokens: value for tokens, value in zip(x, y, strict=True) if not math.isnan(value)}
    real = [event["tokens"] for event in offloaded.steps if event["stage"] == "real"]
    assert waited == dict.fromkeys(real, 0.25)
    moved = axes_of(bytes_moved_plot(offloaded))
    assert {line(moved, name)[1][-1] for name in ("read from disk", "written to disk")} == {120 * 2**20}


def test_a_run_that_keeps_its_state_on_the_device_has_no_such_plots(history: Callable[..., History]) -> None:
    told = history()
    assert state_plot(told) is waiting_plot(told) is bytes_moved_plot(told) is None
