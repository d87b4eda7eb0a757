"""Compute-optimal sizes against the published ones, and the rule for experts against its paper's own figures."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from tenfold.errors import TenfoldError
from tenfold.planning.scaling import CHINCHILLA, CORRECTED, ScalingLaw, effective, optimal_tokens, optimum

GOPHER = 5.76e23
"""Operations that Gopher and Chinchilla were trained with (arXiv 2203.15556)."""


def closed_form(law: ScalingLaw, flops: float) -> float:
    """Parameters by eq. 4 of arXiv 2203.15556."""
    g = (law.alpha * law.a / (law.beta * law.b)) ** (1 / (law.alpha + law.beta))
    return g * (flops / 6) ** (law.beta / (law.alpha + law.beta))


@pytest.mark.parametrize("law", [CHINCHILLA, CORRECTED])
@pytest.mark.parametrize("flops", [1e18, GOPHER, 1e27])
def test_dense_optima_are_those_of_the_closed_form(law: ScalingLaw, flops: float) -> None:
    found = optimum(flops, law=law)
    assert found.parameters == pytest.approx(closed_form(law, flops), rel=1e-3)
    assert 6 * found.parameters * found.tokens == pytest.approx(flops)


def test_the_published_optima_come_out() -> None:
    # Approach 3 of the paper says 40B for Gopher's budget (section 3.4); the corrected fit about 20 tokens a parameter,
    # with 70B and 1.4T tokens (Chinchilla itself) within its range.
    assert optimum(GOPHER, law=CHINCHILLA).parameters == pytest.approx(40e9, rel=0.03)
    corrected = optimum(GOPHER)
    assert corrected.parameters == pytest.approx(70e9, rel=0.1)
    assert corrected.tokens == pytest.approx(1.4e12, rel=0.1)


def test_the_optimum_is_that_of_trying_every_size() -> None:
    for experts in (1, 64):
        sizes = np.geomspace(1e7, 1e11, 20_000)
        tried = [CORRECTED.loss(effective(n, experts), 1e21 / 6 / n) for n in sizes]
        found = optimum(1e21, experts)
        assert found.loss == pytest.approx(min(tried), abs=1e-7)
        assert found.parameters == pytest.approx(sizes[int(np.argmin(tried))], rel=2e-3)


def test_experts_are_worth_what_the_paper_says() -> None:
    # Clark et al., section 5: a model of 5M with 128 experts is worth one of 55M. The table's constants are rounded.
    assert effective(5e6, 128) == pytest.approx(55e6, rel=0.1)
    assert effective(5e6, 1) == pytest.approx(5e6)
    # ... and routing stops to help at 937B.
    assert effective(10 ** (0.108 / 0.009) * 1.01, 128) == 10 ** (0.108 / 0.009) * 1.01
    worth = [effective(1e8, experts) for experts in (1, 2, 8, 64, 512)]
    assert worth == sorted(worth)
    gains = [effective(size, 64) / size for size in (1e7, 1e8, 1e9, 1e10)]
    assert gains == sorted(gains, reverse=True)


def test_with_experts_a_budget_buys_a_lower_loss_by_fewer_active_parameters() -> None:
    dense, mixture = optimum(1e22), optimum(1e22, 64)
    assert mixture.loss < dense.loss
    assert mixture.parameters < dense.parameters
    assert mixture.effective_parameters > dense.parameters
    assert "arXiv 2202.01169" in mixture.notes[0]
    assert not dense.notes
    assert "are beyond" in optimum(1e25, 1024).notes[1]


def test_more_budget_is_a_lower_loss_and_a_larger_model() -> None:
    found = [optimum(10.0**power) for power in range(15, 28)]
    assert all(one.loss > other.loss for one, other in pairwise(found))
    assert all(one.parameters < other.parameters for one, other in pairwise(found))


@pytest.mark.parametrize("experts", [1, 32])
def test_the_tokens_of_a_size_are_those_of_its_budget(experts: int) -> None:
    found = optimum(3e21, experts)
    assert optimal_tokens(found.parameters, experts) == pytest.approx(found.tokens, rel=1e-3)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(TenfoldError, match="a budget of 0 floating"):
        optimum(0)
    with pytest.raises(TenfoldError, match="nan"):
        optimum(math.nan)
    with pytest.raises(TenfoldError, match=r"0\.5 experts"):
        effective(1e9, 0.5)
