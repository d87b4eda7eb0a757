"""Memory on the device for weights of experts that stay while others of their layer leave.

A layer's experts are one run of memory while they are in use, in a working copy that is another layer's a moment later.
What stays lies here meanwhile, as in a tier that is read and written by the device itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tenfold.offload.tiers import Extent, TierName


class Done:
    """A copy that the device makes in the order of what it is told."""

    done = True

    def wait(self) -> None:
        """It comes before what the current stream is told next."""


class Beside:
    """The tier that is the device."""

    name: TierName = "device"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.held = self.bytes_read = self.bytes_written = 0

    def reserve(self, size: int) -> Extent:
        """Room for `size` bytes."""
        self.held += size
        return Extent(size, torch.empty(size, dtype=torch.uint8, device=self._device))

    def release(self, extent: Extent) -> None:
        """Give room back."""
        self.held -= extent.size

    def at(self, extent: Extent, begin: int, size: int) -> Tensor:
        """The bytes themselves."""
        memory: Tensor = extent.place
        return memory[begin : begin + size]

    def read(self, extent: Extent, into: Tensor, begin: int = 0) -> Done:
        """Have bytes copied from there."""
        into.copy_(self.at(extent, begin, len(into)))
        return Done()

    def write(self, extent: Extent, source: Tensor, begin: int = 0) -> Done:
        """Have bytes copied there, if they are not those that are there."""
        into = self.at(extent, begin, len(source))
        if into.data_ptr() != source.data_ptr():
            into.copy_(source)
        return Done()

    def close(self) -> None:
        """Nothing is to be let go of: memory goes with its extents."""
