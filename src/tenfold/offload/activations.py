"""Activations of a layer kept below the device between its forward and its backward pass.

While a layer runs forward, what autograd saves in it is copied into a slab and from there, in the background, to a
tier; the layer's own memory is free at once. When the backward pass of a layer begins, what the layer before it saved
is asked for. Nothing is computed again, and every number is the one that was saved.

What was saved last is needed first: the newest half of the slab is not sent until more comes, and what was sent stays
in the slab until its room is needed.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle

from tenfold.errors import TenfoldError
from tenfold.offload.lending import Lender, Loan, lend_alone
from tenfold.offload.saved import Entry, Held, Kept, Made, Pass, Saved, alone, span_of
from tenfold.offload.slab import Slab
from tenfold.offload.tiers import Extent, Tier, Transfer, aligned

SMALLEST = 64 * 1024
"""Bytes under which a tensor stays where it is."""

First = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class ActivationStore:
    """What autograd saves in the layers that it is attached to, in `tier`, by way of `slab`, which is nobody else's.

    first: a pair (pack, unpack) that is asked before. What pack gives for a tensor, if not None, is kept in its place,
        and unpack makes the tensor of it.
    stays: whether a tensor stays in memory because others hold it. The parameters and buffers of a layer, and all that
        leads to them, stay anyway.

    With a slab smaller than `working_bytes` says everything comes out the same and takes longer. Memory besides the
    slab is taken, a tensor at a time, where one alone does not fit or backward passes hold all of it (`outside`).
    """

    def __init__(
        self,
        tier: Tier,
        slab: Slab,
        *,
        first: First | None = None,
        stays: Callable[[Tensor], bool] | None = None,
        smallest: int = SMALLEST,
    ) -> None:
        self.tier, self.slab, self.first, self.stays, self.smallest = tier, slab, first, stays, smallest
        self.waited = 0.0
        """Seconds that this thread waited for transfers."""
        self.late = 0
        """Reads that were asked for only when they were needed."""
        self.outside = 0
        """The most bytes that one tensor took besides the slab."""
        self._lender = Lender(slab)
        self._device = slab.memory.device  # with its number
        self._running: list[_Running] = []  # innermost last
        self._last: weakref.ref[Pass] | None = None
        self._known: weakref.WeakValueDictionary[tuple[int, ...], Entry] = weakref.WeakValueDictionary()
        self._dead: deque[Held] = deque()
        self._unsent: dict[Loan, weakref.ref[Entry]] = {}  # the oldest first
        self._sent: dict[Loan, weakref.ref[Entry]] = {}  # in the slab and in the tier, or on the way
        self._moving: list[tuple[Transfer, Loan]] = []
        self._current: Pass | None = None  # whose backward pass is under way
        self._wanted: list[weakref.ref[Entry]] = []  # by it and the layer before it; the next to be asked for last
        self._count = itertools.count()

    def attach(self, layer: nn.Module, name: str = "this layer") -> Attached:
        """From now on have what autograd saves in `layer`."""
        recompute = getattr(layer, "recompute", "none")
        if recompute != "none":
            raise TenfoldError(
                f'{name} has training.recompute = "{recompute}", and its activations are to be offloaded to '
                f"{self.tier.name}: a layer's are recomputed or offloaded. Leave one of the two out for this layer"
            )
        return Attached(self, layer)

    def settle(self) -> None:
        """Give back what graphs that have ended held, in the slab and in the tier, and see to transfers that are over.

        Every layer's pass does so; to be called where memory is wanted and no layer runs. Raises the TenfoldError of a
        write that failed.
        """
        while self._dead:
            self._give_back(*self._dead.popleft())
        over: list[tuple[Transfer, Loan]] = []
        moving, self._moving = self._moving, []
        for each in moving:
            (over if each[0].done else self._moving).append(each)
        moving.clear()
        while over:
            over.pop()[0].wait()
        self._lender.settle()

    def finish(self) -> None:
        """Wait for what is on its way, as before the tier is closed."""
        while self._moving:
            self._moving.pop(0)[0].wait()
        self.settle()

    def _give_back(self, extent: Extent | None, loan: Loan | None) -> None:
        if extent is not None:
            self.tier.release(extent)
        if loan is not None:
            self._sent.pop(loan, None)
            self._unsent.pop(loan, None)

    # Forward

    def _enter(self, layer: nn.Module) -> None:
        running = _Running(layer)
        self._running.append(running)
        if torch.is_grad_enabled():
            self._current = None
            self._wanted.clear()
            self.settle()
            running.begin(self, Pass(self._last))

    def _leave(self, layer: nn.Module, finished: bool) -> None:
        if not self._running or self._running[-1].layer is not layer:
            return  # it failed before it was entered
        running = self._running.pop()
        if running.hooks is None:
            return
        running.hooks.__exit__(None, None, None)
        if finished:
            self._send_parts(running.parts)
        if running.saved is not None and running.saved.entries:
            self._last = weakref.ref(running.saved)

    def _pack(self, running: _Running, tensor: Tensor) -> Any:
        if self.first is not None:
            made = self.first[0](tensor)
            if made is not None:
                return Made(made)
        if not self._takes(tensor, running):
            return Kept(tensor)
        assert running.saved is not None
        storage = tensor.untyped_storage()
        whole, (begin, end) = storage.nbytes(), span_of(tensor)
        entry = self._known.get((storage._cdata, tensor._version, 0, whole))
        if entry is None and 2 * (end - begin) < whole:
            # How much of the storage is needed is only known when the layer is through.
            part = Saved(running.saved, tensor, None, 0, Kept(tensor))
            running.parts.append(part)
            return part
        return Saved(running.saved, tensor, entry or self._send(tensor, 0, whole), 0)

    def _takes(self, tensor: Tensor, running: _Running) -> bool:
        if type(tensor) is not Tensor or tensor.device != self._device or tensor.layout != torch.strided:
            return False
        if (tensor.is_leaf and tensor.requires_grad) or tensor.is_conj() or tensor.is_neg():
            return False
        storage = tensor.untyped_storage()
        if storage.nbytes() < self.smallest or storage._cdata in running.held:
            return False
        return not (self.stays is not None and self.stays(tensor))

    def _send_parts(self, parts: list[Saved]) -> None:
        """See to the small views of large storages that a layer saved."""
        by_storage: dict[tuple[int, int], list[Saved]] = {}
        for part in parts:
            assert part.kept is not None
            if part.kept.same():  # else it stays, to be refused in the backward pass as autograd does
                by_storage.setdefault((part.kept.tensor.untyped_storage()._cdata, part.kept.version), []).append(part)
        for same in by_storage.values():
            tensors = [part.kept.tensor for part in same if part.kept is not None]
            whole = tensors[0].untyped_storage().nbytes()
            spans = {span_of(tensor) for tensor in tensors}
            together = 2 * sum(end - begin for begin, end in spans) >= whole
            for part, tensor in zip(same, tensors, strict=True):
                begin, end = (0, whole) if together else span_of(tensor)
                known = self._known.get((tensor.untyped_storage()._cdata, tensor._version, 0, whole))
                if known is not None:
                    part.enter(known, 0)
                elif end - begin < self.smallest:
                    part.kept = Kept(alone(tensor, begin, end))
                else:
                    key = (tensor.untyped_storage()._cdata, tensor._version, begin, end)
                    part.enter(self._known.get(key) or self._send(tensor, begin, end), begin)

    def _send(self, tensor: Tensor, begin: int, end: int) -> Entry:
        """Bytes `begin` to `end` of a tensor's storage, on their way to the tier."""
        storage = tensor.untyped_storage()
        entry = Entry(StorageWeakRef(storage), end - begin, next(self._count), self._dead)
        loan = self._room(entry.size, True)
        besides = loan is None
        entry.loan = loan = lend_alone(entry.size, self._device) if loan is None else loan
        source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, begin, (entry.size,), (1,))
        loan.block.bytes[: entry.size].copy_(source)
        self._unsent[loan] = weakref.ref(entry)
        self._known[(storage._cdata, tensor._version, begin, end)] = entry
        if besides:
            self.outside = max(self.outside, len(loan.block.bytes))
            self._write(loan)
            self._let_go(loan)
        while 2 * sum(len(each.block.bytes) for each in self._unsent) > self.slab.size:
            self._write(next(iter(self._unsent)))
        return entry

    def _write(self, loan: Loan) -> None:
        entry = self._unsent.pop(loan)()
        if entry is None:
            return
        size = len(loan.block.bytes)
        try:
            entry.extent = self.tier.reserve(size)
            entry.write = self.tier.write(entry.extent, loan.block.bytes)
        except TenfoldError as error:
            raise TenfoldError(f"activations: {size:,} bytes to offload to {self.tier.name}: {error}") from error
        self._moving.append((entry.write, loan))
        self._sent[loan] = weakref.ref(entry)

    # Room

    def _room(self, size: int, make: bool) -> Loan | None:
        """A block; with `make` what is in the tier too goes for it, and what is to be sent is, in the order in which it
        is needed last."""
        self.settle()
        loan = self._lender.take(size)
        while loan is None and make and (self._sent or self._unsent):
            if self._sent:
                self._let_go(min(self._sent, key=self._need))
            else:
                self._write(next(iter(self._unsent)))
                continue
            loan = self._lender.take(size)
        return loan

    def _need(self, loan: Loan) -> tuple[bool, int]:
        """Sorts what is in the slab: in a backward pass what it is past, then what was saved first."""
        entry = self._sent[loan]()
        if entry is None:
            return False, -1
        return self._current is None or entry.number <= self._current.newest, entry.number

    def _let_go(self, loan: Loan) -> None:
        """Drop what is in the tier from the slab; while tensors are made of it the block is not free yet."""
        entry = self._sent.pop(loan)()
        if entry is not None:
            entry.loan = None
        for transfer in [transfer for transfer, of in self._moving if of is loan]:
            self._wait(transfer)
        self._moving = [each for each in self._moving if each[1] is not loan]

    def _wait(self, transfer: Transfer) -> None:
        begin = time.perf_counter()
        try:
            transfer.wait()
        finally:
            self.waited += time.perf_counter() - begin

    # Backward

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Made):
            assert self.first is not None
            return self.first[1](packed.made)
        if isinstance(packed, Kept):
            return packed.tensor_unchanged()
        assert isinstance(packed, Saved)
        entry = packed.entry
        if entry is None:
            assert packed.kept is not None
            return packed.kept.tensor_unchanged()
        if packed.during is not self._current:
            self._current = packed.during
            before = None if packed.during.before is None else packed.during.before()
            self._wanted = [*([] if before is None else before.entries), *packed.during.entries]
        loan = entry.loan or self._fetch(entry, True)
        assert loan is not None
        while self._wanted:
            wanted = self._wanted[-1]()
            if wanted is not None and wanted.loan is None and self._fetch(wanted, False) is None:
                break
            self._wanted.pop()
        if entry.read is not None:
            self._wait(entry.read)
        tensor = loan.tensor(packed.dtype, packed.offset, packed.size, packed.stride)
        entry.unpacked += 1
        if entry.unpacked >= entry.packs and entry.write is not None:
            entry.unpacked = 0
            entry.loan = None
            self._sent.pop(loan, None)
        return tensor

    def _fetch(self, entry: Entry, must: bool) -> Loan | None:
        """Ask for an entry that is in the tier alone; unless it `must` be, only where there is room."""
        assert entry.extent is not None
        assert entry.write is not None
        loan = self._room(entry.size, must)
        if loan is None:
            if not must:
                return None
            loan = lend_alone(entry.size, self._device)
            self.outside = max(self.outside, len(loan.block.bytes))
        self.late += must
        entry.write.wait()
        entry.read = self.tier.read(entry.extent, loan.block.bytes)
        entry.loan = loan
        self._moving.append((entry.read, loan))
        self._sent[loan] = weakref.ref(entry)
        return loan


def working_bytes(saved: Sequence[int]) -> int:
    """How large a slab has to be that a layer's backward pass never waits for memory, only for the tier.

    `saved`: the bytes that each layer saves, in the order of the forward pass. What one layer saved is there while that
    of the layer before it comes.
    """
    pairs = [sum(saved[layer : layer + 2]) for layer in range(len(saved))]
    return aligned(max(pairs, default=0) * 9 // 8)  # tensors take whole pages, and room is not always in one piece


class Attached:
    """A layer whose activations a store has, until it is removed.

    A layer that is compiled has to be so before. What it calls then is what is wrapped: hooks of ours would be compiled
    with it, and are nothing that can be.
    """

    def __init__(self, store: ActivationStore, layer: nn.Module) -> None:
        self._layer, self._hooks, self._compiled = layer, list[RemovableHandle](), layer._compiled_call_impl
        compiled = self._compiled
        if compiled is None:
            self._hooks = [
                layer.register_forward_pre_hook(lambda module, _: store._enter(module)),
                layer.register_forward_hook(
                    lambda module, _, out: store._leave(module, out is not None), always_call=True
                ),
            ]
            return

        def call(*inputs: Any, **more: Any) -> Any:
            store._enter(layer)
            out = None
            try:
                out = compiled(*inputs, **more)
            finally:
                store._leave(layer, out is not None)
            return out

        layer._compiled_call_impl = call

    def remove(self) -> None:
        """What is saved from now on stays in memory. What was saved before comes back all the same."""
        if self._compiled is not None:
            self._layer._compiled_call_impl = self._compiled
        for hook in self._hooks:
            hook.remove()


class _Running:
    """A layer in its forward pass."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.hooks: torch.autograd.graph.saved_tensors_hooks | None = None
        self.saved: Pass | None = None
        self.parts: list[Saved] = []
        self._held: set[int] | None = None

    @property
    def held(self) -> set[int]:
        """The storages of its parameters and buffers, as they are while it runs."""
        if self._held is None:
            tensors = itertools.chain(self.layer.parameters(), self.layer.buffers())
            self._held = {tensor.untyped_storage()._cdata for tensor in tensors}
        return self._held

    def begin(self, store: ActivationStore, saved: Pass) -> None:
        self.saved = saved
        self.hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: store._pack(self, tensor), store._unpack)
        self.hooks.__enter__()
