"""The report's page: a run's history as one HTML text, everything from outside escaped."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from tenfold import __version__
from tenfold.reporting.format import (
    MISSING,
    format_bytes,
    format_count,
    format_flops,
    format_logits,
    format_number,
    format_pattern,
    format_seconds,
)
from tenfold.reporting.history import Event, History
from tenfold.reporting.style import CSS


def build_page(history: History, plots: Sequence[tuple[str, str, str]]) -> str:
    """The whole page; `plots` are (title, explanation, SVG)."""
    name = html.escape(history.name)
    status = html.escape(history.status)
    kind = "good" if history.status == "finished" else ""
    sections = [
        _facts(history),
        _verdict(history),
        "<h2>Stages</h2>" + _stages(history),
        _comparison(history),
        "<h2>Course of training</h2>" + _figures(plots),
        _sample(history),
        "<h2>What happened</h2>" + _happenings(history),
        "<h2>How it was run</h2>" + _details(history),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{name} – Tenfold report</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n"
        f'<header><h1>{name}</h1><span class="status {kind}">{status}</span></header>\n'
        + "\n".join(section for section in sections if section)
        + f"\n<footer>Made by Tenfold {html.escape(__version__)} from the run's config.toml and metrics.jsonl.</footer>"
        "\n</main>\n</body>\n</html>\n"
    )


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
    boxes = (
        f"<div><dt>{html.escape(title)}</dt><dd>{html.escape(value)}<small>{html.escape(note)}</small></dd></div>"
        for title, value, note in facts
    )
    return f'<dl class="facts">{"".join(boxes)}</dl>'


def _verdict(history: History) -> str:
    lines = []
    for delink in history.delinks:
        names = f"{delink.get('stage_from')} → {delink.get('stage_to')}"
        kind = {True: "good", False: "bad"}.get(delink.get("logits_equal"), "muted")  # type: ignore[arg-type]
        stored = f"{format_count(delink.get('stored_before'))} → {format_count(delink.get('stored_after'))}"
        lines.append(
            f"<p>Delinking {html.escape(names)} at step {html.escape(str(delink.get('step')))}: logits before and "
            f'after are <span class="{kind}">{html.escape(format_logits(delink))}</span>; '
            f"stored parameters {stored}.</p>"
        )
    return f'<div class="card">{"".join(lines)}</div>' if lines else ""


def _stages(history: History) -> str:
    head = ["stage", "sharing", "stored", "of all", "tokens", "time", "tokens/s", "validation loss"]
    rows = [
        [
            row["name"],
            format_pattern(row.get("sharing")),
            format_count(row.get("stored_parameters")),
            format_count(row.get("total_parameters")),
            format_count(row.get("tokens")),
            format_seconds(row.get("seconds")),
            format_count(row.get("tokens_per_second")),
            format_number(row.get("validation_loss"), ".4f"),
        ]
        for row in history.stage_rows()
    ]
    return f'<div class="card scroll">{_table(head, rows)}</div>'


def _comparison(history: History) -> str:
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
    table = _table(["on held-out text", "loss", "perplexity"], rows)
    return f'<h2>Against n-gram models</h2><div class="card scroll">{table}</div>'


def _figures(plots: Iterable[tuple[str, str, str]]) -> str:
    figures = (
        f'<figure><figcaption><h3>{html.escape(title)}</h3><p class="muted">{html.escape(text)}</p></figcaption>'
        f"{svg}</figure>"
        for title, text, svg in plots
    )
    return f'<div class="plots">{"".join(figures)}</div>'


def _sample(history: History) -> str:
    sample = (history.end or {}).get("sample")
    if not sample:
        return ""
    text = html.escape(str(sample))
    return f'<h2>The model writes</h2><div class="card"><pre class="sample">{text}</pre></div>'


def _happenings(history: History) -> str:
    rows = [[str(event.get("step", MISSING)), *_happening(event)] for event in history.happenings]
    start = history.start.get("stages") or []
    rows.insert(0, ["0", "start", ", then ".join(str(stage.get("name")) for stage in start) or MISSING])
    if history.end is None:
        rows.append([str(history.last["step"]), "last line", "there is no end yet: the run goes on, or was cut off"])
    return f'<div class="card scroll">{_table(["step", "event", ""], rows, "text")}</div>'


def _happening(event: Event) -> tuple[str, str]:
    match event["event"]:
        case "delink":
            patterns = f"{format_pattern(event.get('pattern_from'))} → {format_pattern(event.get('pattern_to'))}"
            names = f"{event.get('stage_from')} → {event.get('stage_to')}"
            return "delink", f"{names}, {patterns}, moments: {event.get('moments')}, logits {format_logits(event)}"
        case "resume":
            return "resume", f"after {format_seconds(event.get('seconds'))} of training"
        case "stop":
            return "stop", str(event.get("reason", ""))
        case _:
            return "end", f"after {format_seconds(event.get('seconds'))} of training"


def _details(history: History) -> str:
    parts = []
    for title, values in (("Machine", history.start.get("machine")), ("Model", history.start.get("model"))):
        if values:
            rows = [[key.removesuffix("_bytes").replace("_", " "), _value(key, value)] for key, value in values.items()]
            table = _table(None, rows, "text")
            is_open = " open" if title == "Machine" else ""
            parts.append(f'<details class="card"{is_open}><summary>{title}</summary>{table}</details>')
    config = html.escape(history.config)
    parts.append(f'<details class="card"><summary>Configuration (config.toml)</summary><pre>{config}</pre></details>')
    return "".join(parts)


def _value(key: str, value: Any) -> str:
    if key.endswith("_bytes"):
        return format_bytes(value)
    if key == "matrix_rate":
        return f"{format_flops(value)}, measured"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list | bool | None) else str(value)


def _table(head: list[str] | None, rows: list[list[str]], kind: str = "") -> str:
    """A table of escaped texts; the first cell of a row is its heading."""
    titles = "".join(f'<th scope="col">{html.escape(title)}</th>' for title in head or [])
    top = f"<thead><tr>{titles}</tr></thead>" if head else ""
    body = "".join(
        f'<tr><th scope="row">{html.escape(first)}</th>'
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in rows
    )
    return f'<table class="{kind}">{top}<tbody>{body}</tbody></table>'
