"""Tensors that ranks hold in pieces, as tensors that are had whole: each is collected when it is asked for.

Ranks must ask for the same tensors in the same order, since each has its part in the collecting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from tenfold.checkpoint import tensors as files
from tenfold.checkpoint.tensors import Stored, writing_order
from tenfold.parallel.layout import Layout

Fetched = Callable[[str, Tensor], Tensor]


def gathered(
    layout: Layout, tensors: Mapping[str, Tensor], fetched: Fetched = lambda _, tensor: tensor
) -> dict[str, Stored]:
    """All ranks' tensors, of which `tensors` are this one's: weights by name, or their state by "name/kind".

    Only rank 0 gets what is in them. `fetched` gives what a tensor stands for that has no memory.
    """
    if layout.alone:

        def own(name: str, tensor: Tensor) -> Iterator[Tensor]:
            yield from fetched(name, tensor).detach().reshape(-1).split(files.PIECE)

        return {
            name: Stored(tensor.dtype, tuple(tensor.shape), partial(own, name, tensor))
            for name, tensor in tensors.items()
        }
    shapes = layout.whole_shapes(tensors)
    dtypes = layout.dtypes(tensors)

    def pieces(name: str) -> Iterator[Tensor]:
        mine = fetched(name, tensors[name]) if name in tensors else None
        found = layout.collect(name, mine, shapes[name], dtypes[name])
        whole = torch.empty(0) if found is None else found.detach()
        yield from whole.reshape(-1).split(files.PIECE)

    return {name: Stored(dtypes[name], shapes[name], partial(pieces, name)) for name in sorted(shapes)}


def hand_over(tensors: Mapping[str, Stored]) -> None:
    """On a rank that does not write: go through `tensors` as the one that does."""
    for name in writing_order(tensors):
        for _ in tensors[name].pieces():
            pass
