"""The words of planning: a way to run a stage, what of work there is in it, and which ranks talk to each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tenfold.config.parallel import Schedule
from tenfold.parallel.mesh import Degrees

OperationKind = Literal["matrix", "attention", "grouped", "memory", "update"]
Way = Literal["forward", "input", "weight"]
CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send"]
Axis = Literal[
    "data_replicate",
    "data_shard",
    "shard",
    "expert_shard",
    "expert",
    "tensor",
    "row",
    "column",
    "context",
    "pipeline",
    "world",
]
"""Of a mesh. "shard" is data_shard x context, which FSDP2 splits parameters over; "expert_shard" those of it that have
the same experts; "row" and "column" are those of tensor ranks in a grid, "world" is all ranks."""


@dataclass(frozen=True)
class Candidate:
    """A way to run one stage, but for where its state lies."""

    degrees: Degrees = field(default_factory=Degrees)
    micro_batch_size: int = 1
    """Sequences of a data rank in one pass."""
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_layers: int | None = None
    schedule: Schedule = "1f1b"
    chunks: int = 2
    """Stages of a pipeline rank, where the schedule interleaves them."""
    slices: int = 4
    """Of every sequence, where the schedule is terapipe."""
    reshard: Literal["forward", "backward", "step"] = "forward"
    gather: Literal["fp32", "bf16"] = "fp32"


@dataclass(frozen=True)
class Operation:
    """Work of one rank on its device, done `count` times.

    matrix: a product of [rows, inner] and [inner, columns]. grouped: `groups` of these, one for each expert, with
    `rows` in all. attention: scores and values, `flops` of them. memory: nothing but `bytes` read and written.
    update: the optimizer's step over `bytes` of weights (fp32), `name` is the optimizer's. `flops` counts two for each
    multiply-add; that scores are made again in attention's backward pass is not counted, of causal attention the half
    that is seen is; its `rows` are the queries of a sequence, `inner` the width of a head. `bytes` of memory are those
    of every pass over memory that PyTorch makes; a word of `name` may be one of `accelerator.MEMORY_WORK`.
    """

    name: str
    kind: OperationKind
    flops: float = 0.0
    bytes: float = 0.0
    rows: int = 0
    inner: int = 0
    columns: int = 0
    groups: int = 1
    count: int = 1
    way: Way = "forward"
    """Of a product: itself, or the gradient of its input or of its weight. Attention's backward pass is "input"."""
    wide: bool = False
    """In fp32, whatever activations are."""


@dataclass(frozen=True)
class Collective:
    """One exchange along an axis of the mesh, done `count` times.

    `bytes` are those of one rank's whole tensor: of all_gather the result, of reduce_scatter the input, of all_reduce
    the tensor, of all_to_all what a rank sends (its own part too), of broadcast and send the message.
    """

    name: str
    kind: CollectiveKind
    axis: Axis
    bytes: float
    count: int = 1


def group_of(axis: Axis, degrees: Degrees) -> tuple[int, int]:
    """How many ranks a group along an axis has, and how far apart their numbers are (`parallel.mesh` numbers them)."""
    tensor, context, shard = degrees.tensor, degrees.context, degrees.data_shard
    return {
        "tensor": (tensor, 1),
        "context": (context, tensor),
        "data_shard": (shard, tensor * context),
        "shard": (shard * context, tensor),
        "expert": (degrees.expert, tensor),
        "expert_shard": (shard * context // degrees.expert, tensor * degrees.expert),
        "row": (degrees.columns, 1),
        "column": (degrees.rows, degrees.columns),
        "world": (degrees.ranks, 1),
        "data_replicate": (degrees.data_replicate, tensor * context * shard),
        "pipeline": (degrees.pipeline, tensor * context * shard * degrees.data_replicate),
    }[axis]
