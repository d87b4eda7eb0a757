"""What a rule saw that ends a stage (`until = "auto"`), as plots."""

from __future__ import annotations

import math
from typing import Any

from matplotlib.figure import Figure

from tenfold.reporting.axes import line_colour, mark_stages, new_figure, scale_up
from tenfold.reporting.history import History
from tenfold.reporting.svg import COLOURS

_MOST_PAIRS = 7  # lines; more are drawn as their mean and range


def correlation_plot(history: History) -> Figure | None:
    """Correlations of neighbouring layers' gradients against tokens, with the threshold that ends the stage."""
    told = [event for event in history.checks if event.get("correlations") and event.get("tokens") is not None]
    if not told:
        return None
    figure, axes = new_figure()
    lines: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in told:
        for (one, other), value in zip(event["pairs"], event["correlations"], strict=True):
            if value is not None:
                lines.setdefault((one, other), []).append((event["tokens"], value))
    marker = "o" if len(told) <= 60 else ""
    style: dict[str, Any] = {"marker": marker, "markersize": 3, "linewidth": 1.1}
    if len(lines) <= _MOST_PAIRS:
        for number, ((one, other), points) in enumerate(lines.items()):
            x, y = [x for x, _ in points], [y for _, y in points]
            axes.plot(x, y, color=line_colour(number), label=f"layers {one} and {other}", **style)
    else:
        x = [event["tokens"] for event in told]
        known = [[value for value in event["correlations"] if value is not None] or [math.nan] for event in told]
        means = [sum(values) / len(values) for values in known]
        axes.plot(x, means, color=COLOURS["training"], label=f"mean of {len(lines)} pairs", **style)
        lowest, highest = [min(values) for values in known], [max(values) for values in known]
        axes.fill_between(x, lowest, highest, color=COLOURS["training"], alpha=0.15, linewidth=0)
    thresholds = {event["threshold"] for event in told if event.get("threshold") is not None}
    for number, threshold in enumerate(sorted(thresholds)):
        label = "threshold" if number == 0 else None
        axes.axhline(threshold, color=COLOURS["baseline"], linestyle=(0, (5, 3)), linewidth=1, label=label)
    axes.set_ylabel("correlation of gradients")
    mark_stages(axes, history, "tokens")
    axes.legend(loc="best")
    return figure


def returns_plot(history: History) -> Figure | None:
    """How fast the loss falls, a second, and how fast it is predicted to fall once delinked."""
    told = [event for event in history.checks if event.get("rule") == "returns" and event.get("tokens") is not None]
    keys = {"loss_per_second": "measured", "next_loss_per_second": "predicted when delinked"}
    series = [[math.nan if event.get(key) is None else event[key] for event in told] for key in keys]
    if not any(not math.isnan(value) for values in series for value in values):
        return None
    figure, axes = new_figure()
    x = [event["tokens"] for event in told]
    for number, (name, y) in enumerate(zip(keys.values(), series, strict=True)):
        axes.plot(x, y, color=line_colour(number), label=name, marker="o", markersize=3, linewidth=1.1)
    axes.set_ylabel("fall of the loss a second")
    scale_up(axes, [value for values in series for value in values], lambda value: f"{value:.2g}")
    mark_stages(axes, history, "tokens")
    axes.legend(loc="best")
    return figure
