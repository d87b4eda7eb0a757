"""The advice on sharing, decided from given numbers."""

from __future__ import annotations

import pytest

from tenfold.training.advising import EVIDENCE, Advice, Candidate, decide, nearest
from tenfold.training.timing import Timing

MEMORY = 100 * 2**30


def candidate(
    name: str,
    step_seconds: float | tuple[float, ...] | None,
    parameters: int = 10**6,
    joules: float | None = None,
    tokens: int = 1000,
    source: str | None = "rapl",
) -> Candidate:
    timing = None
    if step_seconds is not None:
        taken = (step_seconds,) * 4 if isinstance(step_seconds, float) else step_seconds
        timing = Timing(tokens, taken, 0.25, joules, None if joules is None else source)
    return Candidate(name, "all", parameters, 16 * parameters, 1e9, timing, 0.8)


def advice(pseudo: Candidate, real: Candidate, steps: int = 500_000, asked: tuple[float, int] | None = None) -> Advice:
    return decide(pseudo, real, tokens=1000 * steps, steps=steps, asked=asked, memory_bytes=MEMORY)


def test_a_step_that_is_hardly_cheaper_is_not_worth_sharing() -> None:
    told = advice(candidate("pseudo", 0.97), candidate("real", 1.0))
    assert told.verdict == "do not share"
    assert told.delink_step == 0
    assert told.step_cost == pytest.approx(0.97)
    assert "next to nothing" in " ".join(told.reasons)
    assert "25.0% of its time in the optimizer and reaches 80%" in told.reasons[0]


def test_a_long_run_with_cheap_steps_shares_as_was_published() -> None:
    told = advice(candidate("pseudo", 0.4), candidate("real", 1.0))
    assert told.verdict == "share"
    assert told.delink_step == 50_000
    (plan,) = told.plans
    # 500,000 s never shared; a tenth of them at 0.4 s
    assert told.seconds_never_shared == pytest.approx(500_000)
    assert plan.seconds_saved == pytest.approx(30_000)
    assert plan.seconds == pytest.approx(470_000)
    assert "6.4% more tokens" in " ".join(told.reasons)
    assert "73.72 against 73.21" in plan.known_loss


def test_a_short_run_is_told_of_the_study_and_of_what_it_asks_for_itself() -> None:
    told = advice(candidate("pseudo", 0.6), candidate("real", 1.0), steps=1000)
    assert (told.verdict, told.delink_step) == ("share", 100)
    assert "0.037 +- 0.034 nats better" in " ".join(told.reasons)
    assert "0.059 +- 0.077 nats worse" in nearest(1000, 0.35).words


def test_timings_that_overlap_are_not_told_apart() -> None:
    told = advice(candidate("pseudo", (0.5, 0.8, 1.2, 1.5)), candidate("real", (0.9, 1.1, 1.2, 1.9)))
    assert told.told_apart is False
    assert told.verdict == "open"
    assert "within the noise" in told.reasons[0]
    assert "vary too much" in told.reasons[1]


def test_stages_of_other_batch_sizes_are_compared_by_the_token() -> None:
    told = advice(candidate("pseudo", 2.0, tokens=4000), candidate("real", 1.0, tokens=1000))
    assert told.step_cost == pytest.approx(0.5)


def test_the_run_file_s_own_length_is_told_beside_the_published_one() -> None:
    told = advice(candidate("pseudo", 0.5), candidate("real", 1.0), asked=(0.4, 200_000))
    published, own = told.plans
    assert (published.share, published.step) == (0.1, 50_000)
    assert (own.share, own.step) == (0.4, 200_000)
    assert own.seconds_saved == pytest.approx(100_000)
    assert "worse: 72.27" in own.known_loss
    assert len(advice(candidate("pseudo", 0.5), candidate("real", 1.0), asked=(0.1, 50_000)).plans) == 1


def test_energy_is_reckoned_where_it_was_metered_and_else_not_claimed() -> None:
    # 4 timed steps of 1,000 tokens: 0.01 and 0.03 J a token; a tenth of 5e8 tokens.
    told = advice(candidate("pseudo", 0.5, joules=40.0), candidate("real", 1.0, joules=120.0))
    assert told.plans[0].joules_saved == pytest.approx(5e8 * 0.1 * 0.02)
    assert "saves 1 MJ (measured by rapl)" in told.reasons[-1]
    stated = advice(candidate("p", 0.5, joules=40.0, source="estimate"), candidate("r", 1.0, joules=120.0))
    assert "estimated from energy.watts" in stated.reasons[-1]
    none = advice(candidate("pseudo", 0.5), candidate("real", 1.0))
    assert none.plans[0].joules_saved is None
    assert "not claimed" in none.reasons[-1]


def test_what_does_not_fit_is_told_with_the_bytes() -> None:
    large = candidate("real", None, parameters=10 * 2**30)
    told = advice(candidate("pseudo", None), large)
    assert told.verdict == "does not fit"
    assert told.delink_step is None
    assert told.plans == ()
    assert "The Real stage does not fit" in told.reasons[0]
    assert "160 GiB Real, of the 100 GiB" in told.reasons[1]
    assert "Neither stage fits" in advice(large, large).reasons[0]


def test_the_nearest_evidence_is_so_by_length_and_then_by_share() -> None:
    assert nearest(300, 0.1) is EVIDENCE[1]
    assert nearest(400_000, 0.05) is EVIDENCE[4]
    assert nearest(10**7, 0.35) is EVIDENCE[5]
    middle = (391 * 500_000) ** 0.5
    assert nearest(round(middle * 0.99), 0.25) is EVIDENCE[2]
    assert nearest(round(middle * 1.01), 0.25).steps == 500_000
