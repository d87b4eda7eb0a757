"""Tensors that ranks hold in pieces, as tensors that are had whole: each is collected when it is asked for.

Ranks must ask for the same tensors in the same order, since each has its part in the collecting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from tenfold.checkpoint.tensors import PIECE, Stored, writing_order
from tenfold.parallel.layout import Layout

_KEPT = 3  # AdamW's second moment is carried with the first, and a block is asked for by every layer that it becomes


def gathered(layout: Layout, tensors: Mapping[str, Tensor], to: int | None = 0) -> dict[str, Stored]:
    """All ranks' tensors, of which `tensors` are this one's: weights by name, or their state by "name/kind".

    Only rank `to` gets what is in them; all do if None.
    """
    if layout.alone:
        return {name: Stored.of(tensor) for name, tensor in tensors.items()}
    shapes = layout.whole_shapes(tensors)
    dtypes = {name: dtype for told in layout.of_all(_dtypes(tensors)) for name, dtype in told.items()}
    kept: dict[str, Tensor] = {}

    def pieces(name: str) -> Iterator[Tensor]:
        whole = kept.get(name)
        if whole is None:
            parameter = name.partition("/")[0]
            found = layout.collect(parameter, tensors.get(name), shapes[name], dtypes[name], to)
            whole = torch.empty(0) if found is None else found.detach()
            if to is None:
                kept[name] = whole
                while len(kept) > _KEPT:
                    del kept[next(iter(kept))]
        yield from whole.reshape(-1).split(PIECE)

    return {name: Stored(dtypes[name], shapes[name], partial(pieces, name)) for name in sorted(shapes)}


def _dtypes(tensors: Mapping[str, Tensor]) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in tensors.items()}


def hand_over(tensors: Mapping[str, Stored]) -> None:
    """On a rank that does not write: go through `tensors` as the one that does."""
    for name in writing_order(tensors):
        for _ in tensors[name].pieces():
            pass
