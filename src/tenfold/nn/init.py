"""Initial weights, a function of (seed, canonical parameter name, expert) alone: no layout of ranks changes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn

from tenfold.nn.decoder import Decoder
from tenfold.nn.low_rank import LEFT, RIGHT, draw, start_right


class Held(Protocol):
    """What a rank has of a parameter."""

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Of all of it."""

    def local(self, parameter: Tensor) -> Tensor:
        """The memory in which it has its part."""

    def stack(self) -> list[int]:
        """Which entries of the first dimension it has."""

    def take(self, whole: Tensor) -> Tensor:
        """Its part of the whole."""

    def take_inside(self, one: Tensor) -> Tensor:
        """Its part of one entry of the first dimension."""


Memory = Callable[[str, Tensor], AbstractContextManager[Tensor]]
"""Memory to fill for what a name calls and a tensor stands for; it is taken over when the context ends."""


@torch.no_grad()
def initialize(
    model: Decoder,
    seed: int,
    held: Callable[[str], Held] | None = None,
    named: Mapping[str, nn.Parameter] | None = None,
    memory: Memory | None = None,
) -> None:
    """Fill every parameter: norms 1, biases 0, matrices normal with `init_std`.

    Matrices that write into a residual stream that is not normed are scaled by 1 / sqrt(2 L) (GPT-2). A shared block
    starts as its first layer would, and a layer's low-rank difference to it at zero (`nn.low_rank`). Of a parameter
    that many ranks split this one's part is filled, which `held` tells by name, as it is in the whole; `named` are then
    the parameters that this one has of the model, by the names of the whole. `memory` gives what is to be filled where
    a parameter has no memory of its own.
    """
    std = model.config.init_std
    residual_std = std if model.config.norm_position == "post" else std / math.sqrt(2 * model.config.layers)
    for name, parameter in (dict(model.named_parameters()) if named is None else named).items():
        mine = None if held is None else held(name)
        own = nullcontext(parameter if mine is None else mine.local(parameter))
        with own if memory is None else memory(name, parameter) as local:
            _fill(model, seed, name, local, mine, std, residual_std)


def _fill(
    model: Decoder, seed: int, name: str, local: Tensor, mine: Held | None, std: float, residual_std: float
) -> None:
    leaf = name.removesuffix(".weight").rpartition(".")[2]
    if leaf.endswith("norm"):
        local.fill_(1.0)
    elif leaf.endswith(("bias", LEFT)):
        local.zero_()
    elif leaf.endswith(RIGHT):
        if mine is None:
            start_right(local, f"{seed}/{name.removesuffix(RIGHT)}")
        else:
            whole = torch.empty(mine.whole_shape)
            start_right(whole, f"{seed}/{name.removesuffix(RIGHT)}")
            local.copy_(mine.take(whole))
    else:
        scale = residual_std if leaf in ("wo", "down") else std
        shape = local.shape if mine is None else torch.Size(mine.whole_shape)
        if len(shape) == 3:  # a stack of experts is drawn one at a time: a rank draws only those it holds
            stack = range(shape[0]) if mine is None else mine.stack()
            for part, expert in zip(local.unbind(), stack, strict=True):
                drawn = draw(torch.Size(shape[1:]), f"{seed}/{name}/{expert}").mul_(scale)
                part.copy_(drawn if mine is None else mine.take_inside(drawn))
        else:
            drawn = draw(shape, f"{seed}/{name}/0").mul_(scale)
            if name in ("embedding.weight", "head.weight"):
                drawn[model.vocab_size :] = 0  # rows that only pad the vocabulary
            local.copy_(drawn if mine is None else mine.take(drawn))
