"""Sharing as ties: alike layers whose parameters of one name are one parameter. For our decoder and for other models.

Layers stay modules of their own, with their own buffers and attributes (an index into a cache, say); only parameters
are shared. A parameter that several layers hold is found first, and saved, under the lowest of them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from tenfold.config.model import ModelConfig, MoEConfig
from tenfold.errors import TenfoldError
from tenfold.nn.low_rank import add_difference, differences, held, rank_of, useful_rank
from tenfold.nn.moe import MixtureOfExperts
from tenfold.sharing.patterns import Pattern

EXPERTS = ("layer", "prototype", "free")
"""Which routed experts share one set of weights, from the coarsest to none."""

PARTS = ("attention", "ffn", "experts", "router", "norms")
"""What a layer is made of. ffn: dense feed-forwards, an always active expert among them; experts: the routed ones."""


Layers = Sequence[nn.Module] | nn.ModuleList


@dataclass(frozen=True, eq=False)
class Sharing:
    """Which layers share (`pattern`), and what of them (`parts`); all else is each layer's own.

    A part is one of `PARTS`, or a glob over the names that a layer's parameters have in it ("mlp.*"). With a `rank` the
    sharing is relaxed: to each matrix that it shares a layer adds a difference of that rank, its own (`nn.low_rank`),
    and vectors, for which rank 1 would be everything, are not shared at all. Inside of a layer its routed experts may
    share too (`experts`, one of `EXPERTS`): all of them, or those of each prototype.
    """

    pattern: Pattern
    parts: tuple[str, ...] = PARTS
    rank: int = 0
    experts: str = "free"

    def of(self, part: str, name: str = "", vector: bool = False) -> Pattern:
        """The pattern of a parameter that belongs to `part` and has `name` in its layer, and one dimension or more."""
        shared = part in self.parts or any(fnmatchcase(name, glob) for glob in self.parts if glob not in PARTS)
        return self.pattern if shared and not (vector and self.rank) else Pattern(range(self.pattern.layers))

    def of_model(self, model: ModelConfig) -> Sharing:
        """The same for layers of ours, told by `PARTS` where all that the layers have is named: what they have nothing
        of cannot be shared less by one stage than by another."""
        there = {"attention", "norms"} | ({"experts"} if model.moe.experts else {"ffn"})
        there |= {"ffn"} if model.moe.shared_experts else set()
        routed = {"router"} if model.moe.experts else set()
        complete = there <= set(self.parts) <= there | routed and (routed <= set(self.parts) or self.experts != "free")
        return replace(self, parts=PARTS) if complete else self

    def dump(self) -> dict[str, Any]:
        """What a checkpoint's manifest keeps of it; `load` reads it."""
        parts = list(self.parts)
        return {"pattern": list(self.pattern.blocks), "parts": parts, "rank": self.rank, "experts": self.experts}

    @classmethod
    def load(cls, manifest: dict[str, Any]) -> Sharing:
        """The sharing that a manifest tells."""
        parts = tuple(manifest.get("parts", PARTS))
        return cls(Pattern(manifest["pattern"]), parts, manifest.get("rank", 0), manifest.get("experts", "free"))

    def segments(self) -> list[range]:
        """The segments: shortest runs of consecutive layers that no shared parameter crosses."""
        runs, start = [], 0
        for run in self.pattern.segments() if self.parts else [(0,)] * self.pattern.layers:
            runs.append(range(start, start + len(run)))
            start += len(run)
        return runs

    def check_refines(self, coarser: Sharing, where: str, there: Container[str] = PARTS) -> None:
        """Raise TenfoldError unless this one can be reached from `coarser` by delinking, part by part of those that
        are `there`."""
        check_experts_refine(self, coarser.experts, where)
        for part in PARTS:
            if part not in there:
                continue
            if part == "router" and coarser.experts != "free":
                continue  # there is none before
            mine, theirs = self.of(part), coarser.of(part)
            mine.check_refines(theirs, where if self.parts == coarser.parts else f"{where}: {part}")
            check_rank(mine, self.rank, coarser.rank, where)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sharing) or (self.rank, self.experts) != (other.rank, other.experts):
            return False
        return all(self.of(part) == other.of(part) for part in PARTS)

    def __hash__(self) -> int:
        return hash((self.rank, self.experts, *(self.of(part) for part in PARTS)))

    def __str__(self) -> str:
        all_of_them = self.parts == PARTS or self.pattern.stored_blocks == self.pattern.layers
        shared = str(self.pattern) if all_of_them else f"{self.pattern} of {', '.join(self.parts)}"
        relaxed = f"{shared} + rank {self.rank}" if self.rank else shared
        return relaxed if self.experts == "free" else f"{relaxed}, experts by {self.experts}"


def check_experts_refine(after: Sharing, before: str, where: str) -> None:
    """Raise TenfoldError unless delinking leads from one choice of `EXPERTS` to that of `after`."""
    if after.experts != before and after.rank and after.of("experts").stored_blocks < after.pattern.layers:
        raise TenfoldError(
            f'{where}: experts = "{before}" cannot become "{after.experts}" while layers share them with differences '
            f"of rank {after.rank}: free the layers first, or both at once"
        )
    if EXPERTS.index(after.experts) < EXPERTS.index(before):
        raise TenfoldError(
            f'{where}: experts = "{after.experts}" does not refine experts = "{before}"; delinking only frees experts, '
            'from "layer" to "prototype" to "free"'
        )


def check_rank(pattern: Pattern, rank: int, before: int, where: str) -> None:
    """Raise TenfoldError where layers that differ by rank `before` would go on sharing with a lesser `rank`."""
    if rank < before and pattern.stored_blocks < pattern.layers:
        raise TenfoldError(
            f"{where}: layers that still share, {pattern}, have differences of rank {before} by now, which no common "
            f"block can take in: let them keep rank = {before} or more, or free them all"
        )


@dataclass(frozen=True)
class Holder:
    """Where a parameter sits: `module`'s own attribute."""

    module: nn.Module
    attribute: str

    @property
    def parameter(self) -> nn.Parameter:
        found = self.module._parameters[self.attribute]
        assert found is not None
        return found

    @property
    def rank(self) -> int:
        """Of the layer's own difference to the parameter; 0: it has none."""
        return rank_of(self.module, self.attribute)

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The parameter, and left and right of the layer's own difference to it."""
        return (self.parameter, *differences(self.module, self.attribute))

    def hold(self, parameter: nn.Parameter) -> None:
        self.module._parameters[self.attribute] = parameter


def holders(layer: nn.Module) -> dict[str, Holder]:
    """Every place of a parameter in `layer`, by name; a difference is no place of its own."""
    return {
        f"{path}.{attribute}" if path else attribute: Holder(module, attribute)
        for path, module in layer.named_modules()
        for attribute, _ in held(module)
    }


def part_of(layer: nn.Module, name: str) -> str:
    """The part that a parameter of `layer` belongs to, by its name and by the modules that it is in.

    norms: of a module whose class is called a norm; experts: under a module `experts`; router: beside one, in a module
    or a parameter of another name than `shared...`; attention: under a name with attn or attention; else ffn.
    """
    *path, _ = name.split(".")
    modules = [layer]
    for step in path:
        modules.append(getattr(modules[-1], step))
    if "norm" in type(modules[-1]).__name__.lower():
        return "norms"
    if "experts" in path:
        return "experts"
    for depth, module in enumerate(modules):
        if hasattr(module, "experts") and not name.split(".")[depth].startswith("shared"):
            return "router"
    return "attention" if any("attn" in step or "attention" in step for step in map(str.lower, path)) else "ffn"


def tables(layers: Layers) -> dict[str, list[Holder]]:
    """For each parameter name the places of it, layer by layer.

    Raises TenfoldError, naming layer and parameter, when the layers are not alike.
    """
    if not layers:
        raise TenfoldError("there are no layers to share")
    by_layer = [holders(layer) for layer in layers]
    for number, mine in enumerate(by_layer):
        for name in sorted(by_layer[0].keys() ^ mine.keys()):
            raise TenfoldError(
                f"layers 0 and {number} are not alike: only layer {0 if name in by_layer[0] else number} has {name}"
            )
        for name, holder in mine.items():
            shape, first = tuple(holder.parameter.shape), tuple(by_layer[0][name].parameter.shape)
            if shape != first:
                raise TenfoldError(f"layers 0 and {number} are not alike: {name} is {first} there and {shape} here")
    return {name: [mine[name] for mine in by_layer] for name in by_layer[0]}


def tie(layers: Layers, sharing: Sharing) -> None:
    """Make layers that share hold the parameters of the first of them, and experts that share one set of weights.
    Nothing is averaged: the others' are let go.

    Differences of a relaxed sharing are zero at first. Raises TenfoldError when the layers are not alike or differ by
    some rank already, are not as many as the pattern's, or have nothing of a part.
    """
    if sharing.experts != "free":
        for each in layers:
            for moe in mixtures(each, sharing.experts):
                moe.share(sets_of(moe.config, sharing.experts))
    places = tables(layers)
    check_fits(layers, sharing)
    check_plain(places)
    for name, pattern in patterns(layers, places, sharing).items():
        column = places[name]
        for holder, block in zip(column, pattern.blocks, strict=True):
            holder.hold(column[pattern.first_layer(block)].parameter)
        for layer, rank in enumerate(ranks(pattern, sharing, column)):
            if rank:
                add_difference(column[layer].module, column[layer].attribute, rank, f"0/layers.{layer}.{name}")


def check_plain(places: dict[str, list[Holder]]) -> None:
    """Raise TenfoldError where layers differ by a low rank from what they share: they cannot share more."""
    for name, column in places.items():
        if any(holder.rank for holder in column):
            raise TenfoldError(f"{name} of the layers has low-rank differences: delink them, which folds those in")


def patterns(layers: Layers, places: dict[str, list[Holder]], sharing: Sharing) -> dict[str, Pattern]:
    """The pattern that `sharing` means for each parameter in `places`, the `tables` of the layers."""
    return {
        name: sharing.of(part_of(layers[0], name), name, column[0].parameter.dim() < 2)
        for name, column in places.items()
    }


def ranks(pattern: Pattern, sharing: Sharing, column: Sequence[Holder]) -> list[int]:
    """The rank of each layer's difference to a parameter of that `pattern`: 0 where the layer shares it with none."""
    rank = min(sharing.rank, useful_rank(column[0].parameter))
    return [rank if pattern.uses(block) > 1 else 0 for block in pattern.blocks]


def check_fits(layers: Layers, sharing: Sharing) -> None:
    """As many layers as the pattern has, something in them of every part that is named (of all, when all are), and a
    matrix that can use the rank."""
    if len(layers) != (wanted := sharing.pattern.layers):
        raise TenfoldError(f"the sharing map {sharing.pattern} is for {wanted} layers, not {len(layers)}")
    if sharing.rank:
        _check_rank_is_useful(layers, sharing)
    if sharing.parts == PARTS:
        return
    names = {name: part_of(layers[0], name) for name in holders(layers[0])}
    routed = all(moe.router is not None for moe in mixtures(layers[0]))
    for part in sharing.parts:
        if part == "router" and not routed:
            continue
        if part not in names.values() and not any(fnmatchcase(name, part) for name in names):
            there = ", ".join(sorted(set(names.values())))
            raise TenfoldError(f"the layers have nothing of {part!r} to share; they have {there}")


def _check_rank_is_useful(layers: Layers, sharing: Sharing) -> None:
    places = tables(layers)
    found = patterns(layers, places, sharing)
    largest = max(max(ranks(found[name], Sharing(sharing.pattern, rank=2**62), places[name])) for name in places)
    if not largest:
        raise TenfoldError(
            f"rank = {sharing.rank} is of layers' own differences to matrices that they share, and they share none: "
            "leave it out"
        )
    if sharing.rank > largest:
        raise TenfoldError(
            f"rank = {sharing.rank} is more than any shared matrix can use: at {largest}, the smaller side of the "
            "largest, every layer can be anything already"
        )


def sets_of(moe: MoEConfig, experts: str) -> int:
    """How many sets of weights the experts of a layer have, for a choice of `EXPERTS`."""
    return {"layer": 1, "prototype": moe.prototypes, "free": moe.experts}[experts]


def mixtures(layer: nn.Module, needed_for: str = "free") -> list[MixtureOfExperts]:
    """The mixtures of experts of a layer of ours; TenfoldError when it has none and experts are to share."""
    found = [module for module in layer.modules() if isinstance(module, MixtureOfExperts)]
    if needed_for != "free" and not found:
        raise TenfoldError(f'experts = "{needed_for}": these layers have no mixture of experts of Tenfold\'s')
    return found


def tied_pattern(column: Sequence[Holder]) -> Pattern:
    """Which layers hold the same parameter now."""
    return Pattern(id(holder.parameter) for holder in column)


def uses(layers: Layers) -> dict[nn.Parameter, int]:
    """How many layers use each of their parameters."""
    return {parameter: len(numbers) for parameter, numbers in users(layers).items()}


def users(layers: Layers) -> dict[nn.Parameter, list[int]]:
    """Which layers, by number, use each of their parameters."""
    found: dict[nn.Parameter, list[int]] = {}
    for number, layer in enumerate(layers):
        for parameter in layer.parameters():
            found.setdefault(parameter, []).append(number)
    return found


def materialize(model: nn.Module, device: torch.device, then: Callable[[nn.Parameter], None] = lambda _: None) -> None:
    """Give every parameter and buffer of a model on the meta device memory on `device`, each once: ties stay ties.

    `then` is called with each parameter before the next one is made. `Module.to_empty` would give every layer memory of
    its own.
    """
    parameters: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in parameters:
                    empty = torch.empty_like(parameter, device=device)
                    parameters[parameter] = nn.Parameter(empty, parameter.requires_grad)
                    then(parameters[parameter])
                module._parameters[name] = parameters[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device)
