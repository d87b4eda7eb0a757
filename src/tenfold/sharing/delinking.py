"""Delinking: layers that shared a block get blocks of their own, and the optimizer's state goes with them.

What each choice of `moments` means for a block that trained on the mean gradient of `uses_before` layers and that
`uses_after` of them go on sharing (1 when every layer is free); q = uses_before / uses_after:

- copy: every tensor of the state as it is.
- rescale: first moments as they are, since the mean gradient has the scale of one layer's. Second moments are too
  small: averaging q groups whose gradient noise is independent divides the variance by q. With m and v corrected for
  their start (AdamW), v' = v + (q - 1) * max(v - m^2, 0). Adafactor keeps no first moment, so nothing tells noise from
  signal: all of its second moment is multiplied by q, which errs towards smaller steps. Muon has no second moment.
- reset: state as of a new optimizer, all zeros.

A block trained on the *sum* of the gradients would hand over moments that are too large, and want m / uses_before and
v / uses_before^2 first; the training step divides, so that this never arises.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tenfold.errors import TenfoldError
from tenfold.nn.decoder import Decoder
from tenfold.sharing.patterns import Pattern

Moments = Literal["copy", "rescale", "reset"]

_FIRST = ("exp_avg", "momentum_buffer")
_SECOND = ("exp_avg_sq", "row_var", "col_var", "variance")


def delink(
    model: Decoder, optimizers: Sequence[Optimizer], before: Pattern, after: Pattern, moments: Moments = "rescale"
) -> None:
    """Turn a model of pattern `before` into one of pattern `after`, in place, block by block.

    The function the model computes does not change. Optimizer groups and state follow; gradients must be cleared
    first. Raises TenfoldError, with both patterns, when `after` does not refine `before`.
    """
    after.check_refines(before, "delinking")
    assert all(parameter.grad is None for parameter in model.parameters()), "clear gradients before delinking"
    layers: list[nn.Module] = list(model.layers)
    taken: set[nn.Module] = set()
    blocks: list[nn.Module] = []
    for block in range(after.stored_blocks):
        layer = after.first_layer(block)
        parent = layers[layer]
        q = before.uses(before.blocks[layer]) / after.uses(block)
        # The first of a parent's children keeps its weights; it is changed last, once the others have copied it.
        child = copy.deepcopy(parent) if parent in taken else parent
        taken.add(parent)
        blocks.append(child)
        if child is not parent:
            _carry_state(optimizers, parent, child, moments, q)
    for block in range(after.stored_blocks):
        layer = after.first_layer(block)
        if blocks[block] is layers[layer] and after.uses(block) < before.uses(before.blocks[layer]):
            q = before.uses(before.blocks[layer]) / after.uses(block)
            _carry_state(optimizers, blocks[block], blocks[block], moments, q)
    model.set_layers([blocks[block] for block in after.blocks], after.segments())


def _carry_state(
    optimizers: Sequence[Optimizer], parent: nn.Module, child: nn.Module, moments: Moments, q: float
) -> None:
    """Give the child's parameters the parent's place and state in the optimizer."""
    inherited = dict(zip(parent.parameters(), child.parameters(), strict=True))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for old in [parameter for parameter in group["params"] if parameter in inherited]:
                new = inherited[old]
                if new is not old:
                    group["params"].append(new)
                optimizer.state[new] = carried(optimizer.state[old], group, moments, q)


@torch.no_grad()
def carried(state: dict[str, Any], group: dict[str, Any], moments: Moments, q: float) -> dict[str, Any]:
    """A new state for one parameter, made from its parent's as the head of this file tells."""
    if moments == "reset":
        return {key: torch.zeros_like(value) for key, value in state.items()}
    new = {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
    if moments == "copy":
        return new
    for key, value in new.items():
        if key not in (*_FIRST, *_SECOND, "step"):
            raise TenfoldError(f"delinking cannot rescale the optimizer state {key!r}; use moments = copy or reset")
        if key == "exp_avg_sq":
            step = float(state["step"])
            if step:
                corrections = [1 - beta**step for beta in group["betas"]]
                noise = value / corrections[1] - (state["exp_avg"] / corrections[0]).square_()
                value.add_(noise.clamp_(min=0), alpha=(q - 1) * corrections[1])
        elif key in _SECOND:
            value.mul_(q)
    return new
