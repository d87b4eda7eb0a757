"""The plots of several runs, laid over one another."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.figure import Figure

from tenfold.reporting.axes import AXES, Plot, line_colour, name_axis, new_figure, scale_up, show_rate
from tenfold.reporting.format import format_bytes, format_count, format_joules, format_share
from tenfold.reporting.history import History
from tenfold.reporting.svg import smooth, thin

Runs = Sequence[tuple[str, History]]  # each with the name it goes by in legends


def losses_plot(runs: Runs, axis: str) -> Figure | None:
    """Smoothed training loss and validation loss (dots) of each run; a dotted upright where it was delinked."""
    told = [
        (number, name, history)
        for number, (name, history) in enumerate(runs)
        if history.series("loss", axis)[0] or history.series("validation_loss", axis, validation=True)[0]
    ]
    if not told:
        return None
    figure, axes = new_figure()
    most = max(2400 // len(told), 100)
    for number, name, history in told:
        look: dict[str, Any] = {"color": line_colour(number), "linestyle": _style(number)}
        x, y = history.series("loss", axis)
        axes.plot(*thin(x, smooth(y, len(y) // 60) if len(y) > 60 else y, most), label=name, **look)
        x, y = history.series("validation_loss", axis, validation=True)
        x, y = thin(x, y, 100)
        axes.plot(x, y, marker="o", markersize=3.5, linestyle="", color=line_colour(number))
        for _, _, last in history.spans(axis)[:-1]:
            axes.axvline(last, color=line_colour(number), linestyle=(0, (1, 2)), linewidth=1)
    axes.set_ylabel("loss, nats per token")
    axes.set_xlim(left=0)
    name_axis(axes, axis)
    axes.legend(loc="upper right")
    return figure


def overlay_plot(runs: Runs, key: str, label: str, show: Callable[[float], str] | None = None) -> Figure | None:
    """One quantity of the steps of each run against tokens."""
    lines = [(number, name, history.series(key, "tokens")) for number, (name, history) in enumerate(runs)]
    return _lines(lines, label, show)


def drifts_plot(runs: Runs) -> Figure | None:
    """Mean similarity of the layers that once shared, attention and feed-forward together, of each run."""
    lines = []
    for number, (name, history) in enumerate(runs):
        kinds = [history.similarity(kind) for kind in ("attention", "ffn")]
        points = [
            (event["tokens"], sum(first + second) / len(first + second))
            for (event, first), (_, second) in zip(*kinds, strict=False)
            if "tokens" in event
        ]
        if len(points) > 1:
            lines.append((number, name, ([x for x, _ in points], [y for _, y in points])))
    figure = _lines(lines, "cosine between layers", None)
    if figure is not None:
        least = min(value for _, _, (_, y) in lines for value in y)
        figure.axes[0].set_ylim(least - 0.06 * (1 - least) - 1e-3, 1 + 0.06 * (1 - least) + 1e-3)
    return figure


def evaluation_overlays(runs: Runs) -> list[Plot]:
    """For each value of each task and name that two runs have, a plot with a line for each run."""
    found: dict[tuple[str, str, str], dict[int, list[tuple[float, float]]]] = {}
    for number, (_, history) in enumerate(runs):
        for event in history.evaluations:
            for key, value in (event.get("values") or {}).items():
                if isinstance(value, int | float) and event.get("tokens") is not None:
                    lines = found.setdefault((str(event.get("task", "")), str(event.get("name", "")), key), {})
                    lines.setdefault(number, []).append((event["tokens"], float(value)))
    plots = []
    common = [(what, lines) for what, lines in found.items() if len(lines) > 1]
    for index, ((task, name, key), lines) in enumerate(common[:12]):
        series = [(number, runs[number][0], _unzip(points)) for number, points in lines.items()]
        label = key.replace("_", " ")
        draw = functools.partial(_lines, series, label, format_share if key == "accuracy" else None)
        plots.append(Plot.single(f"evaluation-{index}", f"{task}: {label}", f"Evaluated on {name}.", draw))
    return plots


def _unzip(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _lines(
    lines: Sequence[tuple[int, str, tuple[list[float], list[float]]]],
    label: str,
    show: Callable[[float], str] | None,
) -> Figure | None:
    lines = [line for line in lines if any(not math.isnan(value) for value in line[2][1])]
    if not lines:
        return None
    figure, axes = new_figure()
    for number, name, (x, y) in lines:
        marker = "o" if len(x) <= 12 else ""
        look: dict[str, Any] = {"color": line_colour(number), "linestyle": _style(number), "linewidth": 1.1}
        axes.plot(*thin(x, y, max(2400 // len(lines), 100)), label=name, marker=marker, markersize=3, **look)
    axes.set_ylabel(label)
    scale_up(axes, [value for _, _, (_, y) in lines for value in y], show)
    axes.set_xlim(left=0)
    name_axis(axes, "tokens")
    axes.legend(loc="best")
    return figure


def _style(number: int) -> Any:
    """Solid, and dashed for those runs whose colour another has already."""
    from tenfold.reporting.axes import LINE_COLOURS

    return "-" if number < len(LINE_COLOURS) else (0, (4, 2))


def comparison_plots(runs: Runs) -> list[tuple[str, list[Plot]]]:
    """The panels of a comparison by section: (heading, panels)."""

    def overlay(name: str, title: str, text: str, key: str, label: str, show: Any = None) -> Plot:
        return Plot.single(name, title, text, functools.partial(overlay_plot, runs, key, label, show))

    course = [
        Plot(
            "loss",
            "Loss",
            "Lines: training, smoothed; dots: validation; dotted upright: a delinking, in the colour of its run.",
            [(AXES[axis], functools.partial(losses_plot, runs, axis)) for axis in AXES],
        ),
        overlay("throughput", "Throughput", "Tokens a second.", "tokens_per_second", "tokens/s", format_count),
        overlay("memory", "Memory", "In use at each logged step.", "memory_bytes", "memory", format_bytes),
        overlay("gradient-norm", "Gradient norm", "Global norm before clipping.", "grad_norm", "gradient norm"),
        overlay("learning-rate", "Learning rate", "As the optimizer used it.", "lr", "learning rate", show_rate),
        overlay("energy", "Energy", "Joules so far.", "joules", "energy", format_joules),
        overlay("balance", "Balance loss", "What keeps the router even.", "balance_loss", "balance loss"),
        overlay(
            "dropped", "Dropped tokens", "Share that found no room.", "dropped_share", "share dropped", format_share
        ),
        Plot.single(
            "drift",
            "How freed layers drift apart",
            "Mean cosine between the weights of layers that once shared.",
            functools.partial(drifts_plot, runs),
        ),
    ]
    return [("Course of training", course), ("Evaluations", evaluation_overlays(runs))]
