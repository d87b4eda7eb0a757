"""Linear, norm, rotary positions and attention.

Shapes: B sequences, T positions, D hidden, H query heads, K key heads, W width of a head. Weights are stored in fp32
and used in the dtype of the activations, so that one model serves every precision.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tenfold.config.model import ModelConfig


class Linear(nn.Linear):
    """x @ weight^T + bias, in the dtype of x."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last dimension."""

    def __init__(self, config: ModelConfig, width: int, kind: str | None = None) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.width = (width,)
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if (kind or config.norm) == "layernorm" else None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        if self.bias is None:
            return F.rms_norm(x, self.width, weight, self.eps)
        return F.layer_norm(x, self.width, weight, self.bias.to(x.dtype), self.eps)


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
    """Causal self-attention, with grouped key heads and query-key norm where the configuration asks for them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.key_heads, self.width = config.heads, config.key_heads, config.head_width
        self.wq = Linear(config.hidden, self.heads * self.width, bias=config.bias)
        self.wk = Linear(config.hidden, self.key_heads * self.width, bias=config.bias)
        self.wv = Linear(config.hidden, self.key_heads * self.width, bias=config.bias)
        self.wo = Linear(self.heads * self.width, config.hidden, bias=config.bias)
        self.q_norm = Norm(config, self.width, "rmsnorm") if config.qk_norm else None
        self.k_norm = Norm(config, self.width, "rmsnorm") if config.qk_norm else None

    def forward(self, x_BTD: Tensor, rotary: Tensor | None) -> Tensor:
        batch, positions, _ = x_BTD.shape
        q, k, v = (
            project(x_BTD).view(batch, positions, -1, self.width).transpose(1, 2)
            for project in (self.wq, self.wk, self.wv)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        y_BHTW = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.key_heads)
        return self.wo(y_BHTW.transpose(1, 2).reshape(batch, positions, -1))
