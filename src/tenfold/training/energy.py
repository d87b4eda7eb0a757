"""The run's account of energy: joules so far, over all its processes, and what they come to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from tenfold.hardware.carbon import Grid
from tenfold.hardware.cgroup import ROOT
from tenfold.hardware.energy import Meter, open_meter


class Account(Protocol):
    """Where the joules are kept between processes: a part of the run's place. None: some were not metered."""

    joules: float | None
    joules_before: float | None  # when the stage began
    energy_source: str | None


class Ledger:
    """Reads the machine's meter into the run's place, and says what the metrics say of energy.

    Nothing is said of a run any part of which was not metered. A run of which any part is an estimate is an estimate.
    """

    def __init__(self, grid: Grid | None) -> None:
        self._grid = grid
        self._meter: Meter | None = None
        self._read = 0.0  # joules of this process that are in the account
        self._last: tuple[float, int] | None = None  # joules and tokens when `window` was last asked

    @contextmanager
    def open(
        self,
        device: torch.device,
        watts: float | None,
        account: Account,
        note: Callable[[str], None],
        root: Path = ROOT,
    ) -> Iterator[None]:
        """Meter while this is open; `account` goes on from what it holds."""
        self._meter = open_meter(device, watts, note, root)
        if self._meter is None:
            account.joules = None
        elif account.joules is not None:
            source, former = self._meter.source, account.energy_source
            if former not in (None, source):
                note(f"energy: counted by {former} so far, and now by {source}")
                source = "estimate" if "estimate" in (former, source) else f"{former}, {source}"
            account.energy_source = source
        else:
            note("energy: not counted, for a part of this run was not metered")
        try:
            yield
        finally:
            if self._meter is not None:
                self.read(account)
                self._meter.close()

    def read(self, account: Account) -> None:
        """Bring `account` up to now."""
        if self._meter is not None and account.joules is not None:
            now = self._meter.joules()
            account.joules += now - self._read
            self._read = now

    def so_far(self, account: Account) -> dict[str, Any]:
        """`joules` of the run, for every event that has a place."""
        return {} if account.joules is None else {"joules": account.joules}

    def window(self, account: Account, tokens: int) -> dict[str, Any]:
        """For a `step` event: `joules_per_token` since the one before, CO2 so far, and how they were counted."""
        if account.joules is None:
            return {}
        last, self._last = self._last, (account.joules, tokens)
        event: dict[str, Any] = {}
        if last is not None and tokens > last[1]:
            event["joules_per_token"] = (account.joules - last[0]) / (tokens - last[1])
        return event | self._co2(account.joules) | {"energy_source": account.energy_source}

    def of_stage(self, account: Account, tokens: int) -> dict[str, Any]:
        """For the closing numbers of a stage: its joules, validation and checkpoints included, and those of a token."""
        if account.joules is None or account.joules_before is None:
            return {}
        joules = account.joules - account.joules_before
        return {"joules": joules, "joules_per_token": joules / tokens}

    def closing(self, account: Account, tokens: int) -> dict[str, Any]:
        """For the `end` event: joules a token over the whole run, CO2 and the factor it was reckoned by."""
        if account.joules is None:
            return {}
        event = {"joules_per_token": account.joules / tokens, "energy_source": account.energy_source}
        if self._grid is not None:
            event |= {
                "carbon_intensity": self._grid.grams_per_kwh,
                "pue": self._grid.pue,
                "carbon_stated_by": self._grid.stated_by,
            }
        return event | self._co2(account.joules)

    def _co2(self, joules: float) -> dict[str, Any]:
        return {} if self._grid is None else {"co2_kg": self._grid.co2_kg(joules)}
