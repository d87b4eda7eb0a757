"""Writing token shards: bounded files, a folder that appears whole or not at all, and full disks told clearly."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from tenfold.data.shards import ShardEntry
from tenfold.errors import TenfoldError

SHARD_TOKENS = 128 * 1024 * 1024
"""A shard is closed before it passes this many tokens."""


class OpenShard(BaseModel):
    """What a shard that is still written holds so far."""

    tokens: int = 0
    documents: int = 0
    text_bytes: int = 0
    max_token: int = 0


class WriterState(BaseModel):
    """What a ShardWriter wrote so far: enough to go on from there."""

    split: str
    dtype: str
    closed: list[ShardEntry] = []
    open: OpenShard | None = None

    def shards(self) -> list[ShardEntry | OpenShard]:
        """All shards, the open one too."""
        return [*self.closed, *([] if self.open is None else [self.open])]

    def files(self) -> dict[str, int]:
        """The files with the bytes that belong to them."""
        itemsize = np.dtype(self.dtype).itemsize
        sizes: dict[str, int] = {}
        for shard in self.closed:
            sizes |= {shard.file: shard.tokens * itemsize, shard.documents_file: shard.documents * 8}
        if self.open is not None:
            sizes |= {self.name("bin"): self.open.tokens * itemsize, self.name("idx"): self.open.documents * 8}
        return sizes

    def name(self, suffix: str) -> str:
        """The name of a file of the shard that is open or comes next."""
        return f"{self.split}-{len(self.closed):05d}.{suffix}"

    def is_whole(self, folder: Path) -> bool:
        """Whether all that is spoken of lies in the folder."""
        try:
            return all((folder / name).stat().st_size >= size for name, size in self.files().items())
        except OSError:
            return False


class _HashedFile:
    """A file whose sha256 is taken while it is written; with `kept`, one that goes on after so many bytes."""

    def __init__(self, path: Path, kept: int | None = None) -> None:
        self._digest = hashlib.sha256()
        if kept is None:
            self._file: BinaryIO = path.open("xb")
            return
        self._file = path.open("r+b")
        self._file.truncate(kept)
        while block := self._file.read(1024 * 1024):
            self._digest.update(block)

    def write(self, array: npt.NDArray[np.generic]) -> None:
        content = array.tobytes()
        self._file.write(content)
        self._digest.update(content)

    def flush(self) -> None:
        """Bring what is written to the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> str:
        """Bring the file to the disk; its sha256."""
        with self._file:
            self.flush()
        return self._digest.hexdigest()


class ShardWriter:
    """Appends documents to the shards of one split, from the beginning or from a state it had before."""

    def __init__(self, folder: Path, state: WriterState) -> None:
        self._folder = folder
        self._state = state.model_copy(deep=True)
        self._dtype = np.dtype(state.dtype).newbyteorder("<")
        self._files: tuple[_HashedFile, _HashedFile] | None = None
        if self._state.open is not None:
            sizes = self._state.files()
            names = (self._state.name("bin"), self._state.name("idx"))
            self._files = (
                _HashedFile(folder / names[0], sizes[names[0]]),
                _HashedFile(folder / names[1], sizes[names[1]]),
            )

    def add(self, tokens: npt.NDArray[np.uint32], lengths: npt.NDArray[np.int64], text_bytes: int) -> None:
        """Append documents of `lengths` tokens that lie end to end in `tokens`; they stay in one shard."""
        if not len(lengths):
            return
        if self._state.open is not None and self._state.open.tokens + len(tokens) > SHARD_TOKENS:
            self._close_shard()
        if self._files is None:
            self._files = (
                _HashedFile(self._folder / self._state.name("bin")),
                _HashedFile(self._folder / self._state.name("idx")),
            )
            self._state.open = OpenShard()
        shard = self._state.open
        assert shard is not None
        starts = shard.tokens + np.cumsum(lengths) - lengths
        self._files[0].write(tokens.astype(self._dtype))
        self._files[1].write(starts.astype("<i8"))
        shard.tokens += len(tokens)
        shard.documents += len(lengths)
        shard.text_bytes += text_bytes
        shard.max_token = max(shard.max_token, int(tokens.max()))

    def save(self) -> WriterState:
        """Bring all to the disk; the state to go on from."""
        for file in self._files or ():
            file.flush()
        return self._state.model_copy(deep=True)

    def close(self) -> list[ShardEntry]:
        """Finish the last shard; the index entries of all."""
        if self._files is not None:
            self._close_shard()
        return self._state.closed

    def _close_shard(self) -> None:
        assert self._files is not None
        assert self._state.open is not None
        sha256, documents_sha256 = (file.close() for file in self._files)
        entry = ShardEntry(
            file=self._state.name("bin"),
            documents_file=self._state.name("idx"),
            **self._state.open.model_dump(),
            sha256=sha256,
            documents_sha256=documents_sha256,
        )
        self._state.closed.append(entry)
        self._files = self._state.open = None


def write_file(path: Path, content: bytes) -> None:
    """Write a small file and bring it to the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def partial_folder(out: Path) -> Path:
    """Where `out` is written until it is whole."""
    whole = out.absolute()
    return whole.parent / f".{whole.name}.partial"


@contextlib.contextmanager
def appearing_whole(out: Path, journal: str | None = None) -> Iterator[Path]:
    """A folder beside `out` to write in; it gets the name `out` when the block ends well and is removed otherwise.

    What a killed process left there is cleared; a process that is still at work there is an error. With `journal`, a
    folder in which a file of that name lies is neither cleared nor removed: it is work to go on with.
    """
    partial = partial_folder(out)

    def worth_keeping() -> bool:
        return journal is not None and (partial / journal).is_file()

    with telling_disk_faults(out):
        partial.mkdir(parents=True, exist_ok=True)
        lock = os.open(partial, os.O_RDONLY)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise TenfoldError(f"another process is preparing {out} now; wait for it, then run again") from None
            try:
                if not worth_keeping():
                    clear(partial)
                yield partial
                os.fsync(lock)
                partial.rename(out.absolute())
            except BaseException:
                if not worth_keeping():
                    shutil.rmtree(partial, ignore_errors=True)
                raise
        finally:
            os.close(lock)


def clear(folder: Path, keep: Collection[str] = ()) -> None:
    """Remove all that lies in the folder but what `keep` names."""
    for entry in folder.iterdir():
        if entry.name in keep:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


@contextlib.contextmanager
def telling_disk_faults(out: Path, bytes_needed: int = 0) -> Iterator[None]:
    """Turns a full or read-only disk into one clear error; `bytes_needed` is what the whole of `out` will take."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(next(path for path in (out, *out.absolute().parents) if path.exists())).free
            needed = f"it needs about {bytes_needed:,} bytes, " if bytes_needed else ""
            raise TenfoldError(
                f"the disk is full: {out} cannot be written ({needed}{free:,} are free there); make room or choose "
                "another folder"
            ) from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY):
            raise TenfoldError(
                f"{out} cannot be written: {error.strerror} ({error.filename}); choose another folder"
            ) from None
        raise
