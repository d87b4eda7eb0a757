"""Gradients whose place is below the device: each leaves when a backward pass has made it whole.

What came in an earlier pass of the step is fetched and added first, as autograd would have done. The norm of each is
taken before it leaves, of the whole tensor as without offload, so that clipping by the norm of all needs none back.
Where the optimizer steps in the backward pass they go nowhere: each is used and let go. What several ranks have parts
of comes back when all passes are done, to be added up, and leaves again (`LeavingGradients.borrow`).

Guarded, an `AwayGradient` stands for each that is away in its parameter's `grad`, and what is stored counts as long as
it stands there: whoever clears `grad` clears the gradient. It stays stored behind the step, until it is cleared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tenfold.errors import TenfoldError
from tenfold.offload.away import AwayGradient
from tenfold.offload.slab import Block
from tenfold.offload.tiers import Extent, Tier, Transfer
from tenfold.offload.units import APART, Entry, Piece, Portion
from tenfold.offload.workspace import Workspace
from tenfold.parallel.pieces import local_of

StepNow = Callable[[Sequence[Piece]], None]


class LeavingGradients:
    """Gradients of portions between a backward pass and the optimizer's step, each one's in its tier of `homes`.

    Where only some of a stack's experts have a tier, the others (None) are kept on the device, copied there as they
    come. `users`: by how many layers a parameter's gradient is to be divided in the last pass; `kind`: of norms, 2 or
    infinity; `step_now`: steps pieces whose gradients are whole, in place of writing them (`homes` then are all
    portions, with no tier); `guarded`: see above, for parameters that are whole on this rank.
    """

    def __init__(
        self,
        homes: dict[Portion, Tier | None],
        space: Workspace,
        users: Callable[[nn.Parameter], int],
        kind: float = 2.0,
        step_now: StepNow | None = None,
        guarded: bool = False,
    ) -> None:
        self.homes, self._space, self._users, self._step_now = homes, space, users, step_now
        self.guarded = guarded and step_now is None
        self._extents: dict[Piece, Extent] = {}
        self._held: dict[Piece, Tensor] = {}
        self._gone: set[Piece] = set()
        self._zeros: set[Piece] = set()
        """Of those that are gone what is zero, and was not written."""
        self.kind = kind
        self.last = True
        """Whether the pass is the last of the step."""
        self._passes: dict[nn.Parameter, int] = {}
        """Where several passes go on at once: in how many more of them each parameter gets a gradient."""
        self._came: set[Entry] = set()
        """Of the last pass, where the optimizer steps in it: those whose gradient is whole. What stands in `grad` does
        not tell it, for passes before have left something there."""
        self._factors: dict[Piece, Tensor] = {}
        """What to multiply gradients by when they come back."""
        self._norms: dict[Entry, Tensor] = {}
        self._handles = []
        self._by_entry: dict[Entry, list[Piece]] = {}
        for portion, tier in homes.items():
            for piece in portion.pieces:
                if tier is not None:
                    self._extents[piece] = tier.reserve(piece.size)
                elif step_now is None:
                    self._held[piece] = torch.empty(piece.size, dtype=torch.uint8, device=space.slab.device)
                for each in piece.slices:
                    self._by_entry.setdefault(each.entry, []).append(piece)
        for entry, pieces in self._by_entry.items():
            hook = self._hook(entry, pieces)
            self._handles.append(entry.parameter.register_post_accumulate_grad_hook(hook))

    def _hook(self, entry: Entry, pieces: list[Piece]) -> Callable[[Tensor], None]:
        # A piece of several parameters leaves behind the last of them.
        entries = list({each.entry: None for piece in pieces for each in piece.slices})

        def whole(_: Tensor) -> None:
            if entry.parameter in self._passes:
                self._passes[entry.parameter] -= 1
            if all(_arrived(each.parameter) is not None for each in entries):
                self._leave(entries, pieces)

        def whole_in_last(_: Tensor) -> None:
            if self.last:
                self._came.add(entry)
                if self._came.issuperset(entries):
                    self._came.difference_update(entries)
                    self._leave(entries, pieces)

        return whole if self._step_now is None else whole_in_last

    def begin_pass(self, last: bool) -> None:
        """Before a pass: whether it is the last of its step."""
        self.last = last
        self._came.clear()

    def begin_passes(self, passes: Mapping[nn.Parameter, int]) -> None:
        """Before all passes of a step, of which parts go on at once: in how many each parameter gets a gradient."""
        self._passes = dict(passes)

    def _is_last(self, entries: Sequence[Entry]) -> bool:
        if not self._passes:
            return self.last
        return all(self._passes[entry.parameter] == 0 for entry in entries)

    @torch.no_grad()
    def _leave(self, entries: list[Entry], pieces: list[Piece]) -> None:
        adding = self._take_in(entries)
        stored = [
            piece for piece in pieces if piece in self._gone and any(each.entry in adding for each in piece.slices)
        ]
        for piece, memory in self._fetched(stored):
            for number, each in enumerate(piece.slices):
                if each.entry in adding:
                    each.of(_gradient(each.entry)).add_(self.rescale(piece, piece.view(memory, number)))
        if self._is_last(entries):
            self._take_norms([entry for entry in entries if not entry.added])
        if self._step_now is not None:
            self._step_now(pieces)
        else:
            for piece in pieces:
                self._store(piece)
        for entry in entries:
            entry.parameter.grad = AwayGradient(entry.parameter, entry.name) if self.guarded else None

    def _store(self, piece: Piece, only: Collection[Entry] | None = None) -> None:
        """Have in its place what `grad` has of a piece, or of these parameters in it."""
        held = self._held.get(piece)
        block = self._space.take(piece.size, "gradients") if held is None else None
        into = held if block is None else block.bytes
        assert into is not None
        some = [at for at, each in enumerate(piece.slices) if only is None or each.entry in only]
        mixed = block is not None and len(some) < len(piece.slices)
        if mixed and (arriving := self.read(piece, into[: piece.size])) is not None:
            self._space.clock.wait(arriving, "gradients")
        for number in some:
            each = piece.slices[number]
            piece.view(into, number).copy_(each.of(_gradient(each.entry)))
        if block is not None and self._is_zero(piece, into):
            self._zeros.add(piece)
            self._space.give(block)
        elif block is not None:
            self._zeros.discard(piece)
            written = self._tier(piece).write(self._extents[piece], block.bytes[: piece.size])
            self._space.give_after(block, written)
        self._gone.add(piece)
        self._factors.pop(piece, None)

    @contextmanager
    def borrow(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Behind all passes: within it the gradients of these parameters are in `grad`, where ranks add them up. Those
        that were away leave again, whole."""
        given = set(parameters)
        lent = {each: None for each in self._by_entry if each.parameter in given}
        pieces = list({piece: None for entry in lent for piece in self._by_entry[entry] if piece in self._gone})
        lent = {each.entry: None for piece in pieces for each in piece.slices if each.entry in lent}
        with torch.no_grad():
            for entry in lent:
                if entry.parameter.grad is None:
                    entry.parameter.grad = torch.zeros_like(entry.parameter)
            for piece, memory in self._fetched(pieces):
                for number, each in enumerate(piece.slices):
                    if each.entry in lent:
                        each.of(_gradient(each.entry)).add_(piece.view(memory, number))
        yield
        with torch.no_grad():
            self._take_norms(list(lent))
            for piece in pieces:
                self._store(piece, lent)
        for entry in lent:
            entry.parameter.grad = None

    def _is_zero(self, piece: Piece, memory: Tensor) -> bool:
        """Whether a piece of experts has only zeros, as it has where no token came to them. Where the device works by
        itself nobody looks: it would have to be waited for."""
        if not piece.portion.experts or memory.device.type != "cpu":
            return False
        views = [piece.view(memory, number).view(-1).view(torch.uint8) for number in range(len(piece.slices))]
        # -0.0 is no zero here. Nearly always the first numbers tell.
        return not any(view[:APART].any() for view in views) and not any(view.any() for view in views)

    def _take_in(self, entries: Sequence[Entry]) -> set[Entry]:
        """Those to whose gradients what is stored is to be added; autograd's own sums go where gradients belong."""
        if not self.guarded:
            return set(entries)
        found = set()
        for entry in entries:
            grad = entry.parameter.grad
            if isinstance(grad, AwayGradient) and grad.more is not None:
                entry.parameter.grad = grad.more
                found.add(entry)
        return found

    def _take_norms(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            gradient = _gradient(entry)
            if (layers := self._users(entry.parameter)) > 1:
                gradient /= layers
            (self._norms[entry],) = torch._foreach_norm([gradient], self.kind)
            if self._step_now is not None and not self._norms[entry].isfinite():
                raise TenfoldError(
                    f"the gradient of {entry.name} is not finite; with offload.step_in_backward other weights have "
                    "changed in this step already. Go on from the last checkpoint, with a lower optim.lr, a longer "
                    "optim.warmup, or training.precision = fp32"
                )

    @torch.no_grad()
    def settle(self) -> None:
        """Behind the last pass: bring back what only an earlier pass had a gradient of, or of which a part is left."""
        self._came.clear()
        for piece in [piece for piece in self._gone if not self.is_away(piece)]:
            self.drop([piece])
        self._bring_back(
            [
                piece
                for piece in self._gone
                if any(
                    _arrived(each.entry.parameter) is not None
                    or (each.entry not in self._norms and self.exists(piece, each.entry))
                    for each in piece.slices
                )
            ]
        )

    @torch.no_grad()
    def bring_back_all(self) -> None:
        """Let all gradients be on the device, as if they had never left."""
        self.settle()
        self._bring_back(list(self._gone))

    def _bring_back(self, pieces: Sequence[Piece]) -> None:
        entries = list({each.entry: None for piece in pieces for each in piece.slices})
        adding = self._take_in(entries)
        for entry in entries:
            grad = entry.parameter.grad
            if isinstance(grad, AwayGradient) or (grad is None and not self.guarded):
                entry.parameter.grad = torch.zeros_like(entry.parameter)
                adding.add(entry)
        for piece, memory in self._fetched(pieces):
            for number, each in enumerate(piece.slices):
                if each.entry in adding:
                    each.of(_gradient(each.entry)).add_(self.rescale(piece, piece.view(memory, number)))
                self._norms.pop(each.entry, None)
            self._gone.discard(piece)
            self._factors.pop(piece, None)

    def norms(self) -> dict[nn.Parameter, Tensor]:
        """Of the gradients that are away, the norm of each; those that are here are not in it."""
        return {
            entry.parameter: norm
            for entry, norm in self._norms.items()
            if not self.guarded or isinstance(entry.parameter.grad, AwayGradient)
        }

    def scale(self, factor: Tensor) -> None:
        """Multiply gradients that are away by a factor, when they come back."""
        for piece in self._gone:
            if piece in self._held:
                for number in range(len(piece.slices)):
                    piece.view(self._held[piece], number).mul_(factor)
            else:
                self._factors[piece] = self._factors[piece] * factor if piece in self._factors else factor
        self._norms = {entry: norm * factor for entry, norm in self._norms.items()}

    def rescale(self, piece: Piece, gradient: Tensor) -> Tensor:
        """What of a piece has come back, multiplied, in place."""
        return gradient.mul_(self._factors[piece]) if piece in self._factors else gradient

    def here(self, piece: Piece) -> Tensor | None:
        """The gradient of a piece that lies as its weights do, if that is kept so on the device."""
        return self._held.get(piece)

    def is_away(self, piece: Piece) -> bool:
        """Whether the gradient of a piece is where its place is, at least in part, and not in `grad`."""
        return piece in self._gone and (
            not self.guarded or any(isinstance(each.entry.parameter.grad, AwayGradient) for each in piece.slices)
        )

    def exists(self, piece: Piece, entry: Entry) -> bool:
        """Whether a parameter, of which a piece is, has a gradient, here or in its tier."""
        return entry.parameter.grad is not None or (piece in self._gone and not self.guarded)

    def read(self, piece: Piece, into: Tensor) -> Transfer | None:
        """Have the gradient of a piece, which lies as its weights do, brought to `into`; None where it is zeros, which
        are there at once."""
        if piece in self._zeros:
            into.zero_()
            return None
        return self._tier(piece).read(self._extents[piece], into)

    def drop(self, pieces: Iterable[Piece]) -> None:
        """Forget the stored gradients of pieces."""
        for piece in pieces:
            self._gone.discard(piece)
            self._factors.pop(piece, None)
            for each in piece.slices:
                self._norms.pop(each.entry, None)

    def used(self, piece: Piece) -> None:
        """The optimizer has stepped a piece. Its norm counts on where it does that in the backward pass; and guarded,
        gradients are there until they are cleared."""
        if not self.guarded and self._step_now is None:
            self.drop([piece])

    def remove_hooks(self) -> None:
        """What gradients come from now on stay where they are."""
        for handle in self._handles:
            handle.remove()

    def close(self) -> None:
        """Let room go."""
        for piece, extent in self._extents.items():
            self._tier(piece).release(extent)

    def _tier(self, piece: Piece) -> Tier:
        tier = self.homes[piece.portion]
        assert tier is not None
        return tier

    def _fetched(self, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, Tensor]]:
        """The stored gradients of pieces, one after the other in memory for each, the next one on its way."""
        left = iter(pieces)
        coming = self._ask(next(left, None))
        while coming is not None:
            piece, memory, block, transfer = coming
            coming = self._ask(next(left, None))
            if transfer is not None:
                self._space.clock.wait(transfer, "gradients")
            yield piece, memory
            if block is not None:
                self._space.give(block)

    def _ask(self, piece: Piece | None) -> tuple[Piece, Tensor, Block | None, Transfer | None] | None:
        if piece is None:
            return None
        if (held := self._held.get(piece)) is not None:
            return piece, held, None, None
        block = self._space.take(piece.size, "gradients")
        return piece, block.bytes, block, self.read(piece, block.bytes[: piece.size])


def gradient_here(parameter: nn.Parameter) -> Tensor | None:
    """Its gradient, if that is on the device."""
    return None if isinstance(parameter.grad, AwayGradient) else parameter.grad


def _arrived(parameter: nn.Parameter) -> Tensor | None:
    """What of a gradient is on the device: all of it, or what is to be added to what is stored."""
    return parameter.grad.more if isinstance(parameter.grad, AwayGradient) else parameter.grad


def _gradient(entry: Entry) -> Tensor:
    assert entry.parameter.grad is not None
    return local_of(entry.parameter.grad)
