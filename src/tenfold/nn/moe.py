"""Feed-forward: dense, or a mixture of experts with expert prototyping (M6-T, arXiv 2105.15082, section 3.2).

The E experts of a layer form Z prototypes of P = E / Z experts. A token x goes to its top-k experts inside every
prototype, weighted by a softmax over that prototype alone, and the outputs add up:

    y = sum over z of sum over i in top-k of prototype z of p[z, i] * expert[z, i](x)

Z = 1 is ordinary top-k routing. Shapes: B sequences, T positions, N = B * T tokens, D hidden, F expert width,
C = Z * top_k choices of a token, R routed rows (at most N * C).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tenfold.config.model import ModelConfig, MoEConfig
from tenfold.nn.layers import Linear

# Columns of a layer's statistics, before the E columns of tokens per expert. All are sums over tokens.
BALANCE, Z_LOSS, DROPPED, LOADS = 0, 1, 2, 3


class FeedForward(nn.Module):
    """Dense feed-forward: GELU (two matrices) or SwiGLU (three)."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        self.gate = Linear(config.hidden, width, bias=config.bias) if config.activation == "swiglu" else None
        self.up = Linear(config.hidden, width, bias=config.bias)
        self.down = Linear(width, config.hidden, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        inner = F.gelu(up) if self.gate is None else F.silu(self.gate(x)) * up
        return self.down(inner)


class Experts(nn.Module):
    """E feed-forwards without biases, applied to rows sorted by expert through grouped matrix products."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        experts, hidden, width = config.moe.experts, config.hidden, config.expert_ffn
        shape = (experts, hidden, width)
        self.gate = nn.Parameter(torch.empty(shape)) if config.activation == "swiglu" else None
        self.up = nn.Parameter(torch.empty(shape))
        self.down = nn.Parameter(torch.empty(experts, width, hidden))

    def forward(self, x_RD: Tensor, rows_E: Tensor) -> Tensor:
        """`rows_E` (int64) tells how many of the rows, from the first, belong to expert 0, to expert 1, and so on."""
        up = grouped_linear(x_RD, self.up, rows_E)
        inner = F.gelu(up) if self.gate is None else F.silu(grouped_linear(x_RD, self.gate, rows_E)) * up
        return grouped_linear(inner, self.down, rows_E)


def grouped_linear(x_RD: Tensor, weight_EDF: Tensor, rows_E: Tensor) -> Tensor:
    """Each row times the matrix of its expert; experts may have no rows. Result [R, F] in the dtype of x."""
    out: Tensor = _grouped_mm(x_RD, weight_EDF.to(x_RD.dtype), rows_E)
    return out


def _kernel_takes(*sizes: int, like: Tensor) -> bool:
    """Whether PyTorch's grouped product takes these sizes, of this dtype, on this device: rows of 16 bytes; on CUDA
    bf16 alone, from compute capability 8 on."""
    aligned = all(size * like.element_size() % 16 == 0 for size in sizes)
    if like.device.type == "cuda":
        return aligned and like.dtype == torch.bfloat16 and torch.cuda.get_device_capability(like.device) >= (8, 0)
    return aligned and like.dtype in (torch.float32, torch.bfloat16)


# Operators of our own around the kernel: under torch.compile and fake tensors the bare one takes bf16 alone, and its
# gradient fails on gradients that are expanded.
@torch.library.custom_op("tenfold::grouped_mm", mutates_args=())
def _grouped_mm(x_RD: Tensor, weight_EDF: Tensor, rows_E: Tensor) -> Tensor:
    if _kernel_takes(*weight_EDF.shape[1:], like=x_RD):
        return F.grouped_mm(x_RD, weight_EDF, offs=rows_E.cumsum(0).to(torch.int32))
    parts = zip(x_RD.split(rows_E.tolist()), weight_EDF, strict=True)
    return torch.cat([rows @ matrix for rows, matrix in parts])


@torch.library.custom_op("tenfold::grouped_outer", mutates_args=())
def _grouped_outer(x_RD: Tensor, grad_RF: Tensor, rows_E: Tensor) -> Tensor:
    """For each expert the sum over its rows of x^T grad, [E, D, F]: the gradient of its matrix."""
    if _kernel_takes(x_RD.shape[1], grad_RF.shape[1], like=x_RD):
        return F.grouped_mm(x_RD.t(), grad_RF, offs=rows_E.cumsum(0).to(torch.int32))
    parts = zip(x_RD.split(rows_E.tolist()), grad_RF.split(rows_E.tolist()), strict=True)
    return torch.stack([x.t() @ grad for x, grad in parts])


@_grouped_mm.register_fake
def _(x_RD: Tensor, weight_EDF: Tensor, rows_E: Tensor) -> Tensor:
    return x_RD.new_empty(x_RD.shape[0], weight_EDF.shape[2])


@_grouped_outer.register_fake
def _(x_RD: Tensor, grad_RF: Tensor, rows_E: Tensor) -> Tensor:
    return x_RD.new_empty(rows_E.shape[0], x_RD.shape[1], grad_RF.shape[1])


def _save_for_grouped_mm(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grouped_mm_backward(ctx: Any, grad_RF: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x_RD, weight_EDF, rows_E = ctx.saved_tensors
    grad_RF = grad_RF.contiguous()
    grad_x = _grouped_mm(grad_RF, weight_EDF.transpose(1, 2), rows_E) if ctx.needs_input_grad[0] else None
    grad_weight = _grouped_outer(x_RD, grad_RF, rows_E) if ctx.needs_input_grad[1] else None
    return grad_x, grad_weight, None


_grouped_mm.register_autograd(_grouped_mm_backward, setup_context=_save_for_grouped_mm)


def _sum_of_rows(x_RD: Tensor, row_NC: Tensor) -> Tensor:
    """For each token the sum of its rows; an index behind the last row stands for nothing."""
    padded = torch.cat((x_RD, x_RD.new_zeros(1, x_RD.shape[1])))
    return padded[row_NC].sum(1)


class _Dispatch(torch.autograd.Function):
    """Copy each token to its rows. Dispatch and combine are each other's gradient, and both are plain look-ups:
    exact and deterministic on any number of threads, where the gradient of an index would scatter."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, token_R: Tensor, row_NC: Tensor) -> Tensor:
        ctx.save_for_backward(row_NC)
        return x_ND[token_R]

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        (row_NC,) = ctx.saved_tensors
        return _sum_of_rows(grad_RD, row_NC), None, None


class _Combine(torch.autograd.Function):
    """Sum the rows of each token."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, token_R: Tensor, row_NC: Tensor) -> Tensor:
        ctx.save_for_backward(token_R)
        return _sum_of_rows(x_RD, row_NC)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None]:
        (token_R,) = ctx.saved_tensors
        return grad_ND[token_R], None, None


class MixtureOfExperts(nn.Module):
    """Router, routed experts, and shared experts if any. Returns the output and the layer's statistics."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        moe = config.moe
        self.config = moe
        self.router = nn.Linear(config.hidden, moe.experts, bias=False)
        self.experts = Experts(config)
        self.shared = FeedForward(config, moe.shared_experts * config.expert_ffn) if moe.shared_experts else None
        # Added to the probabilities when experts are chosen, never to the gates (arXiv 2408.15664).
        self.balance_bias = nn.Parameter(torch.zeros(moe.experts), requires_grad=False) if moe.bias_rate else None

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        moe = self.config
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        probabilities_NZP, logits_NZP, choice_NC = self.route(x_ND)
        gates_NC = probabilities_NZP.flatten(1).gather(1, choice_NC)
        sequence_loads_BE = _count_by_sequence(choice_NC, x_BTD.shape[0], moe.experts)

        # Rows sorted by expert; the sort is stable, so within an expert rows keep the order of the text.
        order_R = choice_NC.flatten().argsort(stable=True)
        rows_E = sequence_loads_BE.sum(0)
        dropped = x_ND.new_zeros((), dtype=torch.float32)
        if self.training and moe.capacity != "dropless":
            order_R = order_R[self._within_capacity(choice_NC, order_R, sequence_loads_BE, x_BTD.shape[1])]
            rows_E = torch.bincount(choice_NC.flatten()[order_R], minlength=moe.experts)
            dropped = dropped + (choice_NC.numel() - order_R.numel())
        token_R = order_R // choice_NC.shape[1]
        # Where each choice's row stands; a dropped choice points behind the last row.
        row_NC = torch.full_like(choice_NC, len(order_R)).flatten()
        row_NC = row_NC.scatter_(0, order_R, torch.arange(len(order_R), device=x_ND.device)).view_as(choice_NC)

        routed_RD = self.experts(_Dispatch.apply(x_ND, token_R, row_NC), rows_E)
        gates_R = gates_NC.flatten()[order_R]
        y_ND = _Combine.apply(routed_RD * gates_R[:, None].to(routed_RD.dtype), token_R, row_NC)
        if self.shared is not None:
            y_ND = y_ND + self.shared(x_ND)

        loads_E = sequence_loads_BE.sum(0).to(torch.float32)
        balance, z_loss = self._losses(probabilities_NZP, logits_NZP, sequence_loads_BE)
        statistics = torch.cat((torch.stack((balance, z_loss, dropped)), loads_E))
        return y_ND.view_as(x_BTD), statistics

    def route(self, x_ND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Probabilities and logits [N, Z, P] in fp32 or wider, and the chosen experts [N, C], 0..E-1."""
        moe = self.config
        wide = torch.promote_types(x_ND.dtype, torch.float32)
        logits = F.linear(x_ND.to(wide), self.router.weight.to(wide)).unflatten(1, (moe.prototypes, -1))
        probabilities = logits.softmax(-1)
        scores = probabilities.detach()
        if self.balance_bias is not None:
            scores = scores + self.balance_bias.view(moe.prototypes, -1)
        choice_NZk = scores.topk(moe.top_k, dim=-1).indices
        first_Z = torch.arange(moe.prototypes, device=x_ND.device) * (moe.experts // moe.prototypes)
        return probabilities, logits, (choice_NZk + first_Z[:, None]).flatten(1)

    def _within_capacity(self, choice_NC: Tensor, order_R: Tensor, loads_BE: Tensor, positions: int) -> Tensor:
        """Which of the sorted rows their expert takes: in every sequence the first `capacity` that choose it.

        Counted by sequence (GShard's groups, arXiv 2006.16668), so that what a token gets does not depend on what
        else is in the batch, nor on how the batch is cut into micro-batches.
        """
        moe = self.config
        choices = choice_NC.shape[1] if moe.capacity == "k" else 1
        capacity = math.ceil(choices * positions / moe.experts * moe.capacity_factor)
        sequence_R = order_R // (positions * choice_NC.shape[1])
        expert_R = choice_NC.flatten()[order_R]
        # Sorted rows stand by expert, then sequence: the place in such a run is the row minus where the run starts.
        runs_EB = loads_BE.t().flatten()
        starts = runs_EB.cumsum(0) - runs_EB
        place_R = torch.arange(len(order_R), device=order_R.device) - starts[expert_R * len(loads_BE) + sequence_R]
        return place_R < capacity

    def _losses(self, probabilities_NZP: Tensor, logits_NZP: Tensor, loads_BE: Tensor) -> tuple[Tensor, Tensor]:
        """Balance loss and router z-loss, summed over tokens (both 1-per-token scale, mean over prototypes).

        Balance (Switch, arXiv 2101.03961, equation 4) is taken sequence by sequence: P * sum of f * p, where f is
        the share of the sequence's choices that fall on an expert and p its mean probability; 1 when even. Being a
        sum over sequences it is the same for any micro-batch. Z-loss is ST-MoE's (arXiv 2202.08906, equation 5).
        """
        moe = self.config
        share_BZP = (loads_BE / loads_BE.sum(1, keepdim=True)).unflatten(1, (moe.prototypes, -1)) * moe.prototypes
        summed_BZP = probabilities_NZP.unflatten(0, (len(loads_BE), -1)).sum(1)
        balance = (share_BZP * summed_BZP).sum() * (moe.experts // moe.prototypes) / moe.prototypes
        z_loss = logits_NZP.logsumexp(-1).square().sum() / moe.prototypes
        return balance.float(), z_loss.float()


def _count_by_sequence(choice_NC: Tensor, sequences: int, experts: int) -> Tensor:
    """Choices of each expert in each sequence, int64 [B, E]."""
    choice_BX = choice_NC.view(sequences, -1)
    return torch.zeros(sequences, experts, dtype=torch.int64, device=choice_NC.device).scatter_add_(
        1, choice_BX, torch.ones_like(choice_BX)
    )


@torch.no_grad()
def update_balance_bias(layers: Sequence[nn.Module], loads_LE: Tensor, config: MoEConfig) -> None:
    """Raise the balancing bias of experts under their prototype's mean load by `bias_rate`, lower that of those over.

    `layers` are the blocks by depth and `loads_LE` the tokens of one step; a block that several layers use goes by
    their sum (arXiv 2408.15664, algorithm 1).
    """
    by_block: dict[nn.Module, Tensor] = {}
    for block, loads_E in zip(layers, loads_LE, strict=True):
        by_block[block] = by_block[block] + loads_E if block in by_block else loads_E
    for block, loads_E in by_block.items():
        loads_ZP = loads_E.unflatten(0, (config.prototypes, -1))
        step_E = (loads_ZP.mean(1, keepdim=True) - loads_ZP).sign().flatten() * config.bias_rate
        for module in block.modules():
            if isinstance(module, MixtureOfExperts) and module.balance_bias is not None:
                module.balance_bias.add_(step_E)
