"""How long to share: the delinking point that reaches a loss soonest, or the lowest loss within a budget.

Prices are per token of either stage, in seconds, joules or money alike: s shared tokens, the delinking and u free ones
cost s x shared + delinking + u x free. What the loss does is in `planning.curves`. Gains are shares of the price that
never sharing would take to the same loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.optimize import minimize_scalar

from tenfold.errors import TenfoldError
from tenfold.planning.curves import Curves, Fit

Verdict = Literal["share", "do not share", "open"]

LEAST_GAIN = 0.005
"""What saves less of the price than this is not worth a stage of its own (as `tenfold advise` has it)."""
SURE = 0.9
"""The share of likely curves under which sharing has to gain."""
_POINTS = 400


@dataclass(frozen=True)
class Price:
    """Of a token of either stage and of the delinking, in one unit. A budget or a result is in that unit too."""

    shared: float
    free: float
    delinking: float = 0.0
    unit: Literal["seconds", "joules", "cost"] = "seconds"

    def __post_init__(self) -> None:
        for key in ("shared", "free"):
            value = getattr(self, key)
            if not 0 < value < math.inf:
                raise TenfoldError(f"{self.unit} per {key} token = {value:g}: give a number over 0")
        if not 0 <= self.delinking < math.inf:
            raise TenfoldError(f"{self.unit} of delinking = {self.delinking:g}: give 0 or more")


@dataclass(frozen=True)
class Course:
    """A run: tokens shared, tokens free, and what they come to."""

    shared_tokens: float
    free_tokens: float
    loss: float
    price: float

    @property
    def tokens(self) -> float:
        """In all."""
        return self.shared_tokens + self.free_tokens

    @property
    def share(self) -> float:
        """Of the tokens, those that are shared."""
        return self.shared_tokens / self.tokens if self.tokens else 0.0


@dataclass(frozen=True)
class Horizon:
    """How long to share. `best` may be `never` itself."""

    verdict: Verdict
    best: Course
    never: Course
    """Never sharing: to the same loss (`soonest`), or for the same price (`lowest`)."""
    gain: float
    """Share of the price that sharing saves to the loss of `best`, against never sharing."""
    unit: str
    share_range: tuple[float, float] | None = None
    """From a tenth to nine tenths of the likely curves' best shares; None: nothing is known of how sure they are."""
    gain_range: tuple[float, float] | None = None
    """Of the gain that sharing for as long as `best` does would bring."""
    sure: float | None = None
    """The share of the likely curves under which sharing for so long gains."""
    beyond: float = 0.0
    """Tokens of `best` over those of the longest run that was fitted."""
    reasons: tuple[str, ...] = ()


def soonest(known: Fit, price: Price, loss: float) -> Horizon:
    """Reach `loss` for the least price. Raises TenfoldError where the never shared curve does not come to it."""
    curves = known.curves
    if not loss > curves.free.floor:
        raise TenfoldError(
            f"a loss of {loss:g} is never reached: the never shared curve goes down to {curves.free.floor:.4g}; aim "
            "higher, or take a larger model"
        )
    if loss >= float(curves.free.loss(0.0)):
        raise TenfoldError(f"a loss of {loss:g} is reached before the first step: aim lower")
    best, never = _soonest(curves, price, loss)
    return _judged(known, price, best, never, lambda other: _soonest(other, price, loss)[0])


def lowest(known: Fit, price: Price, budget: float) -> Horizon:
    """Reach the lowest loss within `budget`: seconds to a deadline, or joules."""
    if not 0 < budget < math.inf:
        raise TenfoldError(f"a budget of {budget:g} {price.unit}: give a number over 0")
    best, never = _lowest(known.curves, price, budget)
    return _judged(known, price, best, never, lambda other: _lowest(other, price, budget)[0])


def _soonest(curves: Curves, price: Price, loss: float) -> tuple[Course, Course]:
    tokens = float(curves.free.tokens_at(loss))
    if not math.isfinite(tokens):
        return (Course(0.0, math.inf, loss, math.inf),) * 2
    never = Course(0.0, tokens, loss, tokens * price.free)

    def of(shared: np.ndarray) -> np.ndarray:
        after = curves.tokens_after(shared, loss)
        return shared * price.shared + np.where(after > 0, price.delinking + after * price.free, 0.0)

    # Longer than until the shared model has the loss, or has cost what never sharing does, is of no use.
    most = min(float(curves.shared.tokens_at(loss)), never.price / price.shared)
    shared = _least(of, curves.least_shared, most)
    if shared is None or float(of(np.array(shared))) >= never.price:
        return never, never
    return Course(shared, float(curves.tokens_after(shared, loss)), loss, float(of(np.array(shared)))), never


def _lowest(curves: Curves, price: Price, budget: float) -> tuple[Course, Course]:
    tokens = budget / price.free
    never = Course(0.0, tokens, float(curves.free.loss(tokens)), budget)

    def after(shared: np.ndarray) -> np.ndarray:
        return np.maximum(budget - price.delinking - shared * price.shared, 0.0) / price.free

    def of(shared: np.ndarray) -> np.ndarray:
        return curves.loss(shared, shared + after(shared))

    shared = _least(of, curves.least_shared, budget / price.shared)
    if shared is None or float(of(np.array(shared))) >= never.loss:
        return never, never
    return Course(shared, float(after(np.array(shared))), float(of(np.array(shared))), budget), never


def _least(of: Callable[[np.ndarray], np.ndarray], low: float, high: float) -> float | None:
    """Where between `low` and `high` a function of many arguments at once is least: on a grid, then nearer."""
    low = max(low, high * 1e-9)
    if not low < high < math.inf:
        return None
    grid = np.union1d(np.linspace(low, high, _POINTS), np.geomspace(low, high, _POINTS))
    values = of(grid)
    place = int(np.argmin(values))
    ends = grid[max(place - 1, 0)], grid[min(place + 1, len(grid) - 1)]
    near = minimize_scalar(
        lambda x: float(of(np.array(x))), bounds=ends, method="bounded", options={"xatol": 1e-6 * high}
    )
    return float(near.x) if near.fun < values[place] else float(grid[place])


def _judged(known: Fit, price: Price, best: Course, never: Course, again: Callable[[Curves], Course]) -> Horizon:
    gain = _gain(known.curves, price, best)
    share_range = gain_range = sure = None
    if known.draws:
        shares = [again(curves).share for curves in known.draws]
        # Where the best is not to share, how sure that is goes by the shortest shared stage that was seen.
        trial = best if best.shared_tokens else Course(known.curves.least_shared, 0.0, best.loss, 0.0)
        gains = [_gain(curves, price, _same(curves, price, trial, best)) for curves in known.draws]
        share_range, gain_range = _range(shares), _range(gains)
        sure = float(np.mean([value > 0 for value in gains]))
    verdict: Verdict
    if gain < LEAST_GAIN:
        verdict = "do not share"
    elif sure is None or sure >= SURE:
        verdict = "share"
    else:
        verdict = "open"
    beyond = best.tokens / known.curves.last_seen
    return Horizon(
        verdict, best, never, gain, price.unit, share_range, gain_range, sure, beyond, _reasons(known, beyond)
    )


def _same(curves: Curves, price: Price, trial: Course, best: Course) -> Course:
    """A run that shares for as long as `trial` and costs what `best` does, by other curves."""
    shared = trial.shared_tokens
    free = max(best.price - price.delinking - shared * price.shared, 0.0) / price.free
    return Course(shared, free, float(curves.loss(shared, shared + free)), best.price)


def _gain(curves: Curves, price: Price, course: Course) -> float:
    """The share of the never shared price to the course's loss that the course saves."""
    if not course.shared_tokens:
        return 0.0
    whole = float(curves.free.tokens_at(course.loss)) * price.free
    return 1 - course.price / whole if whole > 0 else -math.inf


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = np.quantile(np.array(values), (0.1, 0.9))
    return float(low), float(high)


def _reasons(known: Fit, beyond: float) -> tuple[str, ...]:
    """What the answer hangs on, in sentences."""
    told = []
    if not known.draws:
        told.append("The curves were given, not fitted: how sure they are is not known.")
    else:
        told.append(
            f"Fitted to {', '.join(known.runs)} with {known.noise:.3g} nats of noise a logged loss; ranges come from "
            "that noise alone, not from other seeds."
        )
    if not known.lag_fitted:
        told.append(
            "No delinked run was fitted: a delinked model is taken to learn as the never shared one with the same loss."
        )
    if beyond > 1:
        told.append(
            f"The run is {beyond:.3g} times as long as the longest that was fitted: the curve there is a guess."
        )
    return tuple(told)
