"""Sharing and delinking for anyone's model and training loop: `tenfold.share` and `tenfold.delink`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, get_args

from torch import nn
from torch.optim import Optimizer

from tenfold.config.units import parse_sharing
from tenfold.errors import TenfoldError
from tenfold.sharing import delinking
from tenfold.sharing.averaging import average_gradients, averages_gradients
from tenfold.sharing.delinking import Moments
from tenfold.sharing.patterns import Pattern
from tenfold.sharing.saving import declare_ties
from tenfold.sharing.tying import (
    PARTS,
    Holder,
    Layers,
    Sharing,
    check_fits,
    check_plain,
    holders,
    part_of,
    tables,
    tie,
    tied_pattern,
)

Optimizers = Optimizer | Iterable[Optimizer] | None
PatternSpec = Pattern | str | dict[str, int] | Sequence[int]
"""A pattern as run files have it ("all", "none", "sandwich", {"groups": 2}, {"cycle": 2}, a map), or made already."""


def share(
    layers: Layers, pattern: PatternSpec = "all", *, parts: Iterable[str] = PARTS, optimizer: Optimizers = None
) -> None:
    """Make alike layers of a model share parameters, in place; afterwards they train on the mean of their gradients.

    `layers`: the model's list of layers (any `nn.ModuleList`, such as `model.model.layers` of a Llama). Those that
    `pattern` puts together hold the parameters of the first of them; the others' are let go. `parts` says what of them
    is shared: names of `tenfold.sharing.tying.PARTS`, or globs over the names that parameters have in a layer
    ("mlp.*"). What is not named stays as it is, so that parts may be shared one after another.

    `optimizer`: one or several that exist already; parameters that are let go are taken out, with their state. An
    optimizer made afterwards needs no telling.

    Raises TenfoldError, with nothing changed, when the layers are not alike, the pattern does not fit or would free
    what is shared already, gradients are not cleared, or parameters are sharded (FSDP, DTensor).
    """
    places = _examine(layers)
    sharing = read_sharing(pattern, parts, len(layers))
    if sharing.pattern.stored_blocks == len(layers):
        raise TenfoldError(f"sharing {sharing.pattern} shares nothing: every layer is on its own in it")
    if not sharing.parts:
        raise TenfoldError(f"parts is empty, which shares nothing; name some of {', '.join(PARTS)}, or globs")
    check_fits(layers, sharing)
    check_plain(places)
    optimizers = _listed(optimizer)
    kept: dict[nn.Parameter, nn.Parameter] = {}
    for name, column in places.items():
        if sharing.of(part_of(layers[0], name), name) is sharing.pattern:
            _check_alike(name, column, sharing.pattern)
            for holder, block in zip(column, sharing.pattern.blocks, strict=True):
                kept[holder.parameter] = column[sharing.pattern.first_layer(block)].parameter
    _drop(optimizers, {parameter: first for parameter, first in kept.items() if parameter is not first})
    tie(layers, sharing)
    average_gradients(layers)
    declare_ties(layers)


def delink(
    layers: Layers,
    optimizer: Optimizers = None,
    pattern: PatternSpec = "none",
    *,
    parts: Iterable[str] = PARTS,
    moments: Moments = "rescale",
    rank: int = 0,
) -> list[nn.Parameter]:
    """Give layers that shared parameters of their own, in place, and the optimizer's state with them; the freed ones.

    `pattern` and `parts` say what is shared from now on (nothing, unless told otherwise), which must have been shared
    before. The model's function does not change. `moments` says what the state of freed parameters starts from: copy,
    rescale, reset, or measure, which leaves it zero for a `tenfold.Measurement` of the parameters that are returned
    (`tenfold.sharing.delinking` has the formulas). Clear gradients first.

    With a `rank` layers that go on sharing matrices get low-rank differences to them, their own: relaxed sharing, from
    `pattern="all", rank=8` after `share(layers)` to no more than `delink(layers)` later. A module's `weight` is then
    the sum; the differences are parameters beside it, `weight_left` and `weight_right`, trained in its group.

    Freed parameters go into the group of the parameter that they come from. The parameters of `layers` then stand in
    each group in the order of the layers, which is that of an optimizer made anew from `model.parameters()`: its
    `state_dict` fits one made for the delinked model.

    Raises TenfoldError, with nothing changed, when the pattern does not refine what is shared now, when gradients are
    not cleared, or when an optimizer's state is not known to `rescale`.
    """
    _examine(layers)
    if moments not in get_args(Moments):
        raise TenfoldError(f"moments = {moments!r} is unknown; it is one of {', '.join(get_args(Moments))}")
    if type(rank) is not int or rank < 0:
        raise TenfoldError(f"rank = {rank!r}: give 0, or the rank of differences, a whole number")
    sharing = replace(read_sharing(pattern, parts, len(layers)), rank=rank)
    optimizers = _listed(optimizer)
    averages = averages_gradients(layers)
    freed = delinking.delink(layers, optimizers, sharing, moments)
    _sort(optimizers, layers)
    if averages:
        average_gradients(layers)
        declare_ties(layers)
    return freed


def read_sharing(pattern: PatternSpec, parts: Iterable[str], layers: int) -> Sharing:
    """What a pattern and parts, as `share` takes them, mean for a model of `layers` layers; TenfoldError if nothing."""
    names = (parts,) if isinstance(parts, str) else tuple(parts) if isinstance(parts, Iterable) else (parts,)
    if not all(isinstance(name, str) for name in names):
        raise TenfoldError(f"parts = {parts!r}: name some of {', '.join(PARTS)}, or globs over names of parameters")
    if set(names) == set(PARTS):
        names = PARTS
    if isinstance(pattern, Pattern):
        return Sharing(pattern, names)
    spec = list(pattern) if isinstance(pattern, Sequence) and not isinstance(pattern, str) else pattern
    try:
        return Sharing(Pattern.parse(parse_sharing(spec), layers), names)
    except ValueError as error:
        raise TenfoldError(str(error)) from None


def _listed(optimizer: Optimizers) -> list[Optimizer]:
    found: list[Any] = [] if optimizer is None else list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
    for one in found:
        if not isinstance(one, Optimizer):
            raise TenfoldError(f"expected an optimizer of torch.optim's kind, or several; found {type(one).__name__}")
    return found


def _examine(layers: Layers) -> dict[str, list[Holder]]:
    """The layers' table of parameters, of layers that can be shared and delinked."""
    if not isinstance(layers, nn.ModuleList | nn.Sequential | Sequence):
        raise TenfoldError(
            f"expected the list of a model's layers (an nn.ModuleList, such as model.model.layers), found "
            f"{type(layers).__name__}"
        )
    for number, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            raise TenfoldError(f"layer {number} is no nn.Module but {type(layer).__name__}")
    places = tables(layers)
    if len({id(layer) for layer in layers}) < len(layers):
        raise TenfoldError("one module stands twice among the layers; give each layer a module of its own")
    if not places:
        raise TenfoldError("the layers have no parameters; if they are under FSDP, share and delink before wrapping")
    for number, layer in enumerate(layers):
        names: dict[nn.Parameter, str] = {}
        for name, holder in holders(layer).items():
            if hasattr(holder.parameter, "offloaded"):
                raise TenfoldError(
                    f"layer {number}: {name} is offloaded: close() what tenfold.offload gave, share or delink, and "
                    "offload anew"
                )
            if (other := names.setdefault(holder.parameter, name)) != name:
                raise TenfoldError(f"layer {number} holds one parameter under two names, {other} and {name}")
            if hasattr(holder.parameter, "placements") or getattr(holder.module, "_is_fsdp_managed_module", False):
                raise TenfoldError(
                    f"layer {number}: {name} is sharded (FSDP or DTensor); share and delink before the model is "
                    "sharded, and save, delink and shard anew between stages"
                )
    return places


def _check_alike(name: str, column: Sequence[Holder], pattern: Pattern) -> None:
    """Raise TenfoldError unless layers that are to share `name` can hold one parameter in place of their own."""
    tied = tied_pattern(column)
    if not tied.refines(pattern):
        raise TenfoldError(
            f"{name} is shared by {tied} already, and {pattern} shares less; tenfold.delink frees layers"
        )
    for number, block in enumerate(pattern.blocks):
        first, mine = column[pattern.first_layer(block)].parameter, column[number].parameter
        for what in ("dtype", "device", "requires_grad"):
            if getattr(mine, what) != getattr(first, what):
                raise TenfoldError(
                    f"layers {pattern.first_layer(block)} and {number} are not alike: {what} of {name} is "
                    f"{getattr(first, what)} there and {getattr(mine, what)} here"
                )
        if mine.grad is not None:
            raise TenfoldError(f"layer {number}: {name} has a gradient; clear gradients (zero_grad) before sharing")


def _drop(optimizers: Sequence[Optimizer], let_go: dict[nn.Parameter, nn.Parameter]) -> None:
    """Take parameters that are let go out of the optimizers, which must train those that stand for them."""
    trained = {parameter for one in optimizers for group in one.param_groups for parameter in group["params"]}
    if any(parameter in trained and first not in trained for parameter, first in let_go.items()):
        raise TenfoldError("the optimizer trains a parameter that is let go and not the one that it becomes one with")
    for one in optimizers:
        for group in one.param_groups:
            reorder(group, [place for place, parameter in enumerate(group["params"]) if parameter not in let_go])
        for parameter in let_go:
            one.state.pop(parameter, None)


def reorder(group: dict[str, Any], places: Sequence[int]) -> None:
    """Leave in a parameter group those of its parameters that stand at `places`, in that order."""
    for key in ("params", "param_names"):
        if key in group:
            group[key][:] = [group[key][place] for place in places]


def _sort(optimizers: Sequence[Optimizer], layers: Layers) -> None:
    """Put the layers' parameters of each group in the order of the layers, where the first of them stood."""
    order = {parameter: place for place, parameter in enumerate(nn.ModuleList(layers).parameters())}
    for one in optimizers:
        for group in one.param_groups:
            params = group["params"]
            mine = [place for place, parameter in enumerate(params) if parameter in order]
            others = [place for place, parameter in enumerate(params) if parameter not in order]
            head = [place for place in others if mine and place < mine[0]]
            tail = [place for place in others if place not in head]
            reorder(group, [*head, *sorted(mine, key=lambda place: order[params[place]]), *tail])
