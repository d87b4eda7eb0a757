"""Feed-forward: dense, or a mixture of experts with expert prototyping (M6-T, arXiv 2105.15082, section 3.2).

The E experts of a layer form Z prototypes of P = E / Z experts. A token x goes to its top-k experts inside every
prototype, weighted by a softmax over that prototype alone, and the outputs add up:

    y = sum over z of sum over i in top-k of prototype z of p[z, i] * expert[z, i](x)

Z = 1 is ordinary top-k routing. While experts share weights (`MixtureOfExperts.share`) they are S sets, one for each
prototype or one for the layer, and the layer is a dense feed-forward without a router: y = sum over s of set[s](x).

Shapes: B sequences, T positions, N = B * T tokens, D hidden, F expert width, C = Z * top_k choices of a token, R routed
rows (at most N * C).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tenfold.config.model import ModelConfig, MoEConfig
from tenfold.nn.grouped import feed_forward_rows, keep_rows, sort_rows
from tenfold.nn.layers import Linear
from tenfold.nn.products import linear
from tenfold.nn.ranks import ALONE, Ranks
from tenfold.nn.routing import choose, count_by_sequence, gates_and_losses

# Columns of a layer's statistics, before the E columns of tokens per expert. All are sums over tokens.
BALANCE, Z_LOSS, DROPPED, LOADS = 0, 1, 2, 3


class FeedForward(nn.Module):
    """Dense feed-forward: GELU (two matrices) or SwiGLU (three)."""

    def __init__(self, config: ModelConfig, width: int, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.ranks = ranks
        self.gate = Linear(config.hidden, width, bias=config.bias) if config.activation == "swiglu" else None
        self.up = Linear(config.hidden, width, bias=config.bias)
        self.down = Linear(width, config.hidden, bias=config.bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        ranks = self.ranks.tensor
        x_BTD = ranks.gather(x_BTD)
        up = ranks.expand(self.up, x_BTD)
        inner = F.gelu(up) if self.gate is None else F.silu(ranks.expand(self.gate, x_BTD)) * up
        return ranks.project(self.down, inner)


class Experts(nn.Module):
    """E feed-forwards without biases, applied to rows sorted by expert."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        experts, hidden, width = config.moe.experts, config.hidden, config.expert_ffn
        shape = (experts, hidden, width)
        self.gate = nn.Parameter(torch.empty(shape)) if config.activation == "swiglu" else None
        self.up = nn.Parameter(torch.empty(shape))
        self.down = nn.Parameter(torch.empty(experts, width, hidden))

    def forward(self, *sent: Tensor, through: Callable[..., Tensor] | None = None) -> Tensor:
        """Each row through its expert, times its gate: `sent` are x_RD, gates_R, rows_E of
        `nn.grouped.feed_forward_rows`.

        Where rows come from other ranks while others are computed, `through` does both, given the matrices and what
        was `sent`: data ranks have the weights whole during one call of this module.
        """
        if through is not None:
            return through(self.gate, self.up, self.down, *sent)
        x_RD, gates_R, rows_E = sent
        return feed_forward_rows(x_RD, gates_R, self.gate, self.up, self.down, rows_E)

    def dense(self, x: Tensor) -> Tensor:
        """The sum of what every one of them makes of `x` [..., D]: one feed-forward as wide as all together."""

        def inner(weight_SDF: Tensor) -> Tensor:
            return linear(x, weight_SDF.transpose(1, 2).flatten(0, 1), None)

        up = inner(self.up)
        hidden = F.gelu(up) if self.gate is None else F.silu(inner(self.gate)) * up
        return linear(hidden, self.down.flatten(0, 1).t(), None)


class MixtureOfExperts(nn.Module):
    """Router, routed experts, and shared experts if any. Returns the output and the layer's statistics."""

    def __init__(self, config: ModelConfig, ranks: Ranks = ALONE) -> None:
        super().__init__()
        moe = config.moe
        self.config, self.ranks = moe, ranks
        self.router: nn.Linear | None = nn.Linear(config.hidden, moe.experts, bias=False)  # None: experts share
        self.experts = Experts(config)
        shared = moe.shared_experts * config.expert_ffn
        self.shared = FeedForward(config, shared, ranks) if shared else None
        # Added to the probabilities when experts are chosen, never to the gates (arXiv 2408.15664).
        self.balance_bias = nn.Parameter(torch.zeros(moe.experts), requires_grad=False) if moe.bias_rate else None

    def forward(self, x_BTD: Tensor, decision: list[Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Output and statistics. `decision`, if given, keeps the chosen experts and what ranks told each other of
        them: an empty list is filled, and with a filled one nothing is chosen or told anew."""
        moe = self.config
        if self.router is None:
            y_BTD = self.ranks.tensor.sum(self.experts.dense(self.ranks.tensor.gather(x_BTD)))
            nothing = torch.zeros(LOADS + moe.experts, device=x_BTD.device)
            return y_BTD if self.shared is None else y_BTD + self.shared(x_BTD), nothing
        x_ND, ranks = x_BTD.reshape(-1, x_BTD.shape[-1]), self.ranks.expert
        probabilities_NZP, logits_NZP = self.route(x_ND)
        once = _once(decision)
        choice_NC = once(lambda: self.choose(probabilities_NZP))
        loads_BE = count_by_sequence(choice_NC, x_BTD.shape[0], moe.experts)
        whole_BE = once(lambda: ranks.loads(loads_BE))
        gates_NC, balance, z_loss = gates_and_losses(logits_NZP, probabilities_NZP, choice_NC, whole_BE)

        rows = sort_rows(choice_NC, moe.experts)
        dropped = x_ND.new_zeros((), dtype=torch.float32)
        if moe.capacity != "dropless" and self.training:
            kept_R = once(lambda: self._within_capacity(choice_NC, rows.choices, loads_BE, x_BTD.shape[1]))
            rows = keep_rows(rows, kept_R, choice_NC)
            dropped = dropped + (choice_NC.numel() - len(rows.choices))
        told = once(lambda: ranks.tell(choice_NC, rows))
        shared = None if self.shared is None else partial(self._shared, x_BTD)
        y_BTD = ranks.apply(self.experts, x_ND, gates_NC, rows, told, shared).view_as(x_BTD)

        losses = torch.stack((balance.float(), z_loss.float(), dropped))
        return y_BTD, torch.cat((losses, loads_BE.sum(0).to(torch.float32)))

    def _shared(self, x_BTD: Tensor) -> Tensor:
        assert self.shared is not None
        out: Tensor = self.shared(x_BTD)
        return out.flatten(0, 1)

    def share(self, sets: int) -> None:
        """Keep the weights of the first `sets` experts alone, for all of them: the prototypes' or, if 1, the layer's.

        The layer is dense from then on. `sharing.upcycling` makes it a mixture again.
        """
        self.router = self.balance_bias = None
        for name, parameter in self.experts.named_parameters():
            setattr(self.experts, name, nn.Parameter(parameter.detach()[:sets].clone(), parameter.requires_grad))

    def route(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities (without gradient) and logits [N, Z, P] in fp32 or wider."""
        assert self.router is not None
        wide = torch.promote_types(x_ND.dtype, torch.float32)
        logits = F.linear(x_ND.to(wide), self.router.weight.to(wide)).unflatten(1, (self.config.prototypes, -1))
        return logits.detach().softmax(-1), logits

    def choose(self, probabilities_NZP: Tensor) -> Tensor:
        """The chosen experts [N, C], 0..E-1: those of the highest probability plus balancing bias."""
        scores = probabilities_NZP
        if self.balance_bias is not None:
            scores = scores + self.balance_bias.view(self.config.prototypes, -1)
        return choose(scores, self.config.top_k)

    def _within_capacity(self, choice_NC: Tensor, order_R: Tensor, loads_BE: Tensor, positions: int) -> Tensor:
        """Which of the sorted rows their expert takes: in every sequence the first `capacity` that choose it.

        Counted by sequence (GShard's groups, arXiv 2006.16668), so that what a token gets does not depend on what
        else is in the batch, nor on how the batch is cut into micro-batches.
        """
        moe, (batch, runs) = self.config, (len(loads_BE), self.ranks.expert.runs)
        length = positions * self.ranks.tensor.size * self.ranks.context.size if self.ranks.split else positions
        choices = choice_NC.shape[1] if moe.capacity == "k" else 1
        capacity = math.ceil(choices * length / moe.experts * moe.capacity_factor)
        run_R = order_R // (positions // runs * choice_NC.shape[1])
        expert_R = choice_NC.flatten()[order_R]
        # Sorted rows stand by expert, then run: the place in a run is the row minus where the run starts.
        loads_UE = loads_BE if runs == 1 else count_by_sequence(choice_NC, batch * runs, moe.experts)
        before_UE = self.ranks.expert.before(loads_UE.view(batch, runs, -1)).reshape_as(loads_UE)
        loads_EU = loads_UE.t().flatten()
        starts_EU = loads_EU.cumsum(0) - loads_EU - before_UE.t().flatten()
        place_R = torch.arange(len(order_R), device=order_R.device) - starts_EU[expert_R * len(loads_UE) + run_R]
        return place_R < capacity


def _once(decision: list[Tensor] | None) -> Callable[[Callable[[], Tensor]], Tensor]:
    """What makes tensors, keeps them in an empty list, and takes them, in the same order, from a filled one."""
    taken = iter(tuple(decision)) if decision else None

    def once(make: Callable[[], Tensor]) -> Tensor:
        if taken is not None:
            return next(taken)
        made = make()
        if decision is not None:
            decision.append(made)
        return made

    return once


@torch.no_grad()
def update_balance_bias(
    model: nn.Module, users: Mapping[nn.Parameter, Sequence[int]], loads_LE: Tensor, config: MoEConfig
) -> None:
    """Raise the balancing bias of experts under their prototype's mean load by `bias_rate`, lower that of those over.

    `loads_LE` are the tokens of one step; a bias that several layers share (`users` tells which use it) goes by their
    sum (arXiv 2408.15664, algorithm 1).
    """
    biases = [module.balance_bias for module in model.modules() if isinstance(module, MixtureOfExperts)]
    for bias in dict.fromkeys(biases):
        if bias is None:
            continue
        loads_ZP = loads_LE[list(users[bias])].sum(0).unflatten(0, (config.prototypes, -1))
        bias.add_((loads_ZP.mean(1, keepdim=True) - loads_ZP).sign().flatten() * config.bias_rate)
