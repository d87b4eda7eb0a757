"""Matplotlib figures as small inline SVG that takes its colours from the page's style sheet."""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

# Matplotlib draws in these colours; each then becomes the CSS variable of that name, so a plot follows the theme.
COLOURS = {
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
RC: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: small, and sharp at every size
    "svg.hashsalt": "tenfold",
    "font.family": "sans-serif",
    "font.size": 9,
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
    "legend.fontsize": 8,
    "lines.linewidth": 1.4,
}


def to_svg(figure: Figure, prefix: str, title: str) -> str:
    """`figure` as an `<svg>` element as wide as its place; ids get `prefix`, so that several fit on one page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, dpi=160)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'\sid="([^"]+)"', rf' id="{prefix}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", text)
    text = re.sub(r'xlink:href="#([^"]+)"', rf'href="#{prefix}-\1"', text)
    text = text.replace("xlink:href=", "href=")
    text = re.sub(r"font: ([0-9.]+)px [^;\"]*", r"font-size: \1px", text)
    view = re.search(r'viewBox="[^"]+"', text)
    assert view is not None
    text = re.sub(r"<svg[^>]*>", f'<svg {view[0]} role="img" aria-label="{title}">', text, count=1)
    for name, colour in COLOURS.items():
        text = text.replace(colour, f"var(--{name})")
    return re.sub(r"\n\s*", "\n", text)


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
    """At most `limit` of the indices below `count`, evenly spread, the last one always among them."""
    if count <= limit:
        return list(range(count))
    return list(itertools.accumulate([(count - 1) // (limit - 1)] * (limit - 1), initial=(count - 1) % (limit - 1)))
