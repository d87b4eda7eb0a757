"""Keys and values of sequences that are trained on slice by slice (TeraPipe, arXiv 2102.07988).

Each slice attends to itself and to those before it, whose keys and values every layer keeps. Backward passes come in
the opposite order: what later slices add to the gradients of keys and values is kept too, until the backward pass of
the slice that made them takes it on.

Shapes: B sequences, T positions of a slice, P positions of a whole sequence, S positions up to the end of a slice,
K key heads, W width of a head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tenfold.nn.documents import documents_of


class SliceCache:
    """What `layers` layers keep of the sequences `tokens_BP`, which a model is given slice by slice, in order.

    Attention stays within documents where the token `document_end` ends them.
    """

    def __init__(self, tokens_BP: Tensor, layers: int, document_end: int | None) -> None:
        self._layers = [(_Kept(), _Kept()) for _ in range(layers)]
        self._length, self._held = tokens_BP.shape[1], 0
        self._places_P = torch.arange(self._length, device=tokens_BP.device)
        self._documents = document_end is not None
        self._positions_BP = self._places_P[None]
        if document_end is not None:
            self._positions_BP = documents_of(tokens_BP, document_end).positions

    def begin(self, tokens_BT: Tensor) -> tuple[LayerSlice, ...]:
        """For every layer, where the next slice goes."""
        first, end = self._held, self._held + tokens_BT.shape[1]
        self._held = end
        positions_BT, visible = self._positions_BP[:, first:end], None
        if first or self._documents:
            place_T1, place_S = self._places_P[first:end, None], self._places_P[:end]
            visible = (place_S <= place_T1)[None, None]
            if self._documents:
                visible = visible & (place_S >= place_T1 - positions_BT[..., None])[:, None]
        return tuple(
            LayerSlice(keys, values, first, end, self._length, positions_BT, visible) for keys, values in self._layers
        )


class LayerSlice(NamedTuple):
    """What one layer keeps, and where the slice of this forward pass goes. Made by `SliceCache.begin`."""

    keys: _Kept
    values: _Kept
    first: int
    end: int
    length: int
    """Of whole sequences."""
    positions: Tensor
    """Of the slice, int64 [B or 1, T], counted from the beginning of each one's document where these are masked."""
    visible: Tensor | None
    """Bool [B or 1, 1, T, S], true where a position sees another; None: causal."""

    def extend(self, k_BKTW: Tensor, v_BKTW: Tensor) -> tuple[Tensor, Tensor]:
        """Keep keys and values of the slice; those of it and all before, [B, K, S, W] each. A layer that is computed
        again for its backward pass keeps the same once more."""
        place = self.first, self.end, self.length
        return _Extend.apply(k_BKTW, self.keys, *place), _Extend.apply(v_BKTW, self.values, *place)


class _Kept:
    """Keys or values of a whole sequence [B, K, P, W], and of their gradient what later slices have told so far, in
    fp32 or wider. Each is made when it is first needed."""

    held: Tensor | None = None
    gradient: Tensor | None = None


class _Extend(torch.autograd.Function):
    """New keys or values behind those kept. The result is a view of all that are kept, of which no part that it shows
    changes after: so it is no matter that others are written later."""

    @staticmethod
    def forward(ctx: Any, new_BKTW: Tensor, kept: _Kept, first: int, end: int, length: int) -> Tensor:
        ctx.kept, ctx.first, ctx.end, ctx.dtype = kept, first, end, new_BKTW.dtype
        if kept.held is None:
            batch, heads, _, width = new_BKTW.shape
            kept.held = new_BKTW.new_empty(batch, heads, length, width)
        kept.held[:, :, first:end] = new_BKTW
        return kept.held.data[:, :, :end]  # with a count of changes of its own

    @staticmethod
    def backward(ctx: Any, grad_BKSW: Tensor) -> tuple[Tensor | None, ...]:
        kept, first, end = ctx.kept, ctx.first, ctx.end
        if kept.gradient is None:  # of the last slice
            wide = torch.promote_types(grad_BKSW.dtype, torch.float32)
            kept.gradient = grad_BKSW.to(wide, copy=True)
        else:
            kept.gradient[:, :, :end] += grad_BKSW
        return kept.gradient[:, :, first:end].to(ctx.dtype), None, None, None, None
