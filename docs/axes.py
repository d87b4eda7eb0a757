"""The picture of docs/parallel.md, what one rank has of batch and weights: python docs/axes.py docs/axes.svg."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

WIDTH, HEIGHT, GAP = 132, 92, 26
MINE, OTHER, LENT = "#2f6fb3", "#dfe5ec", "#a9c6e6"

# For every axis: rectangles (x, y, width, height in shares) of the batch, and of the weights, that rank 0 of two has;
# and of the weights those that it gathers while it uses them.
Box = tuple[float, float, float, float]
ALL: list[Box] = [(0, 0, 1, 1)]
TOP: list[Box] = [(0, 0, 1, 0.5)]
LEFT: list[Box] = [(0, 0, 0.5, 1)]
ZIGZAG: list[Box] = [(0, 0, 0.25, 1), (0.75, 0, 0.25, 1)]
EXPERTS: list[Box] = [(0, 0, 0.4, 1), (0.4, 0, 0.6, 0.25), (0.4, 0.5, 0.6, 0.25)]
AXES: list[tuple[str, list[Box], list[Box], list[Box]]] = [
    ("data_replicate", TOP, ALL, []),
    ("data_shard", TOP, LEFT, ALL),
    ("tensor", LEFT, LEFT, []),
    ("context", ZIGZAG, LEFT, ALL),
    ("pipeline", ALL, TOP, []),
    ("expert", TOP, EXPERTS, []),
]


def boxes(boxes: list[Box], x: float, y: float, colour: str) -> Iterator[str]:
    """Rectangles of one colour inside of the frame at x, y."""
    for left, top, width, height in boxes:
        yield (
            f'<rect x="{x + left * WIDTH:.1f}" y="{y + top * HEIGHT:.1f}" width="{width * WIDTH:.1f}" '
            f'height="{height * HEIGHT:.1f}" fill="{colour}"/>'
        )


def text(x: float, y: float, words: str, size: int = 12, anchor: str = "middle") -> str:
    """Words at a place."""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{words}</text>'


def picture() -> str:
    """The whole picture."""
    parts: list[str] = []
    for number, (axis, batch, weights, lent) in enumerate(AXES):
        left = GAP + (number % 3) * (2 * WIDTH + 3 * GAP)
        top = 58 + (number // 3) * (HEIGHT + 84)
        parts.append(text(left + WIDTH + GAP / 2, top - 26, f"{axis} = 2", 15))
        for x, name, mine, gathered in (
            (left, "batch", batch, []),
            (left + WIDTH + GAP, "weights", weights, lent),
        ):
            parts += boxes(ALL, x, top, OTHER)
            parts += boxes(gathered, x, top, LENT)
            parts += boxes(mine, x, top, MINE)
            parts.append(text(x + WIDTH / 2, top - 7, name))
        parts.append(text(left + WIDTH / 2, top + HEIGHT + 15, "positions →", 11))
        parts.append(text(left + WIDTH + GAP + WIDTH / 2, top + HEIGHT + 15, "width →", 11))
        for x, words in ((left - 6, "samples"), (left + WIDTH + GAP - 6, "layers")):
            y = top + HEIGHT / 2
            parts.append(f'<g transform="rotate(-90 {x} {y})">{text(x, y, words, 11)}</g>')
    wide, high = 3 * (2 * WIDTH + 3 * GAP) + GAP, 58 + 2 * (HEIGHT + 84) + 10
    key = high - 14
    parts += [
        f'<rect x="{GAP}" y="{key - 10}" width="12" height="12" fill="{MINE}"/>',
        text(GAP + 18, key, "what rank 0 of two has", 12, "start"),
        f'<rect x="{GAP + 190}" y="{key - 10}" width="12" height="12" fill="{LENT}"/>',
        text(GAP + 208, key, "what it gathers, segment by segment, while it uses it", 12, "start"),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" font-family="sans-serif" fill="#222">'
        f'<title>What one rank has along each axis</title><rect width="{wide}" height="{high}" fill="#fff"/>'
        + "".join(parts)
        + "</svg>\n"
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(picture(), encoding="utf-8")
