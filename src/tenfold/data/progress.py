"""How preparing shows where it is: a bar on a terminal, plain lines elsewhere, nothing when it is not wanted."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn
from rich.progress import Progress as RichProgress

_SECONDS_BETWEEN_LINES = 5.0

Advance = Callable[[int, int, int], None]
"""Called with the bytes, documents and tokens done since the last call."""


class Progress:
    """Notes and phases of a long task, on standard error."""

    def __init__(self, show: bool) -> None:
        self._show = show
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """One line that stays."""
        if self._show:
            self._console.print(text, markup=False)

    @contextlib.contextmanager
    def timed(self, text: str) -> Iterator[None]:
        """A line that stays before something that takes a while, and one with its seconds after."""
        self.note(text)
        start = time.monotonic()
        yield
        self.note(f"done in {time.monotonic() - start:.1f} s")

    @contextlib.contextmanager
    def phase(
        self, name: str, total_bytes: int | None = None, before: tuple[int, int, int] = (0, 0, 0)
    ) -> Iterator[Advance]:
        """A phase over about `total_bytes` of text (None: not known), of which an earlier call did `before`."""
        start, told = time.monotonic(), time.monotonic()
        done = list(before)

        def rate() -> str:
            seconds = max(time.monotonic() - start, 1e-9)
            return f", {(done[2] - before[2]) / seconds:,.0f} tokens/s" if done[2] else ""

        def line(at_end: bool = False) -> str:
            of = f" of {total_bytes / 1e6:,.1f}" if total_bytes and not at_end else ""
            tokens = f", {done[2]:,} tokens" if done[2] else ""
            return f"{name}: {done[0] / 1e6:,.1f}{of} MB, {done[1]:,} documents{tokens}{rate()}"

        with contextlib.ExitStack() as stack:
            bar = None
            if self._show and sys.stderr.isatty():
                columns = (
                    TextColumn("{task.description}"),
                    BarColumn(),
                    DownloadColumn(),
                    TextColumn("{task.fields[state]}"),
                )
                bar = stack.enter_context(RichProgress(*columns, console=self._console, transient=True))
                task = bar.add_task(name, total=total_bytes, completed=done[0], state="")

            def advance(text_bytes: int, documents: int, tokens: int) -> None:
                nonlocal told
                done[:] = done[0] + text_bytes, done[1] + documents, done[2] + tokens
                if bar is not None:
                    bar.update(task, advance=text_bytes, state=f"{done[1]:,} docs{rate()}")
                elif self._show and time.monotonic() - told > _SECONDS_BETWEEN_LINES:
                    told = time.monotonic()
                    self.note(line())

            yield advance
        self.note(f"{line(at_end=True)} ({time.monotonic() - start:.1f} s)")
