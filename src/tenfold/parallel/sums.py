"""Sums over parameters of which ranks have pieces: over rows, over columns, over all of it.

Which ranks' parts make such a sum whole is known from the parameter's name and shape alone (`spread_of`), so that
planning counts what a run exchanges. What several parameters need travels together, in one exchange for each group of
ranks: first of tensor ranks, then of those that split rows as data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tenfold.config.model import ModelConfig
from tenfold.parallel.mesh import Degrees, Mesh
from tenfold.parallel.splits import Split, in_a_layer, splits_along

TOGETHER = 2**22
"""Elements of parameters whose sums travel together, at most, as the rank has them that has most."""


@dataclass(frozen=True)
class Span:
    """The ranks whose parts make a sum whole; none: each has it."""

    places: tuple[int, ...] = ()
    """Along tensor."""
    copies: int = 1
    """How many of these have the same part, which is to count once."""
    shards: bool = False
    """Whether all of data_shard x context have parts too."""


@dataclass(frozen=True)
class Spread:
    """A parameter of the whole `shape`, of which no rank has more than so many `elements`; and how sums over its last
    dimension, over the last but one, and over all of it are made whole."""

    shape: tuple[int, ...]
    elements: int
    row: Span = Span()
    column: Span = Span()
    all: Span = Span()


def spread_of(name: str, shape: tuple[int, ...], config: ModelConfig, degrees: Degrees, tensor: int) -> Spread:
    """How a parameter of that name and whole shape lies on ranks, as the one at `tensor` sees it."""
    splits, shards = splits_along(name, shape, config, degrees, 0), degrees.shard > 1
    each = degrees.shard // (degrees.expert if splits[0].by_expert else 1)
    most = max(-(-split.local_shape[0] // each) * math.prod(split.local_shape[1:]) for split in splits)
    last = len(shape) - 1
    return Spread(
        shape,
        most,
        _span(splits, tensor, (last,), shards and last == 0),
        _span(splits, tensor, (last - 1,), shards and last == 1),
        _span(splits, tensor, range(len(shape)), shards),
    )


def _span(splits: Sequence[Split], tensor: int, dims: Iterable[int], shards: bool) -> Span:
    """Of a sum over some dimensions."""

    def others(split: Split) -> list[object]:
        return [ranges for dim, ranges in enumerate(split.held) if dim not in dims]

    mine = splits[tensor]
    places = tuple(place for place, split in enumerate(splits) if others(split) == others(mine))
    copies = sum(splits[place].held == mine.held for place in places)
    return Span(shards=shards) if copies == len(places) else Span(places, copies, shards)


def summed_together(sizes: Sequence[int]) -> Iterator[slice]:
    """Parameters of these `elements` in runs whose sums travel together."""
    first = total = 0
    for number, size in enumerate(sizes):
        if number > first and total + size > TOGETHER:
            yield slice(first, number)
            first, total = number, 0
        total += size
    if sizes:
        yield slice(first, len(sizes))


class Sums:
    """Makes sums over parameters whole; on one rank they are."""

    def __init__(self, mesh: Mesh | None = None, spreads: Mapping[nn.Parameter, Spread] | None = None) -> None:
        self._mesh, self._spreads = mesh, spreads or {}

    @classmethod
    def over(
        cls,
        mesh: Mesh,
        config: ModelConfig,
        shapes: Mapping[str, tuple[int, ...]],
        named: Mapping[str, nn.Parameter],
    ) -> Sums:
        """Of the parameters `named` on the ranks of a mesh, of a model whose parameters have these `shapes`. All ranks
        must make it at the same time: it opens groups."""
        found: dict[nn.Parameter, Spread] = {}
        known: dict[tuple[object, ...], Spread] = {}
        for name, shape in shapes.items():
            key = (in_a_layer(name), shape)
            if key not in known:
                by_rank = [spread_of(name, shape, config, mesh.degrees, rank) for rank in range(mesh.degrees.tensor)]
                for places in sorted({span.places for each in by_rank for span in (each.row, each.column, each.all)}):
                    if places:
                        mesh.part("tensor", places)
                known[key] = by_rank[mesh.place["tensor"]]
            if name in named:
                found[named[name]] = known[key]
        return cls(mesh, found)

    def spread(self, parameter: nn.Parameter) -> Spread:
        """How a parameter lies, or what it is a part of. One that is not known is on this rank alone."""
        whole = getattr(parameter, "part_of", parameter)  # what is offloaded comes to the optimizer in stand-ins
        return self._spreads.get(whole) or Spread(tuple(parameter.shape), parameter.numel())

    @torch.no_grad()
    def whole(self, parts: Sequence[tuple[Tensor, Span]]) -> list[Tensor]:
        """Sums, from what this rank has of each. All ranks that have parts must ask, for the same, in one order."""
        found = [part for part, _ in parts]
        by_places: dict[tuple[int, ...], list[int]] = {}
        for number, (_, span) in enumerate(parts):
            if span.places:
                by_places.setdefault(span.places, []).append(number)
        for places in sorted(by_places):  # the same order everywhere, that no two ranks wait for each other
            for number in by_places[places]:
                found[number] = found[number] / parts[number][1].copies
            self._add(found, by_places[places], self._group(places))
        self._add(found, [number for number, (_, span) in enumerate(parts) if span.shards], self._group())
        return found

    def _group(self, places: tuple[int, ...] = ()) -> dist.ProcessGroup | None:
        if self._mesh is None or (not places and self._mesh.degrees.shard == 1):
            return None
        return self._mesh.part("tensor", places) if places else self._mesh.group("shard")

    @staticmethod
    def _add(found: list[Tensor], numbers: Sequence[int], group: dist.ProcessGroup | None) -> None:
        if not numbers:
            return
        flat = torch.cat([found[number].double().reshape(-1) for number in numbers])
        dist.all_reduce(flat, group=group)
        for number, part in zip(numbers, flat.split([found[number].numel() for number in numbers]), strict=True):
            found[number] = part.view_as(found[number]).to(found[number].dtype)
