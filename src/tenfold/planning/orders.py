"""In what order a pipeline rank goes through its stages and micro-batches, by PyTorch's schedules and by TeraPipe's."""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from tenfold.config.parallel import Schedule

Kind = Literal["forward", "backward", "input", "weight"]
"""A whole backward pass, or the part of it that makes gradients of hidden states, or of weights."""


class Action(NamedTuple):
    """A pass of a stage."""

    kind: Kind
    stage: int
    micro_batch: int
    slice: int = 0


@lru_cache(maxsize=512)
def order_of(
    schedule: Schedule, rank: int, ranks: int, micro_batches: int, chunks: int = 2, slices: int = 1
) -> tuple[Action, ...]:
    """What `rank` of `ranks` does, with `chunks` stages a rank where the schedule has several."""
    if ranks == 1:
        return tuple(Action(kind, 0, number) for number in range(micro_batches) for kind in ("forward", "backward"))
    if schedule == "gpipe":
        every = range(micro_batches)
        return tuple(Action(kind, rank, number) for kind in ("forward", "backward") for number in every)
    if schedule == "1f1b":
        return _one_by_one(rank, micro_batches, min(micro_batches, ranks - rank))
    if schedule == "terapipe":
        return _sliced(rank, ranks, micro_batches, slices)
    return _of_pytorch(schedule, rank, ranks, micro_batches, 2 if schedule == "zbv" else chunks)


def _one_by_one(rank: int, micro_batches: int, ahead: int) -> tuple[Action, ...]:
    """So many forward passes ahead, then a backward and a forward pass in turn."""
    found = [Action("forward", rank, number) for number in range(ahead)]
    for number in range(micro_batches):
        found.append(Action("backward", rank, number))
        if ahead + number < micro_batches:
            found.append(Action("forward", rank, ahead + number))
    return tuple(found)


def _sliced(rank: int, ranks: int, micro_batches: int, slices: int) -> tuple[Action, ...]:
    """As `parallel.slices.SlicedPasses.run` takes turns."""
    count, behind = micro_batches * slices, slices - 1 + ranks - 1 - rank
    found = []
    for turn in range(count + behind):
        if turn < count:
            found.append(Action("forward", rank, *divmod(turn, slices)))
        if turn >= behind:
            number, index = divmod(turn - behind, slices)
            found.append(Action("backward", rank, number, slices - 1 - index))
    return tuple(found)


def _of_pytorch(schedule: str, rank: int, ranks: int, micro_batches: int, chunks: int) -> tuple[Action, ...]:
    """As PyTorch's own schedules compute it, which need no process group for that."""
    from torch.distributed.pipelining import (  # here: it takes seconds to import
        ScheduleInterleaved1F1B,
        ScheduleInterleavedZeroBubble,
        ScheduleZBVZeroBubble,
    )

    kinds: dict[str, Any] = {
        "interleaved-1f1b": ScheduleInterleaved1F1B,
        "interleaved-zero-bubble": ScheduleInterleavedZeroBubble,
        "zbv": ScheduleZBVZeroBubble,
    }
    asked = SimpleNamespace(
        pp_group_size=ranks,
        n_local_stages=chunks,
        num_stages=ranks * chunks,
        _num_stages=ranks * chunks,
        _n_microbatches=micro_batches,
        microbatches_per_round=micro_batches // max(1, micro_batches // ranks),
    )
    names: dict[str, Kind] = {
        "FORWARD": "forward",
        "FULL_BACKWARD": "backward",
        "BACKWARD_INPUT": "input",
        "BACKWARD_WEIGHT": "weight",
    }
    return tuple(
        Action(names[action.computation_type.name], action.stage_index, action.microbatch_index)
        for action in kinds[schedule]._calculate_single_rank_operations(asked, rank)
        if action is not None
    )
