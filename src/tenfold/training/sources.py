"""The sources of a run: when their weights change, how often each is read, and what share it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tenfold.config.run import RunConfig
from tenfold.data.mixing import MixedSequences, Phase, cut_short
from tenfold.planning.stages import Stage, plan_stages

REPEATED_OFTEN = 4
"""Epochs from which on repeating a text is worth little (Muennighoff et al., arXiv 2305.16264)."""


def phases_of(config: RunConfig, ends: Mapping[str, int]) -> list[Phase]:
    """The stretches of constant weights, of a run whose rules ended stages at the steps in `ends`, in their order.

    What was laid out before a decision stays as it was up to it, and to the end of the block of samples that it falls
    into: the weights of what follows begin there.
    """
    phases, decided = _phases(plan_stages(config)), {}
    for name, step in ends.items():
        decided[name] = step
        stages = plan_stages(config, decided)
        number = [stage.name for stage in stages].index(name)
        phases = cut_short(phases, stages[number].sample_at(step))
        begin = phases[-1].last
        phases += [
            Phase(max(phase.first, begin), phase.last, phase.weights)
            for phase in _phases(stages[number + 1 :])
            if phase.last > begin
        ]
    return phases


def _phases(stages: list[Stage]) -> list[Phase]:
    return [Phase(stage.first_sample, stage.sample_at(stage.last_step), stage.weights) for stage in stages]


def tell_epochs(train: MixedSequences, samples: int, note: Callable[[str], None], warn: Callable[[str], None]) -> None:
    """How often a run of so many samples reads each source of a mixture; a warning where that is very often."""
    epochs = train.epochs(samples)
    if len(epochs) > 1:
        note("this run reads " + ", ".join(f"{name} {times:.2g} times" for name, times in epochs.items()))
    for name, times in epochs.items():
        if times > REPEATED_OFTEN:
            warn(
                f"{name or 'the text'} is read {times:.1f} times in this run; after some {REPEATED_OFTEN} times a text "
                f"teaches little new: take more of it, or {'give it less weight' if name else 'train for fewer tokens'}"
            )


def mixture_metrics(train: MixedSequences, stage: Stage, step: int) -> dict[str, Any]:
    """For events: the share of each source in `stage`, and the tokens it has given before `step`; empty for one."""
    if len(train.sources) == 1:
        return {}
    given, total = train.order.given(stage.sample_at(step)), sum(stage.weights)
    return {
        "mixture": {name: weight / total for name, weight in zip(train.sources, stage.weights, strict=True)},
        "source_tokens": {
            name: samples * stage.sequence_length for name, samples in zip(train.sources, given, strict=True)
        },
    }
