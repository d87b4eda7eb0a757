"""A step of a stage played through on a cluster: when each rank of a pipeline computes, sends, and waits.

One rank stands for all of its pipeline rank. Each has a lane for compute and one for each kind of link; what is asked
for when, and waited for when, is as in the real code and PyTorch's: weights gathered one group ahead (FSDP2), gradients
leaving behind the group that made them whole, passes in the order of the schedule, rows of experts beside their work.
On a CPU ranks send with the cores they compute with: there nothing goes on beside compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tenfold.config.run import RunConfig
from tenfold.offload.placement import Placement
from tenfold.planning.blame import shares_of
from tenfold.planning.cluster import Cluster
from tenfold.planning.events import Tasks, play
from tenfold.planning.memory import RankMemory, memory_of
from tenfold.planning.pricing import Dtype, Prices, in_line
from tenfold.planning.rank_play import Messages, RankPlay, finish
from tenfold.planning.stages import Stage
from tenfold.planning.terms import Candidate
from tenfold.planning.work import RankWork, StageWork, work_of

STEPS = 2
"""Steps that are played where state lies below the device: the second begins as any later one does."""


@dataclass(frozen=True)
class Event:
    """Something that a lane does, from `begin` to `end` seconds after the step began."""

    lane: str
    """Pipeline rank and resource: "0 compute", "1 network", "0 disk read"."""
    kind: str
    """compute, optimizer, communication, message or offload."""
    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class StepForecast:
    """What a step takes, and why."""

    seconds: float
    shares: Mapping[str, float]
    """Seconds of compute, communication (that nothing is computed beside), offload (likewise), optimizer and bubble
    (waiting for other pipeline ranks), on the pipeline rank that computes most; they add up to `seconds`."""
    lanes: Mapping[str, float]
    """Seconds in which each lane is busy, by pipeline rank and resource: "0 compute"."""
    trace: tuple[Event, ...] = field(repr=False)
    slowest: int = 0
    """The pipeline rank of `shares`."""

    def busy(self, resource: str) -> float:
        """Seconds of the busiest lane of a resource: "compute", "network", "disk read"."""
        return max((each for lane, each in self.lanes.items() if lane.partition(" ")[2] == resource), default=0.0)


def play_step(
    config: RunConfig,
    stage: Stage,
    candidate: Candidate,
    cluster: Cluster,
    memory: Sequence[RankMemory] | None = None,
    placements: Sequence[Placement] | None = None,
) -> StepForecast:
    """A step of `stage` of a resolved configuration, run as `candidate` says, with its longest sequences.

    `memory` and `placements` have one of each pipeline rank: the parts of its state, and where they lie.
    """
    prices, works = _priced(config, stage, candidate, cluster)
    tasks, messages, rates = Tasks(), Messages(), cluster.rates(candidate.degrees)
    ranks = [RankPlay(tasks, work, prices, candidate, messages) for work in works]
    steps = 1
    if placements is not None:
        wanted = config.offload.of_stage(stage.config.offload)
        memory = memory or memory_of(config, stage, candidate)
        for rank, held, placement in zip(ranks, memory, placements, strict=True):
            if rank.place_state(held.parts, placement, rates, wanted.step_in_backward):
                steps = STEPS
    first, before = 0, list[int]()
    for _ in range(steps):
        first, before = len(tasks), [task for rank in ranks for task in rank.stream.place()]
        messages.clear()
        for rank in ranks:
            rank.passes()
        finish(ranks)
    after = [task for rank in ranks for task in rank.stream.place()]
    played = play(tasks)
    begin = max((played.end[task] for task in before), default=0.0)
    lanes = {lane: [each for each in numbers if each >= first] for lane, numbers in tasks.lanes.items()}
    sums = {lane: sum(tasks.seconds[each] for each in numbers) for lane, numbers in lanes.items() if numbers}
    slowest = max(range(len(ranks)), key=lambda at: sums.get(f"{at} compute", 0.0))
    last = max(after, key=played.end.__getitem__)
    end = played.end[last]
    trace = tuple(
        Event(lane, *tasks.what[number], played.begin[number] - begin, played.end[number] - begin)
        for lane, numbers in lanes.items()
        for number in numbers
    )
    shares = shares_of(tasks, played, lanes.get(f"{slowest} compute", []), slowest, begin, last)
    return StepForecast(end - begin, shares, sums, trace, slowest)


def bound(config: RunConfig, stage: Stage, candidate: Candidate, cluster: Cluster) -> float:
    """Seconds that a step takes at least: without waiting, and with all that can go on at once."""
    prices, works = _priced(config, stage, candidate, cluster)
    together = prices.together
    first = {each.number: _pass_seconds(each, prices, 0)[0] for work in works for each in work.stages}
    last = {each.number: _pass_seconds(each, prices, 0)[1] for work in works for each in work.stages}
    least = 0.0
    for work in works:
        mine = work.micro_batches * sum(
            sum(_pass_seconds(each, prices, at)) for each in work.stages for at in range(work.slices)
        )
        mine += in_line([prices.priced(item) for item in (*work.begin, *work.end)], together)
        mine += sum(prices.seconds(item) for item in work.update)
        lowest = min(each.number for each in work.stages)
        # Others must come before this rank's first pass, and, but where gradients of weights are put off, go behind it.
        mine += sum(first[number] for number in range(lowest))
        if candidate.schedule not in ("zbv", "interleaved-zero-bubble"):
            mine += sum(last[number] for number in range(lowest))
        least = max(least, mine)
    return least


def _priced(config: RunConfig, stage: Stage, candidate: Candidate, cluster: Cluster) -> tuple[Prices, list[RankWork]]:
    dtype: Dtype = "fp32" if config.training.precision == "fp32" else "bf16"
    works = work_of(config, stage, candidate, fused=cluster.accelerator.kind != "cpu")
    return Prices(cluster, candidate.degrees, dtype), works


def _pass_seconds(stage: StageWork, prices: Prices, at: int) -> tuple[float, float]:
    """The least seconds of a stage's forward pass of a slice, and of its backward pass."""
    together = prices.together
    there = sum(in_line(prices.of(each.forward), together) for each in stage.passes[at])
    back = sum(
        in_line(prices.of(part), together)
        for each in stage.passes[at]
        for part in (each.again, each.backward, each.weights)
    )
    return there, back
