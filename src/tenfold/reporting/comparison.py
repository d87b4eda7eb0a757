"""The report of several runs side by side: results, what they were configured otherwise, and their plots in one."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tenfold.reporting.axes import Plot
from tenfold.reporting.elements import card, document, plot_sections, samples_table, table, wrongs
from tenfold.reporting.format import (
    MISSING,
    format_bytes,
    format_co2,
    format_count,
    format_joules,
    format_measure,
    format_number,
    format_pattern,
    format_seconds,
    format_share,
    format_sharing,
)
from tenfold.reporting.history import History

Runs = Sequence[tuple[str, History]]

_ONE = (".sharing", ".until")  # tables in the configuration that are one value


def name_runs(paths: Sequence[Path], histories: Sequence[History]) -> list[tuple[str, History]]:
    """Each history with the name it goes by: its own, or where two have the same, that with its folders' before it."""
    often = Counter(history.name for history in histories)
    named = []
    for path, history in zip(paths, histories, strict=True):
        parts = path.resolve().parts
        depth = 2
        while often[history.name] > 1 and depth < len(parts) and _same_end(paths, parts, depth) > 1:
            depth += 1
        named.append((history.name if often[history.name] == 1 else "/".join(parts[-depth:]), history))
    return named


def _same_end(paths: Sequence[Path], parts: tuple[str, ...], depth: int) -> int:
    return sum(path.resolve().parts[-depth:] == parts[-depth:] for path in paths)


def build_comparison(runs: Runs, plots: Sequence[tuple[str, Sequence[Plot]]]) -> str:
    """The whole page; `plots` are the panels by section."""
    names = [name for name, _ in runs]
    sections = [
        "<h2>Results</h2>" + card(table(["", *names], _results(runs))),
        "<h2>Configured otherwise</h2>" + _differences(runs),
        *plot_sections(plots),
        _evaluations(runs),
        _samples(runs),
        "<h2>What went wrong</h2>" + _wrongs(runs),
    ]
    title = " and ".join(names) if len(names) < 4 else f"{len(names)} runs: {', '.join(names)}"
    return document(title, f"{len(runs)} runs", "", sections, "the runs' config.toml and metrics.jsonl")


def _results(runs: Runs) -> list[list[str]]:
    """The rows of the table of results; a row that no run has anything for is left out."""
    measures: list[tuple[str, Callable[[History], str]]] = [
        ("status", lambda run: run.status),
        ("stages", lambda run: " → ".join(run.stage_names)),
        ("sharing", lambda run: " → ".join(format_sharing(row) for row in run.stage_rows())),
        ("layers", lambda run: str((run.start.get("model") or {}).get("layers", MISSING))),
        ("stored parameters", _stored),
        ("parameters", lambda run: format_count(_of_last_stage(run, "total_parameters"))),
        ("tokens", lambda run: format_count(run.last.get("tokens"))),
        ("steps", lambda run: format_count(run.last.get("step"))),
        ("time", lambda run: format_seconds(run.last.get("seconds"))),
        ("tokens a second", lambda run: format_count(_per(run, "tokens", "seconds"))),
        ("share of matrix rate", lambda run: format_share(_median(run, "flops_share"))),
        ("most memory", lambda run: format_bytes(max(_known(run, "memory_bytes"), default=None))),
        ("training loss", lambda run: format_number(_known(run, "loss")[-1] if _known(run, "loss") else None, ".4f")),
        ("validation loss", lambda run: format_number(_validation(run, "validation_loss"), ".4f")),
        ("perplexity", lambda run: format_count(_perplexity(run))),
        ("bits per byte", lambda run: format_number(_validation(run, "bits_per_byte"), ".3f")),
        ("energy", lambda run: format_joules(run.last.get("joules"))),
        ("energy a token", lambda run: format_joules(_per(run, "joules", "tokens"))),
        ("energy by", lambda run: str(run.newest("energy_source") or MISSING)),
        ("CO2", lambda run: format_co2(run.newest("co2_kg"))),
        ("went wrong", lambda run: str(len(wrongs(run)) or "nothing")),
    ]
    rows = [[name, *(measure(history) for _, history in runs)] for name, measure in measures]
    return [row for row in rows if any(cell not in (MISSING, "") for cell in row[1:])]


def _stored(run: History) -> str:
    counts = [row["stored_parameters"] for row in run.stage_rows() if row.get("stored_parameters")]
    return " → ".join(map(format_count, counts)) or MISSING


def _of_last_stage(run: History, key: str) -> Any:
    rows = run.stage_rows()
    return rows[-1].get(key) if rows else None


def _per(run: History, key: str, other: str) -> float | None:
    return run.last[key] / run.last[other] if run.last.get(key) is not None and run.last.get(other) else None


def _known(run: History, key: str) -> list[float]:
    return [event[key] for event in run.steps if event.get(key) is not None]


def _median(run: History, key: str) -> float | None:
    known = sorted(_known(run, key))
    return known[len(known) // 2] if known else None


def _validation(run: History, key: str) -> float | None:
    return run.validations[-1].get(key) if run.validations else None


def _perplexity(run: History) -> float | None:
    loss = _validation(run, "validation_loss")
    return None if loss is None else math.exp(min(loss, 700.0))


def _differences(runs: Runs) -> str:
    """Every key of the configurations that is not the same in all runs."""
    flat = [dict(_leaves(history.config)) for _, history in runs]
    keys = list(dict.fromkeys(key for config in flat for key in config))
    rows = [
        [key, *(_show(config[key]) if key in config else MISSING for config in flat)]
        for key in keys
        if any(config.get(key) != flat[0].get(key) for config in flat)
    ]
    if not rows:
        return '<div class="card"><p>Nothing: the configurations are the same.</p></div>'
    return card(table(["key", *(name for name, _ in runs)], rows))


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value and not path.endswith(_ONE):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{path}.{number}")
    else:
        yield path, value


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return format_pattern(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _evaluations(runs: Runs) -> str:
    """The latest value of everything that was evaluated, run by run."""
    found: dict[tuple[str, str, str], dict[int, str]] = {}
    for number, (_, history) in enumerate(runs):
        for event in history.evaluations:
            for key, value in (event.get("values") or {}).items():
                if isinstance(value, int | float):
                    what = (str(event.get("name", "")), str(event.get("task", "")), key.replace("_", " "))
                    found.setdefault(what, {})[number] = format_measure(key, value)
    rows = [[" ".join(what), *(shown.get(n, MISSING) for n in range(len(runs)))] for what, shown in found.items()]
    if not rows:
        return ""
    return "<h2>Latest evaluations</h2>" + card(table(["", *(name for name, _ in runs)], rows))


def _samples(runs: Runs) -> str:
    rows = []
    for name, history in runs:
        told = [event for event in history.samples if event.get("text")][-1:]
        text = told[0]["text"] if told else (history.end or {}).get("sample")
        if text:
            rows.append((name, f"step {told[0]['step'] if told else history.last['step']}", str(text)))
    return "<h2>The models write</h2>" + samples_table(rows) if rows else ""


def _wrongs(runs: Runs) -> str:
    rows = [[name, *row] for name, history in runs for row in wrongs(history)]
    if not rows:
        return '<div class="card"><p class="good">Nothing went wrong.</p></div>'
    return card(table(["run", "step", "what", ""], rows, "text"))
