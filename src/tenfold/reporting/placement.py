"""Where a run's state lies and what that costs, foreseen and measured, for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from tenfold.config.depth import joined
from tenfold.reporting.format import format_bytes, format_seconds
from tenfold.reporting.tables import plain_table

_LONGEST = 32
"""Characters of parts' names in a row."""


def placement_table(event: dict[str, Any]) -> RenderableType:
    """What a `placement` event foresees: the state below the device, rows that are alike joined, and its price.

    Without `seconds` in its forecast only bytes are told.
    """
    forecast = event["forecast"]
    timed = "seconds" in forecast
    alike: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for row in forecast["rows"]:
        alike.setdefault((row["kind"], row["tier"], row["bytes"]), []).append(row)
    lines = [_tiers(event), *([_price(forecast)] if timed else [])]
    if not alike:
        return Group(Text("all state stays on the device"), *map(Text, lines))
    table = plain_table("state of", "kind", "tier", "bytes", "moved a step", *(("hidden", "not hidden") * timed))
    for (kind, tier, size), rows in alike.items():
        seconds = [format_seconds(sum(row[f"seconds_{key}"] for row in rows)) for key in ("hidden", "stalled")]
        table.add_row(
            Text(_short([row["part"] for row in rows])),
            kind,
            tier,
            format_bytes(size * len(rows)),
            format_bytes(sum(row["bytes_read"] + row["bytes_written"] for row in rows)),
            *(seconds if timed else ()),
        )
    return Group(table, *map(Text, lines))


def traffic_line(offload: dict[str, Any] | None) -> str:
    """What a step waits for and moves, from `offload` of a `step` event; nothing where no tier holds or moves any."""
    told, found = [], offload or {}
    for tier, held in (found.get("tier_bytes") or {}).items():
        moved = [(found.get(key) or {}).get(tier) or 0 for key in ("bytes_read", "bytes_written")]
        if held or any(moved):
            read, written = map(format_bytes, moved)
            told.append(f"{tier} {format_bytes(held)}, {read} read, {written} written a step")
    if not told:
        return ""
    waited = sum((found.get("stalled") or {}).values())
    return "; ".join([f"waits {format_seconds(waited)} a step", *told])


def compared(event: dict[str, Any], measured: dict[str, Any]) -> Iterator[tuple[str, Any, float, float | None]]:
    """What a `placement` event foresaw of a step's transfers beside what was `measured` (`Meter.outcome`), by name, and
    how it is shown; None: not known."""
    forecast = event["forecast"]
    stalled = sum(row["seconds_stalled"] for row in forecast["rows"])
    yield "waiting for transfers", format_seconds, stalled, measured.get("stalled_seconds")
    for tier in dict.fromkeys(row["tier"] for row in forecast["rows"]):
        rows = [row for row in forecast["rows"] if row["tier"] == tier]
        for name, key, foreseen in (
            (f"kept on {tier}", "tier_bytes", event["tier_bytes"][tier]),
            (f"read from {tier}", "bytes_read", sum(row["bytes_read"] for row in rows)),
            (f"written to {tier}", "bytes_written", sum(row["bytes_written"] for row in rows)),
        ):
            yield name, format_bytes, foreseen, (measured.get(key) or {}).get(tier)


def device_bytes(event: Mapping[str, Any]) -> int:
    """What a `placement` event foresees of the device: state that lies there, working memory, and all else."""
    return event["tier_bytes"]["device"] + event["working_bytes"] + event["other_bytes"]


def _tiers(event: dict[str, Any]) -> str:
    found = (
        f"device: {format_bytes(device_bytes(event))}, of which state {format_bytes(event['tier_bytes']['device'])}, "
        f"working memory {format_bytes(event['working_bytes'])}, activations and temporaries "
        f"{format_bytes(event['other_bytes'])}"
    )
    below = [
        f"{tier}: {format_bytes(event['tier_bytes'][tier])}" for tier in ("host", "disk") if event["tier_bytes"][tier]
    ]
    return "; ".join([found, *below])


def _price(forecast: dict[str, Any]) -> str:
    stalled = sum(row["seconds_stalled"] for row in forecast["rows"])
    floor = max([forecast["compute_seconds"], *forecast["lane_seconds"].values()])
    return (
        f"a step: {format_seconds(forecast['seconds'])}, of which compute "
        f"{format_seconds(forecast['compute_seconds'])} and waiting for transfers {format_seconds(stalled)}; with "
        f"perfect overlap {format_seconds(floor)}"
    )


def _short(names: list[str]) -> str:
    """Parts in at most `_LONGEST` characters, of many that lie apart how many there are."""
    text = joined(names)
    if len(text) <= _LONGEST:
        return text
    layers = [int(number) for name in names if (number := name.removeprefix("layers.")).isdecimal()]
    others = [name for name in names if not name.removeprefix("layers.").isdecimal()]
    told = [f"{len(layers)} of layers {min(layers)}-{max(layers)}"] if layers else []
    if others:
        experts = all(".experts." in name for name in others)
        many = f"{len(others)} lots of experts" if experts else f"{len(others)} parts"
        told.append(joined(others) if len(joined(others)) <= _LONGEST else many)
    return ", ".join(told)
