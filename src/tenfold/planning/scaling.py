"""Compute-optimal model size and tokens for a budget of floating-point operations.

    loss = floor + a / N^alpha + b / D^beta,   C = 6 N D       N parameters, D tokens, C operations

Hoffmann et al., "Training Compute-Optimal Large Language Models" (arXiv 2203.15556, approach 3), and the fit to the
same runs by Besiroglu et al. (arXiv 2404.10102), who found that the first had not converged; theirs agrees with the
paper's other two approaches, about 20 tokens a parameter, and is the default.

In a mixture of experts a token pays for its active parameters: C = 6 N_active D. What the others bring is told by
Clark et al., "Unified Scaling Laws for Routed Language Models" (arXiv 2202.01169, eq. 1 and 11, table 3, S-BASE): a
mixture with E experts for each one chosen learns as a dense model of

    log10 N' = (a log10 N + b log10 E' + c log10 N log10 E' - b log10 E'(1)) / (a + c log10 E'(1))
    1 / E'(E) = 1 / (E - 1 + 1 / (1 / E_start - 1 / E_max)) + 1 / E_max

and N' stands for N in the loss above. Its limits: fitted at 130e9 tokens, up to 512 experts, one chosen, in every other
layer, and models of up to 1.3e9 parameters a token; from N = 10^(-b / c), about 1e12, on experts bring nothing by it.
What experts change about the need of tokens is not in it, and prototypes count as one choice each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy.optimize import minimize_scalar

from tenfold.errors import TenfoldError

FLOPS_PER_PARAMETER = 6
"""Of a token, forward and backward; attention is not in it (Hoffmann et al., appendix F)."""


@dataclass(frozen=True)
class ScalingLaw:
    """Nats a token of a dense model that N parameters and D tokens come to."""

    source: str
    floor: float
    a: float
    alpha: float
    b: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        """Of effective parameters; see `effective`."""
        return self.floor + self.a * parameters**-self.alpha + self.b * tokens**-self.beta


# The paper's text rounds the exponents, which shifts the loss (Besiroglu et al., section 4); these are of its source.
CHINCHILLA = ScalingLaw("arXiv 2203.15556, approach 3", 1.6934, 406.4, 0.3392, 410.7, 0.2849)
CORRECTED = ScalingLaw("arXiv 2404.10102", 1.8172, 482.01, 0.3478, 2085.43, 0.3658)

_A, _B, _C, _E_START, _E_MAX = -0.082, -0.108, 0.009, 1.847, 314.478
_MOST_EXPERTS, _MOST_ACTIVE = 512, 1.3e9


@dataclass(frozen=True)
class Optimum:
    """The best model for a budget. `parameters` are active ones; `notes` say what of it is beyond what was measured."""

    flops: float
    parameters: float
    tokens: float
    loss: float
    effective_parameters: float
    source: str
    notes: tuple[str, ...] = ()


def effective(active: float, experts: float = 1.0) -> float:
    """Parameters of the dense model that learns as one does with so many `active` and `experts` for each one chosen."""
    if not active >= 1:
        raise TenfoldError(f"a model of {active:g} active parameters: give 1 or more")
    if not experts >= 1:
        raise TenfoldError(f"{experts:g} experts for each one chosen: give 1 (dense) or more")
    size, spread, one = math.log10(active), math.log10(_saturating(experts)), math.log10(_saturating(1.0))
    found = (_A * size + _B * spread + _C * size * spread - _B * one) / (_A + _C * one)
    return max(active, 10.0**found)


def _saturating(experts: float) -> float:
    return 1 / (1 / (experts - 1 + 1 / (1 / _E_START - 1 / _E_MAX)) + 1 / _E_MAX)


LEAST = 1e12
"""Operations below which the law says nothing."""


def optimum(flops: float, experts: float = 1.0, law: ScalingLaw = CORRECTED) -> Optimum:
    """The active parameters and tokens of the lowest loss for `flops`, with `experts` for each one that is chosen."""
    if not LEAST <= flops < math.inf:
        raise TenfoldError(f"a budget of {flops:g} floating-point operations: give 1e12 or more")

    def loss(log_parameters: float) -> float:
        active = math.exp(log_parameters)
        return law.loss(effective(active, experts), flops / FLOPS_PER_PARAMETER / active)

    most = math.log(flops / FLOPS_PER_PARAMETER)
    found = minimize_scalar(loss, bounds=(0.0, most), method="bounded", options={"xatol": 1e-7})
    active = math.exp(found.x)
    notes = _notes(active, experts)
    return Optimum(
        flops,
        active,
        flops / FLOPS_PER_PARAMETER / active,
        float(found.fun),
        effective(active, experts),
        law.source,
        notes,
    )


def optimal_tokens(active: float, experts: float = 1.0, law: ScalingLaw = CORRECTED) -> float:
    """Tokens for which a model of this size is the compute-optimal one."""
    # The optimum grows with the budget, so the budget is found by halving (in logarithms).
    low, high = 12.0, 60.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if optimum(10.0**middle, experts, law).parameters < active else (low, middle)
    return optimum(10.0**high, experts, law).tokens


def _notes(active: float, experts: float) -> tuple[str, ...]:
    if experts == 1:
        return ()
    found = ["What experts bring is by a law fitted at 130B tokens with one expert chosen (arXiv 2202.01169)."]
    if experts > _MOST_EXPERTS or active > _MOST_ACTIVE:
        found.append(
            f"It was fitted up to {_MOST_EXPERTS} experts for each one chosen and {_MOST_ACTIVE:.2g} active "
            f"parameters: {experts:g} and {active:.3g} are beyond."
        )
    return tuple(found)
