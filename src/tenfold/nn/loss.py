"""Cross-entropy over a vocabulary too large for all its logits to exist at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tenfold.nn.products import product_dtype
from tenfold.nn.ranks import ALONE, TensorRanks

IGNORE = -100


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Logits are made, used for loss and gradient, and dropped, `chunk` tokens at a time, all in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        vocab_size: int,
        chunk: int,
        bias_V: Tensor | None,
        ranks: TensorRanks,
        counted_N: Tensor | None,
    ) -> Tensor:
        dtype = product_dtype(hidden_ND)
        weight = weight_VD.to(hidden_ND.dtype).to(dtype)
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden_ND.device)
        train = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        grad_hidden = torch.empty_like(hidden_ND) if train else None
        grad_weight = torch.zeros_like(weight_VD) if train else None
        grad_bias = None if bias_V is None else torch.zeros_like(bias_V)
        for start in range(0, len(hidden_ND), chunk):
            hidden, targets = hidden_ND[start : start + chunk].to(dtype), targets_N[start : start + chunk]
            logits = (hidden @ weight.t()).to(wide)
            if bias_V is not None:
                logits += bias_V
            logits[:, max(0, vocab_size - ranks.first_row) :] = -torch.inf
            valid = (targets != IGNORE)[:, None]
            row = targets[:, None] - ranks.first_row
            mine = valid if ranks.size == 1 else valid & (row >= 0) & (row < len(weight))
            safe = row.where(mine, 0)
            # One exponential serves the loss and, divided by its sum, the gradient; all in the memory of the logits.
            chosen, largest = logits.gather(1, safe).where(mine, 0), ranks.maximum(logits.amax(-1, keepdim=True))
            powers = logits.sub_(largest).exp_()
            sums, chosen = ranks.add(torch.stack((powers.sum(-1, keepdim=True), chosen)))
            counted = valid if counted_N is None else valid & counted_N[start : start + chunk, None]
            total += ((sums.log() + largest - chosen) * counted).sum()
            if grad_hidden is None or grad_weight is None:
                del logits, powers  # before the next chunk's are made
                continue
            grad = powers.mul_(valid / sums).scatter_add_(1, safe, -mine.to(wide)).to(dtype)
            grad_hidden[start : start + chunk] = grad @ weight
            if grad_weight.dtype == dtype:
                grad_weight.addmm_(grad.t(), hidden)
            else:
                grad_weight += grad.t() @ hidden
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=grad_bias.dtype)
            del logits, powers, grad
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        grad_bias = None if grad_bias is None else grad_bias * grad_total
        return (
            grad_hidden * grad_total.to(grad_hidden.dtype),
            grad_weight * grad_total,
            *3 * [None],
            grad_bias,
            None,
            None,
        )


def cross_entropy_sum(
    hidden: Tensor,
    weight_VD: Tensor,
    targets: Tensor,
    vocab_size: int,
    chunk: int = 512,
    bias_V: Tensor | None = None,
    ranks: TensorRanks = ALONE.tensor,
    counted: Tensor | None = None,
) -> Tensor:
    """The sum (never a mean) over tokens of -log p(target), a scalar in fp32 or wider.

    `hidden` [..., D] and `targets` [...] (int64; `IGNORE` is left out); rows of `weight_VD` from `vocab_size` on only
    pad it and have no probability; `bias_V` (as many entries as it has rows) is added to the logits. At most `chunk`
    tokens' logits exist at once.

    `ranks` may split the rows of the matrix (and the bias); every one of them has the same `hidden`, and gets its part
    of the gradient. The sum is over the targets that `counted` [...] (bool) names, the gradient is that of all.
    """
    total: Tensor = _ChunkedCrossEntropy.apply(
        hidden.reshape(-1, hidden.shape[-1]),
        weight_VD,
        targets.reshape(-1),
        vocab_size,
        chunk,
        bias_V,
        ranks,
        None if counted is None else counted.reshape(-1),
    )
    return total
