"""Working copies of weights whose place is below the device: there when they are needed, fetched one ahead.

A pass goes forward and then, where gradients are wanted, backward. What is here and not needed now stays
until its room is wanted, and of several that which is needed last goes first: so the layers at the turn are there
already when the backward pass comes to them.

Of a unit some experts may stay on the device while others are below: the working copy is of all of them, and those that
stay are copied into it (`beside`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from tenfold.offload.beside import Beside
from tenfold.offload.slab import Block, Slab
from tenfold.offload.tiers import Extent, Tier, TierName, Transfer
from tenfold.offload.units import Piece, Portion, Unit
from tenfold.offload.workspace import Clock, Together, Workspace

AHEAD = 1
"""Units that are fetched before they are needed."""


@dataclass(eq=False)
class _Copy:
    block: Block
    arriving: Transfer | None
    leaving: list[Transfer] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class _Stretch:
    """Pieces of a unit that lie one behind the other in a tier, as they do in a working copy from `begin` on."""

    tier: Tier
    begin: int
    extent: Extent


class WorkingCopies:
    """Weights of units of which any portion's place is below: `homes` has the tier of each of their portions, `Beside`
    for those that stay. `order` has, for each place that a forward pass goes through, the units that are needed there
    together: for each layer those that it uses. `held` has those that are held together, whatever places begin
    meanwhile."""

    def __init__(
        self,
        homes: dict[Portion, Tier],
        order: Sequence[Sequence[Unit]],
        held: Sequence[Sequence[Unit]],
        device: torch.device,
        clock: Clock,
    ) -> None:
        self.homes, self._clock = homes, clock
        self.units = dict.fromkeys(portion.unit for portion in homes)
        self._order = [[unit for unit in units if unit in self.units] for units in order]
        self._places = {unit: [at for at, units in enumerate(self._order) if unit in units] for unit in self.units}
        self._slab = Slab(copies_bytes([*self._order, *held]), device)
        self._stretches: dict[Unit, list[_Stretch]] = {}
        self._stretch_of: dict[Piece, _Stretch] = {}
        self._unwritten: set[Piece] = set()
        for unit in self.units:
            self._reserve(unit)
        self._here: dict[Unit, _Copy] = {}
        self._in_use: set[Unit] = set()
        self._held: set[Unit] = set()
        self._now = (-1, 1)  # the place, and which way: forward 1, backward -1
        self._turns = True  # whether a backward pass follows

    def _reserve(self, unit: Unit) -> None:
        self._stretches[unit] = []
        for tier, run in groupby(unit.pieces, lambda piece: self.homes[piece.portion]):
            pieces = list(run)
            stretch = _Stretch(tier, pieces[0].begin, tier.reserve(sum(piece.size for piece in pieces)))
            self._stretches[unit].append(stretch)
            self._stretch_of |= dict.fromkeys(pieces, stretch)
        self._unwritten.update(unit.pieces)

    def take_in(self, unit: Unit, tier: Tier, space: Workspace) -> None:
        """Have all of a unit's weights in `tier` or another below from now on. The model does not compute with them
        any more."""
        if unit in self.units:
            self._send(unit, tier, space)
            return
        self.units[unit], self._places[unit] = None, []
        self.homes |= dict.fromkeys(unit.portions, tier)
        self._reserve(unit)
        self.put_away(unit, space)

    def _send(self, unit: Unit, tier: Tier, space: Workspace) -> None:
        """Have in `tier` what of a unit stays on the device, and what is below where it is."""
        for number, stretch in enumerate(self._stretches[unit]):
            if not isinstance(stretch.tier, Beside):
                continue
            sent = _Stretch(tier, stretch.begin, tier.reserve(stretch.extent.size))
            for piece in [piece for piece in unit.pieces if self._stretch_of[piece] is stretch]:
                block = space.take(piece.size, "weights")
                self.read(piece, block.bytes[: piece.size])
                self._stretch_of[piece], self.homes[piece.portion] = sent, tier
                space.give_after(block, self.write(piece, block.bytes[: piece.size]))
            stretch.tier.release(stretch.extent)
            self._stretches[unit][number] = sent

    def is_below(self, piece: Piece) -> bool:
        """Whether a piece is not on the device but in a working copy."""
        return piece in self._stretch_of and not isinstance(self._stretch_of[piece].tier, Beside)

    @property
    def size(self) -> int:
        """Bytes of memory for working copies."""
        return self._slab.size

    def put_away(self, unit: Unit, space: Workspace) -> None:
        """Move a unit's weights from where they are now to its tier."""
        for piece in unit.pieces:
            block = space.take(piece.size, "weights")
            for number, each in enumerate(piece.slices):
                piece.view(block.bytes, number).copy_(each.of(each.entry.flat()))
            space.give_after(block, self.write(piece, block.bytes[: piece.size]))
        for entry in unit.entries:
            entry.leave()

    def begin(self, place: int, backward: bool = False, turns: bool = True) -> None:
        """What is needed at `place` is here when this comes back, and what is needed next on its way.

        `turns`: whether gradients are wanted, of a forward pass. What was gone through before is done with.
        """
        self._now = (place, -1 if backward else 1)
        if not backward:
            self._turns = turns
        needed = self._order[place]
        self._in_use.intersection_update(needed)
        for unit in needed:
            self.need(unit)
        self._fetch_ahead()

    def hold(self, units: Collection[Unit]) -> None:
        """Have these units here, and in use until others are held."""
        self._held = set(units)
        for unit in units:
            self.need(unit)
        self._in_use.difference_update(units)

    def end(self, place: int) -> None:
        """A forward pass has gone through a place."""
        self._in_use.difference_update(self._order[place])

    def need(self, unit: Unit) -> None:
        """Have a unit here, in use until another place begins."""
        self._in_use.add(unit)
        if unit not in self._here:
            while (block := self._slab.take(unit.size)) is None:
                if not self._evict_one():
                    self._rearrange(unit)
            self._fetch(unit, block)
        copy = self._here[unit]
        if copy.arriving is not None:
            self._clock.wait(copy.arriving, "weights")
            copy.arriving = None
            for entry, memory in unit.views(copy.block.bytes):
                entry.point(memory)

    def forget(self, unit: Unit) -> None:
        """Let go of a working copy: what is in the tier is about to change."""
        self._in_use.discard(unit)
        if unit in self._here:
            self._let_go(unit)

    def shrink(self) -> None:
        """Let go of all working copies, and of their memory: the model does not compute any more."""
        for unit in self.units:
            self.forget(unit)
        self._slab = Slab(0, self._slab.device)

    def pass_ends(self) -> None:
        """The backward pass is done: nothing is in use."""
        self._in_use.clear()

    def fetch_first(self) -> None:
        """A forward pass comes next: fetch what it begins with."""
        self._now = (-1, 1)
        self._in_use.clear()
        self._fetch_ahead()

    def here(self, piece: Piece) -> Tensor | None:
        """The bytes of a piece in the working copy of its unit, if there is one, or beside that."""
        copy = self._here.get(piece.unit)
        if copy is None:
            stretch = self._stretch_of[piece]
            if isinstance(stretch.tier, Beside):
                return stretch.tier.at(stretch.extent, piece.begin - stretch.begin, piece.size)
            return None
        if copy.arriving is not None:
            self.need(piece.unit)
        return copy.block.bytes[piece.begin : piece.begin + piece.size]

    def read(self, piece: Piece, into: Tensor) -> Transfer | None:
        """Have a piece brought to `into`; None where none was ever written, and `into` is zeros."""
        if piece in self._unwritten:
            into.zero_()
            return None
        stretch = self._stretch_of[piece]
        return stretch.tier.read(stretch.extent, into, piece.begin - stretch.begin)

    def write(self, piece: Piece, source: Tensor) -> Transfer:
        """Have a piece written; where a working copy is here, `source` is of it."""
        self._unwritten.discard(piece)
        stretch = self._stretch_of[piece]
        transfer = stretch.tier.write(stretch.extent, source, piece.begin - stretch.begin)
        if piece.unit in self._here:
            copy = self._here[piece.unit]
            copy.leaving = [*(each for each in copy.leaving if not each.done), transfer]
        return transfer

    def place_of(self, tensor: Tensor) -> tuple[Unit, int] | None:
        """The unit in whose working copy a tensor lies, and where it begins there in bytes; None: in none."""
        if tensor.device != self._slab.device:
            return None
        at = tensor.data_ptr()
        for unit, copy in self._here.items():
            begin = copy.block.bytes.data_ptr()
            if begin <= at < begin + len(copy.block.bytes):
                return unit, at - begin
        return None

    def view(self, unit: Unit, begin: int, dtype: torch.dtype, size: torch.Size, stride: Sequence[int]) -> Tensor:
        """What `place_of` found, in the copy that is here now."""
        self.need(unit)
        whole = self._here[unit].block.bytes
        whole = whole[begin : begin + (len(whole) - begin) // dtype.itemsize * dtype.itemsize].view(dtype)
        return whole.as_strided(size, stride, whole.storage_offset())

    def close(self) -> None:
        """Give room back. The weights are lost unless they were read before."""
        self._in_use.clear()
        self._held.clear()
        while self._evict_one():
            pass
        for stretches in self._stretches.values():
            for stretch in stretches:
                stretch.tier.release(stretch.extent)

    def _fetch(self, unit: Unit, block: Block) -> None:
        arriving = [
            each.tier.read(each.extent, block.bytes[each.begin : each.begin + each.extent.size])
            for each in self._stretches[unit]
        ]
        self._here[unit] = _Copy(block, Together(arriving))

    def _fetch_ahead(self) -> None:
        """Ask for the next units that are not here, as far as their room is not that of what is needed sooner."""
        missing = 0
        for place, steps in self._coming():
            for unit in self._order[place]:
                if unit in self._here:
                    continue
                while (block := self._slab.take(unit.size)) is None:
                    last = self._last_needed()
                    if last is None or self._steps_to(last) <= steps:
                        return
                    self._let_go(last)
                self._fetch(unit, block)
                missing += 1
                if missing == AHEAD:
                    return

    def _coming(self) -> Iterator[tuple[int, int]]:
        """The places that will be gone through until the end of the pass, and in how many steps."""
        place, way = self._now
        steps = 0
        while True:
            place += way
            if place == len(self._order) and self._turns:
                place, way = place - 1, -1
            if not 0 <= place < len(self._order):
                return
            steps += 1
            yield place, steps

    def _steps_to(self, unit: Unit) -> int:
        """In how many steps a unit is needed again; after the pass none is."""
        return next((steps for place, steps in self._coming() if place in self._places[unit]), 2 * len(self._order) + 1)

    def _last_needed(self) -> Unit | None:
        kept = [unit for unit in self._here if unit not in self._in_use and unit not in self._held]
        return max(kept, key=self._steps_to, default=None)

    def _evict_one(self) -> bool:
        unit = self._last_needed()
        if unit is None:
            return False
        self._let_go(unit)
        return True

    def _let_go(self, unit: Unit) -> None:
        copy = self._here.pop(unit)
        if copy.arriving is None:
            for entry in unit.entries:
                entry.leave()
        for transfer in [copy.arriving, *copy.leaving]:
            if transfer is not None:
                self._clock.wait(transfer, "weights")
        self._slab.give(copy.block)

    def _rearrange(self, unit: Unit) -> None:
        """Nothing can go and there is no run of bytes for `unit`: a layer's other units lie in the way. They are
        fetched again behind one another."""
        others = [each for each in self._here if each is not unit]
        assert others, f"{unit.name} has {unit.size} bytes, and working copies {self._slab.size}"
        for each in others:
            self._let_go(each)
        for each in others:
            self.need(each)


def copies_bytes(order: Sequence[Sequence[Unit]]) -> int:
    """Memory for working copies: of what is needed at any place, and as much again for the next one's."""
    return (1 + AHEAD) * max((sum(unit.size for unit in units) for units in order), default=0)


def homes_of(
    units: Iterable[Unit],
    tiers: Mapping[TierName, Tier | None],
    place: Callable[[Portion], TierName],
    device: torch.device,
) -> dict[Portion, Tier]:
    """The tiers of the portions of units of which any is below; that of the device is None."""
    found: dict[Portion, Tier] = {}
    beside: Tier = Beside(device)
    for unit in units:
        homes = {portion: tiers[place(portion)] for portion in unit.portions}
        if any(tier is not None for tier in homes.values()):
            found |= {portion: tier or beside for portion, tier in homes.items()}
    return found
