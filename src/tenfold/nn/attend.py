"""Attention itself: softmax(q k^T) v, over what each position may see.

Shapes: B sequences, T positions, H query heads, K key heads, S positions of keys, W width of a head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tenfold.nn.cache import LayerCache
from tenfold.nn.documents import attend_within
from tenfold.nn.products import product_dtype
from tenfold.nn.slices import LayerSlice

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class Context(NamedTuple):
    """What attention knows of a batch besides hidden states; made once in a forward pass, for all layers."""

    rotary: Tensor | None
    """Cosines and sines of the positions' angles (`rotary_table`)."""
    caches: tuple[LayerCache | LayerSlice, ...] = ()
    """In generation, and where sequences are trained on slice by slice, the keys and values of this layer and of those
    above it; else none."""
    causal: bool = True
    """Whether a position sees only itself and those before it (a decoder), or all of them (an encoder)."""
    document_starts: Tensor | None = None
    """Where documents begin that attention may not leave (`documents.Documents`); None: it sees the whole sequence."""

    def above(self, layers: int = 1) -> Context:
        """The same for the layer that stands `layers` higher."""
        return self._replace(caches=self.caches[layers:]) if self.caches else self


def attend(q_BHTW: Tensor, k_BKSW: Tensor, v_BKSW: Tensor, context: Context) -> Tensor:
    """softmax(q k^T / sqrt(W)) v over the positions that `context` lets each position see, [B, H, T, W].

    There may be more keys than queries, S > T: those of positions before (see `nn.cache`, `nn.slices`).
    """
    dtype, grouped = product_dtype(q_BHTW), q_BHTW.shape[1] != k_BKSW.shape[1]
    if dtype != q_BHTW.dtype:
        return attend(q_BHTW.to(dtype), k_BKSW.to(dtype), v_BKSW.to(dtype), context).to(q_BHTW.dtype)
    if context.document_starts is not None:
        if grouped:
            group = q_BHTW.shape[1] // k_BKSW.shape[1]
            k_BKSW, v_BKSW = (x.repeat_interleave(group, dim=1) for x in (k_BKSW, v_BKSW))
        return attend_within(q_BHTW, k_BKSW, v_BKSW, context.document_starts, context.causal)
    if context.caches and q_BHTW.shape[2] == 1:
        return _attend_once(q_BHTW, k_BKSW, v_BKSW, context.caches[0].visible)
    visible = context.caches[0].visible if context.caches else None
    if (
        visible is None and q_BHTW.device.type == "meta"
    ):  # for which PyTorch would choose the kernel that no device runs
        out: Tensor = _flash(q_BHTW, k_BKSW, v_BKSW, 0.0, context.causal)[0]
        return out
    return F.scaled_dot_product_attention(
        q_BHTW, k_BKSW, v_BKSW, attn_mask=visible, is_causal=context.causal and visible is None, enable_gqa=grouped
    )


def _attend_once(q_BH1W: Tensor, k_BKSW: Tensor, v_BKSW: Tensor, visible: Tensor | None) -> Tensor:
    """One query per head: those that share a key head go as its positions, so that no key is copied for them."""
    q_BKGW = q_BH1W.view(len(q_BH1W), k_BKSW.shape[1], -1, q_BH1W.shape[-1])
    return F.scaled_dot_product_attention(q_BKGW, k_BKSW, v_BKSW, attn_mask=visible).view_as(q_BH1W)
