"""Where a run's state lies and what that costs, as plots; nothing for a run that keeps it all on the device."""

from __future__ import annotations

import math
from typing import Any, get_args

from matplotlib.figure import Figure

from tenfold.config.offload import Where
from tenfold.reporting.axes import lines_plot, new_figure
from tenfold.reporting.format import format_bytes, format_seconds
from tenfold.reporting.history import Event, History
from tenfold.reporting.svg import COLOURS

_KINDS = {
    "weights": "training",
    "gradients": "validation",
    "moments": "stage0",
    "activations": "second",
    "working": "ghost",
}
"""What is in a bar, in its order, and its colour."""


def state_plot(history: History) -> Figure | None:
    """A bar for each tier of each stage, as it was placed last: bytes by kind of state."""
    placed = {str(event.get("stage", "")): event for event in history.placements if event.get("kind_bytes")}
    bars: list[tuple[str, dict[str, int]]] = []
    for stage, event in placed.items():
        for tier in get_args(Where):
            kinds: dict[str, int] = dict(event["kind_bytes"].get(tier) or {})
            if tier == "device":
                kinds["activations"] = kinds.get("activations", 0) + event.get("other_bytes", 0)
                kinds["working"] = event.get("working_bytes", 0)
            if sum(kinds.values()):
                name = stage if len(stage) <= 16 else f"{stage[:15]}…"
                bars.append((f"{name}, {tier}", kinds))
    if not bars:
        return None
    figure, axes = new_figure((5.2, max(2.6, 1.1 + 0.4 * len(bars))))
    most = max(sum(kinds.values()) for _, kinds in bars)
    for kind, colour in _KINDS.items():
        if any(kinds.get(kind) for _, kinds in bars):
            begins = [sum(kinds.get(each, 0) for each in _before(kind)) for _, kinds in bars]
            style: dict[str, Any] = {"color": COLOURS[colour], "height": 0.6}
            label = "working memory" if kind == "working" else kind
            axes.barh(range(len(bars)), [kinds.get(kind, 0) for _, kinds in bars], left=begins, label=label, **style)
    for row, (_, kinds) in enumerate(bars):
        size = sum(kinds.values())
        where: dict[str, Any] = {"xytext": (5, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(format_bytes(size), (size, row), **where)
    axes.set_yticks(range(len(bars)), [name for name, _ in bars])
    axes.set_xlim(0, most * 1.25)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.grid(visible=False)
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="y", length=0, labelcolor=COLOURS["ink"])
    figure.legend(loc="outside upper center", ncols=3)
    return figure


def _before(kind: str) -> list[str]:
    kinds = list(_KINDS)
    return kinds[: kinds.index(kind)]


def waiting_plot(history: History) -> Figure | None:
    """Seconds that a step waits for transfers, by kind of state, against tokens."""
    told = _offloaded(history)
    kinds = dict.fromkeys(kind for event in told for kind in event["offload"].get("stalled") or {})
    x = [event["tokens"] for event in told]
    lines = [((x, [_value(event, "stalled", kind) for event in told]), kind) for kind in kinds]
    lines = [line for line in lines if any(value > 0 for value in line[0][1])]
    return lines_plot(history, lines, "seconds a step", format_seconds)


def bytes_moved_plot(history: History) -> Figure | None:
    """Bytes that a step reads from each tier and writes to it, against tokens."""
    told = _offloaded(history)
    tiers = dict.fromkeys(tier for event in told for tier in event["offload"].get("tier_bytes") or {})
    x = [event["tokens"] for event in told]
    lines = [
        ((x, [_value(event, key, tier) for event in told]), f"{way} {tier}")
        for tier in tiers
        for key, way in (("bytes_read", "read from"), ("bytes_written", "written to"))
    ]
    lines = [line for line in lines if any(value > 0 for value in line[0][1])]
    return lines_plot(history, lines, "bytes a step", format_bytes)


def _offloaded(history: History) -> list[Event]:
    return [event for event in history.steps if event.get("offload") and event.get("tokens") is not None]


def _value(event: Event, key: str, name: str) -> float:
    value = (event["offload"].get(key) or {}).get(name)
    return math.nan if value is None else value
