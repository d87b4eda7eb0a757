"""Loss curves: the model of a delinked run, and its numbers found again in noisy runs made of known ones."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tenfold.errors import TenfoldError
from tenfold.planning.curves import Curves, LossCurve, Observed, fit

FREE = LossCurve(floor=2.0, scale=260.0, power=0.30, offset=2e5)
SHARED = LossCurve(floor=2.6, scale=500.0, power=0.36, offset=1e5)
TRUE = Curves(FREE, SHARED, lag=0.4)
INFINITE = math.inf


def observed(
    name: str, shared: float, last: float = 2e8, noise: float = 0.02, seed: int = 0, of: Curves = TRUE
) -> Observed:
    tokens = np.linspace(last / 800, last, 800)
    losses = of.loss(shared, tokens) + np.random.default_rng(seed).normal(0, noise, len(tokens))
    return Observed(name, list(tokens), list(losses), shared)


def test_a_delinked_run_begins_at_the_shared_loss_and_nears_the_shifted_free_curve() -> None:
    s = 2e7
    assert TRUE.loss(s, s * (1 + 1e-9)) == pytest.approx(float(SHARED.loss(s)), rel=1e-6)
    far = 1e10
    late = FREE.loss(float(TRUE.worth(s)) + far - 0.4 * s)
    assert TRUE.loss(s, s + far) == pytest.approx(float(late), rel=1e-12)
    assert TRUE.loss(0.0, 1e8) == FREE.loss(1e8)
    assert TRUE.loss(INFINITE, 1e8) == SHARED.loss(1e8)


@pytest.mark.parametrize("lag", [-3.0, -0.5, 0.0, 0.3, 2.0])
def test_tokens_after_delinking_are_where_the_loss_is_reached(lag: float) -> None:
    curves = Curves(FREE, SHARED, lag)
    for s in (1e6, 2e7, 3e8):
        loss = float(SHARED.loss(s)) - 0.2
        after = float(curves.tokens_after(s, loss))
        assert curves.loss(s, s + after) == pytest.approx(loss, abs=1e-9)
    assert curves.tokens_after(1e8, float(SHARED.loss(1e8)) + 0.1) == 0


@pytest.mark.parametrize("lag", [-0.5, 0.0, 2.0])
def test_the_loss_never_rises_with_tokens(lag: float) -> None:
    losses = Curves(FREE, SHARED, lag).loss(2e7, np.geomspace(1e5, 1e12, 500))
    assert np.all(np.diff(losses) <= 0)


def test_known_numbers_are_found_again() -> None:
    runs = [observed("free", 0.0), observed("shared", INFINITE, seed=1), observed("both", 4e7, seed=2)]
    found = fit(runs, draws=30)
    curves = found.curves
    assert found.noise == pytest.approx(0.02, rel=0.1)
    assert curves.free.floor == pytest.approx(2.0, abs=0.1)
    assert curves.free.power == pytest.approx(0.30, abs=0.02)
    assert curves.shared.floor == pytest.approx(2.6, abs=0.1)
    assert curves.lag == pytest.approx(0.4, abs=0.25)
    assert found.lag_fitted
    tokens = np.geomspace(1e6, 2e8, 50)
    for shared in (0.0, INFINITE, 4e7):
        assert np.abs(curves.loss(shared, tokens) - TRUE.loss(shared, tokens)).max() < 0.02


def test_the_spread_of_the_draws_is_that_of_fits_to_runs_made_anew() -> None:
    """The oracle: twenty sets of runs with noise of their own, each fitted, spread as the draws of one of them do."""

    def of(seed: int, draws: int) -> tuple[float, list[float]]:
        runs = [observed("free", 0.0, seed=seed), observed("shared", INFINITE, seed=seed + 1000)]
        found = fit(runs, draws=draws)
        assert not found.lag_fitted
        assert found.curves.lag == 0
        return float(found.curves.free.loss(1e9)), [float(each.free.loss(1e9)) for each in found.draws]

    _, drawn = of(0, 60)
    true = np.std([of(seed, 0)[0] for seed in range(1, 21)])
    assert 0.5 < np.std(drawn) / true < 2


def test_a_shared_curve_is_not_fitted_below_what_a_free_model_can_learn() -> None:
    # Over the length of these runs the shared curve falls as if it had no floor; the free one has levelled off.
    free, shared = LossCurve(3.0, 1000, 0.5), LossCurve(3.0, 60.0, 0.2)
    made = Curves(free, shared)
    found = fit([observed("a", 0.0, of=made), observed("b", INFINITE, seed=3, of=made)], draws=5)
    for curves in (found.curves, *found.draws):
        assert curves.shared.floor >= curves.free.floor


def test_what_cannot_be_fitted_is_refused() -> None:
    free, shared = observed("free", 0.0), observed("shared", INFINITE)
    with pytest.raises(TenfoldError, match="no run that never shares"):
        fit([shared])
    with pytest.raises(TenfoldError, match="no run that shares"):
        fit([free])
    short = Observed("short", shared.tokens[:7], shared.losses[:7], INFINITE)
    with pytest.raises(TenfoldError, match="short has 7 losses in all, and a curve takes at least 8"):
        fit([free, short])
    tail = Observed("tail", shared.tokens[:30], shared.losses[:30], shared.tokens[26])
    with pytest.raises(TenfoldError, match="tail has 3 losses after delinking"):
        fit([free, tail])
    flat = Observed("flat", free.tokens, [2.0 + 1e-9 * n for n in range(800)], INFINITE)
    with pytest.raises(TenfoldError, match="the loss of flat does not fall"):
        fit([free, flat])
    with pytest.raises(TenfoldError, match=r"power = 0 must be over 0"):
        LossCurve(2.0, 10.0, 0.0)
    with pytest.raises(TenfoldError, match=r"floor 1\.5 is under the never shared one's 2"):
        Curves(FREE, LossCurve(1.5, 10.0, 0.3))
