"""The plots of a report that are maps of colours: expert load, similarity between layers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tenfold.reporting.axes import name_axis, new_figure, whole_ticks
from tenfold.reporting.format import format_count
from tenfold.reporting.history import Event, History
from tenfold.reporting.metrics import load_imbalance
from tenfold.reporting.svg import pick_evenly

_MOST_LAYERS = 12  # of which the experts are drawn
_KINDS = {"attention": "attention", "ffn": "feed-forward"}


def busiest_expert(history: History) -> Figure | None:
    """For each layer and logged step, the busiest expert's load over the mean load."""
    loaded = _loaded(history, 240)
    if not loaded:
        return None
    columns = [load_imbalance(event) for event in loaded]
    layers = max(len(column) for column in columns)
    grid = [[_nan(column[layer]) if layer < len(column) else math.nan for column in columns] for layer in range(layers)]
    figure, axes = new_figure((5.2, min(2.2 + 0.12 * layers, 5)))
    highest = max([2.0, *(value for row in grid for value in row if not math.isnan(value))])
    image = _heat(axes, grid, _extent(loaded, layers), 1, highest)
    figure.colorbar(image, ax=axes, pad=0.02, label="busiest expert / mean")
    whole_ticks(axes.yaxis)
    name_axis(axes, "tokens")
    _delinkings(axes, history)
    axes.set_ylabel("layer")
    return figure


def each_expert(history: History) -> Figure | None:
    """For each layer a map of expert against time: each expert's load over the mean load of its layer."""
    loaded = _loaded(history, 120)
    if not loaded:
        return None
    layers = max(len(event["expert_load"]) for event in loaded)
    experts = max((len(loads or []) for event in loaded for loads in event["expert_load"]), default=0)
    if not experts:
        return None
    shown = pick_evenly(layers, _MOST_LAYERS)
    grids = [_over_mean(loaded, layer, experts) for layer in shown]
    known = np.concatenate([grid[~np.isnan(grid)] for grid in grids])
    highest = max(2.0, float(np.quantile(known, 0.995)) if known.size else 2.0)  # one moment must not pale the rest
    across = min(2, len(shown))
    down = -(-len(shown) // across)
    figure = Figure(figsize=(5.2, 0.7 + 1.25 * down), layout="constrained")
    all_axes = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    for number, axes in enumerate(all_axes.flat):
        if number >= len(shown):
            axes.set_visible(False)
            continue
        image = _heat(axes, grids[number], _extent(loaded, experts), 0, highest)
        axes.set_title(f"layer {shown[number]}", fontsize=9, pad=2)
        whole_ticks(axes.yaxis, 5)
        name_axis(axes, "tokens")
        axes.xaxis.get_major_locator().set_params(nbins=4)
        axes.set_xlabel("tokens" if number + across >= len(shown) else "")
        axes.tick_params(labelbottom=number + across >= len(shown))
        axes.set_ylabel("expert" if number % across == 0 else "")
        _delinkings(axes, history)
    figure.colorbar(image, ax=all_axes, pad=0.02, label="load / mean", aspect=30)
    return figure


def similarity_maps(history: History) -> Figure | None:
    """Cosine similarity between layers at a few moments: before and after a delinking, on the way, at the end."""
    moments = _moments(history)
    if not moments:
        return None
    kinds = [kind for kind in _KINDS if all(kind in event for _, event in moments)]
    known = [
        value for _, event in moments for kind in kinds for line in event[kind] for value in line if value is not None
    ]
    lowest = min([0.999, *known])  # the scale begins here: what has drifted by a little is to be seen too
    across = max(len(moments), 2)
    figure = Figure(figsize=(5.2, 0.7 + 5.0 / across * len(kinds) * 0.92), layout="constrained")
    all_axes = figure.subplots(len(kinds), len(moments), sharex=True, sharey=True, squeeze=False)
    for row, kind in enumerate(kinds):
        for column, (title, event) in enumerate(moments):
            axes, layers = all_axes[row][column], event["layers"]
            grid = [[_nan(value) for value in line] for line in event[kind]]
            image = _heat(axes, grid, (-0.5, len(layers) - 0.5, len(layers) - 0.5, -0.5), lowest, 1)
            axes.set_aspect("equal")
            ticks = range(0, len(layers), max(-(-(len(layers) - 1) // (3 if across > 2 else 8)), 1))
            axes.set_xticks(ticks, [str(layers[index]) for index in ticks])
            axes.set_yticks(ticks, [str(layers[index]) for index in ticks])
            if row == 0:
                axes.set_title(title, fontsize=9, pad=3)
            if column == 0:
                axes.set_ylabel(f"{_KINDS[kind]}\nlayer")
            if row == len(kinds) - 1:
                axes.set_xlabel("layer")
    figure.colorbar(image, ax=all_axes, pad=0.02, label="cosine", aspect=30)
    return figure


def _moments(history: History) -> list[tuple[str, Event]]:
    """Up to four `similarity` events with titles: about the first delinking, and the last, with one between."""
    events = [event for event in history.similarities if event.get("layers")]
    if not events:
        return []
    chosen: list[tuple[str, Event]] = []
    if history.delinks:
        step, stages = (
            history.delinks[0].get("step"),
            [history.delinks[0].get(f"stage_{end}") for end in ("from", "to")],
        )
        for stage, word in zip(stages, ("shared", "just delinked"), strict=True):
            chosen += [(word, event) for event in events if event["step"] == step and event.get("stage") == stage][:1]
    rest = [event for event in events if not chosen or event["step"] > chosen[-1][1]["step"]]
    if len(rest) > 1:
        chosen.append(("", rest[(len(rest) - 1) // 2]))
    if rest:
        chosen.append(("end" if history.end else "latest", rest[-1]))
    return [(f"{_step(event)}\n{word}".rstrip(), event) for word, event in chosen]


def _step(event: Event) -> str:
    return f"step {event['step'] if event['step'] < 10**6 else format_count(event['step'])}"


def _loaded(history: History, most: int) -> list[Event]:
    loaded = [event for event in history.steps if event.get("expert_load") and event.get("tokens") is not None]
    return [loaded[index] for index in pick_evenly(len(loaded), most)]


def _over_mean(loaded: list[Event], layer: int, experts: int) -> Any:
    """[experts, events] of the load of each expert over the mean of its layer."""
    grid = np.full((experts, len(loaded)), np.nan)
    for column, event in enumerate(loaded):
        loads = event["expert_load"][layer] if layer < len(event["expert_load"]) else None
        values = np.array([_nan(load) for load in loads or []])
        known = values[~np.isnan(values)]
        if known.size and known.mean() > 0:
            grid[: len(values), column] = values / known.mean()
    return grid


def _extent(loaded: list[Event], rows: int) -> tuple[float, float, float, float]:
    return loaded[0]["tokens"], max(loaded[-1]["tokens"], loaded[0]["tokens"] + 1), rows - 0.5, -0.5


def _nan(value: float | None) -> float:
    return math.nan if value is None else value


def _heat(axes: Axes, grid: Any, extent: tuple[float, float, float, float], lowest: float, highest: float) -> Any:
    axes.grid(visible=False)
    look: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest", "cmap": "viridis"}
    return axes.imshow(grid, extent=extent, vmin=lowest, vmax=highest, **look)


def _delinkings(axes: Axes, history: History) -> None:
    for _, _, last in history.spans("tokens")[:-1]:
        axes.axvline(last, color="white", linestyle=(0, (3, 2)), linewidth=1.2)
