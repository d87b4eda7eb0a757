"""What the plots of a report have in common: figures, stage bands, axes with readable ticks."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tenfold.reporting.format import format_bytes, format_count, format_joules, format_seconds
from tenfold.reporting.history import History
from tenfold.reporting.svg import COLOURS, thin

WIDE = (5.2, 3.1)  # inches; a figure is scaled to its place, and text stays readable on a phone at this size
AXES = {"tokens": "tokens", "seconds": "time", "joules": "energy"}  # what things are plotted against, and its name
LINE_COLOURS = ("training", "validation", "stage0", "second", "stage2", "stage4", "stage5", "baseline")


@dataclass(frozen=True)
class Plot:
    """A panel: one figure, or several views of the same thing to choose from. A view draws None where there is nothing.

    `name` goes into file names and ids.
    """

    name: str
    title: str
    text: str
    views: Sequence[tuple[str, Callable[[], Figure | None]]]

    @classmethod
    def single(cls, name: str, title: str, text: str, draw: Callable[[], Figure | None]) -> Plot:
        """A panel of one figure."""
        return cls(name, title, text, [("", draw)])


def new_figure(inches: tuple[float, float] = WIDE) -> tuple[Figure, Axes]:
    """An empty figure with one pair of axes."""
    figure = Figure(figsize=inches, layout="constrained")
    return figure, figure.add_subplot()


def lines_plot(
    history: History,
    lines: Sequence[tuple[tuple[list[float], list[float]], str]],
    label: str,
    show: Callable[[float], str] | None,
) -> Figure | None:
    """Lines of (x, y) by name against tokens, from 0 up; None where there are none."""
    lines = [((x, y), name) for (x, y), name in lines if any(not math.isnan(value) for value in y)]
    if not lines:
        return None
    figure, axes = new_figure()
    for number, ((x, y), name) in enumerate(lines):
        marker = "o" if len(x) == 1 else ""
        axes.plot(*thin(x, y), color=line_colour(number), linewidth=1.1, label=name, marker=marker, markersize=3.5)
    axes.set_ylabel(label)
    scale_up(axes, [value for (_, y), _ in lines for value in y], show)
    mark_stages(axes, history, "tokens")
    if len(lines) > 1:
        axes.legend(loc="best")
    return figure


def mark_stages(axes: Axes, history: History, axis: str) -> None:
    """A band of its own colour for each stage, and a line at each delinking; one within a stage is dotted."""
    spans = history.spans(axis)
    delinked = {event.get("stage_from") for event in history.delinks}
    whole = spans[-1][2] if spans else 0
    for number, (name, first, last) in enumerate(spans):
        axes.axvspan(first, last, color=stage_colour(history, name), alpha=0.1, linewidth=0, zorder=0)
        if len(history.stage_names) > 1 and whole > 0:
            # A name wider than its band would run into its neighbour's: it is cut, and may then stand on two heights.
            room = max(int((last - first) / whole * 52), 3)
            text = name if len(name) <= room else name[: room - 1] + "…"
            height = 1.01 if len(spans) < 5 or number % 2 == 0 else 1.06
            where: dict[str, Any] = {"ha": "center", "va": "bottom", "fontsize": 9}
            axes.text((first + last) / 2, height, text, transform=axes.get_xaxis_transform(), **where)
        if name in delinked:
            axes.axvline(last, color=COLOURS["ink"], linestyle=(0, (2, 2)), linewidth=1)
    for split in history.splits:
        if split.get(axis) is not None:
            axes.axvline(split[axis], color=COLOURS["ink"], linestyle=(0, (1, 2)), linewidth=1)
    if whole > 0:
        axes.set_xlim(0, whole)
    name_axis(axes, axis)


def name_axis(axes: Axes, axis: str) -> None:
    """Ticks and name of the horizontal axis: tokens, seconds or joules."""
    shows: dict[str, Callable[[float], str]] = {"tokens": format_count, "seconds": _show_time, "joules": format_joules}
    show = shows[axis]
    axes.xaxis.set_major_formatter(lambda value, _: show(value))
    steps = [1, 1.2, 1.8, 2.4, 3, 3.6, 6, 7.2, 10] if axis == "seconds" else None
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=steps) if steps else MaxNLocator(6))
    axes.set_xlabel(AXES[axis])


def scale_up(axes: Axes, values: Sequence[float], show: Callable[[float], str] | None) -> None:
    """A vertical axis from 0 to above the highest value, with ticks as `show` writes them."""
    highest = max((value for value in values if not math.isnan(value)), default=0)
    axes.set_ylim(0, highest * 1.15 if highest > 0 else 1)
    if show is format_bytes and highest > 0:  # ticks at round multiples of 1024
        axes.set_yticks([tick * 2 ** math.ceil(math.log2(highest / 6)) for tick in range(7)])
        axes.set_ylim(0, highest * 1.15)
    if show is not None:
        axes.yaxis.set_major_formatter(lambda value, _: show(value))


def whole_ticks(axis: Axis, most: int = 12) -> None:
    """Ticks at whole numbers."""
    axis.set_major_locator(MaxNLocator(most, integer=True))


def show_rate(rate: float) -> str:
    """3e-4, 2.5e-4: of one form at every tick."""
    return f"{rate:.1e}".replace(".0e", "e").replace("e-0", "e-") if rate else "0"


def stage_colour(history: History, name: str) -> str:
    """The colour of a stage, the same in every plot."""
    return COLOURS[f"stage{history.stage_names.index(name) % 6}"]


def line_colour(number: int) -> str:
    """The colour of the line of that number: of a quantity, or in a comparison of a run."""
    return COLOURS[LINE_COLOURS[number % len(LINE_COLOURS)]]


def _show_time(seconds: float) -> str:
    return re.sub(r" 00[hms]$", "", format_seconds(seconds)) if seconds else "0"
