"""What the rest of offload asks of a tier below the device: room, and transfers that go on in the background.

A tier keeps bytes. Where they come from and go to is memory cut from a `slab.Slab` on the device (RAM, where there is
no accelerator): flat uint8, whose address and length are multiples of `ALIGN`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from torch import Tensor

Kind = Literal["weights", "gradients", "moments", "activations"]
KINDS: tuple[Kind, ...] = get_args(Kind)
TierName = Literal["device", "host", "disk"]
TIERS: tuple[TierName, ...] = get_args(TierName)

ALIGN = 4096
"""Bytes: what direct I/O asks of addresses, places and lengths."""


def aligned(size: int) -> int:
    """`size` bytes rounded up to whole pages."""
    return -(-size // ALIGN) * ALIGN


@dataclass(frozen=True, eq=False)
class Extent:
    """Room in a tier for `size` bytes, a multiple of `ALIGN`. `place` is the tier's own."""

    size: int
    place: Any


class Transfer(Protocol):
    """Bytes on their way."""

    def wait(self) -> None:
        """Come back when they are there; on CUDA, when what the current stream is told next comes behind them.

        Raises TenfoldError where they did not get there. May be called again.
        """

    @property
    def done(self) -> bool:
        """Whether `wait` would come back at once, with an error too."""


class Tier(Protocol):
    """A place below the device. Its methods come back at once; what they begin, `Transfer.wait` waits for.

    On CUDA a transfer comes behind what the current stream was told before it was asked for.
    """

    name: TierName

    @property
    def held(self) -> int:
        """Bytes that extents have reserved."""

    @property
    def bytes_read(self) -> int:
        """Moved so far."""

    @property
    def bytes_written(self) -> int:
        """Moved so far."""

    def reserve(self, size: int) -> Extent:
        """Room for `size` bytes. Raises TenfoldError, naming bytes and place, where there is none."""

    def release(self, extent: Extent) -> None:
        """Give room back, with transfers of it under way or not."""

    def read(self, extent: Extent, into: Tensor, begin: int = 0) -> Transfer:
        """Have the bytes from `begin` of an extent brought into all of `into`. It sees every write asked for before.

        Every byte that is read must have been written.
        """

    def write(self, extent: Extent, source: Tensor, begin: int = 0) -> Transfer:
        """Have all of `source` brought to `begin` of an extent; it must stay as it is until then."""

    def close(self) -> None:
        """Let all go: files, threads, memory. The tier is of no use afterwards."""


Emit = Callable[[str], None]
"""Takes a remark for people."""
