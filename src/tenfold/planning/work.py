"""What there is to do in a step of a stage, on one rank of each pipeline rank: operations and exchanges, in order.

This is the time model's list; how long each takes, and what goes on at once, is `planning.step`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tenfold.config.run import RunConfig
from tenfold.nn.recompute import Recompute
from tenfold.parallel.layout import exchanges
from tenfold.parallel.sums import Span, summed_together
from tenfold.planning.holdings import Group, Held, Holdings
from tenfold.planning.layer_work import embedding_work, head_work, layer_work
from tenfold.planning.local import FP32, Local
from tenfold.planning.passes import Item, Pass, each
from tenfold.planning.pieces_of_work import Making, memory
from tenfold.planning.stages import Stage
from tenfold.planning.terms import Axis, Candidate, Collective, Operation


@dataclass(frozen=True)
class StageWork:
    """One stage of a pipeline: some layers, and what it sends on."""

    number: int
    layers: range
    passes: tuple[tuple[Pass, ...], ...]
    """For every slice of a micro-batch (one, but with terapipe), what the forward pass goes through in order."""
    send: Collective | None
    """What goes to the next stage, of each slice; None: that is on this rank, or there is none."""
    back: Collective | None
    """What goes to the stage before, likewise."""
    splits: bool
    """Whether gradients of weights can be put off (`parallel.schedule._Part.splits`)."""


@dataclass(frozen=True)
class GroupWork:
    """What data ranks do for parameters that FSDP2 gathers together."""

    name: str
    layers: tuple[int, ...]
    """Of this rank, that use them; none: they are here from the first pass to the last."""
    called: str
    """What of its first layer asks for them: the "layer", its "attention", "ffn" or "experts"."""
    gather: tuple[Item, ...]
    """The exchange, and what is copied before and behind it."""
    scatter: tuple[Item, ...]
    replicate: Collective | None
    """Behind the last of the step's: what replicas add up."""


@dataclass(frozen=True)
class RankWork:
    """A step of one of a pipeline rank's ranks."""

    pipeline_rank: int
    stages: tuple[StageWork, ...]
    groups: tuple[GroupWork, ...]
    """In the order in which a forward pass first asks for them, the root's last."""
    micro_batches: int
    slices: int
    regathered: bool
    """Whether weights that layers use are let go after a forward pass, and gathered again for the backward pass."""
    every_pass: bool
    """Whether gradients are exchanged after each backward pass, and not after the step's last alone."""
    begin: tuple[Item, ...]
    """Before the first pass."""
    end: tuple[Item, ...]
    """Behind the last: gradients of ranks that hold the same added up, the norm, clipping."""
    update: tuple[Operation | Collective, ...]

    def items(self) -> Iterator[tuple[Operation | Collective, int]]:
        """All of a step, with how often each is done, in no order."""
        for item in (*self.begin, *self.end, *self.update):
            yield from each([item])
        for stage in self.stages:
            for part in (part for piece in stage.passes for part in piece):
                for inner, count in each([*part.forward, *part.again, *part.backward, *part.weights]):
                    yield inner, count * self.micro_batches
            for message in (stage.send, stage.back):
                if message is not None:
                    yield message, self.slices * self.micro_batches
        exchanges = self.micro_batches if self.every_pass else 1
        for group in self.groups:
            for inner, count in each(group.gather):
                yield inner, count * exchanges * (2 if self.regathered and group.layers else 1)
            for inner, count in each(group.scatter):
                yield inner, count * exchanges
            if group.replicate is not None:
                yield group.replicate, 1

    @property
    def flops(self) -> float:
        """Of a step."""
        return sum(item.flops * count for item, count in self.items() if isinstance(item, Operation))


def work_of(config: RunConfig, stage: Stage, candidate: Candidate, fused: bool = True) -> list[RankWork]:
    """The work of each pipeline rank in a step of `stage` of a resolved configuration, run as `candidate` says.

    Of its ranks it is that of one with most heads, inner widths and experts' rows. `fused`: norms are one kernel each,
    as on a GPU.
    """
    holdings = Holdings(config, stage.sharing, candidate)
    return [_Rank(config, stage, candidate, holdings, rank, fused).work() for rank in range(candidate.degrees.pipeline)]


class _Rank:
    def __init__(
        self, config: RunConfig, stage: Stage, candidate: Candidate, holdings: Holdings, rank: int, fused: bool
    ) -> None:
        self.config, self.stage, self.candidate, self.holdings, self.rank = config, stage, candidate, holdings, rank
        self.degrees = degrees = candidate.degrees
        self.local = Local.of(config, stage, candidate, fused)
        self.held = holdings.most(rank)
        self.micro_batches = max(1, stage.batch_size // degrees.data // candidate.micro_batch_size)
        self.copies = degrees.data_replicate * degrees.shard > 1
        self.every_pass = degrees.pipeline == 1 and degrees.shard > 1 and candidate.reshard != "step"

    def work(self) -> RankWork:
        holdings, candidate = self.holdings, self.candidate
        parts: dict[tuple[str, str, float, int], Pass] = {}  # of layers that are alike
        recompute = Recompute(candidate.recompute, candidate.recompute_layers)
        depth, slices = self.config.model.layers, self.local.slices
        mine = holdings.stages_at(self.rank)
        uses = self._uses()
        hidden = self.local.own * self.config.model.hidden * self.local.itemsize

        def layer(number: int, at: int) -> Pass:
            key = ("layer", recompute.of(number, depth), uses.get(number, 1.0), at)
            if key not in parts:
                parts[key] = layer_work(Making(self.local, self._adds(key[2])), recompute.of(number, depth), at)
            return parts[key]

        stages = []
        for each_stage in mine:
            passes = []
            for at in range(slices):
                found = [layer(number, at) for number in each_stage.layers]
                if each_stage.first:
                    found.insert(0, embedding_work(Making(self.local, self._adds(1.0)), at))
                if each_stage.last:
                    found.append(head_work(Making(self.local, self._adds(1.0)), at))
                passes.append(tuple(found))
            number, holders = each_stage.number, holdings.holders
            send = back = None
            if not each_stage.last and holders[number + 1] != self.rank:
                send = Collective("hidden states", "send", "pipeline", hidden)
            if not each_stage.first and holders[number - 1] != self.rank:
                back = Collective("gradients of hidden states", "send", "pipeline", hidden)
            shared = any(uses.get(at, 1.0) > 1 for at in each_stage.layers)
            kept = all(recompute.of(at, depth) == "none" for at in each_stage.layers)
            stages.append(StageWork(number, each_stage.layers, tuple(passes), send, back, kept and not shared))
        return RankWork(
            self.rank,
            tuple(stages),
            tuple(self._group(group) for group in holdings.groups(self.held)),
            self.micro_batches,
            slices,
            candidate.reshard == "forward" and self.degrees.pipeline == 1 and self.degrees.shard > 1,
            self.every_pass,
            self._begin(),
            tuple(self._end()),
            tuple(self._update()),
        )

    def _uses(self) -> dict[int, float]:
        """For each layer of this rank how many of its layers use a weight of it, on average over its elements."""
        elements: dict[int, int] = {}
        uses: dict[int, float] = {}
        for held in self.held:
            for number in held.layers:
                elements[number] = elements.get(number, 0) + held.before_sharding
                uses[number] = uses.get(number, 0.0) + held.before_sharding * len(held.layers)
        return {number: uses[number] / elements[number] for number in uses}

    def _adds(self, uses: float) -> float:
        """Of so many uses of a weight in a pass, and of all passes, the share whose gradient is added to others."""
        times = uses * (1 if self.every_pass else self.micro_batches)
        return max(0.0, 1 - 1 / times)

    def _group(self, group: Group) -> GroupWork:
        degrees, by_name = self.degrees, {held.name: held for held in self.held}
        by_expert = any(by_name[name].by_expert for name in group.names)
        shards = degrees.shard // degrees.expert if by_expert else degrees.shard
        axis: Axis = "expert_shard" if by_expert else "shard"
        elements, own = group.elements, group.elements / shards
        item = 2 if self.candidate.gather == "bf16" else FP32
        gather: list[Item] = []
        scatter: list[Item] = []
        if shards > 1:
            gather.append(memory("shards copied", own, FP32 + item))
            gather.append(Collective("weights", "all_gather", axis, elements * item))
            gather.append(memory("weights copied", elements, 2 * item))
            scatter.append(memory("gradients copied", elements, item + FP32))
            scatter.append(Collective("gradients", "reduce_scatter", axis, elements * FP32))
            if self.every_pass and self.micro_batches > 1:
                scatter.append(memory("gradients added", own * (1 - 1 / self.micro_batches), 3 * FP32))
        elif item < FP32:
            gather.append(memory("weights cast", elements, FP32 + item))
        replicate = None
        if degrees.data_replicate > 1:
            replicate = Collective("gradients", "all_reduce", "data_replicate", own * FP32)
        called = "layer"
        for name in ("attention", "ffn"):
            if group.layers and all(f".{name}." in each for each in group.names):
                called = "experts" if ".experts." in group.names[0] and self.local.routed else name
        return GroupWork(_told(group), group.layers, called, tuple(gather), tuple(scatter), replicate)

    def _begin(self) -> tuple[Item, ...]:
        """The count of predicted tokens."""
        return (Collective("predicted tokens", "all_reduce", "world", 8),) if self.degrees.ranks > 1 else ()

    def _end(self) -> Iterator[Item]:
        """`Layout.add_gradients`, the loss and statistics, the mean of what layers share, the norm, clipping."""
        degrees, optim = self.degrees, self.config.optim
        trained = [held for held in self.held if held.trained]
        together: dict[tuple[tuple[Axis, tuple[int, ...]], ...], list[int]] = {}
        for held in trained:
            groups: list[tuple[Axis, tuple[int, ...]]] = [
                ("tensor", self.holdings.tensor_copies(held.name)),
                ("pipeline", self.holdings.stages_of(held.name)),
            ]
            if key := tuple(each for each in groups if len(each[1]) > 1):
                together.setdefault(key, []).append(held.numel)
        for key, sizes in together.items():
            for run in exchanges(sizes):
                whole = sum(sizes[number] for number in run)
                for axis, _ in key:
                    if len(run) > 1:
                        yield memory("gradients copied", whole, 4 * FP32)
                    yield Collective("gradients of copies", "all_reduce", axis, whole * FP32)
        if degrees.ranks > 1:
            moe = self.config.model.moe
            columns = 3 + moe.experts if moe.experts else 0
            yield Collective("loss", "all_reduce", "world", 8 * (1 + self.config.model.layers * columns))
        shared = sum(held.numel for held in trained if self._shared(held))
        if shared:
            yield memory("mean gradient", shared, 2 * FP32)
        yield memory("gradients squared", sum(held.numel for held in trained), FP32)
        if degrees.ranks > 1:
            size = FP32 if optim.norm == "inf" else 8
            yield Collective("gradient norm", "all_reduce", "world", size)
        if optim.clip:
            yield memory("clipping", sum(held.numel for held in trained), 2 * FP32)

    def _shared(self, held: Held) -> bool:
        """Whether several layers, of any rank, use it."""
        return len(self.holdings.whole.users.get(held.name, ())) > 1

    def _sums(self, trained: Sequence[Held]) -> Iterator[Collective]:
        """What Adafactor makes whole over ranks (`training.adafactor`, by `parallel.sums`)."""
        degrees, tensor = self.degrees, self.holdings.fullest(self.rank)
        trained = sorted(trained, key=_group)  # as the optimizer has them
        spreads = [self.holdings.whole.spread(each.name, degrees, tensor) for each in trained]
        for run in summed_together([spread.elements for spread in spreads]):
            moments: list[list[tuple[Span, int]]] = [[], [], []]  # gradients and weights; means over rows; updates
            for held, spread in zip(trained[run], spreads[run], strict=True):
                moments[0].append((spread.all, 1))
                moments[2].append((spread.all, 1))
                if len(held.shape) > 1:
                    *stack, rows, columns = held.shape
                    matrices = math.prod(stack)
                    moments[0] += [(spread.row, matrices * rows), (spread.column, matrices * columns)]
                    moments[1].append((spread.column, matrices))
            for terms in moments:
                for places in sorted({span.places for span, _ in terms if span.places}):
                    size = sum(count for span, count in terms if span.places == places)
                    axis: Axis = "row" if places[1] - places[0] == 1 else "column"
                    axis = "tensor" if len(places) == degrees.tensor else axis
                    yield Collective("sums of squares", "all_reduce", axis, 8 * size)
                if size := sum(count for span, count in terms if span.shards):
                    yield Collective("sums of squares", "all_reduce", "shard", 8 * size)

    def _update(self) -> Iterator[Operation | Collective]:
        optim, trained = self.config.optim, [held for held in self.held if held.trained]
        matrices = []
        if optim.name == "muon":
            matrices = [
                each for each in trained if each.layers and len(each.shape) == 2 and ".router." not in each.name
            ]
        of_muon = {each.name for each in matrices}
        for held in matrices:
            yield Operation("muon", "update", bytes=held.numel * FP32, inner=min(held.shape))
        rest = sum(held.numel for held in trained if held.name not in of_muon)
        yield Operation("adafactor" if optim.name == "adafactor" else "adamw", "update", bytes=rest * FP32)
        if optim.name == "adafactor":
            yield from self._sums(trained)
        shared = sum(held.numel for held in trained if self._shared(held))
        if optim.divide_shared and shared:
            yield memory("updates divided", shared, 2 * FP32, 3 * FP32)


def _group(held: Held) -> int:
    """Where a parameter stands among those of an optimizer (`training.optimizers.build_optimizers`)."""
    if held.layers and len(held.shape) == 2 and ".router." not in held.name:
        return 0
    return 1 if len(held.shape) > 1 and not held.name.startswith(("embedding", "positions")) else 2


def _told(group: Group) -> str:
    if not group.layers:
        return "outside of layers"
    first, last = group.layers[0], group.layers[-1]
    return f"layer {first}" if first == last else f"layers {first}-{last}"


def totals(work: Sequence[RankWork]) -> dict[tuple[str, str], tuple[int, float]]:
    """How often, and with how many bytes in all, the ranks do each kind of collective along each axis in a step."""
    found: dict[tuple[str, str], tuple[int, float]] = {}
    for rank in work:
        for item, count in rank.items():
            if isinstance(item, Collective):
                times, moved = found.get((item.kind, item.axis), (0, 0.0))
                found[item.kind, item.axis] = times + count, moved + count * item.bytes
    return found
