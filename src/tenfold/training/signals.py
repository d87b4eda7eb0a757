"""SIGINT and SIGTERM ask a run to stop."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any


class Signals:
    """While open, a signal's name goes to `stop`; a second one stops at once."""

    def __init__(self, stop: Callable[[str], None]) -> None:
        self._stop = stop
        self._former: dict[int, Any] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._former[number] = signal.signal(number, self._ask)

    def __exit__(self, *_: object) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)

    def _ask(self, number: int, _frame: FrameType | None) -> None:
        self._stop(signal.Signals(number).name)
        signal.signal(number, self._former[number])
