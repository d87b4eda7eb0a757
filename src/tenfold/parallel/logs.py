"""A file for each rank's output: the terminal is rank 0's alone."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any, TextIO

LOGS = "logs"


class RankLog:
    """Standard output and error of this process, in `RUN/logs/rank-00003.log`; rank 0's go to the terminal as well.

    Until the run directory is known they go to a file without a name, which the log then begins with.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.folder: Path | None = None
        self.terminal: TextIO = os.fdopen(os.dup(2), "w", buffering=1)
        self.file: IO[bytes] = tempfile.TemporaryFile("a+b", buffering=0)  # noqa: SIM115
        if rank:
            self._redirect()
        else:
            sys.stderr = _Both(sys.stderr, self)
            if not sys.stdout.isatty():  # a live display is nothing to keep
                sys.stdout = _Both(sys.stdout, self)
        faulthandler.enable(self.file)

    def open(self, run: Path, header: str) -> Path:
        """Go on in the run directory's file, after a line that says when and where this process began."""
        self.folder = run / LOGS
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"rank-{self.rank:05d}.log"
        earlier, self.file = self.file, path.open("ab", buffering=0)
        self.write(f"=== {time.strftime('%Y-%m-%d %H:%M:%S %z')} {header}")
        earlier.seek(0)
        self.file.write(earlier.read())
        faulthandler.enable(self.file)
        if self.rank:
            self._redirect()
        earlier.close()
        return path

    def write(self, text: str) -> None:
        """A line of the log alone; a disk that is full keeps nobody from ending in order."""
        with contextlib.suppress(OSError):
            self.file.write(f"{text}\n".encode())

    def tell(self, text: str) -> None:
        """A line of the terminal and the log, of any rank."""
        print(text, file=self.terminal, flush=True)

    def _redirect(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        for number in (1, 2):
            os.dup2(self.file.fileno(), number)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


class _Both:
    """A stream whose text goes to the log, too."""

    def __init__(self, stream: Any, log: RankLog) -> None:
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        self._log.file.write(text.encode(errors="replace"))
        written: int = self._stream.write(text)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
