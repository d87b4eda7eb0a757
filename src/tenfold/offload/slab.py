"""Memory for what is on its way, cut by us from one piece: nothing is rounded up, nothing grows, all is counted."""

from __future__ import annotations

import bisect
import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

from tenfold.errors import TenfoldError
from tenfold.offload.tiers import aligned


class Runs:
    """Which runs of bytes are free: in order, no two touching. Whole pages where only whole pages are given."""

    def __init__(self) -> None:
        self.free: list[tuple[int, int]] = []
        """(begin, end) of each."""

    def take(self, size: int) -> int | None:
        """Where the first free run that is `size` bytes long begins, which then is not free; None where none is."""
        for place, (begin, end) in enumerate(self.free):
            if end - begin >= size:
                self.free[place : place + 1] = [(begin + size, end)] if end - begin > size else []
                return begin
        return None

    def give(self, begin: int, end: int) -> None:
        """Bytes that are free from now on."""
        if begin == end:
            return
        place = bisect.bisect(self.free, (begin, end))
        assert place == 0 or self.free[place - 1][1] <= begin, "a run was given back twice"
        assert place == len(self.free) or end <= self.free[place][0], "a run was given back twice"
        first = last = place
        if place and self.free[place - 1][1] == begin:
            first, begin = place - 1, self.free[place - 1][0]
        if place < len(self.free) and self.free[place][0] == end:
            last, end = place + 1, self.free[place][1]
        self.free[first:last] = [(begin, end)]


@dataclass(eq=False)
class Block:
    """A run of a slab's bytes, `bytes` (flat uint8), until it is given back."""

    begin: int
    bytes: Tensor


class Slab:
    """`size` bytes on `device`, given out in runs of whole pages, each the first that is free and long enough.

    On a CPU it is mapped by itself and not from the allocator's heap: its addresses are whole pages, and they go back
    to the system with it. On CUDA a run may still be in use by the device when it is given back: whatever writes to it
    next must come behind what the current stream was told until then (as a tier's transfers do).
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.device, self.taken = aligned(size), device, 0
        if device.type == "cpu":
            try:
                mapped = mmap.mmap(-1, max(self.size, mmap.PAGESIZE))  # nothing at all cannot be mapped
            except (OSError, MemoryError) as error:
                raise TenfoldError(
                    f"the working memory of offload, {self.size:,} bytes, could not be had: {error}"
                ) from None
            self.memory = torch.frombuffer(mapped, dtype=torch.uint8)[: self.size]
        else:
            self.memory = torch.empty(self.size, dtype=torch.uint8, device=device)
        self._runs = Runs()
        self._runs.give(0, self.size)

    def take(self, size: int) -> Block | None:
        """A run of `size` bytes, rounded up to whole pages; None where no free run is so long."""
        size = aligned(size)
        begin = self._runs.take(size)
        if begin is None:
            return None
        self.taken += size
        return Block(begin, self.memory[begin : begin + size])

    def give(self, block: Block) -> None:
        """Take a run back."""
        end = block.begin + len(block.bytes)
        self._runs.give(block.begin, end)
        self.taken -= end - block.begin
