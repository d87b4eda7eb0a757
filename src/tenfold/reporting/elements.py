"""Pieces of HTML that the report's pages are made of; everything from outside is escaped here."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from tenfold import __version__
from tenfold.reporting.axes import Plot
from tenfold.reporting.format import MISSING, format_logits, format_seconds, logits_kept
from tenfold.reporting.history import Event, History
from tenfold.reporting.style import CSS
from tenfold.reporting.svg import to_svg

_WRONG = {"note": "note", "skip": "step skipped", "stop": "stopped", "resume": "went on", "error": "error"}


def document(title: str, status: str, kind: str, sections: Iterable[str], source: str) -> str:
    """A whole page; `kind` colours the status, `source` says what the page was made from."""
    mark = f'<span class="status {kind}">{html.escape(status)}</span>' if status else ""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)} – Tenfold report</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n"
        f"<header><h1>{html.escape(title)}</h1>{mark}</header>\n"
        + "\n".join(section for section in sections if section)
        + f"\n<footer>Made by Tenfold {html.escape(__version__)} from {source}.</footer>\n</main>\n</body>\n</html>\n"
    )


def table(head: list[str] | None, rows: list[list[str]], kind: str = "") -> str:
    """A table of texts; the first cell of a row is its heading."""
    titles = "".join(f'<th scope="col">{html.escape(title)}</th>' for title in head or [])
    top = f"<thead><tr>{titles}</tr></thead>" if head else ""
    body = "".join(
        f'<tr><th scope="row">{html.escape(first)}</th>'
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in rows
    )
    return f'<table class="{kind}">{top}<tbody>{body}</tbody></table>'


def card(inner: str) -> str:
    """A framed box; what is too wide for it scrolls inside."""
    return f'<div class="card scroll" tabindex="0">{inner}</div>'


def plot_sections(sections: Sequence[tuple[str, Sequence[Plot]]]) -> Iterable[str]:
    """For each section with anything to show, its heading and its panels."""
    for heading, plots in sections:
        figures = [figure for figure in map(_figure, plots) if figure]
        if figures:
            yield f'<h2>{html.escape(heading)}</h2><div class="plots">{"".join(figures)}</div>'


def _figure(plot: Plot) -> str:
    views = []
    for number, (label, draw) in enumerate(plot.views):
        figure = draw()
        if figure is not None:
            alt = f"{plot.title}{f', {label}' if label else ''}. {plot.text}"
            views.append((label, to_svg(figure, f"{plot.name}-{number}", alt)))
    if not views:
        return ""
    head = f'<h3>{html.escape(plot.title)}</h3><p class="muted">{html.escape(plot.text)}</p>'
    if len(views) == 1:
        return f"<figure><figcaption>{head}</figcaption>{views[0][1]}</figure>"
    # Radio buttons and the style sheet choose the view: no script.
    choices = "".join(
        f'<input type="radio" name="{plot.name}" id="{plot.name}-view-{number}"{" checked" * (number == 0)}>'
        f'<label for="{plot.name}-view-{number}">{html.escape(label)}</label>'
        for number, (label, _) in enumerate(views)
    )
    shown = "".join(f'<div class="view">{svg}</div>' for _, svg in views)
    legend = f"<legend>{html.escape(plot.title)} by</legend>"
    return (
        f'<figure><figcaption>{head}</figcaption><fieldset class="views">{legend}{choices}{shown}</fieldset></figure>'
    )


def wrongs(history: History) -> list[list[str]]:
    """All that went wrong in a run, as rows (step, what, more)."""
    rows: dict[tuple[str, ...], None] = {}
    for event in history.troubles:
        step = str(event.get("step", MISSING))
        row = (step, _WRONG[event["event"]], _trouble(event))
        if event["event"] != "note" or row[1:] not in {known[1:] for known in rows}:  # each process says it anew
            rows[row] = None
    for delink in history.all_delinks:
        if logits_kept(delink) is False:
            rows[(str(delink.get("step")), "delinking", f"logits {format_logits(delink)}")] = None
    for key, name in (("loss", "loss"), ("grad_norm", "gradient norm")):
        steps = [event["step"] for event in history.steps if key in event and event[key] is None]
        if steps:
            rows[(str(steps[0]), "not finite", f"{name}, at {len(steps)} of the logged steps")] = None
    return [list(row) for row in rows]


def _trouble(event: Event) -> str:
    if event["event"] != "resume":
        return str(event.get("text") or event.get("reason") or "")
    step, reached = event.get("step"), event.get("reached")
    text = f"after {format_seconds(event.get('seconds'))} of training"
    if event.get("idle_seconds") is not None:
        text += f" and {format_seconds(event['idle_seconds'])} of rest"
    if isinstance(step, int) and isinstance(reached, int) and reached > step:
        again = f"step {reached} was" if reached == step + 1 else f"steps {step + 1} to {reached} were"
        text += f"; {again} trained again"
    return text


def samples_table(rows: list[tuple[str, str, str]]) -> str:
    """Texts that models wrote, as (heading, heading below, text)."""
    body = "".join(
        f'<tr><th scope="row">{html.escape(first)}<small>{html.escape(second)}</small></th>'
        f'<td><pre class="sample">{html.escape(text)}</pre></td></tr>'
        for first, second, text in rows
    )
    return f'<div class="card"><table class="text samples"><tbody>{body}</tbody></table></div>'
