"""A training step with state below the device, played through: what is asked for when, and waited for when.

How long that takes is a clock's: that of `timeline`, which computes and moves at given rates, or that of a planner, in
which ranks exchange things besides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic

from tenfold.offload.placement import COPIES, IN_PASSING, Part, Placement, together
from tenfold.offload.tiers import Kind
from tenfold.offload.timeline import Clock, Room, T


@dataclass(frozen=True, eq=False)
class _Piece:
    part: Part
    number: int
    share: float
    """Of the part."""

    def size(self, kind: Kind) -> float:
        return self.part.bytes.get(kind, 0) * self.share


class Rehearsal(Generic[T]):
    """The steps of a run of `depth` layers, as `clock` is told of them."""

    def __init__(
        self,
        parts: Sequence[Part],
        placement: Placement,
        clock: Clock[T],
        depth: int,
        step_in_backward: bool,
    ) -> None:
        self.clock, self._placement, self._depth = clock, placement, depth
        self._in_backward = step_in_backward
        self._below = {part.name: set(placement.below(part)) for part in parts}
        if step_in_backward:  # gradients are used at once and go nowhere
            self._below = {name: kinds - {"gradients"} for name, kinds in self._below.items()}
        self._parts = parts
        self._pieces = {part.name: _cut(part) for part in parts}
        self._all = [piece for part in parts for piece in self._pieces[part.name]]
        self._weights = max(1, sum(part.bytes.get("weights", 0) for part in parts))
        passing = [sum(part.piece.get(kind, 0) for kind in self._below[part.name]) for part in parts]
        self._space = Room(clock, IN_PASSING * max(passing, default=0))
        self._writes: dict[tuple[str, Kind, int], T] = {}
        """The last of each piece."""
        self._gone: set[str] = set()
        """Parts of which gradients are below."""
        self._whole_at: list[list[Part]] = [[] for _ in range(depth + 1)]
        """Whose gradients are whole behind the backward pass of a layer; the last of them: behind that of all."""
        for part in parts:
            last = depth if "embedding" in part.ends else min(part.layers, default=depth - 1)
            if "gradients" in part.bytes:
                self._whole_at[last].append(part)
        self._sent: dict[int, dict[int, T]] = {}
        """By micro-batch and layer, where activations went."""
        self._copies = _Copies(self, parts, depth)
        self._kept = [
            next((part for part in parts if layer in part.layers and "activations" in self._below[part.name]), None)
            for layer in range(depth)
        ]

    def step(self, micro_batches: int) -> None:
        """One, of so many passes."""
        every = range(self._depth)
        for number in range(micro_batches):
            self.forward(every)
            self.backward(every, last=number == micro_batches - 1)
        self.update()

    def update(self) -> None:
        """Behind the last pass of a step."""
        self._copies.pass_ends()
        for part in self._parts:
            if part.added and self.below(part, "gradients"):
                self._add_up(part)
        if not self._in_backward:
            self._update(self._all)
        self._gone.clear()
        self._copies.fetch_first()

    def below(self, part: Part, kind: Kind) -> bool:
        return kind in self._below[part.name]

    def move(self, piece: _Piece, kind: Kind, way: str) -> T:
        part, key = piece.part, (piece.part.name, kind, piece.number)
        behind = self._writes.get(key) if way == "read" else None
        size = piece.size(kind) * (part.seen if kind == "gradients" else 1)
        transfer = self.clock.move(key[:2], self._placement.tier(part.name, kind), way, size, behind)
        if way == "write":
            self._writes[key] = transfer
        return transfer

    def bring(self, parts: Sequence[Part]) -> T:
        """Those of their weights that are below."""
        away = [part for part in parts if self.below(part, "weights")]
        return [self.move(piece, "weights", "read") for part in away for piece in self._pieces[part.name]][-1]

    def await_writes(self, parts: Sequence[Part]) -> None:
        """Of their weights, before the memory they come from is another's."""
        for part in parts:
            for piece in self._pieces[part.name]:
                if (transfer := self._writes.get((part.name, "weights", piece.number))) is not None:
                    self.clock.wait(transfer)

    def forward(self, layers: range, micro_batch: int = 0) -> None:
        """Through these layers."""
        kept, sent = self._kept_of(layers), self._sent.setdefault(micro_batch, {})
        for layer in layers:
            self._copies.begin(layer, backward=False)
            if layer in kept and (before := kept[: kept.index(layer)]):
                # What the layer before kept leaves now, from memory in which what is two before is no more needed.
                if len(before) > 1:
                    self.clock.wait(sent[before[-2]])
                sent[before[-1]] = self._move_kept(before[-1], "write")
            self.clock.forward(layer)

    def backward(self, layers: range, micro_batch: int = 0, *, last: bool) -> None:
        """Back through them, of the step's `last` micro-batch or another."""
        kept, sent = self._kept_of(layers), self._sent.pop(micro_batch, {})
        here, coming = kept[-2:], dict[int, T]()
        for layer in reversed(layers):
            self._copies.begin(layer, backward=True)
            if layer in kept:
                if layer not in here:
                    self.clock.wait(coming[layer])
                if (at := kept.index(layer)) and kept[at - 1] not in here:
                    coming[kept[at - 1]] = self._move_kept(kept[at - 1], "read", sent[kept[at - 1]])
            self.clock.backward(layer)
            for part in self._whole_at[layer]:
                self._leave(part, last)
        if layers.start == 0:
            for part in self._whole_at[self._depth]:
                self._leave(part, last)

    def _kept_of(self, layers: range) -> list[int]:
        return [layer for layer in layers if self._kept[layer] is not None]

    def _move_kept(self, layer: int, way: str, behind: T | None = None) -> T:
        part = self._kept[layer]
        assert part is not None
        tier = self._placement.tier(part.name, "activations")
        return self.clock.move(
            (part.name, "activations"), tier, way, part.bytes["activations"] / len(part.layers), behind
        )

    def _leave(self, part: Part, last: bool) -> None:
        """A part's gradients are whole."""
        pieces = self._pieces[part.name]
        if self._in_backward:
            if last:
                self._update(pieces)
            return
        if not self.below(part, "gradients"):
            return
        if part.name in self._gone:
            ahead: list[tuple[_Piece, T]] = []
            for piece in [*pieces, None]:
                if piece is not None:
                    self._space.take(piece.size("gradients"))
                    ahead.append((piece, self.move(piece, "gradients", "read")))
                if piece is None or len(ahead) > 1:
                    done, transfer = ahead.pop(0)
                    self.clock.wait(transfer)
                    self._space.give(done.size("gradients"), [])
        for piece in pieces:
            size = piece.size("gradients")
            self._space.take(size)
            self._space.give(size, [self.move(piece, "gradients", "write")])
        self._gone.add(part.name)

    def _add_up(self, part: Part) -> None:
        """What ranks add up of a part's gradients comes back and leaves again."""
        count = -(-part.added // max(1, part.piece.get("gradients", part.added)))
        for number in range(count):
            piece = _Piece(part, number, part.added / count / part.bytes["gradients"])
            self._space.take(piece.size("gradients"))
            self.clock.wait(self.move(piece, "gradients", "read"))
            self._space.give(piece.size("gradients"), [self.move(piece, "gradients", "write")])

    def _update(self, pieces: Sequence[_Piece]) -> None:
        """The optimizer's step: one read, one updated, one written at once."""
        left = iter(_between(pieces, lambda piece: bool(self._below[piece.part.name] - {"activations"})))
        now, coming = self._load(next(left, None)), self._load(next(left, None))
        while now is not None:
            piece, taken, arriving = now
            for transfer in arriving:
                self.clock.wait(transfer)
            self.clock.update(piece.size("weights") / self._weights)
            kinds: list[Kind] = [kind for kind in ("weights", "moments") if self.below(piece.part, kind)]
            written = [self.move(piece, kind, "write") for kind in kinds]
            self._space.give(taken, written)
            now, coming = coming, self._load(next(left, None))

    def _load(self, piece: _Piece | None) -> tuple[_Piece, float, list[T]] | None:
        if piece is None:
            return None
        taken, arriving = 0.0, list[T]()
        for kind in ("weights", "gradients", "moments"):
            if not self.below(piece.part, kind) or (kind == "gradients" and piece.part.name not in self._gone):
                continue
            if kind == "weights" and (here := self._copies.here(piece.part)) is not None:
                arriving.append(here)
                continue
            self._space.take(piece.size(kind))
            taken += piece.size(kind)
            arriving.append(self.move(piece, kind, "read"))
        return piece, taken, arriving


@dataclass(frozen=True, eq=False)
class _Weights:
    """Of parts that are in one working copy; `layers` use them."""

    parts: tuple[Part, ...]

    @property
    def name(self) -> str:
        return self.parts[0].name

    @property
    def layers(self) -> tuple[int, ...]:
        return self.parts[0].layers

    @cached_property
    def size(self) -> int:
        """In bytes."""
        return sum(part.bytes["weights"] for part in self.parts)


class _Copies(Generic[T]):
    """Working copies of weights, as `weights.WorkingCopies` keeps them."""

    def __init__(self, play: Rehearsal[T], parts: Sequence[Part], depth: int) -> None:
        self._play = play
        below = [_Weights(each) for each in together(parts) if any(play.below(part, "weights") for part in each)]
        self._order = [[each for each in below if layer in each.layers] for layer in range(depth)]
        self._of = {part.name: each.name for each in below for part in each.parts}
        self._free = COPIES * max((sum(each.size for each in some) for some in self._order), default=0)
        self._here: dict[str, tuple[_Weights, T]] = {}
        self._needed: list[_Weights] = []
        self._now, self._way = -1, 1

    def begin(self, layer: int, backward: bool) -> None:
        self._now, self._way = layer, -1 if backward else 1
        self._needed = self._order[layer]
        for part in self._needed:
            if part.name not in self._here:
                self._fetch(part, keep=self._needed)
            self._play.clock.wait(self._here[part.name][1])
        self._fetch_ahead()

    def pass_ends(self) -> None:
        self._needed = []

    def fetch_first(self) -> None:
        self._now, self._way, self._needed = -1, 1, []
        self._fetch_ahead()

    def here(self, part: Part) -> T | None:
        found = self._here.get(self._of[part.name])
        return None if found is None else found[1]

    def _fetch_ahead(self) -> None:
        for layer, steps in self._coming():
            for part in self._order[layer]:
                if part.name in self._here:
                    continue
                sooner = [each for each, _ in self._here.values() if self._steps_to(each) <= steps]
                self._fetch(part, keep=[*self._needed, *sooner])
                return

    def _fetch(self, part: _Weights, keep: Sequence[_Weights]) -> bool:
        """Ask for weights, if there is room without those that are to stay."""
        while self._free < part.size:
            names = {each.name for each in keep}
            going = [each for each, _ in self._here.values() if each.name not in names]
            if not going:
                return False
            last = max(going, key=self._steps_to)
            self._play.clock.wait(self._here.pop(last.name)[1])
            self._play.await_writes(last.parts)
            self._free += last.size
        self._free -= part.size
        self._here[part.name] = part, self._play.bring(part.parts)
        return True

    def _coming(self) -> Iterator[tuple[int, int]]:
        layer, way, steps = self._now, self._way, 0
        while True:
            layer += way
            if layer == len(self._order):
                layer, way = layer - 1, -1
            if layer < 0:
                return
            steps += 1
            yield layer, steps

    def _steps_to(self, part: _Weights) -> int:
        return next((steps for layer, steps in self._coming() if layer in part.layers), 2 * len(self._order) + 1)


def _cut(part: Part) -> list[_Piece]:
    """A part's pieces, all alike."""
    count = max([1, *(-(-part.bytes[kind] // size) for kind, size in part.piece.items() if size)])
    return [_Piece(part, number, 1 / count) for number in range(count)]


def _between(pieces: Sequence[_Piece], moves: Callable[[_Piece], bool]) -> Iterator[_Piece]:
    """Pieces that move spread evenly among those that stay."""
    moving, staying = [piece for piece in pieces if moves(piece)], [piece for piece in pieces if not moves(piece)]
    done = 0
    for number, piece in enumerate(moving, start=1):
        yield piece
        until = number * len(staying) // len(moving)
        yield from staying[done:until]
        done = until
    yield from staying[done:]
