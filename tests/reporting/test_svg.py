"""Thinning and smoothing of lines, and the SVG that is put into the page."""

from __future__ import annotations

import itertools
import math

import pytest
from matplotlib.figure import Figure

from tenfold.reporting.svg import pick_evenly, smooth, thin, to_svg


def test_a_short_line_stays_as_it_is() -> None:
    assert thin([1, 2, 3], [4, 5, 6]) == ([1, 2, 3], [4, 5, 6])


def test_a_long_line_is_thinned_and_keeps_its_spikes_and_gaps() -> None:
    y = [0.0] * 50_000
    y[31_234] = 7.0
    y[1_000:3_000] = [math.nan] * 2_000
    x, thinned = thin([float(index) for index in range(len(y))], y, limit=1000)
    assert len(x) <= 1000
    assert x == sorted(x)
    assert thinned[x.index(31_234.0)] == 7.0
    assert any(math.isnan(value) for value in thinned)


def test_smoothing_neither_lags_nor_bends_a_straight_line() -> None:
    y = [float(index) for index in range(50)]
    assert smooth(y, 5) == pytest.approx(y)


def test_smoothing_passes_over_gaps() -> None:
    assert smooth([1.0, math.nan, 3.0], 1) == [1.0, 2.0, 3.0]
    assert math.isnan(smooth([math.nan], 3)[0])


@pytest.mark.parametrize("count", [1, 2, 9, 10, 11, 999])
def test_picked_indices_are_few_different_and_have_both_ends(count: int) -> None:
    picked = pick_evenly(count, 10)
    assert len(picked) == min(count, 10)
    assert picked == sorted(set(picked))
    assert (picked[0], picked[-1]) == (0, count - 1)
    gaps = {after - before for before, after in itertools.pairwise(picked)}
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_a_figure_becomes_a_bare_svg_with_ids_of_its_own() -> None:
    figure = Figure()
    figure.add_subplot().plot([1, 2], [3, 4], marker="o")
    text = to_svg(figure, "here", "A line")
    assert text.startswith('<svg viewBox="')
    assert "http" not in text
    assert "<metadata" not in text
    assert 'id="here-' in text
    assert 'id="figure' not in text
