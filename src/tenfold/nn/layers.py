"""Linear and norm.

Weights are stored in fp32 and used in the dtype of the activations, so that one model serves every precision.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tenfold.config.model import ModelConfig
from tenfold.nn.products import linear, on_cpu


class Linear(nn.Linear):
    """x @ weight^T + bias, in the dtype of x."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last dimension."""

    def __init__(self, config: ModelConfig, width: int, kind: str | None = None) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.width = (width,)
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if (kind or config.norm) == "layernorm" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None and on_cpu(x) and not torch.compiler.is_compiling():
            out: Tensor = _RMSNorm.apply(x, self.weight, self.eps)
            return out
        weight = self.weight.to(x.dtype)
        if self.bias is None:
            return F.rms_norm(x, self.width, weight, self.eps)
        return F.layer_norm(x, self.width, weight, self.bias.to(x.dtype), self.eps)


class _RMSNorm(torch.autograd.Function):
    """x / sqrt(mean of x^2 + eps) * weight on a CPU, where PyTorch makes a dozen passes over x.

    Computed in fp32 or wider; only x and one number a row are kept for the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        inverse = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
        inverse = inverse.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight_D, inverse)
        return (wide * inverse).mul_(weight_D).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight_D, inverse = ctx.saved_tensors
        normal, grad = x.to(inverse.dtype) * inverse, grad.to(inverse.dtype)
        grad_weight = (grad * normal).flatten(0, -2).sum(0).to(weight_D.dtype)
        grad_normal = grad * weight_D
        along = torch.linalg.vecdot(grad_normal, normal).unsqueeze(-1).div_(x.shape[-1])
        grad_x = grad_normal.addcmul_(normal, along, value=-1).mul_(inverse)
        return grad_x.to(x.dtype), grad_weight, None
