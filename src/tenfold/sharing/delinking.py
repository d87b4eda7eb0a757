"""Delinking: layers that shared a block get blocks of their own, and the optimizer's state goes with them.

What each choice of `moments` means for a block that trained on the mean gradient of `uses_before` layers and that
`uses_after` of them go on sharing (1 when every layer is free); q = uses_before / uses_after:

- copy: every tensor of the state as it is.
- rescale: first moments as they are, since the mean gradient has the scale of one layer's. Second moments are too
  small: averaging q groups whose gradient noise is independent divides the variance by q. With m and v corrected for
  their start (AdamW), v' = v + (q - 1) * max(v - m^2, 0). AMSGrad's largest v so far grows by as much as v. Adafactor
  keeps no first moment of the gradient, so nothing tells noise from signal: all of its second moment is multiplied by
  q, which errs towards smaller steps. Muon and SGD have no second moment.
- reset: state as of a new optimizer: zeros, or, where the state is of another kind than these, none yet.
- measure: as reset here; the freed parameters' moments are then filled from gradients of their own
  (`sharing.measuring`). The only choice that knows where one layer's gradient differs from the mean.

A relaxed sharing (`Sharing.rank`) begins with differences of zero, and a freed layer's difference is folded into its
weight, so that neither changes the function. New differences join their matrix's group without state, as parameters of
a new optimizer; when they are folded their state goes with them, and the freed weight has what `moments` makes of the
shared matrix's: its second moment is that of a mean gradient, as without differences.

What freed experts start from is at the head of `sharing/upcycling.py`; their formulas are these, with a scale.

A block trained on the *sum* of the gradients would hand over moments that are too large, and want m / uses_before and
v / uses_before^2 first; the training step divides, so that this never arises. docs/sharing.md has the four choices in a
table: what each makes of every optimizer's state, and what that is off by.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tenfold.errors import TenfoldError
from tenfold.nn.low_rank import LEFT, RIGHT, add_difference, differences, fold_difference, useful_rank
from tenfold.sharing.patterns import Pattern
from tenfold.sharing.tying import Holder, Layers, Sharing, check_fits, check_rank, patterns, ranks, tables, tied_pattern
from tenfold.sharing.upcycling import check_frees, free_experts

Moments = Literal["copy", "rescale", "reset", "measure"]

_FIRST = ("exp_avg", "momentum_buffer")
_SECOND = ("exp_avg_sq", "row_var", "col_var", "variance", "exp_avg_sq_row", "exp_avg_sq_col")
_LARGEST = "max_exp_avg_sq"
_KNOWN = {*_FIRST, *_SECOND, _LARGEST, "step", "RMS"}  # RMS: of the weights, in the Adafactor of transformers


def delink(
    layers: Layers, optimizers: Sequence[Optimizer], after: Sharing, moments: Moments = "rescale", seed: int = 0
) -> list[nn.Parameter]:
    """Free what `after` no longer shares among `layers`, in place, parameter by parameter, then its experts; the freed
    parameters.

    What is shared now is seen from the layers themselves. The function they compute does not change: to the last bit
    where layers are freed, to rounding where experts are. Optimizer groups and state follow; gradients must be cleared
    first. With "measure" the state of the freed parameters is zero until a `Measurement` of them has filled it. `seed`
    fixes the random halves of new differences. Raises TenfoldError, with nothing changed, when `after` does not refine
    what is shared now, or when a state cannot be rescaled, measured or divided among experts.
    """
    places = tables(layers)
    check_fits(layers, after)
    wanted = patterns(layers, places, after)
    for name, column in places.items():
        pattern, where = wanted[name], f"delinking {name}"
        pattern.check_refines(tied_pattern(column), where)
        shared = [holder.rank for holder, block in zip(column, pattern.blocks, strict=True) if pattern.uses(block) > 1]
        check_rank(pattern, min(after.rank, useful_rank(column[0].parameter)), max(shared, default=0), where)
        if any(parameter.grad is not None for holder in column for parameter in holder.parameters):
            raise TenfoldError(f"delinking: {name} has a gradient; clear gradients (optimizer.zero_grad()) first")
    state = State(optimizers)
    check_frees(layers, state, after)
    if moments in ("rescale", "measure"):
        for column in places.values():
            state.check_known(column[0].parameter, moments)
    freed: list[nn.Parameter] = []
    for name, column in places.items():
        freed += _untie(name, column, wanted[name], state, moments)
        for layer, rank in enumerate(ranks(wanted[name], after, column)):
            holder = column[layer]
            if holder.rank == rank:
                continue
            for old in differences(holder.module, holder.attribute):
                state.leave(old)
            if rank:
                pair = add_difference(holder.module, holder.attribute, rank, f"{seed}/layers.{layer}.{name}")
                for side, parameter in zip((LEFT, RIGHT), pair, strict=True):
                    state.join(holder.parameter, parameter, name, layer, name + side)
            else:
                fold_difference(holder.module, holder.attribute)
    children, routers = free_experts(layers, state, after, moments)
    return [each for each in freed if each not in children] + [*children.values(), *routers]


def _untie(name: str, column: Sequence[Holder], pattern: Pattern, state: State, moments: Moments) -> list[nn.Parameter]:
    """Free what `pattern` does not share of the parameter `name`, which `column` holds layer by layer."""
    before = tied_pattern(column)
    if pattern == before:
        return []
    parents = [holder.parameter for holder in column]
    kept: list[tuple[nn.Parameter, float]] = []
    taken: set[nn.Parameter] = set()
    freed: list[nn.Parameter] = []
    for block in range(pattern.stored_blocks):
        layer = pattern.first_layer(block)
        parent, q = parents[layer], before.uses(before.blocks[layer]) / pattern.uses(block)
        # The first of a parent's children keeps its memory; its state changes last, when all have copied it.
        if parent in taken:
            child = nn.Parameter(parent.detach().clone(), parent.requires_grad)
            state.join(parent, child, name, layer)
            state.carry(parent, child, moments, q)
            freed.append(child)
            for holder, mine in zip(column, pattern.blocks, strict=True):
                if mine == block:
                    holder.hold(child)
        else:
            taken.add(parent)
            kept.append((parent, q))
    for parent, q in kept:
        if q > 1:
            state.carry(parent, parent, moments, q)
            freed.append(parent)
    return freed


class State:
    """Where the optimizers keep each parameter."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._of = {
            parameter: (optimizer, group)
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    def check_known(self, parameter: nn.Parameter, moments: Moments) -> None:
        """Raise TenfoldError unless the parameter's state is of kinds that can be rescaled, or measured."""
        state = self._of[parameter][0].state.get(parameter, {}) if parameter in self._of else {}
        check_known(state, moments)
        for key, value in state.items():
            if moments == "measure" and is_traceable_wrapper_subclass(value):
                raise TenfoldError(f"delinking cannot measure {key!r}, which is quantized; use moments = rescale")

    def join(self, parent: nn.Parameter, child: nn.Parameter, name: str, layer: int, own: str | None = None) -> None:
        """Train `child`, of `layer`, with the optimizer of `parent`, in its group; it has no state as yet.

        An optimizer made from `named_parameters` calls it as `parent`, whose name in its layer is `name`, but with this
        layer's number and, if it has one, its `own` name.
        """
        if parent not in self._of:  # not trained
            return
        self._of[child] = _, group = self._of[parent]
        if "param_names" in group:
            (place,) = (place for place, mine in enumerate(group["params"]) if mine is parent)
            old = group["param_names"][place]
            group["param_names"].append(re.sub(rf"\d+\.{re.escape(name)}$", f"{layer}.{own or name}", old))
        group["params"].append(child)

    def carry(self, parent: nn.Parameter, child: nn.Parameter, moments: Moments, q: float) -> None:
        """Give the child its parent's state, changed as `moments` says."""
        if parent in self._of:
            optimizer, group = self._of[parent]
            if parent in optimizer.state:
                optimizer.state[child] = carried(optimizer.state[parent], group, moments, q)

    def leave(self, parameter: nn.Parameter) -> None:
        """Train a parameter no more."""
        if parameter in self._of:
            optimizer, group = self._of.pop(parameter)
            stay = [place for place, mine in enumerate(group["params"]) if mine is not parameter]
            for key in ("params", "param_names"):
                if key in group:
                    group[key][:] = [group[key][place] for place in stay]
            optimizer.state.pop(parameter, None)

    def check_divides(self, parameter: nn.Parameter) -> None:
        """Raise TenfoldError unless every state of a stack of sets [S, ...] is such a stack too, or one number."""
        for key, value in self._of[parameter][0].state.get(parameter, {}).items() if parameter in self._of else ():
            stack = not isinstance(value, Tensor) or not value.dim() or len(value) == len(parameter)
            if not stack or is_traceable_wrapper_subclass(value):
                raise TenfoldError(f"delinking cannot divide the optimizer state {key!r} among experts")

    def divide(
        self, parent: nn.Parameter, child: nn.Parameter, moments: Moments, copies: int, q: float, scale: float
    ) -> None:
        """Put `child`, which has `copies` of each set of weights of its parent end to end, in the parent's place."""
        if parent not in self._of:
            return
        optimizer, group = self._of[child] = self._of.pop(parent)
        group["params"][:] = [child if each is parent else each for each in group["params"]]
        if parent in optimizer.state:
            of_sets = carried(optimizer.state.pop(parent), group, moments, q, scale)
            optimizer.state[child] = {
                key: value.repeat_interleave(copies, 0) if isinstance(value, Tensor) and value.dim() else value
                for key, value in of_sets.items()
            }


def check_known(keys: Iterable[str], moments: Moments) -> None:
    """Raise TenfoldError unless all these kinds of state can be rescaled by `carried`, or measured."""
    for key in keys:
        if key not in _KNOWN:
            raise TenfoldError(f"delinking cannot {moments} the optimizer state {key!r}; use moments = copy or reset")


@torch.no_grad()
def carried(
    state: dict[str, Any], group: dict[str, Any], moments: Moments, q: float, scale: float = 1.0
) -> dict[str, Any]:
    """A new state for one parameter, made from its parent's as the head of this file tells.

    `scale` is the child's gradient over the parent's; that of layers is 1. Element by element: a piece of the state,
    with `step` and the same piece of the other moments, becomes that piece of the new one.
    """
    empty = moments in ("reset", "measure")
    if empty and not state.keys() <= _KNOWN:
        return {}  # as optimizers have it before the first step; zeros may mean something else
    new = {key: _copied(value) for key, value in state.items()}
    if empty:
        for key, value in new.items():
            if isinstance(value, Tensor):
                value.copy_(torch.zeros(value.shape, dtype=value.dtype, device=value.device))
            elif value is not None:
                new[key] = type(value)()
    if moments != "rescale" or ("step" in state and not float(state["step"])):
        return new
    growth: Tensor | None = None
    if "exp_avg_sq" in new and "betas" in group:
        corrections = [1 - beta ** float(state["step"]) for beta in group["betas"]]
        noise = _plain(state["exp_avg_sq"]) / corrections[1] - (_plain(state["exp_avg"]) / corrections[0]).square_()
        growth = noise.clamp_(min=0).mul_((q - 1) * corrections[1])
    for key in new.keys() & {*_SECOND, _LARGEST}:
        value, wide = new[key], _plain(new[key])
        wide = (wide.mul_(q) if growth is None else wide.add_(growth)).mul_(scale**2)
        if wide is not value:
            value.copy_(wide)
    for key in new.keys() & set(_FIRST) if scale != 1 else ():
        new[key].copy_(_plain(new[key]).mul_(scale))
    return new


def _copied(value: Any) -> Any:
    """A copy of one value of a state: a tensor, one that is made of several (quantized moments), a number or None."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    if not is_traceable_wrapper_subclass(value):
        return value.clone()
    names, context = value.__tensor_flatten__()
    inner = {name: _copied(getattr(value, name)) for name in names}
    return type(value).__tensor_unflatten__(inner, context, value.size(), value.stride())


def _plain(value: Tensor) -> Tensor:
    """The numbers that a quantized moment stands for; any other tensor itself."""
    return value.dequantize() if is_traceable_wrapper_subclass(value) else value
