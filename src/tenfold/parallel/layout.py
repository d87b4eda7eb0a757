"""One stage's model over the ranks of a mesh: made, and told what each rank holds of it.

The order in which a model is laid out is that of `Layout.build`: whole, on the meta device; layers tied; each rank's
part of every parameter; FSDP2; memory; initial weights. Whatever the layout, the weights are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tenfold.config.model import ModelConfig
from tenfold.config.parallel import ParallelConfig
from tenfold.nn.decoder import Decoder
from tenfold.nn.init import Memory, initialize
from tenfold.nn.objective import Example
from tenfold.nn.ranks import ALONE, Ranks, Stage
from tenfold.nn.recompute import KEEP_ALL, Recompute
from tenfold.parallel.absent import drop_memory
from tenfold.parallel.context import SplitSequences
from tenfold.parallel.expert import ExpertGroup
from tenfold.parallel.grid import tensor_ranks
from tenfold.parallel.launch import World
from tenfold.parallel.mesh import Degrees, Mesh
from tenfold.parallel.pieces import Piece, collect, local_of, piece_at, pieces
from tenfold.parallel.pipeline import StageRanks, holders_of, leave, stages_of_model, stages_with
from tenfold.parallel.rank import Borrow, Rank, T
from tenfold.parallel.slices import SlicedPasses
from tenfold.parallel.splits import cut, splits_of, state_shape
from tenfold.parallel.sums import Sums
from tenfold.sharing.tying import Sharing, materialize, tie, users

if TYPE_CHECKING:
    from tenfold.parallel.schedule import Passes


class Layout(Rank):
    """How a model of `model`, whose layers share as `sharing` says, lies on `mesh`.

    `positions`, `dtype` and `recompute` are the decoder's. On one rank all questions have the simplest answer.
    """

    def __init__(
        self,
        mesh: Mesh,
        config: ParallelConfig,
        model: ModelConfig,
        sharing: Sharing,
        positions: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        recompute: Recompute = KEEP_ALL,
    ) -> None:
        super().__init__()
        self.mesh, self.config, self.model_config, self.sharing = mesh, config, model, sharing
        self.device, self.alone, self.number = device, mesh.degrees.ranks == 1, mesh.rank
        self.ranks, self.data, self.tensor = mesh.degrees.ranks, mesh.degrees.data, mesh.degrees.tensor
        self._decoder = (model, positions, dtype, recompute)
        whole = self.whole
        self.shapes = {name: tuple(parameter.shape) for name, parameter in whole.named_parameters()}
        """The whole shape of every parameter, by its canonical name."""
        place = mesh.place
        self.splits = splits_of(whole, model, mesh.degrees, place["tensor"], place["expert"])
        """What this rank holds of every parameter before data ranks split it."""
        names = {parameter: name for name, parameter in whole.named_parameters()}
        self._canonical = {name: names[each] for name, each in whole.named_parameters(remove_duplicate=False)}
        self._users = {names[parameter]: layers for parameter, layers in users(whole.layers).items()}
        self._holders = holders_of(config, mesh.degrees.pipeline)
        self._stages = stages_of_model(whole, sharing, len(self._holders), positions)
        self._passes: tuple[Any, Passes | SlicedPasses] | None = None

    @cached_property
    def whole(self) -> Decoder:
        """The model on the meta device as one rank would have it."""
        with torch.device("meta"):
            model = Decoder(*self._decoder)
        tie(model.layers, self.sharing)
        return model

    @property
    def degrees(self) -> Degrees:
        """Ranks along each axis."""
        return self.mesh.degrees

    @cached_property
    def others(self) -> Ranks:
        """What the model is given to talk to other ranks."""
        tensor, context, expert = tensor_ranks(self.mesh, self.model_config), ALONE.context, ALONE.expert
        degrees = self.degrees
        if degrees.context > 1:
            context = SplitSequences(self.mesh.group("context"))
        if self.model_config.moe.experts and degrees.tensor * degrees.context * degrees.expert > 1:
            expert = ExpertGroup(self.mesh, self.model_config, tensor)
        pipeline = ALONE.pipeline
        if degrees.pipeline > 1:
            pipeline = StageRanks(self.mesh.group("pipeline"), self._stages, self._holders, self.device)
        return Ranks(tensor, context, expert, pipeline)

    def build(
        self,
        seed: int | None = None,
        housed: Callable[[Decoder], Memory] | None = None,
        only: Container[str] | None = None,
    ) -> Decoder:
        """The model with initial weights; without a `seed` they are whatever memory holds, and so are those whose names
        are not among `only`, if that is given.

        `housed` is given the model before its parameters that are trained have memory (`absent`), sees to that, and
        gives the way to fill them.
        """
        model = self.shaped()
        self.give_memory(model, (lambda _: None) if housed is None else _without_memory)
        memory = None if housed is None else housed(model)
        if seed is not None:
            named = {name: each for name, each in self.named(model).items() if only is None or name in only}
            initialize(model, seed, None if self.alone else self._held, named, memory)
        return model

    def shaped(self) -> Decoder:
        """The model as this rank holds it, split and sharded, on the meta device: shapes without memory."""
        others = self.others  # made first: it has tensors of its own, which are to have memory
        with torch.device("meta"):
            model = Decoder(*self._decoder, others)
        tie(model.layers, self.sharing)
        cut(model, self.splits)
        leave(model, self._mine)
        by_expert = {parameter for name, parameter in self.named(model).items() if self.splits[name].by_expert}
        if not self.alone:
            from tenfold.parallel.data import shard  # here: FSDP2 takes seconds to import

            layers = {int(name): layer for name, layer in model.layers.named_children()}
            runs = [[layers[at] for at in run if at in layers] for run in self.sharing.segments()]
            shard(model, [run for run in runs if run], by_expert, self.mesh, self.config)
        return model

    def give_memory(self, model: Decoder, then: Callable[[nn.Parameter], None] = lambda _: None) -> None:
        """Let a model that is `shaped` have memory; `then` is called with each parameter as soon as it has it."""
        materialize(model, self.device, then)
        if self.degrees.data_replicate * self.degrees.shard > 1:
            from tenfold.parallel.data import look_again

            look_again(model)

    def _held(self, name: str) -> Piece:
        return self.piece(name)

    def named(self, model: Decoder) -> dict[str, nn.Parameter]:
        """The parameters that this rank has a part of, by canonical name, in the order of the whole model.

        A block is named by the lowest of all the layers that use it, which may be on another rank.
        """
        if self.degrees.pipeline == 1:
            return dict(model.named_parameters())
        held = {self._canonical[name]: parameter for name, parameter in model.named_parameters()}
        return {name: held[name] for name in self.shapes if name in held}

    def users(self, model: Decoder) -> Mapping[nn.Parameter, Sequence[int]]:
        """Which layers, of all ranks, use each parameter of layers."""
        if self.alone:  # as the layers are now: they are delinked in place
            return super().users(model)
        return {parameter: self._users[name] for name, parameter in self.named(model).items() if name in self._users}

    @property
    def _mine(self) -> list[Stage]:
        return [stage for stage in self._stages if self._holders[stage.number] == self.mesh.place["pipeline"]]

    def stages_of(self, name: str) -> tuple[int, ...]:
        """The pipeline ranks that hold a parameter."""
        stages = stages_with(name, self._users.get(name), self._stages, self.whole.head is None)
        return tuple(sorted({self._holders[stage.number] for stage in stages}))

    def run_passes(
        self, model: Decoder, micro_batches: Sequence[Example], valid_tokens: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        """As one rank does it, or through pipeline stages by their schedule."""
        ranks = model.ranks.pipeline
        if not isinstance(ranks, StageRanks):
            return super().run_passes(model, micro_batches, valid_tokens, chunk)
        from tenfold.parallel.data import begin_schedule, end_schedule  # here: these take seconds to import
        from tenfold.parallel.schedule import Passes

        degrees, count, slices = self.degrees, len(micro_batches), self.config.slices
        sequences, length = micro_batches[0].inputs.shape
        shape = (sequences, length // (degrees.context * degrees.tensor * slices), self.model_config.hidden)
        key = (model, count, shape)
        if self._passes is None or self._passes[0] != key:
            schedule = self.config.pipeline_schedule
            passes: Passes | SlicedPasses
            if schedule == "terapipe":
                passes = SlicedPasses(model, ranks, slices, shape, self.device)
            else:
                passes = Passes(model, ranks, schedule, count, shape, self.device)
            self._passes = (key, passes)
        self.let_go(model)  # parameters are what is told of, and not what FSDP2 gathered of them to validate
        begin_schedule(model)
        self.before_schedule(self._passes_with(model, count))
        found = self._passes[1].run(micro_batches, valid_tokens, chunk)
        end_schedule(model)
        return found

    def whole_shapes(self, tensors: Mapping[str, Tensor], everyone: bool = True) -> dict[str, tuple[int, ...]]:
        """The whole shapes of tensors: weights by name, or their optimizer state by "name/kind". Those of all ranks, or
        of what this one has alone."""
        if self.alone:
            return {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        mine = {
            key: state_shape(key, self.shapes[key.partition("/")[0]]) if tensor.dim() else ()
            for key, tensor in tensors.items()
        }
        return {key: shape for shapes in (self.of_all(mine) if everyone else [mine]) for key, shape in shapes.items()}

    def dtypes(self, tensors: Mapping[str, Tensor], everyone: bool = True) -> dict[str, torch.dtype]:
        """The dtypes of such tensors, likewise."""
        mine = {key: tensor.dtype for key, tensor in tensors.items()}
        return {key: dtype for dtypes in (self.of_all(mine) if everyone else [mine]) for key, dtype in dtypes.items()}

    def piece(self, key: str, shape: tuple[int, ...] | None = None) -> Piece:
        """This rank's piece of a parameter, or of a tensor of its optimizer state, "name/kind", of a whole `shape`."""
        place, degrees = self.mesh.place, self.degrees
        index = place["data_shard"] * degrees.context + place["context"]
        whole = self.shapes[key] if shape is None else shape
        return piece_at(key, whole, self.model_config, degrees, index, place["tensor"])

    def begin_pass(self, model: Decoder, last: bool) -> None:
        """Before a micro-batch, the `last` of a step or not: whether data ranks exchange its gradients."""
        if not self.alone:
            from tenfold.parallel.data import begin_pass

            begin_pass(model, self.config, self.degrees.shard, last)

    def let_go(self, model: Decoder) -> None:
        """Have each data rank hold its own share of the weights alone."""
        if not self.alone:
            from tenfold.parallel.data import let_go

            let_go(model)

    def _passes_with(self, model: Decoder, count: int) -> dict[nn.Parameter, int]:
        """Of a step of `count` micro-batches through pipeline stages: how many backward passes give each parameter a
        gradient. FSDP2 does once, behind all of them."""
        mine, tied = {stage.number for stage in self._mine}, self.whole.head is None
        passes = count * (self.config.slices if self.config.pipeline_schedule == "terapipe" else 1)
        found = {}
        for name, parameter in self.named(model).items():
            stages = stages_with(name, self._users.get(name), self._stages, tied)
            sharded = local_of(parameter) is not parameter
            found[parameter] = 1 if sharded else passes * len({stage.number for stage in stages} & mine)
        return found

    def _holding(self, name: str) -> dict[str, tuple[int, ...]]:
        """The tensor ranks that hold the same of a parameter, and the pipeline ranks that do."""
        return {"tensor": self.splits[name].tensor_copies, "pipeline": self.stages_of(name)}

    def added(self, model: Decoder) -> set[nn.Parameter]:
        named = self.named(model).items()
        return {each for name, each in named if any(len(places) > 1 for places in self._holding(name).values())}

    def add_gradients(self, model: Decoder, borrow: Borrow = nullcontext) -> None:
        """Add up what tensor ranks, and pipeline stages that share a block, have of one gradient each.

        Those of the same ranks follow one another, in the order of the whole model, so that no two ranks wait for each
        other."""
        self.let_go(model)
        named = self.named(model)
        together: dict[tuple[dist.ProcessGroup, ...], list[nn.Parameter]] = {}
        for name in self.shapes:
            asked = [self.mesh.part(axis, places) for axis, places in self._holding(name).items() if len(places) > 1]
            groups, parameter = tuple(group for group in asked if group is not None), named.get(name)
            if groups and parameter is not None and parameter.requires_grad:
                together.setdefault(groups, []).append(parameter)
        for groups, parameters in together.items():
            for run in exchanges([local_of(parameter).numel() for parameter in parameters]):
                some = [parameters[number] for number in run]
                with borrow(some):
                    for parameter in some:
                        if parameter.grad is None:
                            parameter.grad = torch.zeros_like(parameter)
                    for group in groups:
                        add_up([local_of(each.grad) for each in some if each.grad is not None], group)

    def copies(self, model: Decoder) -> dict[nn.Parameter, int]:
        """How many ranks hold the same numbers of each parameter."""
        return {
            parameter: self.degrees.data_replicate * len(self.splits[name].tensor_copies) * len(self.stages_of(name))
            for name, parameter in self.named(model).items()
        }

    def sums(self, model: Decoder) -> Sums:
        """What makes sums over parameters whole of which ranks have pieces. Every rank must call it."""
        return Sums() if self.alone else Sums.over(self.mesh, self.model_config, self.shapes, self.named(model))

    def collect(self, key: str, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """A whole parameter, or a tensor of its optimizer state ("name/kind"), of `shape` and `dtype`, on the CPU of
        rank 0. All ranks must call it; `tensor` is this rank's, None where it has none.
        """
        if self.alone or (not shape and self.degrees.pipeline == 1):
            return tensor
        local = None if tensor is None else local_of(tensor)
        stage = self.stages_of(key.partition("/")[0])[0]
        owners = pieces(key, shape, self.model_config, self.degrees, stage)
        return collect(local, dtype, self.device, shape, owners)

    def largest(self, tensor: Tensor) -> Tensor:
        """The maximum over all ranks."""
        if not self.alone:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor

    def of_all(self, value: T) -> list[T]:
        """Every rank's `value`."""
        return World(self.number, self.ranks).of_all(value)

    def total(self, *tensors: Tensor) -> list[Tensor]:
        """The sum over all ranks of each of `tensors`, in one exchange."""
        if self.alone:
            return list(tensors)
        flat = torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors])
        dist.all_reduce(flat)
        sizes = [tensor.numel() for tensor in tensors]
        parts = zip(flat.split(sizes), tensors, strict=True)
        return [part.view(tensor.shape).to(tensor.dtype) for part, tensor in parts]


def _without_memory(parameter: nn.Parameter) -> None:
    if parameter.requires_grad:  # what is not trained is small
        drop_memory(parameter)


FLAT = 2**20
"""Gradients of fewer elements travel together, as many as these."""


def exchanges(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Which tensors of so many elements are added up at once, by number: large ones alone, small ones together."""
    small, together = list[int](), 0
    for number, size in enumerate(sizes):
        if size >= FLAT:
            yield [number]
        elif size:
            if together + size > FLAT:
                yield small
                small, together = [], 0
            small.append(number)
            together += size
    if small:
        yield small


def add_up(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """Sum each tensor over a group, in place, in one exchange."""
    if len(tensors) == 1:
        dist.all_reduce(tensors[0], group=group)
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
