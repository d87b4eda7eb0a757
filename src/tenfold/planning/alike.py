"""Parts that are alike, so that of a model of many layers a program has to know few."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tenfold.offload.placement import Part, together
from tenfold.offload.tiers import Kind

Below = tuple[Kind, ...]
"""Kinds of a part's state that are below the device."""


@dataclass(frozen=True)
class Class:
    """Parts that are alike, in the order of the depth, and the sets of kinds that may be below."""

    parts: tuple[Part, ...]
    sets: tuple[Below, ...]

    @property
    def one(self) -> Part:
        return self.parts[0]

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return max(self.sets, key=len)


@dataclass(frozen=True)
class Union:
    """Units of several parts that are alike: their names in the order of the depth, and how many parts of a class, by
    its number, each of them has."""

    units: tuple[str, ...]
    members: Mapping[int, int]


def classes_of(parts: Sequence[Part], allowed: Sequence[Kind]) -> tuple[list[Class], list[Union]]:
    """The classes of parts, of whose kinds those `allowed` may leave, and of units of several parts."""
    weights: dict[int, dict[str, None]] = {}
    for part in parts:
        for layer in part.layers:
            weights.setdefault(layer, {})[part.unit or part.name] = None
    # Where a layer's weights are of several units, those that others use too are told apart: what is there at once
    # depends on which of them are below.
    several = any(len(names) > 1 for names in weights.values()) and "weights" in allowed

    def like(part: Part) -> tuple[object, ...]:
        key: tuple[object, ...] = (
            *sorted(part.bytes.items()),
            *sorted(part.piece.items()),
            part.runs,
            len(part.layers),
            part.ends,
            part.seen,
        )
        if several and part.layers:
            mine = part.unit or part.name
            beside = [name for name in weights[part.layers[0]] if name != mine]
            key += (mine,) if len(part.layers) > 1 else (*beside,)
        return key

    by_depth = sorted(parts, key=lambda part: ("embedding" not in part.ends, not part.layers, part.layers))
    alike: dict[tuple[object, ...], list[Part]] = {}
    units: dict[tuple[object, ...], dict[str, None]] = {}
    for unit in together(by_depth):
        keys = [like(part) for part in unit]
        whole = tuple(sorted(keys, key=repr)) if len(unit) > 1 else ()
        if whole:
            units.setdefault(whole, {})[unit[0].unit] = None
        for key, part in zip(keys, unit, strict=True):
            alike.setdefault((whole, key), []).append(part)
    found = []
    for each in alike.values():
        kinds = [kind for kind in allowed if each[0].may_leave(kind)]
        sets = [chosen for size in range(len(kinds) + 1) for chosen in itertools.combinations(kinds, size)]
        found.append(Class(tuple(each), tuple(sets)))
    unions = []
    for members_like, names in units.items():
        members = {
            number: len(found[number].parts) // len(names) for number, (of, _) in enumerate(alike) if of == members_like
        }
        if all("weights" in found[number].kinds for number in members):
            unions.append(Union(tuple(names), members))
    return found, unions
