"""Rotary positions and the attention layer.

Shapes: B sequences, T positions, D hidden, H query heads, K key heads, W width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tenfold.config.model import ModelConfig
from tenfold.nn.attend import Context
from tenfold.nn.layers import Linear, Norm
from tenfold.nn.ranks import ALONE, Ranks


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

    def __init__(self, config: ModelConfig, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.ranks = ranks
        self.heads, self.key_heads, self.width = config.heads, config.key_heads, config.head_width
        self.wq = Linear(config.hidden, self.heads * self.width, bias=config.bias)
        self.wk = Linear(config.hidden, self.key_heads * self.width, bias=config.bias)
        self.wv = Linear(config.hidden, self.key_heads * self.width, bias=config.bias)
        self.wo = Linear(self.heads * self.width, config.hidden, bias=config.bias)
        self.q_norm = Norm(config, self.width, "rmsnorm") if config.qk_norm else None
        self.k_norm = Norm(config, self.width, "rmsnorm") if config.qk_norm else None

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        x_BTD = self.ranks.tensor.gather(x_BTD)
        batch, positions, _ = x_BTD.shape
        q, k, v = (
            self.ranks.tensor.expand(linear, x_BTD).view(batch, positions, -1, self.width).transpose(1, 2)
            for linear in (self.wq, self.wk, self.wv)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if context.rotary is not None:
            q, k = rotate(q, context.rotary), rotate(k, context.rotary)
        if context.caches:
            k, v = context.caches[0].extend(k, v)
        y_BHTW = self.ranks.context.attend(q, k, v, context)
        return self.ranks.tensor.project(self.wo, y_BHTW.transpose(1, 2).reshape(batch, positions, -1))
