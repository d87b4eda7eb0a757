"""What was foreseen of a run's stages beside what was measured, of `measured` events: in a line, and in tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from tenfold.reporting.format import MISSING, format_bytes, format_number, format_seconds
from tenfold.reporting.placement import compared
from tenfold.reporting.tables import plain_table

Event = dict[str, Any]

HEAD = ["foreseen", "a step", "measured", "off", "memory", "measured", "off", "by"]
"""The columns of `foreseen_rows`: the stage; seconds of a step, and memory of a rank; and by what they were."""


def foreseen_line(event: Event) -> str:
    """ "foreseen 0.41 s a step and 1.2 GiB a rank; measured 0.44 s (+7.3%) and 1.3 GiB (+8.3%)"."""
    seconds, memory = _pair(event, "seconds", format_seconds), _pair(event, "device_bytes", format_bytes)
    found = f"{seconds[1]} ({seconds[2]}) and {memory[1]} ({memory[2]})"
    return f"foreseen {seconds[0]} a step and {memory[0]} a rank; measured {found}"


def outcome_table(event: Event, placed: Event | None = None) -> RenderableType:
    """A `measured` event, of a step where it is not said otherwise; of a stage with offload with what its `placement`
    event foresaw of transfers. What is not known may be left out."""
    table = plain_table("of a step", "foreseen", "measured", "difference")
    table.add_row("time", *_pair(event, "seconds", format_seconds))
    table.add_row("memory of a rank, at most", *_pair(event, "device_bytes", format_bytes))
    for name, show, foreseen, found in compared(placed, event.get("measured") or {}) if placed is not None else ():
        table.add_row(name, show(foreseen), show(found), _off(foreseen, found))
    return table


def foreseen_rows(events: Sequence[Event]) -> list[list[str]]:
    """For each stage the last of its `measured` events, as a row for people."""
    latest = {str(event.get("stage")): event for event in events}
    return [
        [name, *_pair(event, "seconds", format_seconds), *_pair(event, "device_bytes", format_bytes), _by(event)]
        for name, event in latest.items()
    ]


def foreseen_table(events: Sequence[Event]) -> RenderableType:
    """The same for the terminal."""
    table = plain_table(*HEAD)
    for row in foreseen_rows(events):
        table.add_row(*map(Text, row))
    return table


def _pair(event: Event, key: str, show: Callable[[Any], str]) -> tuple[str, str, str]:
    foreseen, measured = ((event.get(of) or {}).get(key) for of in ("foreseen", "measured"))
    return show(foreseen), show(measured), _off(foreseen, measured)


def _off(foreseen: float | None, measured: float | None) -> str:
    return MISSING if not foreseen or measured is None else format_number(measured / foreseen - 1, "+.1%")


def _by(event: Event) -> str:
    foreseen = event.get("foreseen") or {}
    cluster = f", {foreseen['cluster']}" if foreseen.get("cluster") else ""
    return f"{foreseen.get('by', MISSING)}{cluster}"
