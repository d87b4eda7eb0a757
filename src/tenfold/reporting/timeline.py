"""A step that was played through, drawn: one row for each lane, as a page, and as a trace for Perfetto."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

from tenfold.planning.step import Event, StepForecast
from tenfold.reporting.elements import card, document, table
from tenfold.reporting.format import format_seconds

_COLOURS = {
    "compute": "stage1",
    "optimizer": "second",
    "communication": "validation",
    "message": "stage5",
    "offload": "stage0",
}
_TOLD = {
    "compute": "forward and backward passes",
    "optimizer": "the optimizer's step",
    "communication": "exchanges between ranks",
    "message": "messages between pipeline stages",
    "offload": "transfers to and from memory below the device",
}
_SHARES = {
    "compute": "computing",
    "communication": "waiting for exchanges",
    "offload": "waiting for transfers",
    "optimizer": "the optimizer's step",
    "bubble": "waiting for other pipeline ranks",
}
_LEFT, _TOP, _ROW, _HIGH, _END = 150, 26, 22, 16, 10
_SMALLEST = 0.4
"""Pixels: what is shorter is drawn with its neighbours."""


def timeline_page(step: StepForecast, name: str) -> str:
    """The page of a step, called `name`: where its time goes, and what every lane does when."""
    facts = [("A step", format_seconds(step.seconds), "forecast")]
    facts += [
        (_SHARES[kind].capitalize(), f"{seconds / step.seconds:.0%}", format_seconds(seconds))
        for kind, seconds in step.shares.items()
        if seconds > 0
    ]
    boxes = "".join(
        f"<div><dt>{html.escape(title)}</dt><dd>{value}<small>{note}</small></dd></div>" for title, value, note in facts
    )
    ranks = len({_rank(event.lane) for event in step.trace})
    of_whom = f" The shares are those of pipeline rank {step.slowest}, which computes most." if ranks > 1 else ""
    sections = [
        f'<dl class="facts">{boxes}</dl>',
        f'<p class="muted">A row is one resource of one rank; what stands above another goes on at the same time.'
        f"{of_whom}</p>",
        "<h2>The step</h2>",
        f"<figure><figcaption>{_legend(step)}</figcaption>{_drawing(step, 1000)}</figure>",
        "<h2>The same, drawn out</h2>",
        card(f'<div style="width: 480rem">{_drawing(step, 7680)}</div>'),
        "<h2>How busy each is</h2>",
        card(table(["lane", "busy", "of the step"], _busy(step))),
    ]
    return document(name, "forecast", "", sections, "a plan's timeline")


def _busy(step: StepForecast) -> list[list[str]]:
    return [
        [_told(lane), format_seconds(step.lanes[lane]), f"{step.lanes[lane] / step.seconds:.0%}"]
        for lane in _in_order(step.lanes)
    ]


def _legend(step: StepForecast) -> str:
    kinds = {event.kind for event in step.trace}
    found = (
        f'<span style="color: var(--{_COLOURS[kind]})">■</span> {_TOLD[kind]}' for kind in _COLOURS if kind in kinds
    )
    return f'<p class="muted">{" &nbsp; ".join(found)}</p>'


def _drawing(step: StepForecast, wide: int) -> str:
    """Rows of boxes, with what each is under the pointer."""
    lanes = _in_order(step.lanes)
    scale = (wide - _LEFT - _END) / step.seconds
    high = _TOP + _ROW * len(lanes) + _END
    parts = [
        f'<svg viewBox="0 0 {wide} {high}" role="img" font-size="11" '
        f'aria-label="What each lane does in a step of {html.escape(format_seconds(step.seconds))}">'
    ]
    for second in _marks(step.seconds, wide // 160):
        x = _LEFT + second * scale
        parts.append(f'<path d="M{x:.1f} {_TOP - 4}V{high - _END}" stroke="var(--grid)" stroke-width="0.6"/>')
        words = html.escape(format_seconds(second)) if second else "0"
        parts.append(f'<text x="{x:.1f}" y="{_TOP - 10}" text-anchor="middle" fill="var(--muted)">{words}</text>')
    by_lane: dict[str, list[Event]] = {lane: [] for lane in lanes}
    for event in step.trace:
        by_lane[event.lane].append(event)
    for row, lane in enumerate(lanes):
        y = _TOP + row * _ROW
        middle = y + _HIGH / 2 + 4
        parts.append(
            f'<text x="{_LEFT - 8}" y="{middle:.1f}" text-anchor="end" fill="var(--ink)">'
            f"{html.escape(_told(lane))}</text>"
        )
        for kind, begin, end, words in _boxes(by_lane[lane], _SMALLEST / scale):
            width = max((end - begin) * scale, _SMALLEST)
            told = f"{words}: {format_seconds(end - begin)}, from {format_seconds(max(begin, 0.0))}"
            parts.append(
                f'<rect x="{_LEFT + begin * scale:.2f}" y="{y}" width="{width:.2f}" height="{_HIGH}" '
                f'fill="var(--{_COLOURS[kind]})"><title>{html.escape(told)}</title></rect>'
            )
    return "".join(parts) + "</svg>"


def _boxes(events: Sequence[Event], smallest: float) -> Iterable[tuple[str, float, float, str]]:
    """Kind, beginning, end and words of each box: events shorter than `smallest` seconds join those next to them, of
    their own kind and no further away than that."""
    joined: list[tuple[str, float, float, str, int]] = []
    for event in sorted(events, key=lambda event: event.begin):
        if event.end <= event.begin:
            continue
        if joined:
            kind, begin, end, words, count = joined[-1]
            short = event.end - event.begin < smallest or end - begin < smallest
            if kind == event.kind and event.begin - end < smallest and (short or words == event.name):
                joined[-1] = kind, begin, event.end, words, count + (words != event.name)
                continue
        joined.append((event.kind, event.begin, event.end, event.name, 0))
    for kind, begin, end, words, more in joined:
        yield kind, begin, end, f"{words} and {more} more" if more else words


def _marks(seconds: float, most: int) -> Iterable[float]:
    """Round times up to `seconds`, at most about so many."""
    unit = 10.0**-9
    steps = (1, 2, 5)
    number = 0
    while seconds / (unit * steps[number % 3] * 10 ** (number // 3)) > max(most, 2):
        number += 1
    each = unit * steps[number % 3] * 10 ** (number // 3)
    return [each * at for at in range(int(seconds / each) + 1)]


def _rank(lane: str) -> int:
    return int(lane.partition(" ")[0])


_RESOURCES = ("compute", "node", "network", "host read", "host write", "disk read", "disk write")


def _in_order(lanes: Iterable[str]) -> list[str]:
    """Rank by rank, compute first."""
    return sorted(lanes, key=lambda lane: (_rank(lane), _RESOURCES.index(lane.partition(" ")[2])))


def _told(lane: str) -> str:
    rank, _, resource = lane.partition(" ")
    words = {"node": "links of the node", "network": "network"}.get(resource, resource)
    return f"rank {rank}: {words}"


def trace_json(step: StepForecast) -> str:
    """The trace in the format of Perfetto (ui.perfetto.dev) and chrome://tracing: a process for each pipeline rank, a
    thread for each of its lanes, times in microseconds."""
    lanes = _in_order(step.lanes)
    threads = {lane: _RESOURCES.index(lane.partition(" ")[2]) for lane in lanes}
    events: list[dict[str, Any]] = []
    for rank in sorted({_rank(lane) for lane in lanes}):
        name = f"pipeline rank {rank}"
        events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": name}})
    for lane in lanes:
        name = lane.partition(" ")[2]
        place = {"pid": _rank(lane), "tid": threads[lane]}
        events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": name}})
        events.append({"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": threads[lane]}})
    for event in step.trace:
        events.append(
            {
                "ph": "X",
                "name": event.name,
                "cat": event.kind,
                "pid": _rank(event.lane),
                "tid": threads[event.lane],
                "ts": event.begin * 1e6,
                "dur": (event.end - event.begin) * 1e6,
            }
        )
    shares = {f"{kind}_seconds": seconds for kind, seconds in step.shares.items()}
    return json.dumps(
        {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {**shares, "seconds": step.seconds}}
    )
