"""The record of an unfinished preparation: what is done and safe on disk, so that a second call goes on from there.

It lies in the partial folder. It is written anew, flushed and renamed each time, after the token files it speaks of
were flushed; what they hold beyond it is cut off when it is taken up.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from tenfold.data.dedup import DIGEST_BYTES, SeenDocuments
from tenfold.data.shards import SplitName
from tenfold.data.survey import Tally
from tenfold.data.writing import WriterState, write_file

JOURNAL, DIGESTS = "journal.json", "seen.bin"


class Journal(BaseModel):
    """How far a preparation is."""

    model_config = ConfigDict(extra="forbid")

    key: str
    """Hash of the text's fingerprint and the options: of which preparation it is."""
    held_out_below: int
    expected: Tally | None = None
    """What a pass over the text found before; None where there was none."""
    read: Tally = Tally()
    """What was read up to `place`."""
    place: tuple[int, int] = (0, 0)
    writers: dict[SplitName, WriterState] = {}
    kept: int = 0
    """Documents whose digests lie in `seen.bin`, when duplicates are dropped."""
    dropped_documents: int = 0
    dropped_bytes: int = 0

    def write(self, folder: Path) -> None:
        """Bring it to the disk in place of the one before."""
        fresh = folder / f"{JOURNAL}.new"
        write_file(fresh, self.model_dump_json().encode())
        fresh.replace(folder / JOURNAL)
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def read_journal(folder: Path, key: str) -> Journal | None:
    """The journal of just this preparation, if the folder holds a whole one and all that it speaks of."""
    try:
        journal = Journal.model_validate_json((folder / JOURNAL).read_bytes())
        digests = (folder / DIGESTS).stat().st_size if journal.kept else 0
    except (OSError, ValidationError):
        return None
    whole = all(state.is_whole(folder) for state in journal.writers.values()) and digests >= journal.kept * DIGEST_BYTES
    return journal if journal.key == key and whole else None


class DigestFile:
    """The digests of the documents that were kept, on disk as in memory, so that duplicates are known after a stop."""

    def __init__(self, folder: Path, kept: int) -> None:
        self.seen = SeenDocuments()
        self._file = (folder / DIGESTS).open("ab")
        self._file.truncate(kept * DIGEST_BYTES)
        if kept:
            self.seen.restore(np.memmap(folder / DIGESTS, np.uint8, "r"))

    def write(self, digests: bytes) -> None:
        """Append digests."""
        self._file.write(digests)

    def flush(self) -> None:
        """Bring them to the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def forget(folder: Path) -> None:
    """Remove what only an unfinished preparation needs."""
    for name in (f"{JOURNAL}.new", DIGESTS, JOURNAL):
        with contextlib.suppress(FileNotFoundError):
            (folder / name).unlink()
