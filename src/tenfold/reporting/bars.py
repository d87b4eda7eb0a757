"""Bars for the terminal: of a whole, how much is what. They can be read without colours."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rich.text import Text

_SIGNS = "█▓▒░▞▚■◆□◇"
_COLOURS = ("blue", "green", "magenta", "yellow", "cyan", "red", "bright_blue", "bright_green", "white", "bright_red")
_FREE = "·"
WIDTH = 48
_LEGEND = 64
"""Characters of a line of what signs stand for: a bar fits 80 columns with 15 to spare."""


def bar(
    parts: Mapping[str, float], whole: float, show: Callable[[float], str], note: str = "", width: int = WIDTH
) -> Text:
    """A line of `width` signs for `whole`, of which each part has its share, and the sum of the parts behind it; below
    it what each sign stands for, the largest first. Parts that are more than `whole` fill the line."""
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    total = sum(parts.values())
    scale = max(total, whole)
    line, legend = Text(), Text()
    drawn, reached, filled = 0, 0.0, 0
    for place, (name, size) in enumerate(ordered):
        sign, colour = _SIGNS[place % len(_SIGNS)], _COLOURS[place % len(_COLOURS)]
        reached += size
        end = round(width * reached / scale) if scale else 0
        line.append(sign * (end - drawn), style=colour)
        drawn = end
        words = f" {name} {show(size)}"
        if place:
            apart = filled + len(words) + 3 > _LEGEND
            legend.append("\n" if apart else "  ")
            filled = 0 if apart else filled + 2
        legend.append(sign, style=colour)
        legend.append(words)
        filled += len(words) + 1
    line.append(_FREE * (width - drawn), style="dim")
    differs = abs(total - whole) > 1e-6 * scale
    line.append(f" {show(total)}{f' of {show(whole)}' if differs else ''}")
    if note:
        legend = Text(f"{note}\n").append_text(legend)
    return line.append("\n").append_text(legend)
