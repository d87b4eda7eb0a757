"""Upcycling: experts that shared one set of weights get weights of their own, and a router chooses among them.

The E experts of a layer are Z prototypes of P = E / Z, of which a token goes to the top k in each (`nn.moe`). While
they share, S sets take their place (S = Z, or 1) and every token passes all of them:

    y = sum over sets s of down_s^T h(x; gate_s, up_s)

Freed, every expert begins as a copy of its set ("sparse upcycling", arXiv 2212.05055), and with three changes the
function is the same to rounding:

- The router's weights are random, a function of their name alone, and so small that its probabilities are 1/P but for a
  few units in the last place: enough to spread tokens over experts, too little to be seen in a gate.
- A token passes k equal experts of a prototype with gates 1/P: their `down` is multiplied by w = P / k.
- From one set to one for each prototype there is no gate, and `down` is divided by Z.

Balancing biases begin at 0. Experts that always are active stay as they are.

What the optimizer's state becomes, with p the gate (1/P), f = k / P the share of the tokens that an expert gets, and w
as above (over both steps at once, from "layer" to "free", w = P / (k Z)): an expert's gradient is that of its set, of a
share f of the tokens, times

    p w   for gate and up, on the way to which stands down
    p     for down itself

so that the mean of the gradient is c times that of the set, c = f p w and c = f p. Its noise comes from fewer tokens,
and its variance falls with f, not f^2. So, with q = 1 / f, m' = c m and v' = c^2 (v + (q - 1) max(v - m^2, 0)), for
AdamW; Adafactor's v' = c^2 q v. That is `carried` of `sharing.delinking`, with a scale. `copy` leaves state as it is,
although the scale of the gradients changes; `reset` makes it zero, and `measure` fills it from the experts' and the
routers' own gradients. Between "layer" and "prototype" all tokens stay: f = p = 1. But for `measure` a new router
starts from no state, and its count of steps from 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tenfold.config.model import MoEConfig
from tenfold.nn.low_rank import draw, held_inside
from tenfold.nn.moe import MixtureOfExperts
from tenfold.sharing.tying import Layers, Sharing, check_experts_refine, mixtures, sets_of

if TYPE_CHECKING:
    from tenfold.sharing.delinking import Moments, State

_SPREAD = 16  # a fresh router's logits, in units in the last place
_PROMISED = 64  # the most that logits may differ for each layer, in units in the last place of the largest


@dataclass(frozen=True)
class Upcycling:
    """What becomes of a set of experts: see the head of this file for the letters."""

    copies: int
    down: float  # w
    q: float
    inner_scale: float  # c of gate and up
    down_scale: float  # c of down

    @classmethod
    def between(cls, moe: MoEConfig, sets: int, routed: bool) -> Upcycling:
        """From `sets` sets to experts that are free (`routed`), or to a set for each prototype."""
        if not routed:
            each = moe.prototypes // sets
            return cls(each, 1 / each, 1.0, 1 / each, 1.0)
        size = moe.experts // moe.prototypes
        gate, share, down = 1 / size, moe.top_k / size, size / moe.top_k * sets / moe.prototypes
        return cls(moe.experts // sets, down, 1 / share, share * gate * down, share * gate)


def _experts_of(layers: Layers, after: Sharing) -> str:
    """Which experts of `layers` share now, in the words of `EXPERTS`; of two that mean the same that of `after`."""
    for moe in mixtures(layers[0], after.experts):
        if moe.router is None:
            same = [kind for kind in ("prototype", "layer") if sets_of(moe.config, kind) == _sets(moe)]
            return after.experts if after.experts in same else same[0]
    return "free"


def _sets(moe: MixtureOfExperts) -> int:
    return len(next(held_inside(moe.experts)))


def check_frees(layers: Layers, state: State, after: Sharing) -> None:
    """Raise TenfoldError unless the experts of `layers`, and the optimizer's state of them, can become what `after`
    says."""
    before = _experts_of(layers, after)
    check_experts_refine(after, before, "delinking")
    if after.experts != before:
        for layer in layers:
            for moe in mixtures(layer):
                for parameter in held_inside(moe.experts):
                    state.check_divides(parameter)


@torch.no_grad()
def free_experts(
    layers: Layers, state: State, after: Sharing, moments: Moments
) -> tuple[dict[nn.Parameter, nn.Parameter], list[nn.Parameter]]:
    """Give the experts of `layers` the weights of their own that `after` says, in place, parameter by parameter.

    Layers that share go on sharing, those of `after` the new routers. Returns what each former parameter has become,
    and the routers' weights.
    """
    new: dict[nn.Parameter, nn.Parameter] = {}
    routers: list[nn.Parameter] = []
    if after.experts == _experts_of(layers, after):
        return new, routers
    routed = after.experts == "free"
    for name in [name for name, module in layers[0].named_modules() if isinstance(module, MixtureOfExperts)]:
        column: list[MixtureOfExperts] = [layer.get_submodule(name) for layer in layers]  # type: ignore[misc]
        how = Upcycling.between(column[0].config, _sets(column[0]), routed)
        for leaf in [leaf for leaf, _ in column[0].experts.named_parameters()]:
            factor, scale = (how.down, how.down_scale) if leaf == "down" else (1.0, how.inner_scale)
            for moe in column:
                parent = moe.experts.get_parameter(leaf)
                if parent not in new:
                    freed = parent.detach().repeat_interleave(how.copies, 0).mul_(factor)
                    new[parent] = nn.Parameter(freed, parent.requires_grad)
                    state.divide(parent, new[parent], moments, how.copies, how.q, scale)
                setattr(moe.experts, leaf, new[parent])
        if routed:
            routers += _add_routers(column, name, state, after)
    return new, routers


def _add_routers(column: list[MixtureOfExperts], name: str, state: State, after: Sharing) -> list[nn.Parameter]:
    added: list[nn.Parameter] = []
    pattern = after.of("router", f"{name}.router.weight")
    for layer, moe in enumerate(column):
        first, down = column[pattern.first_layer(pattern.blocks[layer])], moe.experts.down
        moe.router = nn.Linear(down.shape[2], moe.config.experts, bias=False, device="meta")
        if first is not moe:
            assert first.router is not None
            moe.router.weight, moe.balance_bias = first.router.weight, first.balance_bias
            continue
        moe.router.weight = nn.Parameter(fresh_router(moe.router.weight.shape, f"{layer}.{name}", down))
        state.join(down, moe.router.weight, f"{name}.experts.down", layer, f"{name}.router.weight")
        added.append(moe.router.weight)
        if moe.config.bias_rate:
            moe.balance_bias = nn.Parameter(down.new_zeros(moe.config.experts), requires_grad=False)
    return added


def fresh_router(shape: torch.Size, name: str, like: Tensor) -> Tensor:
    """The weights [E, D] of a router that tells equal experts apart only in the last places of their probabilities."""
    precision = torch.finfo(torch.promote_types(like.dtype, torch.float32)).eps
    return draw(shape, f"router/{name}").to(like).mul_(_SPREAD * precision / math.sqrt(shape[1]))


def tolerance(logits: Tensor, layers: int) -> float:
    """By how much logits may differ after experts of so many layers were freed: rounding, of the largest of them."""
    return _PROMISED * torch.finfo(logits.dtype).eps * layers * logits.abs().max().item()
