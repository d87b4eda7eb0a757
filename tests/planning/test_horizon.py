"""How long to share: against brute force over every length, and what moves it."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from planning.test_curves import FREE, INFINITE, SHARED, TRUE, observed
from tenfold.errors import TenfoldError
from tenfold.planning.curves import Curves, LossCurve, fit, given
from tenfold.planning.horizon import Price, lowest, soonest

QUICK = LossCurve(floor=2.7, scale=1083.0, power=0.42, offset=1e5)
"""A shared model that is ahead of the free one until 3e7 tokens, as in arXiv 2110.03848."""
KNOWN = given(FREE, QUICK)


def price_by_steps(curves: Curves, shared: float, loss: float, price: Price, step: float) -> float:
    """What a run costs that goes step by step until it has the loss."""
    tokens = np.arange(1, 8000) * step
    done = int(np.argmax(curves.loss(shared, tokens) <= loss)) + 1
    assert done > 1
    paid = [price.shared if n <= shared else price.free for n in tokens[:done]]
    return math.fsum(paid) * step + (price.delinking if 0 < shared < tokens[done - 1] else 0.0)


def test_the_soonest_is_that_of_trying_every_length() -> None:
    price, loss = Price(0.4, 1.0, delinking=1e5), 3.0
    curves = Curves(FREE, SHARED, lag=0.4)
    found = soonest(given(FREE, SHARED, 0.4), price, loss)
    step = float(FREE.tokens_at(loss)) / 2000
    tried = {s: price_by_steps(curves, s, loss, price, step) for s in np.arange(0, 1200, 25) * step}
    assert found.best.price == pytest.approx(min(tried.values()), rel=0.01)
    assert found.never.price == pytest.approx(tried[0.0], rel=0.01)
    assert found.best.price == pytest.approx(
        price_by_steps(curves, found.best.shared_tokens, loss, price, step), rel=0.01
    )


def test_the_lowest_is_that_of_trying_every_length() -> None:
    price, budget = Price(0.4, 1.0, delinking=1e6), 1e8
    found = lowest(given(FREE, SHARED, 0.4), price, budget)
    tried = [
        float(TRUE.loss(s, s + (budget - price.delinking - s * 0.4)))
        for s in np.linspace(1, (budget - price.delinking) / 0.4, 20_000)
    ]
    assert found.best.loss == pytest.approx(min(*tried, found.never.loss), abs=1e-6)
    assert found.best.shared_tokens * 0.4 + found.best.free_tokens + price.delinking == pytest.approx(budget)
    assert found.never.loss == float(FREE.loss(budget))


def test_cheaper_shared_steps_move_the_best_delinking_later() -> None:
    shared = [soonest(KNOWN, Price(cost, 1.0), 3.0).best.shared_tokens for cost in (1.0, 0.8, 0.6, 0.4, 0.2, 0.1)]
    assert all(one < other for one, other in pairwise(shared))
    assert shared[0] > 0


def test_a_lag_moves_it_earlier_and_gains_less() -> None:
    found = [soonest(given(FREE, QUICK, lag), Price(0.6, 1.0), 3.0) for lag in (-0.2, 0.0, 0.2, 0.4)]
    assert all(one.best.shared_tokens > other.best.shared_tokens for one, other in pairwise(found))
    assert all(one.gain > other.gain for one, other in pairwise(found))


def test_too_long_a_shared_stage_is_worse_than_none_at_equal_tokens() -> None:
    at = 1e8
    best = lowest(KNOWN, Price(1.0, 1.0), at)
    assert best.verdict == "share"
    losses = {share: float(KNOWN.curves.loss(share * at, at)) for share in (best.best.share, 0.9)}
    assert losses[best.best.share] < best.never.loss < losses[0.9]


def test_a_shared_model_that_learns_no_faster_and_costs_the_same_does_not_pay() -> None:
    slow = LossCurve(floor=2.6, scale=400.0, power=0.28, offset=2e5)
    for found in (soonest(given(FREE, slow), Price(1, 1), 3.0), lowest(given(FREE, slow), Price(1, 1), 1e8)):
        assert found.verdict == "do not share"
        assert found.best == found.never
        assert found.gain == 0


def test_a_shared_model_that_has_the_loss_sooner_by_itself_is_not_delinked() -> None:
    found = soonest(KNOWN, Price(0.05, 1.0, delinking=1e9), 3.0)
    assert found.best.free_tokens == 0
    assert found.best.price == pytest.approx(0.05 * float(QUICK.tokens_at(3.0)), rel=1e-3)


def test_a_delinking_that_costs_more_than_sharing_saves_does_not_pay() -> None:
    assert soonest(KNOWN, Price(0.8, 1.0), 3.0).verdict == "share"
    assert soonest(KNOWN, Price(0.8, 1.0, delinking=1e9), 3.0).verdict == "do not share"


def test_units_do_not_matter() -> None:
    one, other = (soonest(KNOWN, Price(0.5 * unit, unit, 10 * unit), 3.0) for unit in (1.0, 1e-6))
    assert one.best.shared_tokens == pytest.approx(other.best.shared_tokens, rel=1e-3)
    assert one.gain == pytest.approx(other.gain)


def test_fitted_curves_say_how_sure_the_answer_is() -> None:
    runs = [observed("free", 0.0), observed("shared", INFINITE, seed=1), observed("both", 4e7, seed=2)]
    known = fit(runs, draws=40)
    cheap = lowest(known, Price(0.1, 1.0), 1e8)
    assert cheap.verdict == "share"
    assert cheap.sure == 1
    assert cheap.share_range is not None
    assert cheap.share_range[0] <= cheap.best.share <= cheap.share_range[1]
    true = lowest(given(FREE, SHARED, 0.4), Price(0.1, 1.0), 1e8)
    assert cheap.share_range[0] - 0.05 < true.best.share < cheap.share_range[1] + 0.05
    dear = lowest(known, Price(1.0, 1.0), 1e8)
    assert dear.verdict in ("do not share", "open")
    far = lowest(known, Price(0.1, 1.0), 1e10)
    assert far.beyond > 10
    assert "a guess" in far.reasons[-1]


def test_more_noise_makes_the_answer_less_sure() -> None:
    def width(noise: float) -> float:
        runs = [observed("free", 0.0, noise=noise), observed("shared", INFINITE, noise=noise, seed=1)]
        found = lowest(fit(runs, draws=40), Price(0.5, 1.0), 1e8)
        assert found.gain_range is not None
        return found.gain_range[1] - found.gain_range[0]

    assert width(0.01) < width(0.1)


def test_what_cannot_be_reached_is_refused() -> None:
    with pytest.raises(TenfoldError, match=r"a loss of 1\.9 is never reached: the never shared curve goes down to 2"):
        soonest(KNOWN, Price(1.0, 1.0), 1.9)
    with pytest.raises(TenfoldError, match="before the first step"):
        soonest(KNOWN, Price(1.0, 1.0), 50.0)
    with pytest.raises(TenfoldError, match="budget of 0 seconds"):
        lowest(KNOWN, Price(1.0, 1.0), 0.0)
    with pytest.raises(TenfoldError, match="seconds per free token = nan"):
        Price(1.0, math.nan)
