"""What every rank of a layout holds of a stage's state, from names and shapes alone.

A model is made once on the meta device for all candidates of a stage; no process group is asked, and nothing has
memory. `parallel.pieces` says what a rank holds of a parameter, `parallel.pipeline` which layers a pipeline rank has,
and `parallel.data` what data ranks gather together; this puts them together by arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import torch

from tenfold.config.model import ModelConfig
from tenfold.config.parallel import ParallelConfig
from tenfold.config.run import RunConfig
from tenfold.nn.decoder import Decoder
from tenfold.nn.ranks import Stage as PipelineStage
from tenfold.nn.recompute import Recompute
from tenfold.parallel.mesh import Degrees
from tenfold.parallel.pieces import Piece, piece_at
from tenfold.parallel.pipeline import holders_of, stages_of_model, stages_with
from tenfold.parallel.splits import in_a_layer
from tenfold.parallel.sums import Spread, spread_of
from tenfold.planning.terms import Candidate
from tenfold.sharing.tying import Sharing, tie, users


@dataclass(frozen=True)
class Held:
    """What a rank has of a parameter. Lengths are in elements, which are fp32."""

    name: str
    layers: tuple[int, ...]
    """Those of this pipeline rank that use it; none: it is outside of layers."""
    shape: tuple[int, ...]
    """Of this rank's numbers."""
    room: int
    """Of the memory in which they lie: FSDP2 pads shards to equal length."""
    before_sharding: int
    """Before data ranks split it."""
    trained: bool = True
    by_expert: bool = False
    gathered: bool = False
    """Whether data ranks hold shards of it, or copies that FSDP2 keeps alike."""
    experts: tuple[range, ...] = field(default=(), repr=False)
    """Of a stack of experts those that each row stands for: one, or where experts share weights several."""
    added: bool = False
    """Whether tensor or pipeline ranks hold the same numbers, and add up their gradients."""

    @property
    def numel(self) -> int:
        """Numbers."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Group:
    """Parameters of these `names` that FSDP2 gathers together: `elements` of them whole, with what pads them, as one
    rank has them while it uses them, and split over `shards` ranks.

    `layers` use it; of the root, which has what is in no other group, they are none.
    """

    names: tuple[str, ...]
    layers: tuple[int, ...]
    elements: int
    shards: int


class Whole:
    """A stage's model, whole, on the meta device."""

    def __init__(self, model: ModelConfig, positions: int, sharing: Sharing) -> None:
        with torch.device("meta"):
            self.decoder = Decoder(model, positions)
        tie(self.decoder.layers, sharing)
        self.config, self.sharing, self._positions = model, sharing, positions
        named = dict(self.decoder.named_parameters())
        names = {parameter: name for name, parameter in named.items()}
        self.shapes = {name: tuple(parameter.shape) for name, parameter in named.items()}
        self.trained = {name: parameter.requires_grad for name, parameter in named.items()}
        self.users = {names[each]: tuple(layers) for each, layers in users(self.decoder.layers).items()}
        self._stages: dict[tuple[Recompute, int], list[PipelineStage]] = {}
        self._pieces: dict[tuple[Any, ...], Piece] = {}
        self._spreads: dict[tuple[Any, ...], Spread] = {}
        self._experts: dict[tuple[Any, ...], tuple[range, ...]] = {}
        self.ranks_with: dict[tuple[Any, ...], dict[str, tuple[int, ...]]] = {}
        """The pipeline ranks that hold each parameter, for each way to cut the model by depth."""
        self.most: dict[tuple[Any, ...], tuple[int, list[Held]]] = {}
        """What `Holdings.most` found, for each way to cut the model."""
        self.received: dict[tuple[Any, ...], int] = {}
        """What `delinked.received_bytes` found, for each way to lie now and after a delinking."""

    def stages(self, recompute: Recompute, count: int) -> list[PipelineStage]:
        """The model cut by depth into `count` stages."""
        key = (recompute, count)
        if key not in self._stages:
            for number, layer in enumerate(self.decoder.layers):
                layer.recompute = recompute.of(number, self.config.layers)  # type: ignore[assignment]
            self._stages[key] = stages_of_model(self.decoder, self.sharing, count, self._positions)
        return self._stages[key]

    def piece(self, name: str, degrees: Degrees, shard: int, tensor: int) -> Piece:
        """`parallel.pieces.piece_at`, asked once for all layers that are alike."""
        key = (in_a_layer(name), self.shapes[name], degrees, shard, tensor)
        if key not in self._pieces:
            self._pieces[key] = piece_at(name, self.shapes[name], self.config, degrees, shard, tensor)
        return self._pieces[key]

    def spread(self, name: str, degrees: Degrees, tensor: int) -> Spread:
        """`parallel.sums.spread_of`, likewise."""
        key = (in_a_layer(name), self.shapes[name], degrees, tensor)
        if key not in self._spreads:
            self._spreads[key] = spread_of(name, self.shapes[name], self.config, degrees, tensor)
        return self._spreads[key]

    def experts(self, name: str, degrees: Degrees, shard: int) -> tuple[range, ...]:
        """Of a stack of experts those that the rows stand for which a rank has; of what is none, nothing."""
        shape = self.shapes[name]
        if ".experts." not in name or len(shape) != 3:
            return ()
        key = (in_a_layer(name), shape, degrees, shard)
        if key not in self._experts:
            each = self.config.moe.experts // shape[0]
            rows = self.piece(name, degrees, shard, 0).stack()
            self._experts[key] = tuple(range(row * each, (row + 1) * each) for row in rows)
        return self._experts[key]

    @cached_property
    def tied(self) -> bool:
        """Whether the output matrix is the embedding."""
        return self.decoder.head is None


@lru_cache(maxsize=16)
def whole_of(model: ModelConfig, positions: int, sharing: Sharing) -> Whole:
    """The whole model of a resolved configuration, made once."""
    return Whole(model, positions, sharing)


def parallel_of(config: RunConfig, candidate: Candidate) -> ParallelConfig:
    """The section [parallel] of a candidate."""
    chosen = {
        "pipeline_schedule": candidate.schedule,
        "pipeline_chunks": candidate.chunks,
        "pipeline_slices": candidate.slices,
        "reshard": candidate.reshard,
        "gather": candidate.gather,
    }
    degrees = {axis: getattr(candidate.degrees, axis) for axis in ("data_replicate", "data_shard", "tensor", "context")}
    more = {"pipeline": candidate.degrees.pipeline, "expert": candidate.degrees.expert}
    return config.parallel.model_copy(update={**degrees, **more, **chosen, "tensor_grid": candidate.degrees.grid})


class Holdings:
    """What the ranks of a candidate hold in a stage whose layers share as `sharing` says."""

    def __init__(self, config: RunConfig, sharing: Sharing, candidate: Candidate) -> None:
        self.whole = whole_of(config.model, config.data.sequence_length, sharing)
        self.degrees, self.sharing = candidate.degrees, sharing
        self.model_config, self.shapes = config.model, self.whole.shapes
        parallel = parallel_of(config, candidate)
        recompute = Recompute(candidate.recompute, candidate.recompute_layers)
        self.holders = holders_of(parallel, self.degrees.pipeline)
        self.stages = self.whole.stages(recompute, len(self.holders))
        self.cut = (tuple(self.holders), tuple(stage.layers for stage in self.stages))
        """Which pipeline rank has which layers."""
        if self.cut not in self.whole.ranks_with:
            self.whole.ranks_with[self.cut] = {name: self._holders_of(name) for name in self.whole.shapes}
        self._ranks_with = self.whole.ranks_with[self.cut]

    def stages_at(self, pipeline: int) -> list[PipelineStage]:
        """Those of a pipeline rank."""
        return [stage for stage in self.stages if self.holders[stage.number] == pipeline]

    def layers_at(self, pipeline: int) -> tuple[int, ...]:
        """Those of a pipeline rank, ascending."""
        return tuple(sorted(layer for stage in self.stages_at(pipeline) for layer in stage.layers))

    def stages_of(self, name: str) -> tuple[int, ...]:
        """The pipeline ranks that hold a parameter."""
        return self._ranks_with[name]

    def _holders_of(self, name: str) -> tuple[int, ...]:
        stages = stages_with(name, self.whole.users.get(name), self.stages, self.whole.tied)
        return tuple(sorted({self.holders[stage.number] for stage in stages}))

    def tensor_copies(self, name: str) -> tuple[int, ...]:
        """The tensor ranks that hold the same of a parameter as the first of them."""
        return self.whole.piece(name, self.degrees, 0, 0).split.tensor_copies

    def at(self, pipeline: int = 0, tensor: int = 0, shard: int = 0) -> list[Held]:
        """What the rank there holds, in the order of the model's parameters; `shard` is along data_shard x context."""
        whole, degrees = self.whole, self.degrees
        mine = set(self.layers_at(pipeline))
        copies = degrees.data_replicate * degrees.shard > 1
        found = []
        for name in whole.shapes:
            layers = whole.users.get(name)
            if pipeline not in self.stages_of(name):
                continue
            piece = whole.piece(name, degrees, shard, tensor)
            split = piece.split
            gathered = copies and whole.trained[name]
            shards = degrees.shard if gathered else 1
            if split.by_expert:
                shards //= degrees.expert if gathered else 1
                gathered = gathered and degrees.data_replicate * shards > 1
            rows, inner = split.local_shape[0], math.prod(split.local_shape[1:])
            found.append(
                Held(
                    name,
                    () if layers is None else tuple(layer for layer in layers if layer in mine),
                    piece.shape,
                    -(-rows // shards) * inner if gathered else math.prod(piece.shape),
                    rows * inner,
                    whole.trained[name],
                    split.by_expert,
                    gathered,
                    whole.experts(name, degrees, shard),
                    len(split.tensor_copies) > 1 or len(self.stages_of(name)) > 1,
                )
            )
        return found

    def most(self, pipeline: int = 0) -> list[Held]:
        """What that one of a pipeline rank's ranks holds which holds most: the first of data ranks, whose shards are
        never the shorter ones, and of tensor ranks the one with most heads, inner widths and rows."""
        return self._most(pipeline)[1]

    def fullest(self, pipeline: int = 0) -> int:
        """Which of the tensor ranks that is."""
        return self._most(pipeline)[0]

    def _most(self, pipeline: int) -> tuple[int, list[Held]]:
        key = (self.cut, self.degrees, pipeline)
        if key not in self.whole.most:
            ranks = [(tensor, self.at(pipeline, tensor)) for tensor in range(self.degrees.tensor)]
            self.whole.most[key] = max(ranks, key=lambda each: sum(held.room for held in each[1]))
        return self.whole.most[key]

    def groups(self, held: Sequence[Held]) -> list[Group]:
        """How FSDP2 gathers them, in the order of the forward pass, the root last; see `parallel.data.shard`."""
        segments = [list(run) for run in self.whole.sharing.segments()]
        of_layer = {layer: number for number, run in enumerate(segments) for layer in run}
        inside: dict[int, list[Held]] = {}
        for each in held:
            if each.gathered and each.layers:
                inside.setdefault(of_layer[each.layers[0]], []).append(each)
        by_layers: dict[tuple[object, ...], list[Held]] = {}
        free = self.whole.sharing.experts == "free"
        for number in sorted(inside):
            for key, members in _of_segment(inside[number], self.whole.config.moe.experts > 0, free):
                by_layers.setdefault(key, []).extend(members)
        by_layers[("root",)] = [each for each in held if each.gathered and not each.layers]
        found = []
        for members in by_layers.values():
            if members:
                layers = tuple(sorted({layer for each in members for layer in each.layers}))
                names = tuple(each.name for each in members)
                elements = sum(each.room * self._shards(each) for each in members)
                found.append(Group(names, layers, elements, self._shards(members[0])))
        return found

    def _shards(self, held: Held) -> int:
        return self.degrees.shard // (self.degrees.expert if held.by_expert else 1)


def _of_segment(inside: Sequence[Held], mixture: bool, routed: bool) -> Iterator[tuple[tuple[object, ...], list[Held]]]:
    """The groups of a segment's parameters: what its layers share, and what each of several has to itself."""
    rest, segment = list(inside), sorted({layer for each in inside for layer in each.layers})
    for column in ("attention", "ffn"):
        if column == "ffn" and mixture and not routed:
            continue
        under = f".{column}.experts." if column == "ffn" and mixture else f".{column}."
        members = [each for each in rest if under in each.name]
        by_expert = any(each.by_expert for each in members)
        if any(len(each.layers) > 1 for each in members):
            if not by_expert:
                continue
            yield (tuple(segment), column), members
        elif by_expert or len(segment) > 1:
            for layer in segment:
                if own := [each for each in members if each.layers == (layer,)]:
                    yield (layer, column), own
        else:
            continue
        rest = [each for each in rest if under not in each.name]
    if rest:
        yield (tuple(segment), ""), rest
