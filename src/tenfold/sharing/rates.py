"""How far a parameter that several layers use may go in a step: its update is divided by their number.

An optimizer that normalises gradients (Adam, Adafactor, Muon) moves a parameter that q layers share as far as it would
move each layer's own, and moves all q at once and alike. Along such a direction the curvature of the loss is the sum
over every pair of these layers, up to q^2 times that of one and q times that of q layers which go their own ways. So
the largest stable rate falls as 1/q. Measured (docs/results.md, the study of sharing): at the rate of free layers
twelve that shared fell back to the frequencies of tokens, and never made up for it after delinking.

The update of AdamW (its decay included) and of Muon is linear in the learning rate, so this is a rate of lr / q for as
long as q layers use the parameter. It needs no parameter groups of its own, which would be others after every
delinking, and no word with a scheduler. It costs a copy of the shared parameters while the optimizer steps. SGD on the
mean of the layers' gradients needs none of it: its step is the smaller, the less they agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from tenfold.sharing.tying import Layers, uses


def divide_updates(layers: Layers, optimizer: Optimizer | Iterable[Optimizer]) -> list[RemovableHandle]:
    """From now on divide every update of a parameter by the number of `layers` that use it then.

    `layers`: the model's list of layers, shared already or later on; delinking them needs no further word. `optimizer`:
    those that train them, one or several, in Accelerate's wrapping or without. Gives handles whose `remove()` ends it.
    Call it once: a second call divides again.
    """
    return divide_by(lambda: uses(layers), [optimizer] if isinstance(optimizer, Optimizer) else optimizer)


def divide_by(
    counts: Callable[[], Mapping[nn.Parameter, int]], optimizers: Iterable[Optimizer]
) -> list[RemovableHandle]:
    """The same where `counts` tells, before every step, how many layers use each parameter."""
    handles = []
    for each in optimizers:
        each = getattr(each, "optimizer", each)  # a wrapper's step is not hooked, but what it wraps is
        division = _Division(counts)
        handles.append(each.register_step_pre_hook(division.begin))
        handles.append(each.register_step_post_hook(division.end))
    return handles


class _Division:
    def __init__(self, counts: Callable[[], Mapping[nn.Parameter, int]]) -> None:
        self._counts = counts
        self._before: list[tuple[nn.Parameter, Tensor, int]] = []

    def begin(self, optimizer: Optimizer, *_: Any) -> None:
        """Keep the parameters that are used more than once and will be changed."""
        counts = self._counts()
        used = {
            # What is offloaded comes to the optimizer in slices, which say what they are of.
            parameter: counts.get(getattr(parameter, "part_of", parameter), 0)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        }
        self._before = [(each, each.detach().clone(), count) for each, count in used.items() if count > 1]

    @torch.no_grad()
    def end(self, *_: Any) -> None:
        """Go back all of the way but a part in q."""
        for parameter, before, q in self._before:
            parameter.lerp_(before, 1 - 1 / q)
        self._before = []
