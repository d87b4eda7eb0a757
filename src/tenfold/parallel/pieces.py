"""Which rank has which piece of a parameter, or of a tensor of its optimizer state; collecting them, handing them out.

A whole tensor is cut by tensor and expert ranks (`parallel.splits`), and the rows of what is left by data ranks, as
FSDP2 does it: into equal runs, of which the last ones may be short or empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from tenfold.config.model import ModelConfig
from tenfold.parallel.mesh import Degrees
from tenfold.parallel.regions import Region, all_of, part_of, put
from tenfold.parallel.splits import MEANS, Split, split_of, splits_along


@dataclass(frozen=True)
class Piece:
    """What a rank has of a tensor: of its split the rows `rows`."""

    split: Split
    rows: range

    @cached_property
    def region(self) -> Region:
        """Its indices in the whole tensor."""
        held = self.split.held
        return (part_of(held[0], self.rows), *held[1:]) if held else ()

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self.split.shape

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the piece."""
        shape = self.split.local_shape
        return (len(self.rows), *shape[1:]) if shape else ()

    def take(self, whole: Tensor) -> Tensor:
        """The piece of a whole tensor."""
        return self.split.take(whole)[self.rows.start : self.rows.stop] if whole.dim() else whole

    def local(self, parameter: Tensor) -> Tensor:
        """The memory in which the rank has it."""
        return local_of(parameter)

    def stack(self) -> list[int]:
        """Which of the whole tensor's first dimension it has."""
        return [at for each in self.split.held[0] for at in each][self.rows.start : self.rows.stop]

    def take_inside(self, one: Tensor) -> Tensor:
        """Of one entry of the first dimension what the piece has of it."""
        return self.split.take(one, 1)

    def put(self, whole: Tensor, piece: Tensor) -> None:
        """Write the piece into a whole tensor."""
        put(whole, all_of(self.whole_shape), piece, self.region)


def piece_at(
    name: str, shape: tuple[int, ...], config: ModelConfig, degrees: Degrees, shard: int, tensor: int
) -> Piece:
    """The piece of the rank at index `shard` along data_shard x context, and `tensor`.

    Here and below `name` is that of a parameter, or "name/kind" of a tensor of its optimizer state.
    """
    return _piece(name, split_of(name, shape, config, degrees, tensor, shard % degrees.expert), degrees, shard)


def _piece(name: str, split: Split, degrees: Degrees, shard: int) -> Piece:
    shards, index = degrees.shard, shard
    _, _, kind = name.partition("/")
    of_rows = kind in MEANS and len(split.shape) + MEANS[kind] == 0  # a mean, which all have that split the rows
    if of_rows or name.endswith("balance_bias"):  # whole on every rank (`data.shard`)
        shards, index = 1, 0
    elif split.by_expert:
        shards, index = shards // degrees.expert, shard // degrees.expert
    rows = split.local_shape[0] if split.shape else 0
    each = -(-rows // shards)
    return Piece(split, range(min(index * each, rows), min((index + 1) * each, rows)))


def pieces(
    name: str, shape: tuple[int, ...], config: ModelConfig, degrees: Degrees, stage: int
) -> Iterator[tuple[int, Piece]]:
    """All the pieces of a tensor, each once, with the rank that hands it out; `stage` is the first that holds it."""
    first = stage * degrees.ranks // degrees.pipeline
    splits = [splits_along(name, shape, config, degrees, expert) for expert in range(degrees.expert)]
    seen = set()
    for shard in range(degrees.shard):
        for tensor in range(degrees.tensor):
            piece = _piece(name, splits[shard % degrees.expert][tensor], degrees, shard)
            key = (piece.split.held, piece.rows)
            if key not in seen:
                seen.add(key)
                yield first + shard * degrees.tensor + tensor, piece


def piece_by_rank(name: str, shape: tuple[int, ...], config: ModelConfig, degrees: Degrees) -> list[Piece]:
    """The piece of every rank by its number, as if all pipeline ranks held the tensor."""
    splits = [splits_along(name, shape, config, degrees, expert) for expert in range(degrees.expert)]
    found = [
        _piece(name, split, degrees, shard)
        for shard in range(degrees.shard)
        for split in splits[shard % degrees.expert]
    ]
    return found * (degrees.ranks // len(found))


@torch.no_grad()
def collect(
    local: Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
    shape: tuple[int, ...],
    owners: Iterator[tuple[int, Piece]],
) -> Tensor | None:
    """The whole tensor, from the pieces that ranks have (`local` is this one's): on the CPU of rank 0.

    Every rank must call it. The others give None.
    """
    mine = dist.get_rank()
    whole = torch.empty(shape, dtype=dtype) if mine == 0 else None
    for owner, piece in owners:
        sent = local.contiguous() if mine == owner and local is not None else None
        if owner != 0 and mine in (0, owner):
            if sent is None:
                sent = torch.empty(piece.shape, dtype=dtype, device=device)
            if not sent.numel():
                continue
            if mine == owner:
                dist.send(sent, 0)
            else:
                dist.recv(sent, owner)
        if whole is not None and sent is not None and piece.shape == tuple(sent.shape):
            piece.put(whole, sent)
    return whole


def local_of(tensor: Tensor) -> Tensor:
    """This rank's own numbers of a tensor, which FSDP2 may have split (its class takes seconds to import)."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local
