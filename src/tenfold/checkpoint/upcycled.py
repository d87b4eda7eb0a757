"""Experts freed in a checkpoint on disk: what `sharing.upcycling` makes in memory, tensor by tensor, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tenfold.checkpoint.tensors import Stored
from tenfold.config.model import MoEConfig
from tenfold.parallel.splits import state_shape
from tenfold.sharing.delinking import Moments, carried
from tenfold.sharing.tying import Sharing
from tenfold.sharing.upcycling import Upcycling, fresh_router

Tensors = dict[str, Stored]
Sets = Callable[[str, int, int], Sequence[int]]
"""For a parameter of so many sets, of each of which there are to be so many copies: where the sets stand that they are
of, one after another, among those that there are."""


def each_set(_: str, sets: int, copies: int) -> list[int]:
    """Of all sets of a parameter."""
    return [each for each in range(sets) for _ in range(copies)]


def carried_pieces(
    optimizer: Mapping[str, Stored],
    parameter: str,
    key: str,
    moments: Moments,
    q: float,
    scale: float,
    betas: Callable[[], Any],
) -> Iterator[Tensor]:
    """The pieces of one kind of state of a freed parameter, from its parent's (`sharing.delinking.carried`)."""
    state: dict[str, Any] = {}
    group: dict[str, Any] = {}
    needed = [key]
    if key != "step" and f"{parameter}/step" in optimizer:
        state["step"] = next(optimizer[f"{parameter}/step"].pieces()).reshape(())
    if key.endswith("exp_avg_sq") and moments == "rescale":
        needed = list(dict.fromkeys([key, "exp_avg", "exp_avg_sq"]))
        group["betas"] = betas()
    for pieces in zip(*(optimizer[f"{parameter}/{one}"].pieces() for one in needed), strict=True):
        yield carried(state | dict(zip(needed, pieces, strict=True)), group, moments, q, scale)[key]


def upcycled(
    weights: Tensors,
    optimizer: Tensors,
    moe: MoEConfig,
    after: Sharing,
    moments: Moments,
    betas: Callable[[], Any],
    sets: int,
    sets_for: Sets,
) -> tuple[Tensors, Tensors]:
    """Weights and state of a model whose layers are as `after` has them, and each mixture of theirs `sets` sets of
    experts, with its experts so too. New routers are whole, whatever part the others are."""
    new_weights, new_state = dict(weights), dict(optimizer)
    routed, layers = after.experts == "free", after.pattern.layers
    downs = [name for name in weights if name.endswith(".experts.down")]
    paths = dict.fromkeys(name.split(".", 2)[2].removesuffix(".experts.down") for name in downs)
    for name, stored in weights.items():
        if ".experts." not in name:
            continue
        how, is_down = Upcycling.between(moe, sets, routed), name.endswith(".down")
        scale, which = how.down_scale if is_down else how.inner_scale, sets_for(name, sets, how.copies)
        new_weights[name] = _divided(stored, which, how.down if is_down else 1.0)
        for key in _keys(optimizer, name):
            state = optimizer[f"{name}/{key}"]
            pieces = partial(carried_pieces, optimizer, name, key, moments, how.q, scale, betas)
            state = Stored(state.dtype, state.shape, pieces)
            new_state[f"{name}/{key}"] = _divided(state, which, 1.0) if state.shape else state
    for path in paths if routed else ():
        pattern = after.of("router", f"{path}.router.weight")
        of_experts = after.of("experts", f"{path}.experts.down")
        for layer in range(layers):
            if pattern.first_layer(pattern.blocks[layer]) != layer:
                continue
            down = f"layers.{of_experts.first_layer(of_experts.blocks[layer])}.{path}.experts.down"
            like, hidden = torch.empty(0, dtype=weights[down].dtype), weights[down].shape[2]
            router = f"layers.{layer}.{path}.router.weight"
            weight = fresh_router(torch.Size((moe.experts, hidden)), f"{layer}.{path}", like)
            new_weights[router] = Stored.of(weight)
            if moe.bias_rate:
                new_weights[f"layers.{layer}.{path}.balance_bias"] = Stored.of(like.new_zeros(moe.experts))
            for key in _keys(optimizer, down):
                state, name = optimizer[f"{down}/{key}"], f"{router}/{key}"
                shape = state_shape(name, (moe.experts, hidden)) if state.shape else ()
                new_state[name] = Stored.of(torch.zeros(shape, dtype=state.dtype))
    return new_weights, new_state


def _keys(optimizer: Mapping[str, Stored], parameter: str) -> list[str]:
    return [name.rpartition("/")[2] for name in optimizer if name.rpartition("/")[0] == parameter]


def _divided(stored: Stored, which: Sequence[int], factor: float) -> Stored:
    """The sets `which` of a stack [S, ...], one after another, times `factor`."""
    sets, *rest = stored.shape
    size = stored.elements // max(sets, 1)

    def pieces() -> Iterator[Tensor]:
        for first in (each * size for each in which):
            begin = 0
            for piece in stored.pieces():
                part = piece[max(first - begin, 0) : max(first + size - begin, 0)]
                begin += len(piece)
                if len(part):
                    yield part * factor if factor != 1 else part

    return Stored(stored.dtype, (len(which), *rest), pieces)
