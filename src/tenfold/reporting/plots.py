"""The plots of a report, each a function from a run's history to an inline SVG ("" where there is nothing to plot)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tenfold.reporting.format import format_bytes, format_count, format_seconds
from tenfold.reporting.history import History
from tenfold.reporting.metrics import load_imbalance
from tenfold.reporting.svg import COLOURS, RC, pick_evenly, smooth, thin, to_svg

WIDE = (5.2, 3.1)  # inches; a figure is scaled to its place, and text stays readable on a phone at this size


def loss_plot(history: History, axis: str) -> str:
    """Training and validation loss against tokens or seconds, with stages, delinkings and n-gram baselines."""
    figure, axes = _figure()
    x, y = history.series("loss", axis)
    if len(x) > 60:
        axes.plot(*thin(x, y), color=COLOURS["training"], alpha=0.3, linewidth=0.8)
        axes.plot(*thin(x, smooth(y, len(y) // 60)), color=COLOURS["training"], label="training, smoothed")
    else:
        axes.plot(x, y, color=COLOURS["training"], label="training")
    x, y = history.series("validation_loss", axis, validation=True)
    if x:
        axes.plot(*thin(x, y), color=COLOURS["validation"], marker="o", markersize=3.5, label="validation")
    for name in ("unigram", "bigram"):
        level = (history.end or {}).get(f"{name}_loss")
        if level is not None:
            axes.axhline(level, color=COLOURS["baseline"], linestyle=(0, (5, 3)), linewidth=1)
            where: dict[str, Any] = {"ha": "center", "va": "bottom", "fontsize": 8, "color": COLOURS["baseline"]}
            axes.text(0.5, level, name, transform=axes.get_yaxis_transform(), **where)
    axes.set_ylabel("loss, nats per token")
    _mark_stages(axes, history, axis)
    axes.legend(loc="upper right", bbox_to_anchor=(1, 0.97))
    return to_svg(figure, f"loss-{axis}", f"Loss against {axis}")


def line_plot(history: History, keys: dict[str, str], label: str, show: Callable[[float], str] | None = None) -> str:
    """One or two quantities of the steps against tokens; `keys` maps each to its name in the legend."""
    lines = [(history.series(key, "tokens"), name) for key, name in keys.items()]
    lines = [((x, y), name) for (x, y), name in lines if any(not math.isnan(value) for value in y)]
    if not lines:
        return ""
    figure, axes = _figure()
    for ((x, y), name), colour in zip(lines, ("training", "second"), strict=False):
        axes.plot(*thin(x, y), color=COLOURS[colour], linewidth=1.1, label=name)
    axes.set_ylabel(label)
    highest = max(value for (_, y), _ in lines for value in y if not math.isnan(value))
    axes.set_ylim(0, highest * 1.15 if highest > 0 else 1)
    if show is format_bytes and highest > 0:  # ticks at round multiples of 1024
        axes.set_yticks([tick * 2 ** math.ceil(math.log2(highest / 6)) for tick in range(7)])
        axes.set_ylim(0, highest * 1.15)
    if show is not None:
        axes.yaxis.set_major_formatter(lambda value, _: show(value))
    _mark_stages(axes, history, "tokens")
    if len(lines) > 1:
        axes.legend(loc="best")
    return to_svg(figure, next(iter(keys)).replace("_", "-"), label)


def stored_plot(history: History) -> str:
    """Stored parameters of each stage, in front of the parameters that the full model counts."""
    rows = [row for row in history.stage_rows() if row.get("stored_parameters")]
    if not rows:
        return ""
    figure, axes = _figure((5.2, max(2.6, 0.4 + 0.5 * len(rows))))
    names = [row["name"] for row in rows]
    stored = [row["stored_parameters"] for row in rows]
    totals = [row.get("total_parameters") or count for row, count in zip(rows, stored, strict=True)]
    axes.barh(names, totals, color=COLOURS["ghost"], height=0.5)
    axes.barh(names, stored, color=[_stage_colour(history, name) for name in names], height=0.5)
    for row, (count, total) in enumerate(zip(stored, totals, strict=True)):
        text = format_count(count) if count == total else f"{format_count(count)} of {format_count(total)}"
        axes.annotate(text, (total, row), xytext=(5, 0), textcoords="offset points", va="center")
    axes.set_xlim(0, max(totals) * 1.35)
    margin = 0.5 + max(0, 2 - len(rows)) / 2
    axes.set_ylim(len(rows) - 1 + margin, -margin)
    axes.grid(visible=False)
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="y", length=0, labelcolor=COLOURS["ink"])
    return to_svg(figure, "stored", "Stored parameters of each stage")


def load_over_time_plot(history: History) -> str:
    """For each layer and logged step, the busiest expert's load over the mean load."""
    loaded = [event for event in history.steps if event.get("expert_load") and event.get("tokens") is not None]
    if not loaded:
        return ""
    loaded = [loaded[index] for index in pick_evenly(len(loaded), 240)]
    columns = [load_imbalance(event) for event in loaded]
    layers = max(len(column) for column in columns)
    grid = [[_nan(column[layer]) if layer < len(column) else math.nan for column in columns] for layer in range(layers)]
    extent = (loaded[0]["tokens"], max(loaded[-1]["tokens"], loaded[0]["tokens"] + 1), layers - 0.5, -0.5)
    figure, axes = _figure((5.2, min(2.2 + 0.12 * layers, 5)))
    _heat(figure, axes, grid, extent, "busiest expert / mean", lowest=1)
    _tokens_axis(axes)
    for _, _, last in history.spans("tokens")[:-1]:
        axes.axvline(last, color="white", linestyle=(0, (3, 2)), linewidth=1.2)
    axes.set_ylabel("layer")
    return to_svg(figure, "load-time", "Expert load over time")


def load_last_plot(history: History) -> str:
    """The last logged step's load of each expert in each layer, over the mean load of its layer."""
    loaded = [event for event in history.steps if event.get("expert_load")]
    if not loaded:
        return ""
    rows = [[_nan(load) for load in loads or []] for loads in loaded[-1]["expert_load"]]
    experts = max(len(row) for row in rows)
    if not experts:
        return ""
    grid = [_over_mean(row) + [math.nan] * (experts - len(row)) for row in rows]
    figure, axes = _figure((5.2, min(2.2 + 0.12 * len(rows), 5)))
    _heat(figure, axes, grid, (-0.5, experts - 0.5, len(rows) - 0.5, -0.5), "load / mean", lowest=0)
    _whole_ticks(axes.xaxis)
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    return to_svg(figure, "load-last", f"Expert load at step {loaded[-1]['step']}")


def _nan(value: float | None) -> float:
    return math.nan if value is None else value


def _over_mean(row: list[float]) -> list[float]:
    known = [load for load in row if not math.isnan(load)]
    mean = sum(known) / len(known) if known else 0
    return [load / mean if mean else math.nan for load in row]


def _heat(
    figure: Figure, axes: Axes, grid: Any, extent: tuple[float, float, float, float], label: str, lowest: float
) -> None:
    known = [value for row in grid for value in row if not math.isnan(value)]
    image = axes.imshow(
        grid,
        aspect="auto",
        interpolation="nearest",
        extent=extent,
        cmap="viridis",
        vmin=lowest,
        vmax=max([2.0, *known]),
    )
    figure.colorbar(image, ax=axes, pad=0.02, label=label)
    axes.grid(visible=False)
    _whole_ticks(axes.yaxis)


def _figure(inches: tuple[float, float] = WIDE) -> tuple[Figure, Axes]:
    figure = Figure(figsize=inches, layout="constrained")
    return figure, figure.add_subplot()


def _mark_stages(axes: Axes, history: History, axis: str) -> None:
    """A band of its own colour for each stage, and a line at each delinking."""
    spans = history.spans(axis)
    delinked = {event.get("stage_from") for event in history.delinks}
    for name, first, last in spans:
        axes.axvspan(first, last, color=_stage_colour(history, name), alpha=0.1, linewidth=0, zorder=0)
        if len(history.stage_names) > 1:
            transform = axes.get_xaxis_transform()
            middle = (first + last) / 2
            axes.text(middle, 1.01, name, transform=transform, ha="center", va="bottom", fontsize=8)
        if name in delinked:
            axes.axvline(last, color=COLOURS["ink"], linestyle=(0, (2, 2)), linewidth=1)
    if spans and spans[-1][2] > 0:
        axes.set_xlim(0, spans[-1][2])
    if axis == "seconds":
        axes.xaxis.set_major_formatter(lambda value, _: _show_time(value))
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 1.2, 1.8, 2.4, 3, 3.6, 6, 7.2, 10]))
        axes.set_xlabel("time")
    else:
        _tokens_axis(axes)


def _whole_ticks(axis: Axis) -> None:
    axis.set_major_locator(MaxNLocator(12, integer=True))


def _tokens_axis(axes: Axes) -> None:
    axes.xaxis.set_major_formatter(lambda value, _: format_count(value))
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.set_xlabel("tokens")


def _show_time(seconds: float) -> str:
    return re.sub(r" 00[hms]$", "", format_seconds(seconds)) if seconds else "0"


def _show_rate(rate: float) -> str:
    """3e-4, 2.5e-4: of one form at every tick."""
    return f"{rate:.1e}".replace(".0e", "e").replace("e-0", "e-") if rate else "0"


def _stage_colour(history: History, name: str) -> str:
    return COLOURS[f"stage{history.stage_names.index(name) % 6}"]


def all_plots(history: History) -> Sequence[tuple[str, str, str]]:
    """The plots that this run has something for, as (title, explanation, SVG)."""
    with rc_context(RC):
        plots = [
            (
                "Loss against tokens",
                "Cross-entropy. Shaded: the stages; dashed upright: a delinking; dashed level: n-gram models.",
                loss_plot(history, "tokens"),
            ),
            (
                "Loss against time",
                "The same by seconds of training; a stage that is faster takes less room.",
                loss_plot(history, "seconds"),
            ),
            (
                "Stored parameters",
                "Each shared block counts once; pale: the parameters of the whole model.",
                stored_plot(history),
            ),
            (
                "Throughput",
                "Tokens a second at each logged step.",
                line_plot(history, {"tokens_per_second": "tokens/s"}, "tokens/s", format_count),
            ),
            (
                "Memory",
                "In use at each logged step: this process on a CPU, tensors at their most on an accelerator.",
                line_plot(history, {"memory_bytes": "memory"}, "memory", format_bytes),
            ),
            (
                "Gradient norm",
                "Global norm before clipping.",
                line_plot(history, {"grad_norm": "gradient norm"}, "gradient norm"),
            ),
            (
                "Learning rate",
                "As the optimizer used it.",
                line_plot(history, {"lr": "learning rate"}, "learning rate", _show_rate),
            ),
            (
                "Router losses",
                "What keeps the router even and its scores small.",
                line_plot(history, {"balance_loss": "load balance", "z_loss": "router z"}, "auxiliary loss"),
            ),
            (
                "Dropped tokens",
                "Share of routed tokens that found their expert full.",
                line_plot(history, {"dropped_share": "dropped"}, "share dropped", lambda value: f"{value:.1%}"),
            ),
            (
                "Expert load over time",
                "Load of each layer's busiest expert over the mean; 1 is even.",
                load_over_time_plot(history),
            ),
            (
                "Expert load at the last step",
                "Each expert's tokens over its layer's mean; 1 is even.",
                load_last_plot(history),
            ),
        ]
    return [(title, text, svg) for title, text, svg in plots if svg]
