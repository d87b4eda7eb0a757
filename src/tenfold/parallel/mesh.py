"""The mesh of ranks: how many split a run along each axis, whether that fits, and the groups that talk to each other.

Ranks are numbered with tensor innermost, then context, data_shard, data_replicate and pipeline, so that those that
exchange most stand nearest to each other. The expert axis is the inner part of data_shard x context.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tenfold.config.model import ModelConfig
from tenfold.config.parallel import ParallelConfig
from tenfold.config.units import AXES
from tenfold.errors import TenfoldError


@dataclass(frozen=True)
class Degrees:
    """Ranks along each axis."""

    data_replicate: int = 1
    data_shard: int = 1
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1
    grid: bool = False
    """Whether the tensor ranks are a square, of `rows` x `columns`, and split both dimensions of a matrix."""

    @property
    def columns(self) -> int:
        """Ranks that split heads, inner widths and the vocabulary."""
        return math.isqrt(self.tensor) if self.grid else self.tensor

    @property
    def rows(self) -> int:
        """Ranks that split the hidden width of weights, and the sequences of a batch."""
        return self.tensor // self.columns

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.data_replicate * self.data_shard * self.tensor * self.context * self.pipeline

    @property
    def data(self) -> int:
        """Ranks with samples of their own."""
        return self.data_replicate * self.data_shard

    @property
    def shard(self) -> int:
        """Ranks that split a parameter which all of them use."""
        return self.data_shard * self.context

    def __str__(self) -> str:
        told = [f"{axis} {getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        told = [f"{each} (a grid)" if self.grid and each.startswith("tensor") else each for each in told]
        return " x ".join(told) or "one rank"


def degrees_of(config: ParallelConfig, world: int, model: ModelConfig) -> Degrees | None:
    """The degrees of a run on `world` ranks, where arithmetic alone gives those that are "auto"; None: there is a
    choice, which is for the planner.

    Raises TenfoldError with every number when they cannot multiply to `world`.
    """
    given = {axis: getattr(config, axis) for axis in AXES}
    degrees = {axis: 1 if degree == "auto" else int(degree) for axis, degree in given.items()}
    taken = math.prod(degree for axis, degree in degrees.items() if axis != "expert")
    open_axes = [axis for axis in AXES if given[axis] == "auto" and axis != "expert"]
    rest, over = divmod(world, taken)
    if over or (rest > 1 and not open_axes):
        told = " x ".join(f"{axis} {given[axis]}" for axis in AXES if axis != "expert")
        raise TenfoldError(
            f"parallel: {told} does not make the {world} ranks that were started (torchrun's --nproc-per-node x "
            f"--nnodes): the degrees given multiply to {taken}. Change one of them, or the number of ranks"
        )
    if rest > 1 and len(open_axes) > 1:
        return None
    if rest > 1:
        degrees[open_axes[0]] = rest
    if given["expert"] == "auto" and model.moe.experts:
        shard = degrees["data_shard"] * degrees["context"]
        if math.gcd(shard, model.moe.experts // model.moe.prototypes) > 1:
            return None
    return Degrees(**degrees, grid=config.tensor_grid and degrees["tensor"] > 1)


def check(
    degrees: Degrees,
    model: ModelConfig,
    batch_size: int,
    micro_batch_size: int,
    lengths: list[int],
    config: ParallelConfig | None = None,
) -> None:
    """Raise TenfoldError, with the numbers, where degrees do not fit the model, the batch or the sequences; `config`
    has what else is asked for."""
    data, tensor, context = degrees.data, degrees.tensor, degrees.context
    moe = model.moe

    def fail(key: str, degree: int | bool | str, why: str) -> None:
        told = str(degree).lower() if isinstance(degree, bool) else degree
        raise TenfoldError(f"parallel.{key} = {told} {why} (the layout is {degrees}, {degrees.ranks} ranks)")

    if batch_size % data:
        keys = f"data_replicate = {degrees.data_replicate} and data_shard = {degrees.data_shard}"
        raise TenfoldError(
            f"parallel: {keys} give {data} ranks samples of their own, and training.batch_size = {batch_size} does not "
            f"divide by {data} (the layout is {degrees}, {degrees.ranks} ranks)"
        )
    if micro_batch_size and batch_size // data % micro_batch_size:
        raise TenfoldError(
            f"training.micro_batch_size = {micro_batch_size} does not divide the {batch_size // data} samples that "
            f"each of {data} data ranks has of batch_size = {batch_size}"
        )
    if degrees.shard % degrees.expert:
        fail("expert", degrees.expert, f"does not divide data_shard x context = {degrees.shard}")
    if degrees.expert > 1 and not moe.experts:
        fail("expert", degrees.expert, "splits experts, and the model has none (model.moe.experts = 0); set it to 1")
    if degrees.expert > 1 and moe.experts // moe.prototypes % degrees.expert:
        fail(
            "expert",
            degrees.expert,
            f"does not divide the {moe.experts // moe.prototypes} experts of a prototype (model.moe.experts = "
            f"{moe.experts}, prototypes = {moe.prototypes})",
        )
    if degrees.grid:
        _check_grid(degrees, model, micro_batch_size or batch_size // data, fail)
    columns = degrees.columns
    if tensor > 1 and model.heads < columns:
        fail("tensor", tensor, f"is more than model.heads = {model.heads}")
    if columns > model.key_heads and (columns % model.key_heads or model.heads % columns):
        fail(
            "tensor",
            tensor,
            f"does not fit model.heads = {model.heads} with kv_heads = {model.key_heads}: ranks that share a key head "
            "must be equally many, with equally many heads each",
        )
    inner = ("model.moe.ffn", model.expert_ffn) if moe.experts else ("model.ffn", model.ffn)
    for key, width in (inner, ("the rows of the vocabulary", model.padded_vocab() if model.vocab_size else tensor)):
        if width < columns:
            fail("tensor", tensor, f"is more than {key} = {width}")
    if degrees.pipeline > model.layers:
        fail("pipeline", degrees.pipeline, f"is more than model.layers = {model.layers}")
    if degrees.pipeline > 1:
        _check_schedule(degrees, model, batch_size // data, micro_batch_size, config or ParallelConfig(), fail)
        if config is not None and config.pipeline_schedule == "terapipe":
            _check_slices(degrees, model, lengths, config.slices, fail)
    for length in lengths:
        if length % (columns * (2 * context if context > 1 else 1)):
            runs = columns if context == 1 else 2 * context * columns
            parts = f"{'tensor' if context == 1 else '2 x context x tensor'} = {runs} runs"
            raise TenfoldError(f"parallel: sequences of {length} tokens do not divide into {parts} of equal length")


def _check_schedule(
    degrees: Degrees,
    model: ModelConfig,
    samples: int,
    micro_batch_size: int,
    config: ParallelConfig,
    fail: Callable[..., None],
) -> None:
    """The part of `check` for pipeline ranks, each of which has `samples`."""
    ranks, schedule = degrees.pipeline, config.pipeline_schedule
    stages = ranks * config.stages_per_rank
    if stages > model.layers:
        each = f"with pipeline_schedule = {schedule} and {config.stages_per_rank} stages a rank makes {stages} stages"
        fail("pipeline", ranks, f"{each}, more than model.layers = {model.layers}")
    micro_batches = samples // (micro_batch_size or samples)
    if schedule in ("gpipe", "terapipe"):
        return
    if micro_batches < ranks:
        told = f"training.micro_batch_size = {micro_batch_size}" + ("" if micro_batch_size else ", all at once,")
        remedy = f"set it to {samples // ranks} or less" if samples >= ranks else "take a larger batch_size"
        fail(
            "pipeline",
            ranks,
            f"with pipeline_schedule = {schedule} needs {ranks} micro-batches or more, and {samples} samples a rank in "
            f"micro-batches of {told} are {micro_batches}: {remedy}, or take gpipe",
        )
    if micro_batches % (rounds := max(1, micro_batches // ranks)) and schedule.startswith("interleaved"):
        fail(
            "pipeline",
            ranks,
            f"with pipeline_schedule = {schedule} goes through {micro_batches} micro-batches in {rounds} rounds, and "
            f"needs as many in each: change training.micro_batch_size, so that there are {ranks * rounds}, say",
        )


def _check_slices(
    degrees: Degrees, model: ModelConfig, lengths: list[int], slices: int, fail: Callable[..., None]
) -> None:
    """The part of `check` for pipeline ranks that go through sequences slice by slice."""
    other = "take another schedule, 1f1b, say"
    if model.objective == "masked":
        why = "is for decoders, and with model.objective = masked a position sees those behind it"
        fail("pipeline_schedule", "terapipe", f"{why}: {other}")
    if model.moe.experts:
        why = "is for dense models, for balance and capacity are those of whole sequences; model.moe.experts = "
        fail("pipeline_schedule", "terapipe", f"{why}{model.moe.experts}: {other}")
    if degrees.context > 1:
        fail("pipeline_schedule", "terapipe", f"does not go with context = {degrees.context}: set it to 1, or {other}")
    for length in lengths:
        if length % (slices * degrees.tensor):
            parts = f"{slices} slices" + (f" of {degrees.tensor} tensor ranks' runs" if degrees.tensor > 1 else "")
            fail("pipeline_slices", slices, f"does not fit: sequences of {length} tokens do not divide into {parts}")


def _check_grid(degrees: Degrees, model: ModelConfig, micro_batch_size: int, fail: Callable[..., None]) -> None:
    """The part of `check` for tensor ranks in a grid."""
    tensor, rows = degrees.tensor, degrees.rows
    if tensor != rows**2:
        fail("tensor", tensor, "makes no grid (parallel.tensor_grid = true): take 4, 9, 16 or another square")
    if model.moe.experts:
        fail("tensor_grid", True, f"is for dense models, and model.moe.experts = {model.moe.experts}; set it to false")
    if degrees.pipeline > 1:
        fail("tensor_grid", True, f"does not go with pipeline = {degrees.pipeline}; set one of them to false or 1")
    if model.hidden % rows:
        fail("tensor", tensor, f"is {rows} rows of a grid, which do not divide model.hidden = {model.hidden}")
    if micro_batch_size % rows:
        why = f"is {rows} rows of a grid, which do not divide the samples of a pass, {micro_batch_size}"
        fail("tensor", tensor, f"{why}; change training.micro_batch_size")


class Mesh:
    """The ranks of this process' world in their order. Every rank makes it, at the same time: it opens groups.

    `device` is "cpu" or "cuda". On one rank there are no groups, and nothing is to be asked for.
    """

    def __init__(self, degrees: Degrees, device: str) -> None:
        self.degrees, self._device = degrees, device
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        shape = {
            "pipeline": degrees.pipeline,
            "data_replicate": degrees.data_replicate,
            "data_shard": degrees.data_shard,
            "context": degrees.context,
            "tensor": degrees.tensor,
        }
        place, left = {}, self.rank
        for axis in reversed(shape):
            place[axis], left = left % shape[axis], left // shape[axis]
        place["expert"] = (place["data_shard"] * degrees.context + place["context"]) % degrees.expert
        self.place = place
        """This rank's index along each axis."""
        self._mesh = self._open(shape) if degrees.ranks > 1 else None
        shards = {"pipeline": degrees.pipeline, "data_replicate": degrees.data_replicate}
        self._shards = self._experts = None
        if degrees.data_replicate * degrees.shard > 1:
            self._shards = self._open({**shards, "shard": degrees.shard, "tensor": degrees.tensor})
        if degrees.expert > 1:
            inner = {"expert_shard": degrees.shard // degrees.expert, "expert": degrees.expert}
            self._experts = self._open({**shards, **inner, "tensor": degrees.tensor})
        self._groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}

    def _open(self, shape: dict[str, int]) -> DeviceMesh:
        return init_device_mesh(self._device, tuple(shape.values()), mesh_dim_names=tuple(shape))

    @cached_property
    def data_index(self) -> int:
        """Which part of a batch is this rank's, of `degrees.data`."""
        return self.place["data_replicate"] * self.degrees.data_shard + self.place["data_shard"]

    def group(self, axis: str) -> dist.ProcessGroup:
        """The ranks that differ from this one in their index along `axis` alone; "shard" is data_shard x context."""
        mesh = {"expert": self._experts, "shard": self._shards}.get(axis, self._mesh)
        assert mesh is not None, axis
        return mesh.get_group(axis)

    @property
    def fsdp(self) -> DeviceMesh | None:
        """Ranks that use the same parameters on other tokens, (replicas, shards) or shards; None: no other does."""
        return None if self._shards is None else self._of_data(self._shards, "shard")

    @property
    def expert_fsdp(self) -> DeviceMesh | None:
        """The same for the experts of an expert rank; None: no other rank has them."""
        if self._experts is None:
            return self.fsdp
        mesh = self._of_data(self._experts, "expert_shard")
        return mesh if mesh.size() > 1 else None

    def _of_data(self, mesh: DeviceMesh, shard: str) -> DeviceMesh:
        return mesh["data_replicate", shard] if self.degrees.data_replicate > 1 else mesh[shard]

    def part(self, axis: str, places: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Of the ranks along `axis` those at `places`, if this rank is one of them. All along the axis must ask, in one
        order."""
        key, mine = (axis, places), self.place[axis] in places
        if key not in self._groups:
            everyone = dist.get_process_group_ranks(self.group(axis))
            if len(places) == len(everyone):
                return self.group(axis)
            # PyTorch finds a group by its members and by how many groups a rank has: who is no member opens one too.
            members = [everyone[place] for place in places] if mine else [self.rank]
            self._groups[key] = dist.new_group(members, use_local_synchronization=True)
        return self._groups[key] if mine else None
