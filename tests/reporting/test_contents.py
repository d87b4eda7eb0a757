"""Bars and lines about data."""

from __future__ import annotations

import numpy as np
from rich.cells import cell_len

from tenfold.data.inspection import Lengths, TextFacts
from tenfold.reporting.contents import _bar, text_lines


def test_bars_have_eighths_of_a_cell_and_show_the_least() -> None:
    assert _bar(1.0, 10) == "█" * 10
    assert _bar(0.5, 10) == "█" * 5
    assert _bar(1e-9, 10) == "▏"
    assert _bar(0.0, 10) == ""
    assert [cell_len(_bar(share / 80, 10)) for share in range(81)] == [-(-share // 8) for share in range(81)]


def test_a_row_for_every_power_of_two_between_shortest_and_longest() -> None:
    lengths = Lengths()
    lengths.add(np.array([1, 1, 1, 1, 9, 300], np.int64))
    lines = list(text_lines("a.txt", TextFacts(lengths, characters=312, first=[("x" * 500, True)]), 60))
    rows = [line for line in lines if "  " in line and line.strip()[-1].isdigit() and " - " in line]
    assert [row.split()[0] for row in rows] == ["2", "4", "8", "16", "32", "64", "128", "256"]
    assert next(line for line in lines if line.strip().startswith("1  █")).endswith("  4")
    assert lines[-1].endswith(" …")
    assert all(cell_len(line) <= 60 for line in lines[6:])
