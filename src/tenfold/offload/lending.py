"""Blocks of a slab lent to tensors that others hold: each comes back when the last of its tensors is gone."""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor

from tenfold.offload.slab import Block, Slab


class Loan:
    """A block that is lent for as long as this, or a tensor of it, is there."""

    def __init__(self, block: Block, holder: Any) -> None:
        self.block, self._holder = block, holder

    def tensor(self, dtype: torch.dtype, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
        """A tensor in the block, by its geometry; `offset` in elements from the block's begin."""
        if isinstance(self._holder, memoryview):
            base = torch.frombuffer(self._holder, dtype=torch.uint8)
        else:
            base = torch.as_tensor(self._holder)
        return torch.empty(0, dtype=dtype, device=base.device).set_(base.untyped_storage(), offset, size, stride)


class Lender:
    """Lends blocks of a slab. A tensor's storage holds an object of ours, whose end says that the block is free.

    Tensors may end on any thread and at any moment, in the midst of a call of the slab too. So that their blocks are
    only noted then, and the slab has them when `settle` (or `take`) is called next.
    """

    def __init__(self, slab: Slab) -> None:
        self.slab = slab
        self._returned: deque[Block] = deque()

    def take(self, size: int) -> Loan | None:
        """A block of at least `size` bytes, or None where no free run is so long."""
        self.settle()
        block = self.slab.take(size)
        if block is None:
            return None
        # What a storage can be made to hold: a view of a buffer on the CPU, and on CUDA an object that has an address.
        holder: Any = _view(block) if block.bytes.device.type == "cpu" else _Addressed(block)
        weakref.finalize(holder, self._returned.append, block).atexit = False
        return Loan(block, holder)

    def settle(self) -> None:
        """Give back to the slab what tensors have let go."""
        while self._returned:
            self.slab.give(self._returned.popleft())


def lend_alone(size: int, device: torch.device) -> Loan:
    """A block of a slab of its own, which ends with it."""
    loan = Lender(Slab(size, device)).take(size)
    assert loan is not None
    return loan


def _view(block: Block) -> memoryview:
    return memoryview((ctypes.c_char * len(block.bytes)).from_address(block.bytes.data_ptr())).cast("B")


class _Addressed:
    """Memory of a CUDA device, as `torch.as_tensor` takes it without a copy."""

    def __init__(self, block: Block) -> None:
        self.__cuda_array_interface__ = {
            "shape": (len(block.bytes),),
            "typestr": "|u1",
            "data": (block.bytes.data_ptr(), False),
            "strides": None,
            "version": 3,
        }
