"""The ways to run a stage on a cluster that are worth a look, and by what rules others are not.

What a run file names is kept; what it leaves out, and a degree of "auto", is open. Batch size, precision, `gather` and
`tensor_grid` change what is computed, and are never open. Of what is open, these are left out:

- tensor ranks on several nodes: they exchange in every layer, forward and backward (arXiv 2104.04473, takeaway 1);
- context ranks that are left less than `RUN` tokens of a sequence each, or lie on several nodes, unless there are fewer
  sequences than data ranks would be; and where a pass has several sequences, for smaller passes need as little memory
  and no exchange;
- replicas, but of what a node shards, or of everything; and experts over less ranks than divide them, but over those of
  a node: `beside` has those of a node, which are looked at where a layout that shards and spreads all, or nothing, is
  among the best;
- gpipe, which is as fast as 1f1b and keeps more, but for fewer passes than pipeline ranks; terapipe, but for one
  sequence a pass; interleaving beyond four stages a rank;
- of recompute and resharding, what another way beats that fits, too: less recompute and fewer gathers are never slower
  (`search`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from tenfold.config.parallel import ParallelConfig, Schedule
from tenfold.config.run import RunConfig
from tenfold.config.units import AXES
from tenfold.errors import TenfoldError
from tenfold.parallel.mesh import Degrees
from tenfold.planning.refusals import check_trained
from tenfold.planning.stages import Stage
from tenfold.planning.terms import Candidate

Reshard = Literal["forward", "backward", "step"]
Mode = Literal["none", "selective", "full"]

MODES: tuple[Mode, ...] = ("none", "selective", "full")
"""From most memory to least."""
RUN = 2048
"""Tokens of a sequence that a context rank has at least: with fewer its exchanges are not worth it."""
RESHARDS: tuple[Reshard, ...] = ("step", "backward", "forward")
"""From most memory to least."""


@dataclass(frozen=True)
class Choices:
    """What a run file leaves open in a stage, and what it names."""

    parallel: ParallelConfig
    named: frozenset[str]
    """Keys of [parallel] that are kept."""
    micro_batch_size: int | None
    """None: open. 0: all sequences at once."""
    modes: tuple[Mode, ...]
    layers: int | None
    """How many recompute."""
    layers_open: bool

    @classmethod
    def of(cls, config: RunConfig, stage: Stage) -> Choices:
        """Of a stage."""
        own, given = config.of_stage(stage.config), config.training.model_fields_set
        parallel, training = own.parallel, own.training
        named = {key for key in parallel.model_fields_set if key not in AXES or getattr(parallel, key) != "auto"}
        micro = stage.config.micro_batch_size is not None or "micro_batch_size" in given
        mode = stage.config.recompute is not None or "recompute" in given
        layers = training.recompute_layers is not None
        return cls(
            parallel,
            frozenset(named),
            training.micro_batch_size if micro else None,
            (training.recompute,) if mode else MODES,
            training.recompute_layers,
            not mode and not layers,
        )

    @property
    def reshards(self) -> tuple[Reshard, ...]:
        """Those that are possible."""
        return (self.parallel.reshard,) if "reshard" in self.named else RESHARDS


def layouts(config: RunConfig, stage: Stage, choices: Choices, ranks: int, per_node: int) -> list[Degrees]:
    """Degrees that make `ranks` ranks and fit model, batch and sequences, with passes of some size.

    Raises TenfoldError where there are none, with what is wrong with the first of those that were looked at.
    """
    found, fault = [], None
    for degrees in dict.fromkeys(_degrees(config, stage, choices, ranks, per_node)):
        try:
            check_layout(config, stage, choices, degrees)
        except TenfoldError as error:
            fault = fault or error
            continue
        if any(True for _ in ways(config, stage, choices, degrees)):
            found.append(degrees)
        else:
            fault = fault or _fault(config, stage, choices, degrees)
    if found:
        return found
    if fault is None:
        told = ", ".join(f"{axis} {getattr(choices.parallel, axis)}" for axis in AXES if axis in choices.named)
        fault = TenfoldError(
            f"parallel: no degrees make the {ranks} ranks of the cluster, {per_node} a node, and fit the passes"
            f"{' with what is fixed: ' + told if told else ''}. Take another cluster, or leave degrees open"
        )
    raise fault


def check_layout(config: RunConfig, stage: Stage, choices: Choices, degrees: Degrees) -> None:
    """Raise TenfoldError where degrees fit no passes, or training refuses them; schedules, which ask more of these, are
    for `ways` to check."""
    check_trained(_as(config, choices, "gpipe", 2, 0), stage, degrees)


def _degrees(config: RunConfig, stage: Stage, choices: Choices, ranks: int, per_node: int) -> Iterator[Degrees]:
    moe, grid = config.model.moe, choices.parallel.tensor_grid
    experts = moe.experts // moe.prototypes if moe.experts else 1

    def of(axis: str, rest: int, most: int) -> list[int]:
        if axis in choices.named:
            given = int(getattr(choices.parallel, axis))
            return [given] if rest % given == 0 else []
        return [each for each in divisors(rest) if each <= most]

    for tensor in of("tensor", ranks, per_node):
        for pipeline in of("pipeline", ranks // tensor, config.model.layers):
            rest = ranks // tensor // pipeline
            for context in of("context", rest, rest):
                few = rest > stage.batch_size
                whole = tensor * context <= per_node and max(stage.lengths) >= context * RUN
                if context > 1 and "context" not in choices.named and not (few or whole):
                    continue
                data = rest // context
                copies = of("data_replicate", data, data)
                for replicate in copies if "data_replicate" in choices.named else dict.fromkeys((1, data)):
                    shard = data // replicate
                    if "data_shard" in choices.named and shard != choices.parallel.data_shard:
                        if "data_replicate" in choices.named or data % int(choices.parallel.data_shard):
                            continue
                        shard = int(choices.parallel.data_shard)
                        replicate = data // shard
                    spread = math.gcd(shard * context, experts)
                    expert = int(choices.parallel.expert) if "expert" in choices.named else spread
                    yield Degrees(replicate, shard, tensor, context, pipeline, expert, grid and tensor > 1)


def beside(config: RunConfig, choices: Choices, degrees: Degrees, per_node: int) -> list[Degrees]:
    """Layouts of the same tensor, context and pipeline ranks with replicas, or with experts on a node's ranks."""
    moe, data, tensor, context = config.model.moe, degrees.data, degrees.tensor, degrees.context
    experts = moe.experts // moe.prototypes if moe.experts else 1
    shards = [degrees.shard // context]
    if not {"data_replicate", "data_shard"} & choices.named:
        local = max(1, per_node // (tensor * context))
        shards = [each for each in dict.fromkeys((data, local, 1)) if data % each == 0]
    found = []
    for shard in shards:
        spread = math.gcd(shard * context, experts)
        near = max(each for each in divisors(spread) if each == 1 or each * tensor <= per_node)
        each = [degrees.expert] if "expert" in choices.named else [spread, near]
        found += [
            replace(degrees, data_replicate=data // shard, data_shard=shard, expert=expert)
            for expert in dict.fromkeys(each)
        ]
    return [each for each in dict.fromkeys(found) if each != degrees]


def ways(config: RunConfig, stage: Stage, choices: Choices, degrees: Degrees) -> Iterator[Candidate]:
    """A layout's passes and schedules, those of most sequences first, without recompute and with most memory."""
    for own in _tries(config, stage, choices, degrees):
        with suppress(TenfoldError):
            check_trained(own, stage, degrees)
            yield Candidate(
                degrees,
                own.training.micro_batch_size,
                choices.modes[0],
                choices.layers if choices.modes[0] != "none" else None,
                own.parallel.pipeline_schedule,
                own.parallel.pipeline_chunks,
                own.parallel.pipeline_slices,
                choices.reshards[0],
                own.parallel.gather,
            )


def _fault(config: RunConfig, stage: Stage, choices: Choices, degrees: Degrees) -> TenfoldError | None:
    """What is wrong with a layout of which `ways` gives none; None: there is nothing to try."""
    for own in _tries(config, stage, choices, degrees):
        try:
            check_trained(own, stage, degrees)
        except TenfoldError as error:
            return error
    return None


def _tries(config: RunConfig, stage: Stage, choices: Choices, degrees: Degrees) -> Iterator[RunConfig]:
    """The run with each of a layout's passes and schedules that the rules leave, whether they fit or not."""
    mine = stage.batch_size // degrees.data
    sizes = [choices.micro_batch_size or mine] if choices.micro_batch_size is not None else divisors(mine)[::-1]
    for size in sizes:
        if degrees.context > 1 and size > 1 and "context" not in choices.named and choices.micro_batch_size is None:
            continue
        for schedule, chunks in _schedules(choices, degrees, size, mine // size):
            yield _as(config, choices, schedule, chunks, size)


def _as(config: RunConfig, choices: Choices, schedule: Schedule, chunks: int, micro_batch_size: int) -> RunConfig:
    """The run with the keys of a stage, and this schedule and these passes."""
    update = {"pipeline_schedule": schedule, "pipeline_chunks": chunks}
    training = config.training.model_copy(update={"micro_batch_size": micro_batch_size})
    return config.model_copy(update={"parallel": choices.parallel.model_copy(update=update), "training": training})


def _schedules(choices: Choices, degrees: Degrees, size: int, passes: int) -> list[tuple[Schedule, int]]:
    parallel = choices.parallel
    chunks = [parallel.pipeline_chunks] if "pipeline_chunks" in choices.named else [2, 4]
    if degrees.pipeline == 1 or "pipeline_schedule" in choices.named:
        schedules: list[Schedule] = [parallel.pipeline_schedule]
    else:
        schedules = ["1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv"]
        if size == 1:
            schedules.append("terapipe")
        if passes < degrees.pipeline:
            schedules = ["gpipe", *schedules[4:]]
    interleaved = degrees.pipeline > 1
    return [
        (schedule, each)
        for schedule in schedules
        for each in (chunks if interleaved and schedule.startswith("interleaved") else chunks[:1])
    ]


def divisors(number: int) -> list[int]:
    """Those of a number, ascending."""
    low = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return sorted({*low, *(number // each for each in low)})
