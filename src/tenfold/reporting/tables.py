"""Tables for the terminal: what a run will be, and what it came to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tenfold.reporting.format import (
    format_bytes,
    format_co2,
    format_count,
    format_energy_source,
    format_joules,
    format_logits,
    format_number,
    format_seconds,
    format_share,
    format_sharing,
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
    table = plain_table("stage", "sharing", *columns)
    for stage in stages:
        counts = [format_count(stage.get(key)) for key in columns.values()]
        table.add_row(Text(str(stage.get("name"))), Text(format_sharing(stage)), *counts)
    legend = (
        "params: as if every layer had its own; experts: those of them in routed experts; stored: those that exist, a "
        "shared block once; active: used by one token; FLOPs: for one token, forward and backward"
    )
    return Group(table, Text(legend, style="dim"))


def closing_table(
    end_event: dict[str, Any],
    delinks: list[dict[str, Any]],
    report: Path | None = None,
    foreseen: RenderableType | None = None,
) -> RenderableType:
    """What a run came to, from its `end` event, its `delink` events and where its report was written; `foreseen` is the
    table of what was foreseen of it."""
    metered = end_event.get("joules") is not None
    energy = ("energy", "each token") if metered else ()
    table = plain_table("stage", "stored parameters", "tokens", "tokens/s", "validation loss", "seconds", *energy)
    for stage in end_event.get("stages") or []:
        more = (format_joules(stage.get("joules")), format_joules(stage.get("joules_per_token"))) if metered else ()
        table.add_row(
            Text(str(stage.get("name"))),
            format_count(stage.get("stored_parameters")),
            format_count(stage.get("tokens")),
            format_count(stage.get("tokens_per_second")),
            format_number(stage.get("validation_loss"), ".4f"),
            format_number(stage.get("seconds"), ".1f"),
            *more,
        )
    lines = []
    if metered:
        lines.append(energy_line(end_event))
    counted = [name for name in ("unigram", "bigram") if end_event.get(f"{name}_loss") is not None]
    if counted:
        losses = (f"{name} loss {format_number(end_event[f'{name}_loss'], '.4f')}" for name in counted)
        tokens = format_count(end_event.get("counted_tokens"))
        lines.append(f"for comparison: {', '.join(losses)}, counted on the same {tokens} tokens")
    if len(epochs := end_event.get("epochs") or {}) > 1:
        lines.append(
            "read: " + ", ".join(f"{name} {format_number(times, '.2f')} epochs" for name, times in epochs.items())
        )
    for delink in delinks:
        names = f"{delink.get('stage_from')} -> {delink.get('stage_to')}"
        if delink.get("event") == "split":
            names = f"{delink.get('stage_from')}, within the stage,"
        lines.append(f"delinking {names} at step {delink.get('step')}: logits {format_logits(delink)}")
    if end_event.get("sample"):
        lines += ["", "the model writes:", *(f"  {line}" for line in str(end_event["sample"]).splitlines())]
    if report is not None:
        lines += ["", f"report: {report}"]
    return Group(table, *([] if foreseen is None else [Text(), foreseen]), *(Text(line) for line in lines))


def energy_line(end_event: dict[str, Any]) -> str:
    """A run's energy and CO2 in one line, with how each was come by."""
    line = (
        f"energy: {format_joules(end_event.get('joules'))}, {format_joules(end_event.get('joules_per_token'))} a token "
        f"({format_energy_source(end_event.get('energy_source'))})"
    )
    if end_event.get("co2_kg") is None:
        return line
    overhead = f" times {end_event['pue']:g} for the site" if end_event.get("pue", 1) != 1 else ""
    factor = f"{format_number(end_event.get('carbon_intensity'), 'g')} g a kWh{overhead}"
    return f"{line}; {format_co2(end_event['co2_kg'])} of CO2 at {factor} ({end_event.get('carbon_stated_by')})"


def advice_table(found: dict[str, Any]) -> RenderableType:
    """What `tenfold advise` found: the two stages, what each length of the shared one comes to, and plain words."""
    stages = plain_table(
        "stage", "sharing", "stored", "state", "step", "tokens/s", "of rate", "optimizer", "energy/token"
    )
    for stage in found["stages"]:
        stages.add_row(
            Text(stage["name"]),
            Text(stage["sharing"], overflow="fold"),
            format_count(stage["stored_parameters"]),
            format_bytes(stage["state_bytes"]),
            format_seconds(stage.get("step_seconds")),
            format_count(stage.get("tokens_per_second")),
            format_number(stage.get("rate_share"), ".0%"),
            format_share(stage.get("optimizer_share")),
            format_joules(stage.get("joules_per_token")),
        )
    parts: list[RenderableType] = [stages, Text()]
    if found["plans"]:
        plans = plain_table("shared for", "delinked at step", "whole run", "saved", "energy saved")
        plans.add_column("what is known of the loss", overflow="fold")
        for plan in found["plans"]:
            plans.add_row(
                f"{plan['share']:.3g}" if plan["share"] < 0.01 else f"{plan['share']:.0%}",
                f"{plan['step']:,}",
                format_seconds(plan["seconds"]),
                f"{plan['seconds_saved'] / found['seconds_never_shared']:.1%}",
                format_joules(plan["joules_saved"]),
                Text(plan["known_loss"]),
            )
        parts += [plans, Text()]
    styles = {"share": "bold green", "do not share": "bold red", "does not fit": "bold red"}
    parts.append(Text(found["verdict"], style=styles.get(found["verdict"], "bold yellow")))
    parts.append(Text(" ".join(found["reasons"])))
    return Group(*parts)


def plain_table(first: str, *others: str) -> Table:
    """A table without lines; all columns but the first, and one of sharing, are numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first)
    for title in others:
        table.add_column(title, justify="left" if title == "sharing" else "right")
    return table
