"""The report of one run: its history as one HTML text."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from typing import Any

from tenfold.reporting.axes import Plot
from tenfold.reporting.elements import card, document, plot_sections, samples_table, table, wrongs
from tenfold.reporting.foreseen import HEAD, foreseen_rows
from tenfold.reporting.format import (
    MISSING,
    describe_check,
    format_bytes,
    format_co2,
    format_count,
    format_energy_source,
    format_flops,
    format_joules,
    format_logits,
    format_measure,
    format_number,
    format_pattern,
    format_seconds,
    format_sharing,
    logits_kept,
)
from tenfold.reporting.history import Event, History
from tenfold.reporting.svg import pick_evenly

_MOST_SAMPLES = 8


def build_page(history: History, plots: Sequence[tuple[str, Sequence[Plot]]]) -> str:
    """The whole page; `plots` are the panels by section."""
    kind = {"finished": "good", "failed": "bad"}.get(history.status, "")
    sections = [
        _facts(history),
        _verdict(history),
        "<h2>Stages</h2>" + _stages(history),
        _foreseen(history),
        _ngrams(history),
        *plot_sections(plots),
        _evaluations(history),
        _samples(history),
        "<h2>What went wrong</h2>" + _wrongs(history),
        "<h2>What happened</h2>" + _happenings(history),
        "<h2>How it was run</h2>" + _details(history),
    ]
    return document(history.name, history.status, kind, sections, "the run's config.toml and metrics.jsonl")


def _facts(history: History) -> str:
    last = history.last
    facts = []
    if history.validations:
        event = history.validations[-1]
        loss, bits = event.get("validation_loss"), event.get("bits_per_byte")
        note = f"{format_number(bits)} bits per byte" if bits is not None else "nats per token"
        title = "Final validation loss" if history.end else "Latest validation loss"
        facts.append((title, format_number(loss, ".4f"), note))
    else:
        facts.append(("Latest training loss", format_number(history.steps[-1].get("loss"), ".4f"), "nats per token"))
    planned = sum(stage.get("tokens") or 0 for stage in history.start.get("stages") or [])
    of_plan = f"of {format_count(planned)} planned" if planned else ""
    facts.append(("Tokens", format_count(last.get("tokens")), of_plan))
    facts.append(("Time", format_seconds(last.get("seconds")), f"{last.get('step', MISSING)} steps"))
    if last.get("seconds"):
        facts.append(("Tokens a second", format_count(last["tokens"] / last["seconds"]), "mean over the run"))
    shares = [event["flops_share"] for event in history.steps if event.get("flops_share") is not None]
    if shares:
        median = sorted(shares)[len(shares) // 2]
        facts.append(("Compute used", format_number(median, ".0%"), "of the measured matrix rate, median"))
    memory = [event["memory_bytes"] for event in history.steps if event.get("memory_bytes") is not None]
    if memory:
        limit = (history.start.get("machine") or {}).get("memory_limit_bytes")
        facts.append(("Most memory", format_bytes(max(memory)), f"of {format_bytes(limit)} allowed" if limit else ""))
    if last.get("joules") is not None:
        source = format_energy_source(history.newest("energy_source"))
        facts.append(("Energy", format_joules(last["joules"]), source))
        if last.get("tokens"):
            facts.append(("Energy a token", format_joules(last["joules"] / last["tokens"]), "mean over the run"))
    co2 = history.newest("co2_kg")
    if co2 is not None:
        factor = (history.end or {}).get("carbon_intensity")
        note = (
            f"at {format_number(factor, '.4g')} g a kWh, {history.end['carbon_stated_by']}" if history.end else "so far"
        )
        facts.append(("CO2", format_co2(co2), note))
    boxes = (
        f"<div><dt>{html.escape(title)}</dt><dd>{html.escape(value)}<small>{html.escape(note)}</small></dd></div>"
        for title, value, note in facts
    )
    return f'<dl class="facts">{"".join(boxes)}</dl>'


def _verdict(history: History) -> str:
    lines = []
    for delink in history.all_delinks:
        names = f"{delink.get('stage_from')} → {delink.get('stage_to')}"
        kind = {True: "good", False: "bad", None: "muted"}[logits_kept(delink)]
        stored = f"{format_count(delink.get('stored_before'))} → {format_count(delink.get('stored_after'))}"
        lines.append(
            f"<p>Delinking {html.escape(names)} at step {html.escape(str(delink.get('step')))}: logits before and "
            f'after are <span class="{kind}">{html.escape(format_logits(delink))}</span>; '
            f"stored parameters {stored}.</p>"
        )
    return f'<div class="card">{"".join(lines)}</div>' if lines else ""


def _stages(history: History) -> str:
    head = ["stage", "sharing", "stored", "of all", "tokens", "time", "tokens/s", "validation loss"]
    stages = history.stage_rows()
    metered = any(row.get("joules") is not None for row in stages)
    if metered:
        head += ["energy", "each token"]
    rows = [
        [
            row["name"],
            format_sharing(row),
            format_count(row.get("stored_parameters")),
            format_count(row.get("total_parameters")),
            format_count(row.get("tokens")),
            format_seconds(row.get("seconds")),
            format_count(row.get("tokens_per_second")),
            format_number(row.get("validation_loss"), ".4f"),
            *((format_joules(row.get("joules")), format_joules(row.get("joules_per_token"))) if metered else ()),
        ]
        for row in stages
    ]
    return card(table(head, rows))


def _foreseen(history: History) -> str:
    rows = foreseen_rows(history.measured)
    return "<h2>Foreseen and measured</h2>" + card(table(HEAD, rows)) if rows else ""


def _ngrams(history: History) -> str:
    """The model beside n-gram models of the same text: a loss alone says little."""
    end = history.end or {}
    entries = [(name, end.get(f"{name}_loss")) for name in ("unigram", "bigram")]
    entries = [(f"{name} model", loss) for name, loss in entries if loss is not None]
    if not entries:
        return ""
    if history.validations:
        entries.append(
            (f"this model, after {history.last.get('step')} steps", history.validations[-1]["validation_loss"])
        )
    rows = [
        [name, format_number(loss, ".4f"), format_count(math.exp(min(loss, 700.0))) if loss is not None else MISSING]
        for name, loss in entries
    ]
    return "<h2>Against n-gram models</h2>" + card(table(["on held-out text", "loss", "perplexity"], rows))


def _evaluations(history: History) -> str:
    latest = {(event.get("task"), event.get("name")): event for event in history.evaluations}
    rows = []
    for event in latest.values():
        values = (event.get("values") or {}).items()
        told = [(key, value) for key, value in values if isinstance(value, int | float)]
        where = [str(event.get("name", "")), str(event.get("task", "")), str(event["step"])]
        rows += [[*where, key.replace("_", " "), format_measure(key, value)] for key, value in told]
    if not rows:
        return ""
    return "<h2>Latest evaluations</h2>" + card(table(["text", "task", "step", "measure", "value"], rows, "text"))


def _samples(history: History) -> str:
    samples = [event for event in history.samples if event.get("text")]
    if samples:
        chosen = [samples[index] for index in pick_evenly(len(samples), _MOST_SAMPLES)]
        rows = [(f"step {event['step']}", str(event.get("stage", "")), str(event["text"])) for event in chosen]
    elif (history.end or {}).get("sample"):
        rows = [(f"step {history.last['step']}", "", str((history.end or {})["sample"]))]
    else:
        return ""
    return "<h2>The model writes</h2>" + samples_table(rows)


def _wrongs(history: History) -> str:
    rows = wrongs(history)
    if not rows:
        return '<div class="card"><p class="good">Nothing went wrong.</p></div>'
    return card(table(["step", "what", ""], rows, "text"))


def _happenings(history: History) -> str:
    start = history.start.get("stages") or []
    rows = [["0", "start", ", then ".join(str(stage.get("name")) for stage in start) or MISSING]]
    rows += [[str(event["step"]), "planned", line] for event in history.plans for line in event.get("lines") or []]
    told = [(delink, "delinked", _delinking(delink)) for delink in history.all_delinks]
    told += [(check, "decided", describe_check(check)) for check in history.checks if check.get("decision")]
    # A decision comes before what it leads to.
    for event, what, more in sorted(told, key=lambda row: (row[0]["step"], row[1])):
        rows.append([str(event["step"]), what, more])
    if history.end is not None:
        seconds = format_seconds(history.end.get("seconds"))
        rows.append([str(history.end.get("step", MISSING)), "end", f"after {seconds} of training"])
    else:
        rows.append([str(history.last["step"]), "last line", "there is no end yet: the run goes on, or was cut off"])
    return card(table(["step", "event", ""], rows, "text"))


def _delinking(event: Event) -> str:
    patterns = f"{format_pattern(event.get('pattern_from'))} → {format_pattern(event.get('pattern_to'))}"
    names = f"{event.get('stage_from')} → {event.get('stage_to')}"
    return f"{names}, {patterns}, moments: {event.get('moments')}, logits {format_logits(event)}"


def _details(history: History) -> str:
    parts = []
    for title, values in (("Machine", history.start.get("machine")), ("Model", history.start.get("model"))):
        if values:
            rows = [[key.removesuffix("_bytes").replace("_", " "), _value(key, value)] for key, value in values.items()]
            is_open = " open" if title == "Machine" else ""
            parts.append(
                f'<details class="card"{is_open}><summary>{title}</summary>{table(None, rows, "text")}</details>'
            )
    config = html.escape(history.config_text)
    parts.append(f'<details class="card"><summary>Configuration (config.toml)</summary><pre>{config}</pre></details>')
    return "".join(parts)


def _value(key: str, value: Any) -> str:
    if key.endswith("_bytes"):
        return format_bytes(value)
    if key == "matrix_rate":
        return f"{format_flops(value)}, measured"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list | bool | None) else str(value)
