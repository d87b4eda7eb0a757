"""Matplotlib figures as small inline SVG that takes its colours from the page's style sheet."""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from tenfold.reporting.style import CSS

# Matplotlib draws in these colours; each then becomes the CSS variable of that name, so a plot follows the theme.
_VARIABLES = {
    "ink": "#010203",
    "muted": "#020304",
    "grid": "#030405",
    "ghost": "#040506",
    "training": "#050607",
    "validation": "#060708",
    "baseline": "#070809",
    "second": "#08090a",
    **{f"stage{index}": f"#1002{index:02x}" for index in range(6)},
}
COLOURS = dict(_VARIABLES)  # what plots draw in


@contextmanager
def drawing(colours: dict[str, str] | None = None) -> Iterator[None]:
    """Matplotlib as a report wants it: colours of the page's style sheet, or for a file of its own those given."""
    COLOURS.update(colours or {})
    try:
        with rc_context(_settings()):
            yield
    finally:
        COLOURS.update(_VARIABLES)


def light_colours() -> dict[str, str]:
    """The colours of the page's light theme, for files that stand alone."""
    found = dict(re.findall(r"--(\w+): (#\w+)", CSS.split("@media")[0]))
    return {name: found[name] for name in _VARIABLES}


def _settings() -> dict[Any, Any]:
    return {
        "svg.fonttype": "none",  # text stays text: small, and sharp at every size
        "svg.hashsalt": "tenfold",
        "font.family": "sans-serif",
        "font.size": 10,
        "text.parse_math": False,  # a stage may be called what it likes
        "text.color": COLOURS["ink"],
        "axes.labelcolor": COLOURS["muted"],
        "axes.edgecolor": COLOURS["grid"],
        "axes.grid": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "grid.color": COLOURS["grid"],
        "grid.linewidth": 0.6,
        "xtick.color": COLOURS["grid"],
        "ytick.color": COLOURS["grid"],
        "xtick.labelcolor": COLOURS["muted"],
        "ytick.labelcolor": COLOURS["muted"],
        "legend.frameon": False,
        "legend.fontsize": 9,
        "lines.linewidth": 1.4,
    }


def to_svg(figure: Figure, prefix: str, title: str) -> str:
    """`figure` as an `<svg>` element as wide as its place; ids get `prefix`, so that several fit on one page.

    `title` is what a screen reader says of it.
    """
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, dpi=160)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    # An image goes by its content, and the same one may stand twice; nothing refers to it.
    text = re.sub(r'(<image\b[^>]*?)\sid="[^"]+"', r"\1", text)
    text = re.sub(r'\sid="([^"]+)"', rf' id="{prefix}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", text)
    text = re.sub(r'xlink:href="#([^"]+)"', rf'href="#{prefix}-\1"', text)
    text = text.replace("xlink:href=", "href=")
    text = re.sub(r"font: ([0-9.]+)px [^;\"]*", r"font-size: \1px", text)
    view = re.search(r'viewBox="[^"]+"', text)
    assert view is not None
    head = f'<svg {view[0]} role="img" aria-label="{html.escape(title)}">'
    text = re.sub(r"<svg[^>]*>", lambda _: head, text, count=1)
    for name, colour in _VARIABLES.items():
        text = text.replace(colour, f"var(--{name})")
    return re.sub(r"\n\s*", "\n", text)


def to_file(svg: str) -> str:
    """What `to_svg` gave, drawn in `light_colours`, as a file that stands alone: with its size and a background."""
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    svg = svg.replace("<svg", f'<svg {names} width="720" font-family="sans-serif"', 1)
    return svg.replace("<defs>", '<rect width="100%" height="100%" fill="#fff"/><defs>', 1)


def thin(x: Sequence[float], y: Sequence[float], limit: int = 1200) -> tuple[list[float], list[float]]:
    """At most about `limit` points that keep a line's looks: of each bucket its lowest and highest, so spikes stay."""
    if len(x) <= limit:
        return list(x), list(y)
    buckets = limit // 2
    kept: list[int] = []
    for bucket in range(buckets):
        indices = range(bucket * len(x) // buckets, (bucket + 1) * len(x) // buckets)
        known = [index for index in indices if not math.isnan(y[index])]
        if known:
            kept += sorted({min(known, key=y.__getitem__), max(known, key=y.__getitem__)})
        else:
            kept.append(indices[0])
    return [x[index] for index in kept], [y[index] for index in kept]


def smooth(y: Sequence[float], reach: int) -> list[float]:
    """The mean of each value and its neighbours, as many before as after (at most `reach`), so that nothing lags."""
    means = []
    for index in range(len(y)):
        near = min(reach, index, len(y) - 1 - index)
        known = [value for value in y[index - near : index + near + 1] if not math.isnan(value)]
        means.append(sum(known) / len(known) if known else math.nan)
    return means


def pick_evenly(count: int, limit: int) -> list[int]:
    """At most `limit` (two or more) of the indices below `count`, evenly spread, the first and the last among them."""
    if count <= limit:
        return list(range(count))
    return [round(number * (count - 1) / (limit - 1)) for number in range(limit)]
