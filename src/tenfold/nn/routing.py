"""Which experts a token goes to, with what weight, and the losses that keep the router in order.

Shapes: B sequences, N tokens, Z prototypes of P experts, E = Z * P, k choices in each prototype, C = Z * k.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("tenfold::choose", mutates_args=())
def choose(scores_NZP: Tensor, top_k: int) -> Tensor:
    """The experts of the highest scores in each prototype, counted over the whole layer, int64 [N, C].

    An operator of its own: it is what recomputation keeps (see `nn.recompute`). One expert is found by a maximum, which
    takes a fraction of the time of a partial sort.
    """
    prototypes, size = scores_NZP.shape[1:]
    best = scores_NZP.argmax(-1, keepdim=True) if top_k == 1 else scores_NZP.topk(top_k, dim=-1).indices
    first_Z = torch.arange(0, prototypes * size, size, device=scores_NZP.device)
    return (best + first_Z[:, None]).flatten(1)


CHOOSE = torch.ops.tenfold.choose.default


@choose.register_fake
def _(scores_NZP: Tensor, top_k: int) -> Tensor:
    return scores_NZP.new_empty(scores_NZP.shape[0], scores_NZP.shape[1] * top_k, dtype=torch.int64)


def count_by_sequence(choice_NC: Tensor, sequences: int, experts: int) -> Tensor:
    """Choices of each expert in each sequence, int64 [B, E]."""
    choice_BX = choice_NC.view(sequences, -1)
    return torch.zeros(sequences, experts, dtype=torch.int64, device=choice_NC.device).scatter_add_(
        1, choice_BX, torch.ones_like(choice_BX)
    )


class _Gates(torch.autograd.Function):
    """Gates and losses in one, so that the gradient of the logits is made in one pass over them.

    With p the probabilities and g their gradient that of the logits is p * (g - sum of p * g) over a prototype; the
    z-loss, with l = log sum exp, adds 2 * l * p.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_NZP: Tensor, p_NZP: Tensor, choice_NC: Tensor, loads_BE: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        sequences, (_, prototypes, size) = len(loads_BE), p_NZP.shape
        gates_NC = p_NZP.flatten(1).gather(1, choice_NC)
        lse_NZ = logits_NZP.logsumexp(-1)
        # P * share of the choices, mean over prototypes: what one unit of probability costs.
        price_BE = loads_BE.to(p_NZP.dtype) * (size / loads_BE.sum(1, keepdim=True))
        price_BZP = price_BE.unflatten(1, (prototypes, size))
        balance = (price_BZP * p_NZP.unflatten(0, (sequences, -1)).sum(1)).sum()
        z_loss = lse_NZ.square().sum() / prototypes
        ctx.save_for_backward(p_NZP, choice_NC, lse_NZ, price_BZP, gates_NC)
        return gates_NC, balance, z_loss

    @staticmethod
    def backward(
        ctx: Any, grad_gates_NC: Tensor, grad_balance: Tensor, grad_z_loss: Tensor
    ) -> tuple[Tensor, None, None, None]:
        p_NZP, choice_NC, lse_NZ, price_BZP, gates_NC = ctx.saved_tensors
        p_BTZP = p_NZP.unflatten(0, (len(price_BZP), -1))
        grad_NZP = (p_BTZP * (price_BZP * grad_balance)[:, None]).flatten(0, 1)  # p * g
        grad_NZP.view(len(grad_NZP), -1).scatter_add_(1, choice_NC, grad_gates_NC * gates_NC)
        less_NZ = grad_NZP.sum(-1) - lse_NZ * (grad_z_loss * 2 / p_NZP.shape[1])
        return grad_NZP.addcmul_(p_NZP, less_NZ[..., None], value=-1), None, None, None


def gates_and_losses(
    logits_NZP: Tensor, probabilities_NZP: Tensor, choice_NC: Tensor, loads_BE: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gates [N, C] of the chosen experts, the balance loss and the router z-loss, with gradients for the logits.

    Both losses are summed over tokens (1-per-token scale, mean over prototypes). Balance (Switch, arXiv 2101.03961,
    equation 4) is taken sequence by sequence: P * sum of f * p, where f is the share of the sequence's choices that
    fall on an expert and p its mean probability; 1 when even. Being a sum over sequences it is the same for any
    micro-batch. Z-loss is ST-MoE's (arXiv 2202.08906, equation 5). `probabilities_NZP` is the softmax of the logits
    over a prototype, `loads_BE` the choices of each expert by sequence.
    """
    out: tuple[Tensor, Tensor, Tensor] = _Gates.apply(logits_NZP, probabilities_NZP, choice_NC, loads_BE)
    return out
