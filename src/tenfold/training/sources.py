"""What a run tells of its sources: how often each is read, and what share it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tenfold.data.mixing import MixedSequences
from tenfold.training.stages import Stage

REPEATED_OFTEN = 4
"""Epochs from which on repeating a text is worth little (Muennighoff et al., arXiv 2305.16264)."""


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
