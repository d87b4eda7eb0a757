"""A dry run: one rank of each kind of a layout of any size goes through real steps, with tensors that have no memory.

The code is that of a run: the model laid out, FSDP2, optimizers with their state, forward and backward passes, the
exchange of gradients, the norm, clipping, the step, and the delinking between stages. Tensors are PyTorch's fakes, and
so is the process group, in which nobody answers. What is counted is what was there at once and what was sent (`tally`);
`dry_run` holds it against what the planner says by arithmetic.

Nothing is known of numbers. So what hangs on them is as even as can be: every expert gets as many tokens as any other,
none is dropped, every sequence is one document, losses and norms are finite. What lies below the device is taken to be
on it, for the engine of `offload` moves bytes that are none here: `Counted.tiers` then says what a placement leaves.

Every rank has a process of its own, in which nothing else is done: process groups and fakes stay in it.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

import torch

from tenfold.config.run import RunConfig
from tenfold.errors import TenfoldError
from tenfold.offload.placement import Part
from tenfold.planning.holdings import Holdings, parallel_of
from tenfold.planning.memory import Device
from tenfold.planning.stages import Stage
from tenfold.planning.terms import Candidate
from tenfold.training.tally import Exchange


@dataclass(frozen=True)
class Counted:
    """What one rank had in memory in a stage's second step, and exchanged in it."""

    number: int
    """Of the stage, of those that were gone through."""
    stage: str
    rank: int
    pipeline_rank: int
    items: dict[str, int]
    """Bytes of weights, gradients, moments; of what is gathered and of activations, when a backward pass begins."""
    peaks: dict[str, int]
    """The most bytes there were at once in forward and backward passes, in the step after them, and in delinking."""
    exchanges: dict[Exchange, int]
    """How often each was made in the step."""
    delinking: dict[Exchange, int] = field(default_factory=dict)
    """The same of the delinking that the stage begins with."""
    seconds: float = 0.0
    """That counting took."""
    parts: list[Part] = field(default_factory=list)
    """What `offload` would move of the real model's state, where that was asked for."""


@dataclass(frozen=True)
class Task:
    """What a process is to do: the stages of a run, one after the other, as one of its ranks."""

    config: RunConfig
    stages: tuple[Stage, ...]
    candidates: tuple[Candidate, ...]
    rank: int
    device: Device
    delinking: bool
    parts: bool


def rehearse(
    config: RunConfig,
    stages: Sequence[Stage],
    candidates: Sequence[Candidate],
    device: Device = "cuda",
    pipeline_ranks: Sequence[int] | None = None,
    delinking: bool = True,
    parts: bool = False,
    note: Callable[[str], None] = lambda _: None,
) -> list[Counted]:
    """Go through two steps of each of `stages` of a resolved configuration, run as its candidate says, and from each to
    the next by `delinking`.

    `pipeline_ranks` are those to be counted (None: the first, the middle and the last one), each by that of its ranks
    which holds most. `device` is what the run is for: its arithmetic, not what this needs. `parts`: those of the state
    are told too. `note` is told of what is begun, which takes minutes. Raises TenfoldError for what a run would refuse.
    """
    worlds = {candidate.degrees.ranks for candidate in candidates}
    if len(worlds) > 1:
        raise TenfoldError(f"a dry run has as many ranks in every stage, and these have {sorted(worlds)}")
    depth = max(candidate.degrees.pipeline for candidate in candidates)
    kinds = sorted({0, depth // 2, depth - 1} if pipeline_ranks is None else set(pipeline_ranks))
    found: dict[int, list[Counted]] = {}
    for kind in kinds:
        # Where stages lie otherwise one rank is followed through all of them: it is of some kind in each.
        rank = _holding_most(config, stages[-1], candidates[-1], min(kind, candidates[-1].degrees.pipeline - 1))
        if rank not in found:
            task = Task(config, tuple(stages), tuple(candidates), rank, device, delinking, parts)
            names = ", ".join(stage.name for stage in stages)
            note(f"rank {rank} of {min(worlds)} goes through {names} without memory")
            found[rank] = _in_process(task)
    return [counted for each in found.values() for counted in each]


def as_run(config: RunConfig, candidate: Candidate) -> RunConfig:
    """The configuration with a stage's candidate put into it."""
    training = config.training.model_copy(
        update={
            "micro_batch_size": candidate.micro_batch_size,
            "recompute": candidate.recompute,
            "recompute_layers": candidate.recompute_layers,
        }
    )
    return config.model_copy(update={"training": training, "parallel": parallel_of(config, candidate)})


def _holding_most(config: RunConfig, stage: Stage, candidate: Candidate, pipeline: int) -> int:
    """Of a pipeline rank's ranks, by its number in the world, the one that `Holdings.most` is of."""
    holdings, degrees = Holdings(config, stage.sharing, candidate), candidate.degrees
    return pipeline * degrees.ranks // degrees.pipeline + holdings.fullest(pipeline)


def _in_process(task: Task) -> list[Counted]:
    """By a process of its own, which takes its group of ranks and its tensors with it; what it runs is imported once,
    in the server that all of them are forked from."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tenfold.training.fake_run"])
    with ProcessPoolExecutor(1, mp_context=context, initializer=_begin) as process:
        try:
            return process.submit(_run, task).result()
        except TenfoldError as error:
            raise TenfoldError(f"the dry run of rank {task.rank}: {error}") from None


def _begin() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)


def _run(task: Task) -> list[Counted]:
    from tenfold.training.fake_run import run

    return run(task)
