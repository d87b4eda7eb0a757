"""Where each part of a model's state lies between its uses: as rules say it, written and read again.

A *part* is the parameters that the same layers use: of a plain model one a layer, of layers that share one for all of
them, and what is outside of layers. Where some experts of a layer lie apart from others, each lot of them is a part,
and what else is in the layer; where weights of one are below, those of all go through a working copy (`Part.unit`). A
*placement* names the tier of every (part, kind). What is below the device comes up for its use through working memory
on the device (`Working`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from tenfold.config.depth import experts_of, joined, places_of
from tenfold.config.offload import PlacementRule
from tenfold.errors import TenfoldError
from tenfold.offload.activations import working_bytes as slab_for_activations
from tenfold.offload.tiers import KINDS, TIERS, Kind, TierName

End = Literal["embedding", "head"]

COPIES = 2
"""Weights of a place that are on the device at once: those in use, and those fetched for the next."""
IN_PASSING = 3
"""Pieces on their way through the device: one read, one worked on, one written."""


@dataclass(frozen=True)
class Part:
    """State that comes and goes as one, on this rank.

    `layers` use it; of what is outside of layers, `ends` says before or behind them (a tied embedding is both).
    `bytes` are those of each kind it has (activations: of one micro-batch, in all its layers alike), `piece` those of
    the largest piece of each kind that is stepped at once. `experts` are the numbers of those that it is, where it is
    some of a layer's alone. `added` are the bytes of gradients that come back behind the passes, where ranks add them
    up, and leave again. `unit` names what its weights are used with, if that is more than the part. `seen` is
    the share of a step's passes behind which its gradient is not zero, and has to be moved, as far as that is known.
    """

    name: str
    layers: tuple[int, ...]
    bytes: Mapping[Kind, int]
    piece: Mapping[Kind, int] = field(default_factory=dict)
    ends: tuple[End, ...] = ()
    experts: tuple[int, ...] = ()
    unit: str = ""
    seen: float = 1.0
    added: int = 0

    @property
    def runs(self) -> int:
        """How many times a forward pass comes to it: layers next to each other are one."""
        return len(self.ends) + sum(1 for layer in self.layers if layer - 1 not in self.layers)

    def may_leave(self, kind: Kind) -> bool:
        """Whether its state of a kind can lie below the device: weights outside of layers cannot, being used at any
        time."""
        return self.bytes.get(kind, 0) > 0 and (kind != "weights" or bool(self.layers))


@dataclass(frozen=True)
class Placement:
    """The tier of every kind of state of every part."""

    tiers: tuple[tuple[str, tuple[tuple[Kind, TierName], ...]], ...]

    @classmethod
    def of(cls, tiers: Mapping[str, Mapping[Kind, TierName]]) -> Placement:
        """From parts' names."""
        return cls(tuple((name, tuple(sorted(kinds.items()))) for name, kinds in tiers.items()))

    @classmethod
    def load(cls, dumped: Any) -> Placement:
        """What `dump` gave. Raises TenfoldError for anything else."""
        for name, kinds in dumped.items() if isinstance(dumped, dict) else [("", dumped)]:
            if not isinstance(kinds, dict) or not {*kinds} <= {*KINDS} or not {*kinds.values()} <= {*TIERS}:
                raise TenfoldError(f"a saved placement has {kinds!r} for {name!r}, which is none: it was changed")
        return cls.of(dumped)

    def dump(self) -> dict[str, dict[str, str]]:
        """As JSON has it: {"layers.3": {"moments": "disk", ...}}."""
        return {name: {**dict(kinds)} for name, kinds in self.tiers}

    @cached_property
    def _by_name(self) -> dict[str, dict[Kind, TierName]]:
        return {name: dict(kinds) for name, kinds in self.tiers}

    def tier(self, part: str, kind: Kind) -> TierName:
        """Where a part's state of a kind lies; on the device, of a kind that it has none of."""
        if part not in self._by_name:
            raise TenfoldError(
                f"the placement does not know {part}: it is of another model, and has {', '.join(self._by_name)}"
            )
        return self._by_name[part].get(kind, "device")

    def below(self, part: Part) -> list[Kind]:
        """What of a part is not on the device."""
        return [kind for kind in part.bytes if self.tier(part.name, kind) != "device"]

    def __str__(self) -> str:
        alike: dict[str, list[str]] = {}
        for name, kinds in self.tiers:
            if text := ", ".join(f"{kind} {tier}" for kind, tier in kinds if tier != "device"):
                alike.setdefault(text, []).append(name)
        return "; ".join(f"{joined(names)}: {text}" for text, names in alike.items()) or "all on the device"


def explicit(rules: Sequence[PlacementRule], parts: Sequence[Part], depth: int, experts: int = 0) -> Placement:
    """The placement that rules say, in a model of `depth` layers with so many experts in each.

    A part that several layers share has the fastest tier that rules give one of them, and so has one that several
    experts are; what is outside of layers goes by rules for either of its ends, and its weights stay on the device.
    """
    read = [
        (
            places_of(rule.layers, depth),
            None if rule.experts is None else experts_of(rule.experts, experts),
            rule.kinds,
        )
        for rule in rules
    ]
    place: dict[End, int] = {"embedding": -1, "head": depth}

    def told(places: Iterable[int], kind: Kind, expert: int | None) -> TierName:
        named = [
            kinds[kind]
            for where, only, kinds in read
            if kind in kinds and not where.isdisjoint(places) and (only is None or expert in only)
        ]
        return named[-1] if named else "device"

    def tier(part: Part, kind: Kind) -> TierName:
        if not part.may_leave(kind):
            return "device"
        if not part.layers:
            return told([place[end] for end in part.ends], kind, None)
        return min((told([at], kind, one) for at in part.layers for one in part.experts or [None]), key=TIERS.index)

    return Placement.of({part.name: {kind: tier(part, kind) for kind in part.bytes} for part in parts})


def together(parts: Iterable[Part]) -> list[tuple[Part, ...]]:
    """Parts whose weights are in one working copy."""
    found: dict[str, list[Part]] = {}
    for part in parts:
        found.setdefault(part.unit or part.name, []).append(part)
    return [tuple(each) for each in found.values()]


def traffic(part: Part, kind: Kind, micro_batches: int = 1) -> tuple[int, int]:
    """Bytes that state below the device is read and written in a step.

    Moments come and go once. Gradients leave in every micro-batch, come back in every one beyond the first, to add to
    them, and for the step; where ranks add them up they come and go once more; those of zeros do not. Weights come for
    every run of layers, forward and backward, and come and go in the step.
    """
    size = part.bytes[kind]
    if kind == "moments":
        return size, size
    if kind == "weights":
        return size * (2 * part.runs * micro_batches + 1), size
    again = 0
    if kind == "gradients":
        size, again = round(size * part.seen), round(part.added * part.seen)
    return size * micro_batches + again, size * micro_batches + again


class Working:
    """Memory on the device through which what lies below it passes, of `parts`.

    Weights of the layer in use and of the next, all that come and go with any that is below; pieces of all that is
    below for the optimizer's step, through which gradients leave, too; activations of two layers, those in use and
    those on their way.
    """

    def __init__(self, parts: Iterable[Part]) -> None:
        self._whole: dict[str, int] = {}  # weights of units that are not yet counted
        for part in parts:
            name = part.unit or part.name
            self._whole[name] = self._whole.get(name, 0) + part.bytes.get("weights", 0)
        self._weights: dict[int, int] = {}  # by layer
        self._pieces: dict[str, int] = {}  # by part
        self._most_weights = self._most_piece = 0
        self._activations = [0, 0]

    def add(self, part: Part, kind: Kind) -> None:
        """A part's state of a kind is below."""
        size = part.bytes[kind]
        if kind == "activations":
            layers = len(part.layers)
            self._activations = sorted([*self._activations, *[-(-size // layers)] * min(layers, 2)])[-2:]
            return
        if kind == "weights":
            whole = self._whole.pop(part.unit or part.name, 0)
            for layer in part.layers:
                self._weights[layer] = self._weights.get(layer, 0) + whole
                self._most_weights = max(self._most_weights, self._weights[layer])
        self._pieces[part.name] = self._pieces.get(part.name, 0) + part.piece.get(kind, 0)
        self._most_piece = max(self._most_piece, self._pieces[part.name])

    @property
    def bytes(self) -> int:
        """Of it."""
        activations = slab_for_activations([each for each in self._activations if each])
        return COPIES * self._most_weights + IN_PASSING * self._most_piece + activations


def working_bytes(parts: Sequence[Part], placement: Placement) -> int:
    """Of `Working`, for a placement."""
    working = Working(parts)
    for part in parts:
        for kind in placement.below(part):
            working.add(part, kind)
    return working.bytes


def kind_bytes(
    parts: Sequence[Part], placement: Placement, in_backward: bool = False
) -> dict[TierName, dict[Kind, int]]:
    """Bytes of state of each kind that lie in each tier. `in_backward`: the optimizer steps in the one backward pass of
    a step, so that of gradients there are only those of the largest part (with all that its weights come and go with),
    and of parts that a pass comes to again."""
    found: dict[TierName, dict[Kind, int]] = {tier: {} for tier in TIERS}
    passing: dict[str, int] = {}
    for part in parts:
        for kind, size in part.bytes.items():
            if kind == "gradients" and in_backward and part.runs == 1:
                passing[part.unit or part.name] = passing.get(part.unit or part.name, 0) + size
            else:
                tier = found[placement.tier(part.name, kind)]
                tier[kind] = tier.get(kind, 0) + size
    if largest := max(passing.values(), default=0):
        found["device"]["gradients"] = found["device"].get("gradients", 0) + largest
    return found


def tier_bytes(parts: Sequence[Part], placement: Placement, in_backward: bool = False) -> dict[TierName, int]:
    """Bytes of state that lie in each tier; see `kind_bytes`."""
    return {tier: sum(kinds.values()) for tier, kinds in kind_bytes(parts, placement, in_backward).items()}
