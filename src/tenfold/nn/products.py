"""Products of bf16 matrices, on processors that have a unit for them and on those that have none.

A bf16 unit multiplies exactly, adds up in fp32 and rounds once. Without one PyTorch multiplies bf16 by slow scalar
code; casting to fp32, multiplying there and rounding once is the same arithmetic, at the speed of fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tenfold.hardware.device import has_bf16_unit


@torch.compiler.assume_constant_result
def _cpu_widens() -> bool:
    return not has_bf16_unit()


_foreseen: list[bool] = []


@contextmanager
def foreseeing(bf16_unit: bool) -> Iterator[None]:
    """Have tensors on the meta device computed with as on a processor that has a bf16 unit, or has none.

    So the shapes of a run elsewhere are seen here.
    """
    _foreseen.append(bf16_unit)
    try:
        yield
    finally:
        _foreseen.pop()


def on_cpu(x: Tensor) -> bool:
    """Whether a CPU computes with `x`, or is foreseen to."""
    return x.device.type == "cpu" or (bool(_foreseen) and x.device.type == "meta")


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which matrices like `x` are multiplied: its own, but fp32 for bf16 on a CPU without a bf16 unit."""
    if x.dtype == torch.bfloat16 and on_cpu(x) and (not _foreseen[-1] if _foreseen else _cpu_widens()):
        return torch.float32
    return x.dtype


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """x @ weight^T + bias in the dtype of `x` [..., I], whatever that of the parameters; result [..., O]."""
    if product_dtype(x) != x.dtype:
        out: Tensor = _WidenedLinear.apply(x, weight_OI, bias_O)
        return out
    return F.linear(x, weight_OI.to(x.dtype), None if bias_O is None else bias_O.to(x.dtype))


class _WidenedLinear(torch.autograd.Function):
    """Keeps the bf16 input alone for the backward pass, not its fp32 copy; no gradient of a parameter is rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_OI, bias_O)
        bias = None if bias_O is None else bias_O.to(x.dtype).float()
        return F.linear(x.float(), weight_OI.to(x.dtype).float(), bias).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OI, bias_O = ctx.saved_tensors
        grad_NO = grad.flatten(0, -2).float()
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad_NO @ weight_OI.to(x.dtype).float()).to(x.dtype).view_as(x)
        if ctx.needs_input_grad[1]:
            grad_weight = (grad_NO.t() @ x.flatten(0, -2).float()).to(weight_OI.dtype)
        if bias_O is not None and ctx.needs_input_grad[2]:
            grad_bias = grad_NO.sum(0).to(bias_O.dtype)
        return grad_x, grad_weight, grad_bias
