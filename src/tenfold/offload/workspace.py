"""Working memory for what passes through it, as those who use it at the same time see it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import torch

from tenfold.offload.slab import Block, Slab
from tenfold.offload.tiers import Transfer


class Clock:
    """How long the run stood still for transfers, in seconds, by the kind of state that it waited for."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def wait(self, transfer: Transfer, kind: str) -> None:
        """Wait for a transfer, and count the time."""
        begin = time.perf_counter()
        transfer.wait()
        self.seconds[kind] = self.seconds.get(kind, 0.0) + time.perf_counter() - begin


class Together:
    """Several transfers as one."""

    def __init__(self, transfers: Sequence[Transfer]) -> None:
        self._transfers = transfers

    def wait(self) -> None:
        for transfer in self._transfers:
            transfer.wait()

    @property
    def done(self) -> bool:
        return all(transfer.done for transfer in self._transfers)


class Workspace:
    """A slab in which every block is given back before long: whoever needs room waits for what is leaving."""

    def __init__(self, size: int, device: torch.device, clock: Clock) -> None:
        self.slab, self.clock = Slab(size, device), clock
        self._leaving: deque[tuple[Block, Transfer]] = deque()

    def take(self, size: int, kind: str) -> Block:
        """A block, as soon as there is one; `kind` is what it is for."""
        while self._leaving and self._leaving[0][1].done:
            self._give_first(kind)
        while (block := self.slab.take(size)) is None:
            if not self._leaving:
                raise AssertionError(f"{size} bytes wanted, and {self.slab.taken} of {self.slab.size} are in use")
            self._give_first(kind)
        return block

    def give(self, block: Block) -> None:
        """Give a block back at once."""
        self.slab.give(block)

    def give_after(self, block: Block, transfer: Transfer) -> None:
        """Give a block back when what is written from it has left."""
        self._leaving.append((block, transfer))

    def drain(self) -> None:
        """Wait for all that is leaving."""
        while self._leaving:
            self._give_first("drain")

    def _give_first(self, kind: str) -> None:
        block, transfer = self._leaving.popleft()
        try:
            self.clock.wait(transfer, kind)
        finally:
            self.slab.give(block)
