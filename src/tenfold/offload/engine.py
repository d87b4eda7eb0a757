"""State of a model and its optimizers that lies where a placement says; see `Offload`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from tenfold.errors import TenfoldError
from tenfold.offload.activations import ActivationStore
from tenfold.offload.away import in_backward
from tenfold.offload.gradients import LeavingGradients, gradient_here
from tenfold.offload.moments import Inventory, StoredMoments, is_tensor_of_state
from tenfold.offload.noting import NotedWeights
from tenfold.offload.slab import Slab
from tenfold.offload.stepping import StreamedStep, only
from tenfold.offload.taking import Taken
from tenfold.offload.tiers import Kind, Tier, TierName
from tenfold.offload.units import IN_PASSING, Entry, Piece, Portion, Slice, Unit, keepers
from tenfold.offload.weights import WorkingCopies, homes_of
from tenfold.offload.workspace import Clock, Workspace
from tenfold.parallel.absent import is_absent
from tenfold.parallel.pieces import local_of

Place = Callable[[Portion, Kind], TierName]
"""Where a kind of a portion's state lives between uses. Activations are asked of a unit's `main`."""


class Offload:
    """Keeps the state of a model where `place` says, and brings what is needed when it is needed.

    `inventory` is what there is of it; the steps of its optimizers are taken over. Weights of layers alone may lie
    below the device. `tiers` has those that there are, but for "device". `users`: by how many layers a gradient is to
    be divided when it is whole; `norm_kind`: of the norms that are taken of gradients as they leave (2 or infinity).
    `order`: the parameters that are needed together, in the order of a forward pass, where the caller tells when they
    are (`weights.begin`); unset: those of each layer. Hooks on the layers tell of those that are in none.
    `activations`: the bytes that each layer of the whole model leaves for its backward pass, which may be away too.
    `guarded`: an `AwayGradient` stands in `grad` for each gradient that is away, so that whoever reads or clears it
    without us does nothing wrong silently. `put_off`: step a layer only when it runs forward again, beside the layers
    before it; whoever looks at weights otherwise calls `complete` first.

    A model whose parameters have no memory yet (`absent`) gets it here, and its weights through `filling`.
    """

    def __init__(
        self,
        inventory: Inventory,
        place: Place,
        tiers: Mapping[TierName, Tier],
        *,
        step_in_backward: bool = False,
        users: Callable[[nn.Parameter], int] = lambda _: 1,
        norm_kind: float = 2.0,
        order: Sequence[Collection[nn.Parameter]] | None = None,
        activations: Sequence[int] = (),
        guarded: bool = False,
        put_off: bool = False,
    ) -> None:
        self.inventory, self.units, self._place, self._tiers = inventory, inventory.units, place, tiers
        self.step_in_backward = step_in_backward
        self.clock = Clock()
        self._by_name = {entry.name: entry for unit in self.units for entry in unit.entries}
        self._pieces: dict[Entry, list[tuple[Piece, int]]] = {}
        for unit in self.units:
            for piece in unit.pieces:
                for number, each in enumerate(piece.slices):
                    self._pieces.setdefault(each.entry, []).append((piece, number))
        self.device = next(iter(self._pieces)).local.device
        homes = homes_of(self.units, {"device": None, **tiers}, lambda each: place(each, "weights"), self.device)
        weights = dict.fromkeys(portion.unit for portion in homes)
        moments, leaving = self._homes("moments"), self._homes("gradients")
        portions = [portion for unit in self.units for portion in unit.portions]
        for portion in portions:  # what is kept in another format is not in the optimizer, wherever it lies
            if portion not in moments and any(inventory.lay_out(piece).open_size for piece in portion.pieces):
                moments[portion] = None
        if step_in_backward:
            leaving = dict.fromkeys(portions, None)
        for unit in weights:
            if not unit.layers:
                raise TenfoldError(
                    f"the weights of {unit.name} belong to no layer, and are used at any time: they stay on the "
                    "device; its gradients and moments may lie elsewhere"
                )
        self.moments = StoredMoments(moments, inventory)
        together: Sequence[Collection[nn.Parameter]] = [set(layer.parameters()) for layer in inventory.layers]
        together = together if order is None else order
        needed = [
            [unit for unit in weights if any(each.parameter in some for each in unit.entries)] for some in together
        ]
        gathered = set().union(*together)
        held = [
            [unit for unit in weights if any(each.parameter in own - gathered for each in unit.entries)]
            for own in (set(layer.parameters()) for layer in inventory.layers)
        ]
        """Of each layer what the caller does not tell of."""
        self.weights = WorkingCopies(homes, needed, held, self.device, self.clock)
        sizes = [self._in_passing(piece, leaving) for unit in self.units for piece in unit.pieces]
        self.space = Workspace(IN_PASSING * max(sizes), self.device, self.clock)
        step_now = self._step_in_backward if step_in_backward else None
        self.gradients = LeavingGradients(leaving, self.space, users, norm_kind, step_now, guarded)
        for unit in self.units:
            if unit in weights:
                self.weights.put_away(unit, self.space)
            self.moments.put_away(unit, self.space)
            self._give_memory(unit)
        self._taken: dict[Optimizer, Taken] = {}
        self._saving: list[saved_tensors_hooks] = []
        self._handles: list[Any] = []
        self._stored: set[int] = set()  # layers whose activations are in a store
        self.activations: dict[TierName, ActivationStore] = {}
        self._noted = NotedWeights(self.weights)
        self._attach_activations(activations)
        self._put_off = put_off and order is None and not step_in_backward and bool(weights or leaving or moments)
        for number, layer in enumerate(inventory.layers):
            if held[number] or (order is None and (weights or self._put_off)):
                self._hook(number, layer, held[number])
        if weights or leaving or moments:
            for optimizer in inventory.optimizers:
                self._taken[optimizer] = Taken(optimizer, self._step_optimizer, self._clear)
        steps = {optimizer: taken.native for optimizer, taken in self._taken.items()}
        self._step = StreamedStep(self.weights, self.gradients, self.moments, inventory.owners, steps, self.space)

    def _homes(self, kind: Kind) -> dict[Portion, Tier | None]:
        """The tier of every portion that is below, and None for those whose parameters others below have too."""
        found: dict[Portion, Tier | None] = {}
        for unit in self.units:
            names = {portion: self._place(portion, kind) for portion in unit.portions}
            split = any(portion.experts and name != "device" for portion, name in names.items())
            for portion, name in names.items():
                if name != "device":
                    found[portion] = self._tiers[name]
                elif portion.experts and split:
                    found[portion] = None
        return found

    def _give_memory(self, unit: Unit) -> None:
        """Of what is on the device and has none."""
        for entry in unit.entries:
            if unit not in self.weights.units and is_absent(entry.flat()):  # of an empty shard there is padding
                entry.point(torch.empty(entry.room, dtype=entry.dtype, device=self.device))
            if not self._keeps_moments(entry) and (owner := self.inventory.owners.get(entry)) is not None:
                state = owner.optimizer.state[entry.parameter]
                for key, value in state.items():
                    if is_tensor_of_state(value) and is_absent(value):
                        state[key] = torch.zeros_like(value)

    def _attach_activations(self, saved: Sequence[int]) -> None:
        layers, of_model = self.inventory.layers, self.inventory.numbers
        homes: dict[TierName, list[int]] = {}
        for number, unit in enumerate(keepers(self.units, of_model) if saved else []):
            if unit is not None and (name := self._place(unit.main, "activations")) != "device":
                homes.setdefault(name, []).append(number)
        for name, numbers in homes.items():
            slab = Slab(sum(sorted(saved[of_model[number]] for number in numbers)[-2:]), self.device)
            store = ActivationStore(self._tiers[name], slab, first=(self._noted.pack_ours, self._noted.unpack))
            self.activations[name] = store
            for number in numbers:
                self._handles.append(store.attach(layers[number], f"layer {of_model[number]}"))
                self._stored.add(number)

    def _in_passing(self, piece: Piece, leaving: Mapping[Portion, Tier | None]) -> int:
        """Bytes of working memory that a piece takes on its way through the optimizer's step."""
        size = self.moments.in_passing(piece)
        size += piece.size if self.weights.is_below(piece) else 0
        return size + (piece.size if leaving.get(piece.portion) is not None else 0)

    def _hook(self, number: int, layer: nn.Module, held: Sequence[Unit]) -> None:
        """Have weights be there when a layer is called. `held`: only these, for the caller tells of the others."""

        def before(*_: object) -> None:
            recomputes = in_backward()
            if self._put_off and not recomputes:
                for unit in self.units:
                    if self.inventory.numbers[number] in unit.layers:
                        self._step.complete(unit)
            if held:
                self.weights.hold(held)
            else:
                self.weights.begin(number, recomputes, torch.is_grad_enabled())
            if self.weights.homes and number not in self._stored:  # there the store asks us first
                others = torch._C._autograd._top_saved_tensors_default_hooks(True)
                saving = saved_tensors_hooks(*self._noted.before(others))
                saving.__enter__()
                self._saving.append(saving)

        def after(_module: nn.Module, _inputs: object, outputs: object) -> None:
            if self._saving:
                self._saving.pop().__exit__(None, None, None)
            if held:
                self.weights.hold(())
                return
            if not in_backward():
                self.weights.end(number)
            for each in tree_leaves(outputs):
                if isinstance(each, Tensor) and each.requires_grad:
                    each.register_hook(lambda _: self.weights.begin(number, backward=True))

        self._handles.append(layer.register_forward_pre_hook(before, prepend=True))
        self._handles.append(layer.register_forward_hook(after, always_call=True))

    def _stepped_by(self, optimizer: Optimizer) -> list[Piece]:
        found = {
            piece: None
            for entry, owner in self.inventory.owners.items()
            if owner.optimizer is optimizer
            for piece, _ in self._pieces[entry]
        }
        return list(found)

    def _clear(self, optimizer: Optimizer) -> None:
        if not self.gradients.guarded:  # there what is in `grad` says it
            put_off = self._step.put_off()
            self.gradients.drop([piece for piece in self._stepped_by(optimizer) if piece not in put_off])

    def _step_optimizer(self, optimizer: Optimizer) -> None:
        self.weights.pass_ends()
        pieces = self._stepped_by(optimizer)
        if not self._step.put_off().isdisjoint(pieces):  # of the step before
            self.complete()
        self.gradients.settle()
        jobs = self._step.jobs(optimizer, pieces)
        can_wait = {unit for unit in self.units if self._put_off and unit.layers and unit not in self.weights.units}
        self._step.run([job for job in jobs if job.piece.unit not in can_wait])
        self._step.later([job for job in jobs if job.piece.unit in can_wait])
        self.moments.step += 1
        own = {entry.parameter for entry in self.inventory.owners}
        others = [[each for each in group["params"] if each not in own] for group in optimizer.param_groups]
        if any(each.grad is not None for group in others for each in group):
            with only(optimizer, others):
                self._taken[optimizer].native()
        self.weights.fetch_first()

    def _step_in_backward(self, pieces: Sequence[Piece]) -> None:
        for optimizer in self._taken:
            self._step.run(self._step.jobs(optimizer, pieces))

    def complete(self) -> None:
        """Do what was put off of the last step: weights and state are what they should be."""
        self._step.complete()

    def begin_step(self, number: int) -> None:
        """Before a step: which it is of a run, so that one that goes on rounds as one that did not stop (`codec`)."""
        self.moments.step = number

    def begin_pass(self, last: bool) -> None:
        """Before a micro-batch: whether it is the last of its step. Not needed where every norm may be taken."""
        self.gradients.begin_pass(last)

    def gradient_norms(self) -> dict[nn.Parameter, Tensor]:
        """The norm of each gradient that is away, of the order `gradients.kind`."""
        self.complete()
        self.gradients.settle()
        return self.gradients.norms()

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply the gradients that are away by a factor, when they come back."""
        self.gradients.scale(factor)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """As `torch.nn.utils.clip_grad_norm_` over all the model's parameters, of which gradients may be away."""
        if norm_type != self.gradients.kind and self.gradients.homes:
            raise TenfoldError(
                f"norms of order {self.gradients.kind} are taken as gradients leave: give that order to "
                f"clip_grad_norm_, or norm_type={norm_type} to tenfold.offload"
            )
        away = self.gradient_norms()
        parameters = list(self.inventory.model.parameters())
        here = {each: grad for each in parameters if (grad := gradient_here(each)) is not None}
        norms = away | {each: torch.linalg.vector_norm(grad, norm_type) for each, grad in here.items()}
        if not norms:
            return torch.tensor(0.0)
        total = torch.linalg.vector_norm(torch.stack([norms[each] for each in parameters if each in norms]), norm_type)
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for grad in here.values():
            grad.mul_(factor)
        self.scale_gradients(factor)
        return total

    @contextmanager
    def filling(self, name: str, tensor: Tensor) -> Iterator[Tensor]:
        """Memory to fill for what `name` calls: a parameter, or a tensor of its state ("name/exp_avg").

        `tensor` is what stands for it in the model or the optimizer: that itself where its place is the device.
        """
        self.complete()
        local = local_of(tensor)
        if not self.is_below(name):
            yield local
            return
        memory = torch.empty(local.shape, dtype=local.dtype, device=local.device)
        yield memory
        self.write(name, memory)

    def write(self, name: str, whole: Tensor) -> None:
        """Let what `name` calls, whose place is below the device, be `whole`."""
        if "/" not in name:
            self.forget(name)
        self._visit(name, whole, write=True)

    def forget(self, name: str) -> None:
        """Let go of the working copy of a parameter and of all in its unit."""
        self.weights.forget(self._unit_of(name))

    def is_below(self, name: str) -> bool:
        """Whether the place of what `name` calls is below the device, or not in the format that a model computes in."""
        parameter, _, key = name.partition("/")
        if parameter not in self._by_name:
            return False
        if not key:
            return self._unit_of(name) in self.weights.units
        entry = self._by_name[parameter]
        return self._keeps_moments(entry) and key in self.inventory.tensors(entry)

    def tensor_of(self, name: str, tensor: Tensor) -> Tensor:
        """What `name` calls: a copy from its tier, or, where its place is the device, `tensor`, which stands for it."""
        self.complete()
        if not self.is_below(name):
            return tensor
        local = local_of(tensor)
        memory = torch.empty(local.shape, dtype=local.dtype, device=local.device)
        self._visit(name, memory, write=False)
        return memory

    def _keeps_moments(self, entry: Entry) -> bool:
        """Whether the state of a parameter is not simply in its optimizer."""
        return self._pieces[entry][0][0].portion in self.moments.homes

    def _unit_of(self, name: str) -> Unit:
        return self._pieces[self._by_name[name.partition("/")[0]]][0][0].unit

    def _visit(self, name: str, whole: Tensor, write: bool) -> None:
        """Copy a whole tensor to its tier, or from there."""
        parameter, _, key = name.partition("/")
        store = self.moments if key else self.weights
        for piece, number in self._pieces[self._by_name[parameter]]:
            size = self.moments.size(piece) if key else piece.size
            if not size:  # of what pads a shard there is no state
                continue
            kept, block = self.moments.here(piece) if key else None, None
            if kept is None:
                block = self.space.take(size, "visit")
                kept = block.bytes[:size]
                if (arriving := store.read(piece, kept)) is not None:
                    arriving.wait()
            memory = self.moments.opened(piece, kept, [number]) if key else kept
            view = self.moments.views(piece, number, memory)[key] if key else piece.view(memory, number)
            each: Slice = piece.slices[number]
            part = each.of(whole) if whole.shape == each.entry.shape else whole
            if write:
                view.copy_(part)
                if key:
                    self.moments.shut(piece, memory, kept, [number], self.moments.step)
                if block is not None:
                    self.space.give_after(block, store.write(piece, kept))
            else:
                part.copy_(view)
                if block is not None:
                    self.space.give(block)

    def put_all_away(self, tier: Tier) -> None:
        """Leave nothing of weights and optimizer state on the device. The model can only be read from then on
        (`tensor_of`): another is about to be made, within the same budget."""
        self.complete()
        self.space.drain()
        largest = max(
            max(piece.size, self.inventory.lay_out(piece).size) for unit in self.units for piece in unit.pieces
        )
        self.space = Workspace(2 * largest, self.device, self.clock)
        self.weights.shrink()
        for unit in self.units:
            self.weights.take_in(unit, tier, self.space)
            self.moments.take_in(unit, tier, self.space)
        self.space.drain()

    def waited(self) -> dict[str, float]:
        """Seconds that the run has stood still for transfers, by the kind of state that it waited for."""
        activations = sum(store.waited for store in self.activations.values())
        return self.clock.seconds | ({"activations": activations} if self.activations else {})

    def close(self) -> None:
        """Let hooks, room in tiers and working memory go; what was below the device is lost, unless it was read."""
        self.complete()
        for handle in self._handles:
            handle.remove()
        for taken in self._taken.values():
            taken.give_back()
        self.gradients.remove_hooks()
        for store in self.activations.values():
            store.finish()
        self.space.drain()
        for each in (self.weights, self.gradients, self.moments):
            each.close()
