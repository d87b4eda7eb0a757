"""What a piece of code has in memory at once, and what it exchanges with other ranks: counted while it runs.

It may run on real tensors or on tensors without memory (`fake_ranks`). Storages are counted, each once, for as long as
anything holds them; FSDP2 empties and refills some in place, and that is seen too.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tenfold.planning.terms import CollectiveKind

_SPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_OPENED = ("tenfold::ring_attention", "tenfold::block_product")
"""Operators of ours that talk to other ranks: what they do inside is looked at too."""

# Operators by the kind of exchange, and which of their tensors tells its bytes: see `terms.Collective`.
_KINDS: dict[str, tuple[CollectiveKind, int]] = {
    "_allgather_base_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "allreduce_": ("all_reduce", 0),
    "all_reduce": ("all_reduce", 0),
    "alltoall_base_": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 0),
    "broadcast_": ("broadcast", 0),
    "broadcast": ("broadcast", 0),
    "send": ("send", 0),
}
_GATHERED_AFTER = "all_gather_into_tensor"  # which tells its input, and makes the result
_SILENT = ("wait_tensor", "recv_", "recv_any_source_", "barrier", "monitored_barrier_")


class Exchange(NamedTuple):
    """A collective of one kind in one group, with one size."""

    kind: CollectiveKind
    ranks: int
    """In the group."""
    apart: int
    """How far apart their numbers are."""
    bytes: int
    """As `planning.terms.Collective` counts them."""


class Tally(TorchDispatchMode):
    """Inside of `with tally.watching():` storages and exchanges are counted, of this thread: on a CPU, where backward
    passes run in it, all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.exchanges: Counter[Exchange] = Counter()
        self.peaks: dict[str, int] = {}
        """The most bytes that were there at once, by moment."""
        self.moment = "build"
        self.alive = 0
        """Bytes that are there now."""
        self.turned_back: Callable[[], None] = lambda: None
        """Called when a backward pass begins, before anything of it is counted."""
        self._backward = False
        self._aside = 0
        self._closes = False
        self._held: dict[int, _Held] = {}
        self._groups: dict[Any, tuple[int, int]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count what is done inside."""
        from torch.distributed.tensor._sharding_prop import ShardingPropagator  # here: it takes seconds to import

        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            out = resize(storage, size)
            held = self._held.get(storage._cdata)
            if held is not None:
                self._add(size - held.size)
                held.size = size
            return out

        # DTensors make tensors without memory, of the whole shape, to see what an operator gives.
        propagate = ShardingPropagator.propagate_op_sharding_non_cached

        def propagated(*args: Any) -> Any:
            self._aside += 1
            try:
                return propagate(*args)
            finally:
                self._aside -= 1

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign,assignment]
        ShardingPropagator.propagate_op_sharding_non_cached = propagated  # type: ignore[method-assign,assignment]
        try:
            with self:
                yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
            ShardingPropagator.propagate_op_sharding_non_cached = propagate  # type: ignore[method-assign]

    def forget(self) -> None:
        """Begin anew with peaks and exchanges; what is there stays counted."""
        self.exchanges.clear()
        self.peaks.clear()
        self._closes = False

    def begin(self, moment: str) -> None:
        """What is there from now on is of `moment`; of "forward" backward passes are told apart."""
        self.moment = moment
        self.peaks[moment] = max(self.alive, self.peaks.get(moment, 0))

    def begin_pass(self, _last: bool) -> None:
        """Before a micro-batch, where each goes forward and backward before the next begins (`Rank.before_pass`): its
        gradients, and what else is there behind its backward pass, are of that and not of a forward pass."""
        self._closes = True
        self.begin("forward")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(each, "to_local") for each in types):  # a DTensor: its local tensors come by here
            return NotImplemented
        kwargs = kwargs or {}
        backward = torch._C._current_graph_task_id() != -1
        if backward != self._backward:
            self._backward = backward
            if backward:
                self.turned_back()
            elif self._closes:
                self.begin("backward")
        if func.namespace in _SPACES:
            self._exchange(func, args)
        if func._schema.name.startswith(_OPENED):
            with self:
                out = OPDEFS[func._schema.name]._init_fn(*self.inside(args), **kwargs)
        else:
            out = self.run(func, args, kwargs)
        for each in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(each, Tensor):
                self._note(each)
            elif isinstance(each, (tuple, list)):
                for inner in tree_leaves(each):
                    if isinstance(inner, Tensor):
                        self._note(inner)
        return out

    def inside(self, args: Any) -> Any:
        """What an operator of ours is given when it is looked into."""
        return args

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operator gives."""
        return func(*args, **kwargs)

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if self._aside or key in self._held or hasattr(tensor, "to_local"):
            return
        held = _Held(storage.nbytes())

        def gone(_: Any) -> None:
            del self._held[key]
            self.alive -= held.size

        held.storage = weakref.ref(storage, gone)
        self._held[key] = held
        self._add(held.size)

    def _add(self, size: int) -> None:
        self.alive += size
        moment = self.moment if self.moment != "forward" or not self._backward else "backward"
        if self.alive > self.peaks.get(moment, 0):
            self.peaks[moment] = self.alive

    def _exchange(self, func: Any, args: Any) -> None:
        name = func._schema.name.partition("::")[2]
        if name in _SILENT:
            return
        ranks, apart = self._group(args)
        if ranks == 1:
            return
        tensors = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
        if name == _GATHERED_AFTER:
            self.exchanges[Exchange("all_gather", ranks, apart, ranks * _bytes(tensors[0]))] += 1
            return
        kind, told = _KINDS[name]
        self.exchanges[Exchange(kind, ranks, apart, _bytes(tensors[told]))] += 1

    def _group(self, args: Any) -> tuple[int, int]:
        group = next((each for each in reversed(args) if isinstance(each, (str, torch.ScriptObject))), None)
        key = group if isinstance(group, str) else None
        if key in self._groups:
            return self._groups[key]
        if isinstance(group, str):
            by_name: Any = torch.distributed.distributed_c10d
            ranks = dist.get_process_group_ranks(by_name._resolve_process_group(group))
        else:
            scripts = [each for each in args if isinstance(each, torch.ScriptObject)]
            found = next(each for each in scripts if "ProcessGroup" in str(each._type()))
            ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(found))
        told = len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1
        if key is not None:
            self._groups[key] = told
        return told


class _Held:
    """One storage."""

    __slots__ = ("size", "storage")

    def __init__(self, size: int) -> None:
        self.size = size
        self.storage: Any = None


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
