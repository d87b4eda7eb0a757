"""What moves together: the parameters that the same layers use, and how they lie in the memory that they share.

A unit is cut into pieces, each of which an optimizer can step alone: runs of whole small parameters, or slices of a
large one where its optimizer treats every number by itself. A piece lies on whole pages; the pieces of a unit lie one
behind the other, so that a parameter is whole in memory when its unit is.

Weights of a unit are in one place. Its gradients and moments may be in several: a unit consists of *portions*, which
are a lot of the experts of its stacks each, and all else that it has. A piece is of one portion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor, nn

from tenfold.config.depth import ranges
from tenfold.errors import TenfoldError
from tenfold.offload.tiers import aligned
from tenfold.parallel.absent import absent, is_absent
from tenfold.sharing.tying import users

PIECE = 2**22
"""Elements of a slice of a large parameter, and of small ones together."""
IN_PASSING = 3
"""Pieces that pass through working memory at once: one comes, one is worked on, one goes."""
_TOLD = 8
"""Runs of experts of which a portion's name has the numbers."""
APART = 64
"""Bytes: every parameter begins at a multiple of this."""


@dataclass(eq=False, repr=False)
class Entry:
    """A parameter as offload sees it: `name`, and the tensors whose memory is its own on this rank.

    `memory` is flat and has all of it, with what FSDP2 pads it by; `local` is what the rank has of the parameter, from
    number `first` of the whole one. On one rank `local` is the parameter. Of a stack of experts `experts` has, for each
    of the rows here, those that the row stands for: one, or where experts share weights several. `added`: several ranks
    have parts of its gradient, and add them up behind the passes of a step. `most` are the elements of the rank that
    has most of it: ranks that step whole parameters together cut their memory alike.
    """

    name: str
    parameter: nn.Parameter
    local: Tensor
    memory: Tensor | None = None
    first: int = 0
    experts: Sequence[range] = ()
    added: bool = False
    most: int = 0

    def __post_init__(self) -> None:
        self.shape, self.dtype, self.numel = self.local.shape, self.local.dtype, self.local.numel()
        self.room = self.numel if self.memory is None else self.memory.numel()
        """Elements of its memory."""
        self.most = max(self.most, self.room)

    def runs(self, lots: Sequence[int]) -> list[tuple[int, tuple[int, ...], int, int]]:
        """A stack's rows in runs of one lot, `lots` being those of all experts: the lot of each, its experts, and where
        it begins and ends in the entry's memory."""
        row, begin = self.numel // max(1, len(self.experts)), 0
        found = []
        for lot, numbers in groupby(range(len(self.experts)), lambda number: lots[self.experts[number].start]):
            rows = list(numbers)
            last = rows[-1] == len(self.experts) - 1
            end = self.room if last else (rows[-1] + 1) * row
            found.append((lot, tuple(each for number in rows for each in self.experts[number]), begin, end))
            begin = end
        return found

    def flat(self) -> Tensor:
        """Its memory now, flat."""
        return self.local.detach().view(-1) if self.memory is None else self.memory

    def point(self, memory: Tensor) -> None:
        """Let `memory`, flat [room], be that of the parameter."""
        if self.memory is not None:
            self.memory.data = memory
        self.local.data = memory[: self.numel].view(self.shape)

    def leave(self) -> None:
        """Let go of its memory: until it is pointed elsewhere the parameter is of its shape, and not a number."""
        nothing = absent(torch.Size([1]), self.dtype, self.local.device)
        if self.memory is not None:  # FSDP2 looks whether both are of one storage
            self.memory.data = nothing.expand(self.room)
        self.local.data = nothing[0].expand(self.shape)


@dataclass(frozen=True, eq=False, repr=False)
class Slice:
    """Elements `begin` to `end` of an entry's memory."""

    entry: Entry
    begin: int
    end: int

    @property
    def experts(self) -> list[int]:
        """Those of whose weights any are in it."""
        if not self.entry.experts:
            return []
        row = self.entry.numel // len(self.entry.experts)
        return [each for rows in self.entry.experts[self.begin // row : -(-self.end // row)] for each in rows]

    @property
    def last(self) -> bool:
        """Whether it ends where its entry does."""
        return self.end == self.entry.room

    @property
    def shape(self) -> torch.Size:
        """The entry's, of all of it; else flat, and without padding."""
        if self.last and not self.begin:
            return self.entry.shape
        return torch.Size([max(min(self.end, self.entry.numel) - self.begin, 0)])

    def of(self, flat: Tensor) -> Tensor:
        """What of an entry's memory, or of a tensor of its shape, is in the slice and no padding, in its shape."""
        return flat.view(-1)[self.begin : max(min(self.end, self.entry.numel), self.begin)].view(self.shape)


@dataclass(eq=False, repr=False)
class Piece:
    """What an optimizer steps at once, and where its weights (and gradients, which lie alike) begin in the unit."""

    portion: Portion
    slices: list[Slice]
    begin: int

    def __post_init__(self) -> None:
        self.unit = self.portion.unit
        self.places: list[int] = []
        """Where each slice begins in the piece, in bytes."""
        end = 0
        for each in self.slices:
            self.places.append(end)
            end += -(-(each.end - each.begin) * each.entry.dtype.itemsize // APART) * APART
        self.size = aligned(end)
        """Bytes of its weights, of which those of gradients are as many."""

    def view(self, memory: Tensor, number: int) -> Tensor:
        """Slice `number` in the flat bytes of the piece, in its shape and without padding."""
        each, begin = self.slices[number], self.places[number]
        return (
            memory[begin : begin + each.shape.numel() * each.entry.dtype.itemsize]
            .view(each.entry.dtype)
            .view(each.shape)
        )


@dataclass(eq=False, repr=False)
class Portion:
    """What of a unit has its gradients in one place, and its moments: the `experts` of these numbers, or all else."""

    unit: Unit
    experts: tuple[int, ...] = ()
    pieces: list[Piece] = field(default_factory=list)

    @property
    def name(self) -> str:
        """That of the unit, and of the experts if it has some alone."""
        return name_of(self.unit.name, self.experts)

    @property
    def layers(self) -> tuple[int, ...]:
        """Those that use it."""
        return self.unit.layers


@dataclass(eq=False, repr=False)
class Unit:
    """Parameters that the same `layers` use; none: those outside of all layers, which are in one module."""

    name: str
    layers: tuple[int, ...]
    entries: list[Entry]
    pieces: list[Piece] = field(default_factory=list)
    """As they lie one behind the other."""
    portions: list[Portion] = field(default_factory=list)

    def cut(self, stepped_by: Callable[[Entry], tuple[object, bool]], lots: Sequence[int] = ()) -> None:
        """Make the pieces, each of parameters that one optimizer steps: `stepped_by` says which, and whether it needs
        all of the parameter at once. What ranks add up is in other pieces than what they do not, that these need not
        come back for it. Stacks are cut wherever the lot of experts is another, if `lots` has one for each
        expert: there whole pages of weights have to end."""
        self.pieces, begin = [], 0
        portions: dict[int | None, Portion] = {None: Portion(self)}

        told: dict[int | None, set[int]] = {}

        def add(slices: list[Slice], lot: int | None = None) -> None:
            nonlocal begin
            portion = portions.setdefault(lot, Portion(self))
            self.pieces.append(Piece(portion, slices, begin))
            portion.pieces.append(self.pieces[-1])
            begin += self.pieces[-1].size

        small: dict[object, list[Slice]] = {}
        taken: dict[object, int] = {}
        for entry in self.entries:
            optimizer, whole = stepped_by(entry)
            size = entry.most if whole else entry.room
            if lots and entry.experts and not whole:
                for lot, experts, start, end in entry.runs(lots):
                    told.setdefault(lot, set()).update(experts)
                    for first in range(start, end, PIECE):
                        add([Slice(entry, first, min(first + PIECE, end))], lot)
            elif size <= PIECE:
                kind = (optimizer, entry.added)
                run = small.setdefault(kind, [])
                if taken.get(kind, 0) + size > PIECE:
                    add(run)
                    run = small[kind] = []
                    taken[kind] = 0
                taken[kind] = taken.get(kind, 0) + size
                run.append(Slice(entry, 0, entry.room))
            elif whole:
                add([Slice(entry, 0, entry.room)])
            else:
                for first in range(0, entry.room, PIECE):
                    add([Slice(entry, first, min(first + PIECE, entry.room))])
        for run in small.values():
            add(run)
        for named, numbers in told.items():
            portions[named].experts = tuple(sorted(numbers))
        self.portions = [portion for portion in portions.values() if portion.pieces]

    @property
    def main(self) -> Portion:
        """The portion that the weights, and the activations of layers, are told with: what is no expert, if any."""
        return self.portions[0]

    @property
    def size(self) -> int:
        """Bytes of its weights as they lie in its pieces."""
        return sum(piece.size for piece in self.pieces)

    def views(self, memory: Tensor) -> list[tuple[Entry, Tensor]]:
        """Every entry's memory, flat, in the flat bytes of the unit."""
        found = []
        for piece in self.pieces:
            for each, place in zip(piece.slices, piece.places, strict=True):
                if each.begin == 0:
                    begin, dtype = piece.begin + place, each.entry.dtype
                    found.append((each.entry, memory[begin : begin + each.entry.room * dtype.itemsize].view(dtype)))
        return found


def units_of(
    model: nn.Module,
    layers: Sequence[nn.Module],
    entry_of: Callable[[str, nn.Parameter], Entry] | None = None,
    numbers: Sequence[int] | None = None,
) -> list[Unit]:
    """The units of a model, uncut, those of layers first and in their order.

    `entry_of` makes an entry where a parameter is not simply a tensor of its own, or has another name. `numbers` are
    those of `layers` in the whole model, where these are a part of it.

    Parameters that are not trained are in none: they stay where they are. Raises TenfoldError where a parameter cannot
    be moved.
    """
    used = users(layers)
    by_layers: dict[tuple[int, ...], list[Entry]] = {}
    by_module: dict[str, list[Entry]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        entry = Entry(name, parameter, parameter) if entry_of is None else entry_of(name, parameter)
        lies_well = is_absent(entry.local) or entry.local.is_contiguous()
        if not entry.dtype.is_floating_point or not lies_well:
            raise TenfoldError(
                f"{name} cannot be offloaded: it is {entry.dtype}{'' if lies_well else ' and not contiguous'}; freeze "
                "it (requires_grad_(False)), or make it a contiguous floating-point tensor"
            )
        if places := used.get(parameter):
            by_layers.setdefault(tuple(places if numbers is None else (numbers[at] for at in places)), []).append(entry)
        else:
            by_module.setdefault(name.rpartition(".")[0] or name, []).append(entry)
    units = [Unit(f"layers.{told_layers(using)}", using, entries) for using, entries in sorted(by_layers.items())]
    units += [Unit(name, (), entries) for name, entries in by_module.items()]
    return units


def keepers(units: Sequence[Unit], layers: Sequence[int]) -> list[Unit | None]:
    """The unit that each layer's activations go with: of those that the layer uses the one that fewest layers do."""
    found: list[Unit | None] = []
    for layer in layers:
        using = [unit for unit in units if layer in unit.layers]
        found.append(min(using, key=lambda unit: len(unit.layers), default=None))
    return found


def name_of(unit: str, experts: Sequence[int]) -> str:
    """Of a portion of a unit that is these experts; of many that are no neighbours the first, and how many more."""
    told = ranges(experts).replace(" ", "")
    if told.count(",") >= _TOLD:
        told = f"{experts[0]}+{len(experts) - 1}"
    return f"{unit}.experts.{told}" if told else unit


def told_layers(numbers: tuple[int, ...]) -> str:
    """Layer numbers as people write them: 0-3,8."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
