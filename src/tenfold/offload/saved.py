"""What autograd saved in a layer: the tensors, and the bytes that they are of."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tenfold.offload.lending import Loan
from tenfold.offload.tiers import Extent, Transfer

LINE = 64
"""Bytes that PyTorch aligns memory to on a CPU. What is brought back stands to it as it stood, since the speed of a
product and the order of its sums may go by it."""

Held = tuple[Extent | None, Loan | None]
"""What an entry holds in the tier and in the slab."""


class Pass:
    """What one forward pass of a layer saved; `before` is the pass that saved before it."""

    def __init__(self, before: weakref.ref[Pass] | None) -> None:
        self.before, self.newest = before, -1
        self.entries: list[weakref.ref[Entry]] = []


class Entry:
    """A storage, or a part of one, of `size` bytes that was saved, by `packs` tensors."""

    def __init__(self, of: StorageWeakRef, size: int, number: int, dead: deque[Held]) -> None:
        self.size, self.number = size, number
        self.packs = self.unpacked = 0
        self.loan: Loan | None = None
        """Where it is, or comes to be, in the slab."""
        self.extent: Extent | None = None
        self.write: Transfer | None = None
        self.read: Transfer | None = None
        self._of = of  # as long as this is there, no other storage has its address
        self._dead = dead

    def __del__(self) -> None:
        self._dead.append((self.extent, self.loan))


class Saved:
    """A tensor, of an entry; until it has one, the tensor itself."""

    def __init__(self, during: Pass, tensor: Tensor, entry: Entry | None, begin: int, kept: Kept | None = None):
        self.during, self.kept = during, kept
        self.entry: Entry | None = None
        self.dtype, self.offset = tensor.dtype, int(tensor.storage_offset())
        self.size, self.stride = tuple(tensor.shape), tensor.stride()
        if entry is not None:
            self.enter(entry, begin)

    def enter(self, entry: Entry, begin: int) -> None:
        """Be of an entry whose bytes begin at `begin` of the storage."""
        self.entry = entry
        self.kept = None
        self.offset -= begin // self.dtype.itemsize
        entry.packs += 1
        self.during.newest = max(self.during.newest, entry.number)
        if not any(each() is entry for each in self.during.entries):
            self.during.entries.append(weakref.ref(entry))


class Made:
    """What the handler that is asked first made of a tensor."""

    def __init__(self, made: Any) -> None:
        self.made = made


class Kept:
    """A tensor that stays in memory. That it is as it was autograd does not check where there are hooks."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor if tensor.is_leaf else tensor.detach()  # else the graph would hold itself
        self.version = tensor._version

    def same(self) -> bool:
        return self.tensor._version == self.version

    def tensor_unchanged(self) -> Tensor:
        if not self.same():
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{tuple(self.tensor.shape)} of {self.tensor.dtype} is at version {self.tensor._version}; expected "
                f"version {self.version}"
            )
        return self.tensor


def span_of(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage, from the begin of a line on, that a tensor lies in."""
    if tensor.numel() == 0:
        return 0, 0
    item, first = tensor.element_size(), int(tensor.storage_offset())
    last = first + sum(int(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * item // LINE * LINE, (last + 1) * item


def alone(tensor: Tensor, begin: int, end: int) -> Tensor:
    """The tensor in a storage of its own, with nothing but its bytes."""
    size, item = end - begin, tensor.element_size()
    source = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    copy = source.set_(tensor.untyped_storage(), begin, (size,), (1,)).clone()
    place = tensor.storage_offset() - begin // item, tensor.shape, tensor.stride()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(copy.untyped_storage(), *place)
