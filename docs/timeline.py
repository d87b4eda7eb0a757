"""The picture of docs/offload.md, a step with all state below the device: python docs/timeline.py docs/offload.svg."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

LAYERS, LEFT, TOP, HIGH, APART = 4, 74, 46, 30, 44
FORWARD, BACKWARD, STEP = 56, 84, 62
COMPUTE, READ, WRITE = "#2f6fb3", "#a9c6e6", "#e3b778"
LANES = ("compute", "read", "write")

Box = tuple[str, float, float, str]  # lane, from, to, what


def boxes() -> Iterator[Box]:
    """What each lane does when."""
    for layer in range(LAYERS):
        yield "compute", layer * FORWARD, (layer + 1) * FORWARD, f"F{layer}"
        if layer + 1 < LAYERS:
            yield "read", layer * FORWARD, layer * FORWARD + 42, f"W{layer + 1}"
    turn = LAYERS * FORWARD
    for place, layer in enumerate(reversed(range(LAYERS))):
        begin = turn + place * BACKWARD
        yield "compute", begin, begin + BACKWARD, f"B{layer}"
        if place > 0 and layer > 0:  # the two last layers' weights are still here
            yield "read", begin, begin + 42, f"W{layer - 1}"
        yield "write", begin + BACKWARD, begin + BACKWARD + 42, f"G{layer}"
    step = turn + LAYERS * BACKWARD
    for layer in range(LAYERS):
        begin = step + 54 + layer * STEP
        yield "read", begin - 54, begin - 4, f"G M W {layer}"
        yield "compute", begin, begin + 44, f"S{layer}"
        yield "write", begin + 48, begin + 98, f"M W {layer}"
    yield "read", step + 54 + LAYERS * STEP, step + 54 + LAYERS * STEP + 36, "W0"


def text(x: float, y: float, words: str, size: int = 11, anchor: str = "middle") -> str:
    """Words at a place."""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{words}</text>'


def picture() -> str:
    """The whole picture."""
    found = list(boxes())
    wide = LEFT + max(end for _, _, end, _ in found) + 16
    parts = [text(LEFT - 10, TOP + number * APART + HIGH / 2 + 4, lane, 13, "end") for number, lane in enumerate(LANES)]
    for lane, begin, end, words in found:
        number = LANES.index(lane)
        y, colour = TOP + number * APART, (COMPUTE, READ, WRITE)[number]
        parts.append(
            f'<rect x="{LEFT + begin + 1:.1f}" y="{y}" width="{end - begin - 2:.1f}" height="{HIGH}" fill="{colour}"/>'
        )
        shown = text(LEFT + (begin + end) / 2, y + HIGH / 2 + 4, words)
        parts.append(shown.replace("<text", '<text fill="#fff"', 1) if lane == "compute" else shown)
    turn, step = LAYERS * FORWARD, LAYERS * (FORWARD + BACKWARD)
    bounds = [0, turn, step, step + 54 + LAYERS * STEP]
    for name, begin, end in zip(("forward", "backward", "the optimizer's step"), bounds, bounds[1:], strict=False):
        parts.append(text(LEFT + (begin + end) / 2, TOP - 18, name, 13))
    low = TOP + len(LANES) * APART
    for at in bounds[1:]:
        parts.append(
            f'<line x1="{LEFT + at}" y1="{TOP - 32}" x2="{LEFT + at}" y2="{low}" stroke="#888" stroke-dasharray="3 3"/>'
        )
    keys = "F, B, S: forward, backward, step of a layer.  W: its weights.  G: its gradients.  M: its optimizer state."
    parts.append(text(LEFT, low + 16, keys, 12, "start"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:.0f} {low + 28}" font-family="sans-serif" '
        f'fill="#222"><title>A step whose state is below the device</title>'
        f'<rect width="{wide:.0f}" height="{low + 28}" fill="#fff"/>' + "".join(parts) + "</svg>\n"
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(picture(), encoding="utf-8")
