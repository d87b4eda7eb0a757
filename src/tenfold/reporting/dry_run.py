"""What a dry run counted beside what was planned, for the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from tenfold.reporting.format import format_bytes
from tenfold.reporting.tables import plain_table


def dry_run_view(told: dict[str, Any]) -> RenderableType:
    """What `training.dry_run.DryRun.told` gives: the bytes and exchanges of every rank that was counted."""
    table = plain_table("stage", "rank", "", "counted", "planned", "")
    for row in told["rows"]:
        numbers = [_number(row[key], row["unit"]) for key in ("counted", "planned")]
        place = Text(str(row["pipeline_rank"])), Text(row["what"])
        table.add_row(Text(row["stage"]), *place, *numbers, Text("" if row["agrees"] else "apart", style="red"))
    apart = sum(not row["agrees"] for row in told["rows"])
    parts = [
        f"counted: real code of {told['ranks']} of {told['world']} ranks on tensors without memory, in "
        f"{told['seconds']:.0f} s. Experts get equally many tokens; state is taken to be on the device.",
        f"{apart} of {len(told['rows'])} numbers are more than 3% apart."
        if apart
        else f"all {len(told['rows'])} numbers agree within 3%.",
        *(
            f"delinking to {each['stage']}: rank {each['rank']} has {format_bytes(each['bytes'])} at once, device "
            "and host together"
            for each in told["delinkings"]
        ),
    ]
    return Group(table, *(Text(part, style="dim") for part in parts))


def _number(value: float, unit: str) -> str:
    return format_bytes(value) if unit == "bytes" else f"{value:,.0f}"
