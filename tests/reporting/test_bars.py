"""Bars: as many signs of a part as its share of the whole, whatever the order and the rounding."""

from __future__ import annotations

import pytest

from tenfold.reporting.bars import WIDTH, bar


def drawn(parts: dict[str, float], whole: float, width: int = WIDTH) -> tuple[str, str]:
    line, legend = bar(parts, whole, lambda value: f"{value:g}", width=width).plain.split("\n", 1)
    return line[:width], legend


def test_parts_have_their_share_of_the_line_largest_first() -> None:
    line, legend = drawn({"small": 10, "large": 50}, 100, width=20)
    assert line == "█" * 10 + "▓" * 2 + "·" * 8
    assert legend == "█ large 50  ▓ small 10"


@pytest.mark.parametrize(
    "parts", [{"a": 1.0, "b": 1.0, "c": 1.0}, {str(n): 1.0 for n in range(10)}, {"a": 1e-9, "b": 3.0}]
)
def test_a_full_bar_has_every_sign_drawn_whatever_the_rounding(parts: dict[str, float]) -> None:
    line, _ = drawn(parts, sum(parts.values()))
    assert len(line) == WIDTH
    assert "·" not in line


def test_more_than_the_whole_fills_the_line_and_says_how_much_there_is() -> None:
    text = bar({"a": 150.0}, 100, lambda value: f"{value:g}", "in forward").plain
    assert text.startswith("█" * WIDTH + " 150 of 100\nin forward\n")


def test_a_bar_of_nothing_is_empty() -> None:
    assert drawn({}, 0)[0] == "·" * WIDTH


def test_what_signs_stand_for_is_in_lines_that_fit() -> None:
    _, legend = drawn({f"a long name {number}": 1.0 + number for number in range(10)}, 100)
    lines = legend.split("\n")
    assert len(lines) > 1
    assert all(len(line) <= 64 for line in lines)
    assert " ".join(lines).count("a long name") == 10
