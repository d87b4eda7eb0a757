"""What a stage needs of memory, rank by rank and moment by moment, from the configuration alone.

Nothing is started and nothing has memory: a search asks this for hundreds of candidates. State is counted parameter by
parameter (`planning.holdings`, `planning.parts`), passes by running a few layers without memory (`planning.tracing`),
the optimizer's step and a delinking by what they make besides. Resident libraries are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from tenfold.config.run import RunConfig
from tenfold.hardware.device import has_bf16_unit
from tenfold.nn.recompute import Recompute
from tenfold.offload.placement import Part, Placement, kind_bytes, working_bytes
from tenfold.offload.tiers import TierName
from tenfold.parallel.mesh import Degrees
from tenfold.parallel.sums import summed_together
from tenfold.planning.activations import FP32, Gathering, Layered, Moment, Passes, layered, piped, whole_gradients
from tenfold.planning.holdings import Held, Holdings
from tenfold.planning.orders import order_of
from tenfold.planning.parts import Lots, State, optimizer_of, state_of, together
from tenfold.planning.stages import Stage, plan_stages
from tenfold.planning.terms import Candidate
from tenfold.planning.tracing import Traced

Device = Literal["cpu", "cuda"]

_RESERVE = {"cpu": 0.0, "cuda": 0.06}
"""Of a device's bytes in use: what its allocator holds besides, in rests of blocks that were cut."""


def usable(budget: int, device: Device) -> int:
    """Bytes of a device's budget that tensors can have."""
    return int(budget / (1 + _RESERVE[device]))


@dataclass(frozen=True)
class RankMemory:
    """Bytes of the rank of a pipeline rank that holds most."""

    pipeline_rank: int
    parts: list[Part]
    """Its state, as `offload.budget.choose` takes it; activations are those of one micro-batch."""
    items: dict[str, int]
    """On the device by what they are for: weights, gradients, moments, and working memory for what lies below; at the
    highest point of the passes gathered weights, activations that are kept, buffers of exchanges and temporaries; what
    the loss takes besides (logits); and the allocator's reserve."""
    peaks: dict[str, int]
    """On the device, by moment of the step: forward, backward, step; and delinking, of a stage that begins with one."""
    tiers: dict[TierName, int]
    """In each tier: on the device the largest of the peaks."""
    other: int
    """On the device for all but state and the working memory of what lies below it."""

    @property
    def needed(self) -> int:
        """The most that the device has at any moment."""
        return self.tiers["device"]


class Shape(NamedTuple):
    """How a data rank goes through its samples: sequences of so many tokens in each of so many micro-batches."""

    micro_batches: int
    sequences: int
    length: int


def passes_of(config: RunConfig, stage: Stage, candidate: Candidate) -> Shape:
    """The passes of a step, where sequences are longest."""
    mine = max(stage.batch_size // candidate.degrees.data, 1)
    micro = min(candidate.micro_batch_size, mine)
    length = stage.lengths[-1]
    return Shape(-(-mine // micro), micro * (config.data.sequence_length // length), length)


def memory_of(
    config: RunConfig,
    stage: Stage,
    candidate: Candidate,
    placement: Sequence[Placement | None] | None = None,
    device: Device = "cuda",
    before: Candidate | None = None,
    lots: Lots = together,
) -> list[RankMemory]:
    """What each pipeline rank needs in `stage` of a resolved configuration, run as `candidate` says.

    `placement` has for each of them what lies below the device, of the `parts` that this gives without one. `before` is
    how the stage before is run; None: as this one. `lots` says which experts of a layer are placed together.
    """
    holdings = Holdings(config, stage.sharing, candidate)
    places = placement or [None] * candidate.degrees.pipeline
    return [
        _of_rank(config, stage, candidate, place, device, before or candidate, holdings, at, lots)
        for at, place in enumerate(places)
    ]


def _of_rank(
    config: RunConfig,
    stage: Stage,
    candidate: Candidate,
    placement: Placement | None,
    device: Device,
    former: Candidate,
    holdings: Holdings,
    pipeline: int,
    lots: Lots,
) -> RankMemory:
    degrees, shape = candidate.degrees, passes_of(config, stage, candidate)
    fullest = holdings.fullest(pipeline)
    held, layers, stages = holdings.most(pipeline), holdings.layers_at(pipeline), holdings.stages_at(pipeline)
    ends = (any(each.first for each in stages), any(each.last for each in stages))
    keeps = candidate.reshard != "forward" or degrees.pipeline > 1
    itemsize = 2 if candidate.gather == "bf16" else FP32
    gathering = Gathering(tuple(holdings.groups(held)), itemsize, keeps, degrees.shard, device == "cpu")

    def run_of(accumulates: bool, layers: Sequence[int] = layers, ends: tuple[bool, bool] = ends) -> Layered:
        what = _traced(config, stage, candidate, shape.length, device, accumulates, bool(gathering.groups), fullest)
        recompute = Recompute(candidate.recompute, candidate.recompute_layers)
        return layered(what, recompute, held, layers, ends, shape.sequences)

    run = run_of(True)
    again = Passes(run, gathering, held)
    state = state_of(held, config.optim, {layer: run.movable(layer) for layer in layers}, lots)
    in_backward = config.offload.of_stage(stage.config.offload).step_in_backward and shape.micro_batches == 1
    lies = _lies(held, state, config, placement, in_backward)

    # Gradients are there before a pass where it is not the first of its step, or where they are counted as if it were.
    sharded = sum(each.room for each in held if each.trained) * FP32
    stay = sharded
    groups = bool(gathering.groups)
    each_sends = degrees.pipeline == 1 and candidate.reshard != "step" and degrees.shard > 1
    here = lies["gradients"]
    if groups and not each_sends:  # they are whole until the last pass of a step, wherever shards then go
        own = sum(each.room for each in held if each.trained and not each.gathered) * FP32
        stay = own + whole_gradients(gathering, held)
        here = stay - own + min(here, own)
    several = shape.micro_batches > 1 or degrees.pipeline > 1
    forward = again.forward()
    if placement is not None or (several and not each_sends):
        backward = again.backward(groups and degrees.pipeline == 1, True)
        there = here
    else:
        backward = Passes(run_of(False), gathering, held).backward(groups, several)
        there = sharded if several else 0
    others = 0
    if degrees.pipeline > 1:

        def runs(accumulates: bool) -> dict[int, Layered]:
            return {each.number: run_of(accumulates, each.layers, (each.first, each.last)) for each in stages}

        micro_batches = shape.micro_batches
        if candidate.schedule == "1f1b":  # more of them only go on as these end
            micro_batches = min(micro_batches, 2 * degrees.pipeline)
        slices = candidate.slices if candidate.schedule == "terapipe" else 1
        order = order_of(candidate.schedule, pipeline, degrees.pipeline, micro_batches, candidate.chunks, slices)
        again_by_stage = runs(True)
        begun_by_stage = again_by_stage if placement is not None else runs(False)
        split = degrees.context * degrees.tensor
        width = FP32 if config.training.precision == "fp32" else 2
        hidden = shape.sequences * shape.length // split * config.model.hidden * width
        keys = 2 * shape.sequences * shape.length * config.model.key_heads * config.model.head_width // degrees.tensor
        cached = {each.number: len(each.layers) * keys * FP32 for each in stages} if slices > 1 else {}
        walked = piped(order, begun_by_stage, again_by_stage, hidden, slices, cached)
        coming = sum((not each.first) + (not each.last) for each in stages) if slices == 1 else 0
        received = coming * shape.micro_batches * hidden
        whole = sum(map(gathering.whole, gathering.groups))
        there = here if placement is not None else 0
        forward = [Moment(walked.forward + whole + received, whole, received)]
        sending = Moment(again.sending() + stay - there + received, 0, again.sending() + received)
        backward = [Moment(walked.backward + whole + received, whole, received), sending]
        others = walked.kept - run.kept
    away = _share_away(state, placement)

    def highest(moments: Sequence[Moment]) -> Moment:
        return max(moments, key=lambda each: each.most - round(away * each.movable))

    def size(moment: Moment) -> int:
        return moment.most - round(away * moment.movable)

    always = lies["weights"] + lies["moments"] + lies["working"]
    besides = _step_besides(held, config)
    peaks = {
        "forward": always + there + size(highest(forward)),
        "backward": always + there + size(highest(backward)),
        "step": always + lies["gradients"] + besides,
    }
    if (begun := _delinking(config, stage, former, held, placement, lies, pipeline)) is not None:
        peaks["delinking"] = begun
    most = max(peaks.values())
    reserve = round(_RESERVE[device] * most)
    peaks = {moment: size + reserve for moment, size in peaks.items()}
    top = highest(backward)
    activations = max(run.kept + others - round(away * sum(map(run.movable, layers))), 0)
    items = {
        **lies,
        "gathered": top.gathered,
        "activations": activations,
        "temporaries": max(peaks["backward"] - reserve - always - there - top.gathered - activations - top.buffers, 0),
        "logits": run.loss.most - run.loss.left,
        "buffers": top.buffers,
        "reserve": reserve,
    }
    # As if gradients were there from the first pass on: which of them may then leave, `choose` decides.
    passing = max(each.most - each.movable for each in [*again.forward(), *again.backward(groups, True)])
    other = state.frozen + state.open_size + max(passing + others + stay - sharded, besides)
    tiers: dict[TierName, int] = {"device": max(peaks.values()), "host": 0, "disk": 0}
    if placement is not None:
        below = kind_bytes(state.parts, placement, in_backward)
        tiers |= {"host": sum(below["host"].values()), "disk": sum(below["disk"].values())}
    return RankMemory(pipeline, list(state.parts), items, peaks, tiers, other)


def _traced(
    config: RunConfig,
    stage: Stage,
    candidate: Candidate,
    length: int,
    device: Device,
    accumulates: bool,
    gathered: bool,
    tensor_rank: int,
) -> Traced:
    """What is traced of a candidate's layers, but for how each recomputes."""
    degrees, sharing = candidate.degrees, stage.sharing
    fp32 = config.training.precision == "fp32"
    return Traced(
        config.model,
        config.data.sequence_length,
        sharing.parts,
        sharing.rank,
        sharing.experts,
        Degrees(tensor=degrees.tensor, context=degrees.context, expert=degrees.expert, grid=degrees.grid),
        "none",
        torch.float32 if fp32 else torch.bfloat16,
        torch.bfloat16 if gathered and candidate.gather == "bf16" else torch.float32,
        length,
        config.training.loss_chunk,
        accumulates,
        device == "cuda" or has_bf16_unit(),
        device == "cuda",
        tensor_rank,
    )


def _lies(
    held: Sequence[Held], state: State, config: RunConfig, placement: Placement | None, in_backward: bool
) -> dict[str, int]:
    """Bytes of each kind of state on the device, and of the memory through which what is below it passes."""
    trained = sum(each.room for each in held if each.trained) * FP32
    moments = state.moments
    if config.optim.state != "fp32":
        moments = sum(part.bytes["moments"] for part in state.parts)
    if placement is None:
        return {"weights": trained + state.frozen, "gradients": trained, "moments": moments, "working": state.open_size}
    here = kind_bytes(state.parts, placement, in_backward)["device"]
    return {
        "weights": here.get("weights", 0) + state.frozen,
        "gradients": here.get("gradients", 0),
        "moments": here.get("moments", 0),
        "working": working_bytes(state.parts, placement) + state.open_size,
    }


def _share_away(state: State, placement: Placement | None) -> float:
    """Of the activations that could be below the device the share that is."""
    if placement is None:
        return 0.0
    movable = [
        (part.bytes["activations"], placement.tier(part.name, "activations"))
        for part in state.parts
        if "activations" in part.bytes
    ]
    whole = sum(size for size, _ in movable)
    return sum(size for size, tier in movable if tier != "device") / whole if whole else 0.0


def _step_besides(held: Sequence[Held], config: RunConfig) -> int:
    """Bytes that the optimizer's step takes besides state."""
    by_optimizer: dict[str, list[Held]] = {}
    for each in held:
        if each.trained:
            by_optimizer.setdefault(optimizer_of(each, config.optim), []).append(each)
    found = 0
    for name, mine in by_optimizer.items():
        sizes = [each.room * FP32 for each in mine]
        copies = 0
        if config.optim.divide_shared:  # of what layers share, to go a part of the way (`sharing.rates`)
            copies = sum(each.room * FP32 for each in mine if len(each.layers) > 1)
        if name == "adafactor":  # updates, until their norms are known
            copies += max(sum(sizes[run]) for run in summed_together([each.room for each in mine]))
        elif name == "muon":  # the mean gradient, and Newton and Schulz's iteration in bf16
            copies += 5 * max(sizes) // 2
        found = max(found, copies)
    return found


def _delinking(
    config: RunConfig,
    stage: Stage,
    former: Candidate,
    held: Sequence[Held],
    placement: Placement | None,
    lies: dict[str, int],
    pipeline: int,
) -> int | None:
    """Bytes on the device while this stage's model is made of the one before; None: there is none before."""
    stages = plan_stages(config)
    numbers = [number for number, each in enumerate(stages) if each.name == stage.name]
    if not numbers or numbers[0] == 0:
        return None
    now = lies["weights"] + lies["moments"] + lies["working"]
    last = stages[numbers[0] - 1]
    offloads = placement is not None or config.offload.of_stage(last.config.offload).on
    holdings = Holdings(config, last.sharing, former)
    had = holdings.most(min(pipeline, former.degrees.pipeline - 1))
    if former.degrees.ranks == 1 and not offloads:  # in place: what was shared leaves its state when all is done
        return now + state_of([each for each in had if len(each.layers) > 1], config.optim).moments
    # Both models are there, the former without gradients. A new optimizer steps once on zeros; then a parameter's two
    # moments are on their way, where they are not simply copied, with the piece that they become.
    old = state_of(had, config.optim)
    held_then = sum(each.room for each in had) * FP32 + old.moments if not offloads else 0
    coming = 3 * max(each.room for each in held) * FP32
    return now + held_then + max(lies["gradients"], coming)
