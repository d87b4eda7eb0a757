"""Tables for the terminal: what a run will be, and what it came to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tenfold.reporting.format import (
    format_count,
    format_logits,
    format_number,
    format_pattern,
)


def dry_run_table(stages: list[dict[str, Any]]) -> RenderableType:
    """The stages of a run that has not begun, from the `stages` of its `start` event."""
    columns = {
        "params": "total_parameters",
        "experts": "expert_parameters",
        "stored": "stored_parameters",
        "active": "active_parameters",
        "FLOPs": "flops_per_token",
        "steps": "steps",
        "tokens": "tokens",
    }
    table = _table("stage", "sharing", *columns)
    for stage in stages:
        counts = [format_count(stage.get(key)) for key in columns.values()]
        table.add_row(Text(str(stage.get("name"))), Text(format_pattern(stage.get("sharing"))), *counts)
    legend = (
        "params: as if every layer had its own; experts: those of them in routed experts; stored: those that exist, a "
        "shared block once; active: used by one token; FLOPs: for one token, forward and backward"
    )
    return Group(table, Text(legend, style="dim"))


def closing_table(
    end_event: dict[str, Any], delinks: list[dict[str, Any]], report: Path | None = None
) -> RenderableType:
    """What a run came to, from its `end` event, its `delink` events and where its report was written."""
    table = _table("stage", "stored parameters", "tokens", "tokens/s", "validation loss", "seconds")
    for stage in end_event.get("stages") or []:
        table.add_row(
            Text(str(stage.get("name"))),
            format_count(stage.get("stored_parameters")),
            format_count(stage.get("tokens")),
            format_count(stage.get("tokens_per_second")),
            format_number(stage.get("validation_loss"), ".4f"),
            format_number(stage.get("seconds"), ".1f"),
        )
    lines = []
    if end_event.get("bigram_loss") is not None:
        lines.append(
            f"for comparison: unigram loss {format_number(end_event.get('unigram_loss'), '.4f')}, "
            f"bigram loss {format_number(end_event.get('bigram_loss'), '.4f')}, "
            f"counted on the same {format_count(end_event.get('counted_tokens'))} tokens"
        )
    for delink in delinks:
        names = f"{delink.get('stage_from')} -> {delink.get('stage_to')}"
        lines.append(f"delinking {names} at step {delink.get('step')}: logits {format_logits(delink)}")
    if end_event.get("sample"):
        lines += ["", "the model writes:", *(f"  {line}" for line in str(end_event["sample"]).splitlines())]
    if report is not None:
        lines += ["", f"report: {report}"]
    return Group(table, *(Text(line) for line in lines))


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first)
    for title in others:
        table.add_column(title, justify="left" if title == "sharing" else "right")
    return table
