"""What was foreseen of a stage beside what is measured of it: seconds of a step, and the most memory of a rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tenfold.hardware.memory import forget_peak, peak_memory_bytes
from tenfold.planning.foreseen import Foreseen
from tenfold.reporting.placement import device_bytes

_INTERVALS = 2
"""So many lines of metrics are followed by a comparison, and the stage's last step is."""

_NOTHING = 2**24
"""Bytes of a peak above what is in use that are no matter: pages are counted in batches."""


def foreseen_by(planned: Foreseen | None, placed: Mapping[str, Any] | None) -> Foreseen | None:
    """What a stage is held against: a plan, which knows of all a step does, else the forecast of its placement."""
    if planned is not None or placed is None:
        return planned
    return Foreseen(placed["forecast"]["seconds"], device_bytes(placed), "offload")


class Memory:
    """The most memory that tensors of this process take in a stage, as far as it can be known.

    On a CPU it is by how much the resident set has grown since before there was a model, with what the C library keeps
    free for later.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = self.begin()

    def begin(self) -> int:
        """A stage begins; the bytes in use now."""
        now = forget_peak(self._device)
        peak = peak_memory_bytes(self._device)
        self._stale = peak if peak - now > _NOTHING else 0  # a system that forgets no peak has one of before
        return now

    @property
    def most(self) -> int | None:
        """Bytes; None: not known."""
        peak = peak_memory_bytes(self._device)
        return peak - self._before if peak > self._stale else None


class Outlook:
    """The steps of one stage in this process, beside what was foreseen of them. The first is not counted: in it
    libraries set themselves up."""

    def __init__(self, foreseen: Foreseen) -> None:
        self.foreseen = foreseen
        self._first, self._steps, self._seconds, self._told = True, 0, 0.0, 0

    def step(self, seconds: float) -> None:
        """A step took so long."""
        if not self._first:
            self._steps, self._seconds = self._steps + 1, self._seconds + seconds
        self._first = False

    def is_due(self, last: bool) -> bool:
        """Whether the two are to be told now: at the first lines of metrics, and behind the stage's last step."""
        if not self._steps or (not last and self._told >= _INTERVALS):
            return False
        self._told += 1
        return True

    def told(self, most: int | None, last: bool, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What the event `measured` has; `most` bytes of memory were used by the rank that used most, `last`: the stage
        is done."""
        measured = {"steps": self._steps, "seconds": self._seconds / self._steps, "device_bytes": most}
        return {"last": last, "foreseen": self.foreseen.dump(), "measured": {**(more or {}), **measured}}
