"""Rotary positions and attention.

Shapes: B sequences, T positions, D hidden, H query heads, K key heads, W width of a head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tenfold.config.model import ModelConfig
from tenfold.nn.cache import LayerCache
from tenfold.nn.documents import attend_within
from tenfold.nn.layers import Linear, Norm
from tenfold.nn.products import product_dtype


class Context(NamedTuple):
    """What attention knows of a batch besides hidden states; made once in a forward pass, for all layers."""

    rotary: Tensor | None
    """Cosines and sines of the positions' angles (`rotary_table`)."""
    caches: tuple[LayerCache, ...] = ()
    """In generation, the keys and values of this layer and of those above it; else none."""
    causal: bool = True
    """Whether a position sees only itself and those before it (a decoder), or all of them (an encoder)."""
    document_starts: Tensor | None = None
    """Where documents begin that attention may not leave (`documents.Documents`); None: it sees the whole sequence."""

    def above(self, layers: int = 1) -> Context:
        """The same for the layer that stands `layers` higher."""
        return self._replace(caches=self.caches[layers:]) if self.caches else self


def rotary_table(positions: int, width: int, theta: float, device: torch.device) -> Tensor:
    """Cosines and sines of the rotary angles (RoFormer, arXiv 2104.09864), fp32 [2, positions, width / 2]."""
    powers = torch.arange(0, width, 2, device=device, dtype=torch.float32) / width
    angles = torch.outer(torch.arange(positions, device=device, dtype=torch.float32), theta**-powers)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x_BHTW: Tensor, table: Tensor) -> Tensor:
    """Turn each pair (i, i + W/2) of a head by the angle of its position; computed in fp32 or wider."""
    cos, sin = table
    first, second = x_BHTW.to(torch.promote_types(x_BHTW.dtype, torch.float32)).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BHTW.dtype)


class Attention(nn.Module):
    """Self-attention, with grouped key heads and query-key norm where the configuration asks for them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.key_heads, self.width = config.heads, config.key_heads, config.head_width
        self.wq = Linear(config.hidden, self.heads * self.width, bias=config.bias)
        self.wk = Linear(config.hidden, self.key_heads * self.width, bias=config.bias)
        self.wv = Linear(config.hidden, self.key_heads * self.width, bias=config.bias)
        self.wo = Linear(self.heads * self.width, config.hidden, bias=config.bias)
        self.q_norm = Norm(config, self.width, "rmsnorm") if config.qk_norm else None
        self.k_norm = Norm(config, self.width, "rmsnorm") if config.qk_norm else None

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        batch, positions, _ = x_BTD.shape
        q, k, v = (
            project(x_BTD).view(batch, positions, -1, self.width).transpose(1, 2)
            for project in (self.wq, self.wk, self.wv)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if context.rotary is not None:
            q, k = rotate(q, context.rotary), rotate(k, context.rotary)
        if context.caches:
            k, v = context.caches[0].extend(k, v)
        y_BHTW = attend(q, k, v, context)
        return self.wo(y_BHTW.transpose(1, 2).reshape(batch, positions, -1))


def attend(q_BHTW: Tensor, k_BKSW: Tensor, v_BKSW: Tensor, context: Context) -> Tensor:
    """softmax(q k^T / sqrt(W)) v over the positions that `context` lets each position see, [B, H, T, W].

    There may be more keys than queries, S > T: those of positions before (see `nn.cache`).
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
    return F.scaled_dot_product_attention(
        q_BHTW, k_BKSW, v_BKSW, attn_mask=visible, is_causal=context.causal and visible is None, enable_gqa=grouped
    )


def _attend_once(q_BH1W: Tensor, k_BKSW: Tensor, v_BKSW: Tensor, visible: Tensor | None) -> Tensor:
    """One query per head: those that share a key head go as its positions, so that no key is copied for them."""
    q_BKGW = q_BH1W.view(len(q_BH1W), k_BKSW.shape[1], -1, q_BH1W.shape[-1])
    return F.scaled_dot_product_attention(q_BKGW, k_BKSW, v_BKSW, attn_mask=visible).view_as(q_BH1W)
