"""Linear and norm.

Weights are stored in fp32 and used in the dtype of the activations, so that one model serves every precision.
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
