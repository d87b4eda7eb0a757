"""What a rank needs of the former model's parameters when a stage is laid out anew, and the ways on which it comes.

Known from names, shapes and degrees alone: a run goes these ways, and planning counts them (`planning.delinked`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Protocol

from tenfold.config.model import ModelConfig
from tenfold.nn.low_rank import LEFT, RIGHT
from tenfold.parallel.mesh import Degrees
from tenfold.parallel.pieces import Piece, piece_at, piece_by_rank
from tenfold.parallel.regions import Region, all_of, common, elements, runs_of
from tenfold.parallel.relay import Route, route
from tenfold.parallel.splits import in_a_layer
from tenfold.sharing.lineage import Lineage
from tenfold.sharing.tying import Sharing, sets_of


class Lying(Protocol):
    """How a stage's model lies on ranks: a `Layout`, or what planning knows of one."""

    @property
    def model_config(self) -> ModelConfig:
        """The model's."""

    @property
    def sharing(self) -> Sharing:
        """What its layers share."""

    @property
    def degrees(self) -> Degrees:
        """Ranks along each axis."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The whole shape of every parameter."""

    def stages_of(self, name: str) -> tuple[int, ...]:
        """The pipeline ranks that hold a parameter."""


class Routes:
    """From what lies as `before` says to what is to lie as `after`, delinked as `lineage` says, for one rank.

    It needs of a parameter the piece that it is to have of what that becomes; of sets of experts those that its experts
    begin as; and of a low-rank difference that is folded in all that goes into its piece of the weight.
    """

    def __init__(self, before: Lying, after: Lying, lineage: Lineage, rank: int) -> None:
        self.before, self.after, self.rank = before, after, rank
        self.become: dict[str, list[str]] = {}
        """Parameters of the former model, with what each becomes."""
        for name, (source, _) in lineage.origins.items():
            self.become.setdefault(source, []).append(name)
        self.folded = {
            name + side: (name, lineage.origins[name][0]) for name in lineage.folded for side in (LEFT, RIGHT)
        }
        """Of differences that are folded in the weight to which they are added, and what that comes from."""
        moe, had, now = before.model_config.moe, before.sharing.experts, after.sharing.experts
        self._copies = sets_of(moe, now) // sets_of(moe, had) if had != now else 1
        self._alone = before.degrees.ranks == 1
        self._known: dict[tuple[object, ...], Route] = {}
        self._parts: dict[tuple[object, ...], Region] = {}

    @cached_property
    def travels(self) -> bool:
        """Whether anything goes from rank to rank."""
        return not all(self._stays(name) for name in (*self.become, *self.folded))

    def of(self, tensor: str, shape: tuple[int, ...]) -> Route:
        """That of a parameter, or of a tensor of its state ("name/kind"), of that whole shape."""
        parameter = _parameter(tensor)
        had, wanted = self.before.stages_of(parameter), self._wanted_by(parameter)
        key = (*self._kind(tensor, shape), had, wanted)
        if key not in self._known:
            if self._stays(parameter):
                region, place = self.part(tensor, shape), _stage(self.before, self.rank)
                wants = region if place in wanted else None
                self._known[key] = Route(region if place in had else None, wants, wants)
            else:
                has = _on(_by_rank(self.before, tensor, shape), self.before, had)
                wants_by_rank = _on(self._needed(tensor, shape), self.after, wanted)
                self._known[key] = route(has, wants_by_rank, self.rank)
        return self._known[key]

    def part(self, tensor: str, shape: tuple[int, ...]) -> Region:
        """What this rank needs of it, if it is to have what it becomes."""
        key = self._kind(tensor, shape)
        if key not in self._parts:
            (self._parts[key],) = self._needed(tensor, shape, self.rank)
        return self._parts[key]

    def lacks(self, tensor: str, shape: tuple[int, ...]) -> int:
        """Elements of it that this rank gets from others."""
        parameter = _parameter(tensor)
        if self._stays(parameter) or _stage(self.after, self.rank) not in self._wanted_by(parameter):
            return 0
        wanted = self.part(tensor, shape)
        if _stage(self.before, self.rank) not in self.before.stages_of(parameter):
            return elements(wanted)
        (had,) = _by_rank(self.before, tensor, shape, self.rank)
        return elements(wanted) - elements(common(had, wanted))

    def sets_for(self, parameter: str, sets: int, copies: int) -> list[int]:
        """For the experts that this rank is to have of a parameter: where the sets that they begin as stand among those
        that it needs."""
        shape = self.after.shapes[parameter]
        if self._alone:
            return [each for each in range(sets) for _ in range(copies)]
        (piece,) = _pieces(self.after, parameter, shape, self.rank)
        wanted = [expert // copies for expert in piece.stack()]
        places = {each: place for place, each in enumerate(sorted(set(wanted)))}
        return [places[each] for each in wanted]

    def _stays(self, parameter: str) -> bool:
        """Whether every rank has what it needs of it."""
        if self.before.degrees != self.after.degrees or parameter in self.folded or self._divides(parameter):
            return self._alone
        return set(self._wanted_by(parameter)) <= set(self.before.stages_of(parameter))

    def _divides(self, parameter: str) -> bool:
        return self._copies > 1 and ".experts." in parameter

    def _wanted_by(self, parameter: str) -> tuple[int, ...]:
        """The pipeline ranks that need it."""
        if self.after.degrees.pipeline == 1:
            return (0,)
        names = self.become.get(parameter) or [self.folded[parameter][0]]
        return tuple(sorted({stage for name in names for stage in self.after.stages_of(name)}))

    def _kind(self, tensor: str, shape: tuple[int, ...]) -> tuple[object, ...]:
        """What tells regions of one tensor from those of another."""
        return in_a_layer(tensor), shape, tensor in self.folded

    def _needed(self, tensor: str, shape: tuple[int, ...], rank: int | None = None) -> list[Region]:
        """What each rank needs, or `rank` alone, as if all pipeline ranks did."""
        if tensor in self.folded and shape:
            matrix = self.folded[tensor][1]
            of_matrix = self._needed(matrix, self.before.shapes[matrix], rank)
            if tensor.endswith(LEFT):
                return [(*region[:-1], (range(shape[-1]),)) for region in of_matrix]
            return [(*region[:-2], (range(shape[-2]),), region[-1]) for region in of_matrix]
        if not self._divides(tensor) or not shape or self._alone:
            return _by_rank(self.after, tensor, shape, rank)
        freed = _pieces(self.after, tensor, (shape[0] * self._copies, *shape[1:]), rank)
        sets = [runs_of(sorted({expert // self._copies for expert in piece.stack()})) for piece in freed]
        return [(of_stack, *piece.region[1:]) for of_stack, piece in zip(sets, freed, strict=True)]


def _parameter(tensor: str) -> str:
    """The parameter that a tensor is, or is the state of."""
    return tensor.partition("/")[0]


def _pieces(lying: Lying, parameter: str, shape: tuple[int, ...], rank: int | None = None) -> list[Piece]:
    """Of each rank, or of `rank` alone, as if all pipeline ranks had it."""
    degrees = lying.degrees
    if rank is None:
        return piece_by_rank(parameter, shape, lying.model_config, degrees)
    shard, tensor = divmod(rank % (degrees.shard * degrees.tensor), degrees.tensor)
    return [piece_at(parameter, shape, lying.model_config, degrees, shard, tensor)]


def _by_rank(lying: Lying, parameter: str, shape: tuple[int, ...], rank: int | None = None) -> list[Region]:
    if lying.degrees.ranks == 1:  # whatever an optimizer keeps
        return [all_of(shape)]
    return [piece.region for piece in _pieces(lying, parameter, shape, rank)]


def _stage(lying: Lying, rank: int) -> int:
    """The pipeline rank that a rank belongs to."""
    return rank // (lying.degrees.ranks // lying.degrees.pipeline)


def _on(regions: Sequence[Region], lying: Lying, stages: Sequence[int]) -> list[Region | None]:
    """Of what each rank would have that of the pipeline ranks `stages`."""
    return [region if _stage(lying, rank) in stages else None for rank, region in enumerate(regions)]
