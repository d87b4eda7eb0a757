"""The loss of a run by its tokens, never shared, shared and delinked: the model, and its fit to short runs.

With n tokens seen, s of them shared:

    never shared   F(n) = floor + scale (n + offset)^-power
    shared         P(n) = the same form with numbers of its own, and a floor no lower: a shared model is a free one too
    delinked       F(m + w),  F(m) = P(s),  w = u - g (1 - exp(-u / |g|)),  u = n - s,  g = lag x s

Delinking changes no output, so the loss goes on from where it was; from there on it is that of the never shared run
which had the same loss (m tokens), as growing a model was found to keep its course (Shen et al., "Staged Training for
Transformer Language Models", arXiv 2203.06211), but for g tokens that layers need to become unlike: the loss nears
F(m + u - g). A lag below 0 is a gain. Without a delinked run the lag is taken to be 0. That too long a shared stage is
worse than none (SWE, arXiv 2110.03848) follows where P falls slower than F does at the same loss, or from the lag.

The form of the curves is that of Kaplan et al. (arXiv 2001.08361) and Hoffmann et al. (arXiv 2203.15556) in tokens, at
one model size. It knows no learning rate: runs that are fitted together should have schedules alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares
from scipy.special import lambertw

from tenfold.errors import TenfoldError

Array = np.ndarray
_BUCKETS = 64
_LEAST_POINTS = 8
_TINY = 1e-12


@dataclass(frozen=True)
class LossCurve:
    """floor + scale (tokens + offset)^-power: nats a token; `scale` counts the tokens one by one."""

    floor: float
    scale: float
    power: float
    offset: float = 0.0

    def __post_init__(self) -> None:
        for key in ("scale", "power"):
            if not getattr(self, key) > 0:
                raise TenfoldError(f"a loss curve's {key} = {getattr(self, key):g} must be over 0: the loss falls")
        for key in ("floor", "offset"):
            if not getattr(self, key) >= 0:
                raise TenfoldError(f"a loss curve's {key} = {getattr(self, key):g} must be 0 or more")

    def loss(self, tokens: Array | float) -> Array:
        """Nats a token after so many tokens."""
        return self.floor + self.scale * np.maximum(np.asarray(tokens, float) + self.offset, _TINY) ** -self.power

    def tokens_at(self, loss: Array | float) -> Array:
        """Where the loss is this: under 0 before the run's begin, infinite at the floor and under it."""
        over = np.asarray(loss, float) - self.floor
        with np.errstate(divide="ignore"):
            found = (np.maximum(over, 0) / self.scale) ** (-1 / self.power) - self.offset
        return np.where(over > 0, found, math.inf)


@dataclass(frozen=True)
class Curves:
    """What is known of the loss. `least_shared`: a shared stage of fewer tokens was not seen, and none is advised."""

    free: LossCurve
    shared: LossCurve
    lag: float = 0.0
    """Tokens a delinked run loses, for each shared token."""
    least_shared: float = 0.0
    last_seen: float = math.inf
    """Tokens of the longest run that was fitted; further on the curves are a guess."""

    def __post_init__(self) -> None:
        if self.shared.floor < self.free.floor:
            raise TenfoldError(
                f"the shared curve's floor {self.shared.floor:g} is under the never shared one's {self.free.floor:g}: "
                "what a shared model learns, the same without sharing can learn too; raise the one or lower the other"
            )

    def loss(self, shared_tokens: Array | float, tokens: Array | float) -> Array:
        """Of a run that shares for `shared_tokens` (infinite: throughout, 0: never) and has seen `tokens`."""
        shared, tokens = np.broadcast_arrays(np.asarray(shared_tokens, float), np.asarray(tokens, float))
        at = np.where((shared > 0) & np.isfinite(shared), shared, 1.0)
        from_there = self.free.loss(self.worth(at) + _forward(np.maximum(tokens - at, 0), self.lag * at))
        delinked = np.where(shared > 0, from_there, self.free.loss(tokens))
        return np.where(tokens <= shared, self.shared.loss(tokens), delinked)

    def worth(self, shared_tokens: Array | float) -> Array:
        """Tokens after which the never shared run has the loss that a shared stage of this length ends with."""
        return self.free.tokens_at(self.shared.loss(shared_tokens))

    def tokens_after(self, shared_tokens: Array | float, loss: float) -> Array:
        """Tokens from delinking until the loss is `loss`; 0 where it is no higher already."""
        shared = np.asarray(shared_tokens, float)
        goal = self.free.tokens_at(loss)
        missing = goal - self.worth(shared)
        return np.where(missing > 1e-9 * goal, _backward(np.maximum(missing, 0), self.lag * shared), 0.0)


def _forward(tokens: Array, lag: Array) -> Array:
    size = np.maximum(np.abs(lag), _TINY)
    return tokens + lag * np.expm1(-tokens / size)


def _backward(worth: Array, lag: Array) -> Array:
    """The inverse of `_forward`: with x = u / |g|, y = x - w / |g| - sign solves y e^y = -sign e^(-sign - w / |g|)."""
    size = np.maximum(np.abs(lag), _TINY)
    sign, over = np.sign(lag), worth / size
    with np.errstate(over="ignore", invalid="ignore"):
        y = lambertw(-sign * np.exp(-sign - over)).real
    return np.where(np.isfinite(over), np.maximum((y + over + sign) * size, 0), worth)


@dataclass(frozen=True)
class Observed:
    """A run's losses by tokens. `shared_tokens`: where it was delinked; 0: never shared, infinite: never delinked."""

    name: str
    tokens: Sequence[float]
    losses: Sequence[float]
    shared_tokens: float

    @property
    def kind(self) -> str:
        """never shared, shared, or delinked."""
        if not self.shared_tokens:
            return "never shared"
        return "delinked" if self.shared_tokens < max(self.tokens, default=0) else "shared"


@dataclass(frozen=True)
class Fit:
    """Curves fitted to runs; `draws` are as likely ones, from residuals drawn anew (of the noise within runs alone)."""

    curves: Curves
    draws: tuple[Curves, ...]
    noise: float
    """Standard deviation of a loss about its curve, nats."""
    lag_fitted: bool
    runs: tuple[str, ...] = ()


def fit(runs: Sequence[Observed], draws: int = 100, seed: int = 0) -> Fit:
    """Fit the curves of `runs` together, by least squares over losses averaged in stretches that grow with the tokens.

    At least one run has to share at its begin, and at least one never; delinked ones tell the lag. Raises TenfoldError
    where one of them is missing, too short, or does not learn.
    """
    data = _Data(runs)
    start = _start(data)
    found = least_squares(data.residuals, start, bounds=data.bounds, x_scale="jac", args=(data.losses,))
    point = data.curves(found.x)
    fitted = data.predicted(found.x)
    free = max(len(data.losses) - len(start), 1)
    noise = math.sqrt(float(np.sum(found.fun**2)) / free)
    generator = np.random.default_rng(seed)
    spread = found.fun - found.fun.mean()
    likely = []
    for _ in range(draws):
        again = fitted + generator.choice(spread, len(spread)) * math.sqrt(len(spread) / free) / data.weights
        result = least_squares(data.residuals, found.x, bounds=data.bounds, x_scale="jac", args=(again,), max_nfev=200)
        likely.append(data.curves(result.x))
    return Fit(point, tuple(likely), noise, data.lag_fitted, tuple(run.name for run in runs))


class _Data:
    """The runs as one least squares problem over
    (free: floor, log of the loss over it at the end, power, log of the offset; shared: floor over the free one, the
    same; lag), the middle ones in units of `unit` tokens."""

    def __init__(self, runs: Sequence[Observed]) -> None:
        kinds = {run.kind for run in runs}
        if "never shared" not in kinds:
            raise TenfoldError(
                "no run that never shares is among those to fit: without one it is not known what sharing is to be "
                'compared to; make a short one (one stage, sharing = "none") and name it too'
            )
        if kinds == {"never shared"}:
            raise TenfoldError(
                "no run that shares is among those to fit: name one whose layers share, with the same model and data"
            )
        shared, tokens, losses, weights = [], [], [], []
        for run in runs:
            for part, n, mean, count in _bucketed(run):
                shared.append(part)
                tokens.append(n)
                losses.append(mean)
                weights.append(math.sqrt(count))
        self.shared, self.tokens, self.losses, self.weights = map(np.array, (shared, tokens, losses, weights))
        self.unit = float(self.tokens.max())
        self.lag_fitted = "delinked" in kinds
        self.least_shared = float(self.tokens[self.shared > 0].min())
        top = float(self.losses.max()) * 4
        curve_low, curve_high = [0.0, math.log(1e-4), 0.02, math.log(1e-9)], [top, math.log(top), 3.0, math.log(10.0)]
        low, high = [*curve_low, *curve_low], [*curve_high, *curve_high]
        if self.lag_fitted:
            low, high = [*low, -5.0], [*high, 20.0]
        self.bounds = (np.array(low), np.array(high))

    def curve(self, numbers: Array, floor: float) -> LossCurve:
        """A curve of its four numbers; what it loses over its floor at `unit` tokens is the second of them."""
        _, over, power, offset = (float(number) for number in numbers)
        tokens = math.exp(offset) * self.unit
        return LossCurve(floor, math.exp(over) * (self.unit + tokens) ** power, power, tokens)

    def curves(self, numbers: Array) -> Curves:
        free = self.curve(numbers[:4], float(numbers[0]))
        shared = self.curve(numbers[4:8], float(numbers[0] + numbers[4]))
        lag = float(numbers[8]) if self.lag_fitted else 0.0
        return Curves(free, shared, lag, self.least_shared, self.unit)

    def predicted(self, numbers: Array) -> Array:
        return self.curves(numbers).loss(self.shared, self.tokens)

    def residuals(self, numbers: Array, losses: Array) -> Array:
        found = (self.predicted(numbers) - losses) * self.weights
        # Where the shared curve is under the free one's floor there is no free run with the same loss.
        return np.where(np.isfinite(found), found, 1e3 * self.weights)


def _bucketed(run: Observed) -> list[tuple[float, float, float, int]]:
    """(shared tokens, tokens, mean loss, count) of stretches of a run; none goes over a delinking."""
    found = []
    pairs = sorted(
        (float(n), float(loss)) for n, loss in zip(run.tokens, run.losses, strict=True) if math.isfinite(loss) and n > 0
    )
    parts = [
        ("before delinking", [pair for pair in pairs if pair[0] <= run.shared_tokens]),
        ("after delinking", [pair for pair in pairs if pair[0] > run.shared_tokens]),
    ]
    for where, part in parts:
        if not part:
            continue
        if len(part) < _LEAST_POINTS:
            told = where if run.kind == "delinked" else "in all"
            raise TenfoldError(
                f"{run.name} has {len(part)} losses {told}, and a curve takes at least {_LEAST_POINTS}: make a longer "
                "run, or one with a smaller training.log_every"
            )
        from_start = where == "before delinking" or run.kind != "delinked"
        third = max(len(part) // 3, 1)
        first, last = (_mean([loss for _, loss in some]) for some in (part[:third], part[-third:]))
        if from_start and first <= last:
            raise TenfoldError(
                f"the loss of {run.name} does not fall (from {first:.3f} to {last:.3f}): there is no curve to fit"
            )
        begin = part[0][0] if from_start else run.shared_tokens
        end = part[-1][0]
        bucket: list[tuple[float, float]] = []
        number = 0
        # By the logarithm of the tokens (of those since delinking, plus those before): a curve bends early.
        for n, loss in part:
            place = int(_BUCKETS * math.log(n / begin) / math.log(end / begin)) if end > begin else 0
            if place != number and bucket:
                found.append(_bucket(run, bucket))
                bucket = []
            number = place
            bucket.append((n, loss))
        found.append(_bucket(run, bucket))
    return found


def _bucket(run: Observed, pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float, int]:
    return run.shared_tokens, _mean([n for n, _ in pairs]), _mean([loss for _, loss in pairs]), len(pairs)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _start(data: _Data) -> Array:
    """Each curve by itself: for many powers and offsets the best floor and scale, which are linear."""
    free = _alone(data, data.shared == 0)
    shared = _alone(data, data.tokens <= data.shared)
    shared[0] = max(shared[0] - free[0], 1e-3)
    numbers = [*free, *shared, *([0.0] if data.lag_fitted else [])]
    low, high = data.bounds
    room = 1e-6 * (high - low)
    return np.clip(np.array(numbers), low + room, high - room)


def _alone(data: _Data, chosen: Array) -> list[float]:
    n, y, w = data.tokens[chosen] / data.unit, data.losses[chosen], data.weights[chosen]
    best, found = math.inf, [0.0, 0.0, 0.5, math.log(1e-3)]
    for power in np.geomspace(0.05, 2.0, 20):
        for offset in np.geomspace(1e-6, 1.0, 13):
            x = ((n + offset) / (1 + offset)) ** -power
            columns = np.stack([np.ones_like(x), x], axis=1) * w[:, None]
            (floor, over), *_ = np.linalg.lstsq(columns, y * w, rcond=None)
            if floor < 0:
                floor, over = 0.0, float(np.sum(w * w * x * y) / np.sum(w * w * x * x))
            off = float(np.sum((w * (floor + over * x - y)) ** 2))
            if over > 0 and off < best:
                best, found = off, [float(floor), math.log(over), float(power), math.log(offset)]
    return found


def given(free: LossCurve, shared: LossCurve, lag: float = 0.0) -> Fit:
    """Curves that somebody states: no draws, so nothing is told of how sure they are."""
    return Fit(Curves(free, shared, lag), (), 0.0, False)
