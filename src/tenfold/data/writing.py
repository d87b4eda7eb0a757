"""Writing token shards: bounded files, a folder that appears whole or not at all, and full disks told clearly."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from tenfold.data.shards import ShardEntry
from tenfold.errors import TenfoldError

SHARD_TOKENS = 128 * 1024 * 1024
"""A shard is closed before it passes this many tokens."""


class _HashedFile:
    """A file whose sha256 is taken while it is written."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("xb")
        self._digest = hashlib.sha256()

    def write(self, array: npt.NDArray[np.generic]) -> None:
        content = array.tobytes()
        self._file.write(content)
        self._digest.update(content)

    def close(self) -> str:
        """Bring the file to the disk; its sha256."""
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
        return self._digest.hexdigest()


class ShardWriter:
    """Appends documents to the shards of one split."""

    def __init__(self, folder: Path, split: str, dtype: str) -> None:
        self._folder = folder
        self._split = split
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._entries: list[ShardEntry] = []
        self._files: tuple[_HashedFile, _HashedFile] | None = None
        self._tokens = self._documents = self._text_bytes = self._max_token = 0

    def add(self, tokens: npt.NDArray[np.uint32], lengths: npt.NDArray[np.int64], text_bytes: int) -> None:
        """Append documents of `lengths` tokens that lie end to end in `tokens`; they stay in one shard."""
        if not len(lengths):
            return
        if self._files is not None and self._tokens + len(tokens) > SHARD_TOKENS:
            self._close_shard()
        if self._files is None:
            self._files = (_HashedFile(self._folder / self._name("bin")), _HashedFile(self._folder / self._name("idx")))
        starts = self._tokens + np.cumsum(lengths) - lengths
        self._files[0].write(tokens.astype(self._dtype))
        self._files[1].write(starts.astype("<i8"))
        self._tokens += len(tokens)
        self._documents += len(lengths)
        self._text_bytes += text_bytes
        self._max_token = max(self._max_token, int(tokens.max()))

    def close(self) -> list[ShardEntry]:
        """Finish the last shard; the index entries of all."""
        if self._files is not None:
            self._close_shard()
        return self._entries

    def _name(self, suffix: str) -> str:
        return f"{self._split}-{len(self._entries):05d}.{suffix}"

    def _close_shard(self) -> None:
        assert self._files is not None
        sha256, documents_sha256 = (file.close() for file in self._files)
        entry = ShardEntry(
            file=self._name("bin"),
            documents_file=self._name("idx"),
            tokens=self._tokens,
            documents=self._documents,
            text_bytes=self._text_bytes,
            max_token=self._max_token,
            sha256=sha256,
            documents_sha256=documents_sha256,
        )
        self._entries.append(entry)
        self._files = None
        self._tokens = self._documents = self._text_bytes = self._max_token = 0


def write_file(path: Path, content: bytes) -> None:
    """Write a small file and bring it to the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def appearing_whole(out: Path) -> Iterator[Path]:
    """A folder beside `out` to write in; it gets the name `out` when the block ends well and is removed otherwise.

    What a killed process left there is cleared; a process that is still at work there is an error.
    """
    whole = out.absolute()
    partial = whole.parent / f".{whole.name}.partial"
    with telling_disk_faults(out):
        partial.mkdir(parents=True, exist_ok=True)
        lock = os.open(partial, os.O_RDONLY)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise TenfoldError(f"another process is preparing {out} now; wait for it, then run again") from None
            try:
                _clear(partial)
                yield partial
                os.fsync(lock)
                partial.rename(whole)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
        finally:
            os.close(lock)


def _clear(folder: Path) -> None:
    for entry in folder.iterdir():
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
