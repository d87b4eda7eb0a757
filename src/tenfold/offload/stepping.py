"""The optimizer's step, piece by piece: the next one is read, this one stepped, the last one written, all at once.

What of a piece is on the device stays where it is. The optimizer is the user's own: for each piece it is told that the
piece is all that there is. Updates are those of one step over everything, to the last bit, since it treats every
parameter by itself (`moments.BY_ELEMENT`: every number).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tenfold.offload.gradients import LeavingGradients
from tenfold.offload.moments import Owner, StoredMoments, is_tensor_of_state
from tenfold.offload.slab import Block
from tenfold.offload.tiers import Transfer
from tenfold.offload.units import Entry, Piece, Slice, Unit
from tenfold.offload.weights import WorkingCopies
from tenfold.offload.workspace import Together, Workspace
from tenfold.parallel.pieces import local_of


@dataclass(eq=False)
class Job:
    """A piece that an optimizer is to step: of its slices those with a gradient, by number, with what of that is on the
    device. `settings` are those of the optimizer's groups as they were when the step was asked for, `counts` what there
    was in the state of each parameter besides tensors, and `step` is the number of it."""

    optimizer: Optimizer
    piece: Piece
    gradients: dict[int, Tensor | None]
    settings: list[dict[str, Any]]
    counts: dict[Entry, dict[str, Any]]
    step: int


@dataclass(eq=False)
class _Loaded:
    """A piece of which all is here, or on its way; the bytes of what is on the device for itself are None."""

    job: Job
    weights: Tensor | None = None
    gradients: Tensor | None = None
    moments: Tensor | None = None
    blocks: list[Block] = field(default_factory=list)
    arriving: list[Transfer] = field(default_factory=list)

    def comes(self, transfer: Transfer | None) -> None:
        """Something is on its way; None: it is here."""
        if transfer is not None:
            self.arriving.append(transfer)


class StreamedStep:
    """The step of optimizers over pieces. `steps` are the optimizers' own, by optimizer.

    A step may be put off (`later`) until its weights are needed: then it is done beside the next forward pass.
    """

    def __init__(
        self,
        weights: WorkingCopies,
        gradients: LeavingGradients,
        moments: StoredMoments,
        owners: Mapping[Entry, Owner],
        steps: Mapping[Optimizer, Callable[[], object]],
        space: Workspace,
    ) -> None:
        self._weights, self._gradients, self._moments = weights, gradients, moments
        self._owners, self._steps, self._space = owners, steps, space
        self._later: list[Job] = []
        self._loaded: list[_Loaded] = []  # the first of those that were put off

    def jobs(self, optimizer: Optimizer, pieces: Iterable[Piece]) -> list[Job]:
        """What `optimizer` has to step of `pieces`."""
        settings = [
            {key: _now(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]
        found = []
        counts: dict[Entry, dict[str, Any]] = {}
        for piece in pieces:
            away = self._gradients.is_away(piece)
            gradients: dict[int, Tensor | None] = {}
            for number, each in enumerate(piece.slices):
                owner = self._owners.get(each.entry)
                if owner is None or owner.optimizer is not optimizer or not self._gradients.exists(piece, each.entry):
                    continue
                gradient = each.entry.parameter.grad
                gradients[number] = None if away or gradient is None else local_of(gradient)
                if each.entry not in counts:  # its slices are stepped in any order, and all begin with the same
                    state = optimizer.state[each.entry.parameter]
                    counts[each.entry] = {key: _now(one) for key, one in state.items() if not is_tensor_of_state(one)}
            if gradients:
                found.append(Job(optimizer, piece, gradients, settings, counts, self._moments.step))
        return found

    @torch.no_grad()
    def run(self, jobs: Sequence[Job]) -> None:
        """Do all of these now, those that move spread evenly among those that do not."""
        if jobs:  # all of working memory is theirs
            self.complete()
        left = iter(_spread(jobs, self._moves))
        now, coming = self._load(next(left, None)), self._load(next(left, None))
        while now is not None:
            self._finish(now)
            now, coming = coming, self._load(next(left, None))

    @torch.no_grad()
    def later(self, jobs: Sequence[Job]) -> None:
        """Put these off. They are done in the order of the layers that need them."""
        self._later = sorted([*self._later, *jobs], key=lambda job: job.piece.unit.layers)
        self._load_ahead()

    @torch.no_grad()
    def complete(self, unit: Unit | None = None) -> None:
        """Do what was put off, as far as `unit` needs it; None: all."""
        waiting = [*(loaded.job for loaded in self._loaded), *self._later]
        last = max((at for at, job in enumerate(waiting) if unit is None or job.piece.unit is unit), default=-1)
        for _ in range(last + 1):
            self._finish(self._loaded.pop(0))
            self._load_ahead()

    def put_off(self) -> set[Piece]:
        """The pieces that are put off."""
        return {job.piece for job in [*(loaded.job for loaded in self._loaded), *self._later]}

    def _load_ahead(self) -> None:
        while self._later and len(self._loaded) < 2:
            loaded = self._load(self._later.pop(0))
            assert loaded is not None
            self._loaded.append(loaded)

    def _finish(self, loaded: _Loaded) -> None:
        for transfer in loaded.arriving:
            self._space.clock.wait(transfer, "moments")
        self._step(loaded)
        self._store(loaded)

    def _moves(self, job: Job) -> bool:
        """Whether something of a piece is to be brought here."""
        piece = job.piece
        gradient = self._gradients.is_away(piece) and self._gradients.here(piece) is None
        return bool(self._weights.is_below(piece) or gradient or self._moments.in_passing(piece))

    def _load(self, job: Job | None) -> _Loaded | None:
        if job is None:
            return None
        loaded, piece = _Loaded(job), job.piece

        def room(size: int) -> Tensor:
            loaded.blocks.append(self._space.take(size, "moments"))
            return loaded.blocks[-1].bytes[:size]

        if piece.unit in self._weights.units:
            loaded.weights = self._weights.here(piece)
            if loaded.weights is None:
                loaded.weights = room(piece.size)
                loaded.comes(self._weights.read(piece, loaded.weights))
        if self._gradients.is_away(piece):
            loaded.gradients = self._gradients.here(piece)
            if loaded.gradients is None:
                loaded.gradients = room(piece.size)
                loaded.comes(self._gradients.read(piece, loaded.gradients))
        if size := self._moments.size(piece):
            loaded.moments = self._moments.here(piece)
            if loaded.moments is None:
                loaded.moments = room(size)
                loaded.comes(self._moments.read(piece, loaded.moments))
        return loaded

    def _step(self, loaded: _Loaded) -> None:
        optimizer = loaded.job.optimizer
        groups: list[list[nn.Parameter]] = [[] for _ in optimizer.param_groups]
        stand_ins: dict[nn.Parameter, Slice] = {}
        piece, kept, numbers = loaded.job.piece, loaded.moments, loaded.job.gradients
        memory = None if kept is None else self._moments.opened(piece, kept, numbers)
        for number in numbers:
            each = piece.slices[number]
            stored = {} if memory is None else self._moments.views(piece, number, memory)
            stand_in = self._stand_in(loaded, number, each, stored)
            stand_ins[stand_in] = each
            groups[self._owners[each.entry].group].append(stand_in)
        with only(optimizer, groups, loaded.job.settings):
            self._steps[optimizer]()
        if kept is not None and memory is not None:
            self._moments.shut(piece, memory, kept, numbers, loaded.job.step)
        for stand_in, each in stand_ins.items():
            state, whole = optimizer.state.pop(stand_in), optimizer.state[each.entry.parameter]
            whole.update({key: value for key, value in state.items() if not is_tensor_of_state(value)})

    def _stand_in(self, loaded: _Loaded, number: int, each: Slice, stored: Mapping[str, Tensor]) -> nn.Parameter:
        """A parameter that is the slice, with its gradient and state, of which `stored` is not in the optimizer."""
        piece, entry, optimizer = loaded.job.piece, each.entry, loaded.job.optimizer
        weight = each.of(entry.flat()) if loaded.weights is None else piece.view(loaded.weights, number)
        found = nn.Parameter(weight)
        found.part_of = entry.parameter  # type: ignore[attr-defined]
        gradient = loaded.job.gradients[number]
        if gradient is not None:
            found.grad = each.of(gradient)
        else:
            assert loaded.gradients is not None
            found.grad = piece.view(loaded.gradients, number)
            self._gradients.rescale(piece, found.grad)
        state = {key: _now(value) for key, value in loaded.job.counts[entry].items()}
        for key, value in optimizer.state[entry.parameter].items():
            if key in stored:
                state[key] = stored[key]
            elif is_tensor_of_state(value):
                local = local_of(value)
                state[key] = each.of(local) if local.shape == entry.shape else local
        optimizer.state[found] = state
        return found

    def _store(self, loaded: _Loaded) -> None:
        piece, leaving = loaded.job.piece, []
        if loaded.weights is not None:
            leaving.append(self._weights.write(piece, loaded.weights))
        if loaded.moments is not None and self._moments.here(piece) is None:
            leaving.append(self._moments.write(piece, loaded.moments))
        for block in loaded.blocks:
            if leaving:
                self._space.give_after(block, Together(leaving))
            else:
                self._space.give(block)
        self._gradients.used(piece)


@contextmanager
def only(
    optimizer: Optimizer, groups: Sequence[list[nn.Parameter]], settings: Sequence[dict[str, Any]] = ()
) -> Iterator[None]:
    """For a while the optimizer's groups have these parameters and no others, and these settings, if any are given."""
    kept = [dict(group) for group in optimizer.param_groups]
    for group, parameters in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = parameters
    for group, given in zip(optimizer.param_groups, settings, strict=False):
        group.update(given)
    try:
        yield
    finally:
        for group, before in zip(optimizer.param_groups, kept, strict=True):
            group.update(before)


def _now(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _spread(jobs: Sequence[Job], moves: Callable[[Job], bool]) -> Iterator[Job]:
    """Jobs in an order in which those that move are spread evenly among those that do not, to move meanwhile."""
    moving = [job for job in jobs if moves(job)]
    staying = [job for job in jobs if not moves(job)]
    done = 0
    for number, job in enumerate(moving, start=1):
        yield job
        until = number * len(staying) // len(moving)
        yield from staying[done:until]
        done = until
    yield from staying[done:]
