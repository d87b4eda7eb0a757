"""A plan for the terminal, of the numbers that `plan_numbers` has of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tenfold.reporting.bars import bar
from tenfold.reporting.format import (
    MISSING,
    format_bytes,
    format_count,
    format_joules,
    format_number,
    format_seconds,
    format_share,
    format_sharing,
)

_MOMENTS = {
    "forward": ("weights", "moments", "gathered", "activations", "logits", "buffers", "working", "reserve"),
    "backward": (
        "weights",
        "gradients",
        "moments",
        "gathered",
        "activations",
        "temporaries",
        "buffers",
        "working",
        "reserve",
    ),
    "step": ("weights", "gradients", "moments", "working", "reserve"),
}
"""What of `RankMemory.items` is there at each moment; what a peak has besides is "other"."""


def fullest(memory: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Of pipeline ranks the one that holds most on its device."""
    return max(memory, key=lambda each: max(each["peaks"].values(), default=0))


def at_its_fullest(memory: Mapping[str, Any]) -> tuple[str, dict[str, int]]:
    """The moment at which a rank's device holds most, and what it holds then, in all as many bytes as the peak."""
    moment = max(memory["peaks"], key=memory["peaks"].get)
    there = {name: memory["items"].get(name, 0) for name in _MOMENTS.get(moment, _MOMENTS["step"])}
    there = {name: size for name, size in there.items() if size > 0}
    rest = memory["peaks"][moment] - sum(there.values())
    if rest > 0:
        there["other"] = rest
    return moment, there


def plan_view(told: Mapping[str, Any]) -> RenderableType:
    """A plan for the terminal, of what `plan_told` gives, with `advice`, `doubled` of stages and `horizon` if known."""
    parts: list[RenderableType] = [Text(_heading(told), style="bold")]
    for stage in told["stages"]:
        parts += [Text(), *stage_view(stage)]
    for stage in told["unfit"]:
        parts += [Text(), *unfit_view(stage)]
    parts += [Text(), Text(_whole(told))]
    if told.get("horizon"):
        parts += [Text(), *horizon_view(told["horizon"])]
    if told.get("compute_optimal"):
        parts.append(Text(optimal_words(told["compute_optimal"])))
    if told.get("advice"):
        parts += [Text(), Text(told["advice"])]
    if told["cluster"]["notes"]:
        notes = Table.grid(padding=(0, 1))
        for note in told["cluster"]["notes"]:
            notes.add_row(Text("-", style="dim"), Text(note, style="dim"))
        parts += [Text(), Text("assumed:", style="dim"), notes]
    return Group(*parts)


def _heading(told: Mapping[str, Any]) -> str:
    cluster = told["cluster"]
    nodes, ranks = cluster["nodes"], cluster["nodes"] * cluster["per_node"]
    have = f"{ranks} x {cluster['accelerator']} in {nodes} node{'s' * (nodes != 1)}"
    return f"{told['run']} on {cluster['name']} ({have}), for the least {told['objective']}"


def optimal_words(best: Mapping[str, Any]) -> str:
    """What a run's operations could be spent on instead."""
    told = (
        f"for the same operations ({format_count(best['flops'])}FLOP) the lowest loss would come of "
        f"{format_count(best['parameters'])} active parameters and {format_count(best['tokens'])} tokens "
        f"({best['source']}); this run has {format_count(best['active_parameters'])} and "
        f"{format_count(best['run_tokens'])}, and a model of its size is best for "
        f"{format_count(best['tokens_for_this_model'])} tokens"
    )
    return " ".join([f"{told}.", *best["notes"]])


def _title(stage: Mapping[str, Any]) -> Text:
    counts = (
        f": {format_count(stage['stored_parameters'])} of {format_count(stage['total_parameters'])} parameters stored, "
        f"{stage['steps']:,} steps of {format_count(stage['tokens_per_step'])} tokens"
    )
    return Text.assemble((str(stage["name"]), "bold"), f" ({format_sharing(dict(stage))})", counts)


def unfit_view(stage: Mapping[str, Any]) -> list[RenderableType]:
    """A stage that fits in no way."""
    looked = f", of {_looked_at(stage['looked_at'])}" if stage["looked_at"] else ""
    verdict = Text(f"does not fit in any way{looked}; what missed least:", style="bold red")
    return [_title(stage), verdict, rejected(stage["rejected"])]


def stage_view(stage: Mapping[str, Any]) -> list[RenderableType]:
    """A stage that fits: what it is, how it is run, what it takes, and what else there was."""
    rows: list[tuple[str, RenderableType]] = [
        ("layout", Text(layout_words(stage["layout"]))),
        ("placement", Text(_placements(stage["placement_words"]))),
        ("a step", Text(_step_words(stage))),
        ("the stage", Text(_amounts(stage))),
    ]
    if stage.get("delinking"):
        rows.append(("delinking", Text(_delinking_words(stage["delinking"]))))
    rows += _memory_rows(stage)
    shares = {name: seconds for name, seconds in stage["step"]["shares"].items() if seconds > 0}
    rows.append(("time", bar(shares, stage["step_seconds"], format_seconds)))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    for name, value in rows:
        grid.add_row(Text(name, style="dim"), value)
    parts: list[RenderableType] = [_title(stage), grid]
    if len(stage["table"]) > 1:
        parts += [Text(f"the best {len(stage['table'])} of {_looked_at(stage['looked_at'])}:"), alternatives(stage)]
    if stage["rejected"]:
        parts += [Text("what missed least:"), rejected(stage["rejected"])]
    return parts


def _memory_rows(stage: Mapping[str, Any]) -> list[tuple[str, RenderableType]]:
    rank = fullest(stage["memory"])
    moment, there = at_its_fullest(rank)
    many = f", pipeline rank {rank['pipeline_rank']}" if len(stage["memory"]) > 1 else ""
    rows: list[tuple[str, RenderableType]] = [
        ("device", bar(there, stage["budgets"]["device"], format_bytes, f"most in {moment}{many}"))
    ]
    for tier in ("host", "disk"):
        held = max(each["tiers"].get(tier, 0) for each in stage["memory"])
        if held:
            rows.append((tier, bar({"state": held}, stage["budgets"][tier], format_bytes, "of each rank")))
    return rows


def layout_words(layout: Mapping[str, Any]) -> str:
    """A way to run a stage in a line: "data_shard 64 x tensor 8, micro-batch 2, recompute full"."""
    degrees = dict(layout["degrees"])
    grid = degrees.pop("grid", False)
    expert = degrees.pop("expert", None)
    words = [" x ".join(f"{axis} {value}" for axis, value in degrees.items()) or "one rank"]
    if grid:
        words.append("tensor ranks as a grid")
    if expert:
        words.append(f"experts over {expert}")
    words.append(f"micro-batch {layout['micro_batch_size']}")
    if layout["recompute"] != "none":
        count = layout.get("recompute_layers")
        words.append(f"recompute {layout['recompute']}{'' if count is None else f' in {count} layers'}")
    if degrees.get("pipeline"):
        chunks = f" of {layout['chunks']} chunks" if layout["schedule"].startswith("interleaved") else ""
        slices = f" of {layout['slices']} slices" if layout["schedule"] == "terapipe" else ""
        words.append(f"{layout['schedule']}{chunks}{slices}")
    if layout["reshard"] != "forward":
        words.append(f"reshard {layout['reshard']}")
    if layout["gather"] != "fp32":
        words.append(f"gather {layout['gather']}")
    return ", ".join(words)


def _placements(words: Sequence[str]) -> str:
    if len(set(words)) <= 1:
        return words[0] if words else "all on the device"
    return "\n".join(f"pipeline rank {rank}: {word}" for rank, word in enumerate(words))


def _step_words(stage: Mapping[str, Any]) -> str:
    peak = stage.get("flops_share")
    reached = "" if peak is None else f", {format_share(peak)} of the peak"
    return (
        f"{format_seconds(stage['step_seconds'])}: {format_count(stage['tokens_per_second'])} tokens a second, "
        f"{format_count(stage['tokens_per_day'])} a day{reached}"
    )


def _amounts(of: Mapping[str, Any]) -> str:
    told = [format_seconds(of["seconds"])]
    if of.get("joules") is not None:
        told.append(f"{format_joules(of['joules'])} ({format_number(of['joules'] / 3.6e6, ',.4g')} kWh)")
    if of.get("cost") is not None:
        told.append(f"cost {format_number(of['cost'], ',.2f' if of['cost'] >= 1 else '.3g')}")
    return ", ".join(told)


def _delinking_words(delinking: Mapping[str, Any]) -> str:
    parts = [f"{name} {format_seconds(seconds)}" for name, seconds in delinking["shares"].items() if seconds]
    return _amounts(delinking) + (f": {', '.join(parts)}" if parts else "")


def _looked_at(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number:,} {what}" for what, number in counts.items()) or "all"


def alternatives(stage: Mapping[str, Any]) -> Table:
    """The best ways to run a stage, none of them better than another in everything."""
    metered = any(row["joules"] is not None for row in stage["table"])
    priced = any(row["cost"] is not None for row in stage["table"])
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("layout", overflow="fold", ratio=1)
    titles = ["step", "tokens/s", *["energy"] * metered, *["cost"] * priced, "device", "host", "disk"]
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for row in stage["table"]:
        below = (format_bytes(row[key]) if row[key] else MISSING for key in ("host_bytes", "disk_bytes"))
        table.add_row(
            Text(layout_words(row["layout"])),
            format_seconds(row["seconds"]),
            format_count(row["tokens_per_second"]),
            *((format_joules(row["joules"]),) * metered),
            *((format_number(row["cost"], ".3g"),) * priced),
            format_bytes(row["device_bytes"]),
            *below,
        )
    return table


def rejected(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Ways that do not fit, and what each lacked."""
    table = Table.grid(padding=(0, 2))
    table.add_column(ratio=1)
    table.add_column(ratio=1)
    for row in rows:
        table.add_row(Text(layout_words(row["layout"])), Text(row["why"]))
    return table


def _whole(told: Mapping[str, Any]) -> str:
    return f"{'the stages that fit' if told['unfit'] else 'the whole run'}: {_amounts(told)}"


def horizon_view(found: Mapping[str, Any]) -> list[RenderableType]:
    """How long to share: the best course beside never sharing, and how sure that is."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("course", "shared", "tokens shared", "tokens free", "loss", found["unit"]):
        table.add_column(title, justify="left" if title == "course" else "right")
    show = {"seconds": format_seconds, "joules": format_joules}.get(found["unit"], format_count)
    for name, key in (("best", "best"), ("never shared", "never")):
        course = found[key]
        table.add_row(
            name,
            format_share(course["share"]),
            format_count(course["shared_tokens"]),
            format_count(course["free_tokens"]),
            format_number(course["loss"], ".4f"),
            show(course["price"]),
        )
    styles = {"share": "bold green", "do not share": "bold red"}
    verdict = Text("how long to share: ")
    verdict.append(found["verdict"], style=styles.get(found["verdict"], "bold yellow"))
    return [verdict, table, Text(horizon_words(found))]


def horizon_words(found: Mapping[str, Any]) -> str:
    """The verdict on sharing in sentences."""
    gain, best = found["gain"], found["best"]
    told = []
    if found["verdict"] == "do not share":
        told.append(f"Sharing does not pay: at its best it saves {format_share(gain)} of the {found['unit']}.")
    else:
        when = f"Delink after {format_count(best['shared_tokens'])} tokens"
        if not best["free_tokens"]:
            when = "Do not delink at all: the shared model gets there by itself"
        sure = "It may pay. " if found["verdict"] == "open" else ""
        told.append(
            f"{sure}{when}: to the same loss that takes {format_share(gain)} fewer {found['unit']} than never sharing."
        )
    if found["share_range"] is not None:
        low, high = (format_share(value) for value in found["share_range"])
        least, most = (format_share(value) for value in found["gain_range"])
        told.append(
            f"Of likely curves eight in ten have the best share between {low} and {high}, and a gain at this one of "
            f"{least} to {most}; {format_number(found['sure'], '.0%')} have a gain at all."
        )
    return " ".join([*told, *found["reasons"]])
