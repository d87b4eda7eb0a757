"""Whether Pseudo-to-Real pays: decided from measured steps, counted bytes, and what is known of the loss.

The model. A run of N tokens of which a share f is Pseudo takes N (f p + (1 - f) r) seconds, p and r being the measured
seconds of a token in a Pseudo and a Real step; it saves f (1 - p / r) of the run's time, and energy likewise. A step
does the same arithmetic in both, so what can be saved is the optimizer and the traffic of weights, gradients and
moments. What sharing does to the loss at equal tokens is not computed: `EVIDENCE` is all that is known of it, and the
nearest of it in length of run, then in share, is what is told.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tenfold.reporting.format import format_bytes, format_joules, format_seconds, format_share
from tenfold.training.timing import Timing

Verdict = Literal["share", "do not share", "open", "does not fit"]

CHOSEN_SHARE = 0.1
"""The length of a shared stage, as a share of the run, that came out better than none in runs of both lengths that are
known (EVIDENCE)."""

NO_CHEAPER = 0.95
"""A Pseudo step that costs more of a Real one than this saves less than half a percent of a run."""


@dataclass(frozen=True)
class Evidence:
    """What was measured of a run that shared all its layers for `share` of its `steps`, against one that never did."""

    steps: int
    share: float
    words: str


_STUDY = "a decoder of 12 layers, 391 steps, three seeds, updates divided; docs/results.md"
EVIDENCE = (
    Evidence(391, 0.05, f"level: 0.016 +- 0.031 nats worse ({_STUDY})"),
    Evidence(391, 0.1, f"0.037 +- 0.034 nats better ({_STUDY})"),
    Evidence(391, 0.2, f"level: 0.009 +- 0.059 nats better ({_STUDY})"),
    Evidence(391, 0.4, f"0.059 +- 0.077 nats worse ({_STUDY})"),
    Evidence(500_000, 0.1, "better: 73.72 against 73.21% (BERT-Large, 500k steps, masked tokens; arXiv 2110.03848)"),
    Evidence(500_000, 0.4, "worse: 72.27 against 73.21% (BERT-Large, 500k steps, masked tokens; arXiv 2110.03848)"),
)


@dataclass(frozen=True)
class Candidate:
    """A stage as counted and timed.

    `state_bytes` are those of weights, gradients and optimizer state, `rate_share` is the share of the machine's matrix
    rate that its steps reach. Without `timing` it was not timed, since one of the two does not fit.
    """

    name: str
    sharing: str
    stored_parameters: int
    state_bytes: int
    flops_per_token: float
    timing: Timing | None = None
    rate_share: float | None = None


@dataclass(frozen=True)
class Plan:
    """A length of the Pseudo stage: where it ends, and what it comes to at equal tokens against never sharing."""

    share: float
    step: int
    seconds: float
    seconds_saved: float
    joules_saved: float | None
    known_loss: str


@dataclass(frozen=True)
class Advice:
    """The verdict, why, and the figures behind it. `delink_step`: where to delink; 0: do not share at all."""

    verdict: Verdict
    delink_step: int | None
    step_cost: float | None  # a Pseudo step's, as a share of a Real one's, token by token
    told_apart: bool | None  # whether the timings of the two overlap less than their noise
    seconds_never_shared: float | None
    plans: tuple[Plan, ...]
    reasons: tuple[str, ...]


def nearest(steps: int, share: float) -> Evidence:
    """What is known of runs most like one of so many steps: nearest in the ratio of lengths, then in the share."""
    return min(EVIDENCE, key=lambda known: (abs(math.log(steps / known.steps)), abs(share - known.share)))


def decide(
    pseudo: Candidate, real: Candidate, tokens: int, steps: int, asked: tuple[float, int] | None, memory_bytes: int
) -> Advice:
    """Advice for a run of so many tokens and steps, on a machine with `memory_bytes` for state.

    `asked` is what the run file would do, if it shares at all: the share of the tokens, and the step that it ends at.
    """
    memory = (
        f"Weights, gradients and optimizer state are {format_bytes(pseudo.state_bytes)} Pseudo and "
        f"{format_bytes(real.state_bytes)} Real, of the {format_bytes(memory_bytes)} there are."
    )
    if pseudo.timing is None or real.timing is None:
        if pseudo.state_bytes > memory_bytes:
            why = "Neither stage fits on this machine: sharing alone does not make this model small enough for it."
        else:
            why = (
                "The Real stage does not fit on this machine: sharing would put off running out of memory to delinking."
            )
        remedy = "Take a machine with more memory, a smaller model, or a last stage that goes on sharing."
        reasons = [why, memory, remedy]
        return Advice("does not fit", None, None, None, None, (), tuple(reasons))
    cost = pseudo.timing.seconds_per_token / real.timing.seconds_per_token
    per_token = (
        pseudo.timing.quartiles[2] / pseudo.timing.tokens_per_step,
        real.timing.quartiles[0] / real.timing.tokens_per_step,
    )
    told_apart = per_token[0] < per_token[1]
    never = tokens * real.timing.seconds_per_token
    lengths = [(CHOSEN_SHARE, round(CHOSEN_SHARE * steps))] + ([] if asked is None else [asked])
    plans = [_plan(pseudo.timing, real.timing, tokens, steps, *length) for length in dict.fromkeys(lengths)]
    chosen, known = plans[0], nearest(steps, CHOSEN_SHARE)
    saved = chosen.seconds_saved / never
    reasons = [_step_words(pseudo, real, cost, told_apart)]
    verdict: Verdict
    if cost >= NO_CHEAPER:
        verdict = "do not share"
        reasons.append(
            "Do not share to save time here: the model fits, and what sharing saves of a step is next to nothing "
            "beside what stays."
        )
    elif not told_apart:
        verdict = "open"
        reasons.append(
            "The timings vary too much to tell the two apart: ask again while nothing else runs, with more --seconds."
        )
    else:
        verdict = "share"
        reasons.append(
            f"Share for the first {CHOSEN_SHARE:.0%} of the run and delink at step {chosen.step:,}: that takes "
            f"{format_seconds(chosen.seconds)} instead of {format_seconds(never)} at equal tokens, or gives "
            f"{saved / (1 - saved):.1%} more tokens in the same time. What more tokens are worth to the loss is not "
            "known here."
        )
    reasons.append(
        f"Loss at equal tokens, in the measured run most like this one ({known.share:.0%} shared): {known.words}."
    )
    reasons.append(memory)
    reasons.append(_energy_words(pseudo.timing, chosen))
    step = chosen.step if verdict in ("share", "open") else 0
    return Advice(verdict, step, cost, told_apart, never, tuple(plans), tuple(reasons))


def _plan(pseudo: Timing, real: Timing, tokens: int, steps: int, share: float, step: int) -> Plan:
    saved = tokens * share * (real.seconds_per_token - pseudo.seconds_per_token)
    joules = None
    if pseudo.joules_per_token is not None and real.joules_per_token is not None:
        joules = tokens * share * (real.joules_per_token - pseudo.joules_per_token)
    known = nearest(steps, share)
    return Plan(
        share=share,
        step=step,
        seconds=tokens * real.seconds_per_token - saved,
        seconds_saved=saved,
        joules_saved=joules,
        known_loss=f"{known.share:.0%} shared: {known.words}",
    )


def _step_words(pseudo: Candidate, real: Candidate, cost: float, told_apart: bool) -> str:
    assert pseudo.timing is not None
    assert real.timing is not None
    reached = "" if real.rate_share is None else f" and reaches {real.rate_share:.0%} of the machine's matrix rate"
    apart = "" if told_apart else ", which is within the noise of these timings"
    return (
        f"A Pseudo step costs {format_share(cost)} of a Real one, token by token{apart}. Both do the same arithmetic; "
        f"a Real step spends {format_share(real.timing.optimizer_share)} of its time in the optimizer{reached}."
    )


def _energy_words(timing: Timing, plan: Plan) -> str:
    if plan.joules_saved is None:
        return "Energy is not claimed: this machine has no meter that can be read, and energy.watts is not stated."
    how = "estimated from energy.watts" if timing.energy_source == "estimate" else f"measured by {timing.energy_source}"
    verb = "saves" if plan.joules_saved >= 0 else "costs"
    joules = format_joules(abs(plan.joules_saved))
    return f"At equal tokens sharing for {plan.share:.0%} of the run {verb} {joules} ({how})."
