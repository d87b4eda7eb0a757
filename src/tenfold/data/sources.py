"""What can be prepared: a file or folder of text, the Python library, a recipe. Each is parts that hold documents."""

from __future__ import annotations

import hashlib
import itertools
import os
import platform
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tenfold.data.arrow import COLUMN_SUFFIXES, read_column
from tenfold.data.progress import Progress
from tenfold.data.reading import PACKED_SUFFIXES, RECORD_SUFFIXES, TEXT_SUFFIXES, plain_suffix, read_text, reading
from tenfold.data.recipes import fetch_recipe
from tenfold.data.saved import is_saved_dataset, saved_files
from tenfold.data.shards import SplitName, holds_shards
from tenfold.data.stdlib import stdlib_documents, stdlib_fingerprint
from tenfold.errors import TenfoldError

HASHED_BYTES = 64 * 1024 * 1024
"""Sources up to this size are told apart by their content, larger ones by path, size and time of change."""


@dataclass(frozen=True)
class Part:
    """A stretch of documents that can be entered at its beginning, such as a file."""

    read: Callable[[int], Iterator[str]]
    """The documents without the first so many, from the start each time it is called."""
    split: SplitName | None = None
    """The split that all of them belong to; None: each document's text decides."""

    @classmethod
    def of(cls, documents: Callable[[], Iterable[str]], split: SplitName | None = None) -> Part:
        """A part that can only be read from its beginning."""
        return cls(lambda skip: itertools.islice(documents(), skip, None), split)


@dataclass(frozen=True)
class Source:
    """A text to prepare."""

    name: str
    fingerprint: str
    parts: list[Part]
    text_bytes: int | None = None
    """About how much text it is; None where that shows only when it is read (compressed files, columns)."""
    about: dict[str, Any] = field(default_factory=dict)
    """What the index records besides name and fingerprint."""


def readable_name(source: str) -> str:
    """A short name for folders: `recipe-three-kingdoms`, `corpus`, `notes.txt`."""
    last = source if source.startswith("recipe:") else Path(source).resolve().name
    return re.sub(r"[^\w.-]+", "-", last).strip("-.") or "text"


def open_source(source: str, text_field: str, recipe_folder: Path, progress: Progress) -> Source:
    """The source that `source` names; a recipe is fetched into `recipe_folder` unless it is there."""
    if source == "python-stdlib":
        about = {"python": platform.python_version()}
        return Source(source, stdlib_fingerprint(), [Part.of(stdlib_documents)], about=about)
    if source.startswith("recipe:"):
        path, packages = fetch_recipe(source.removeprefix("recipe:"), recipe_folder, progress)
        return Source(source, _hash([path], path.parent), [_part(path, "text")], about={"packages": packages})
    path = Path(source).expanduser()
    with reading(path):
        try:
            path.stat()
        except FileNotFoundError:
            raise TenfoldError(
                f"there is no file or folder {path}; a source (data.path, the path of one in data.mixture, SOURCE of "
                "`tenfold prepare`) is text, python-stdlib or recipe:NAME"
            ) from None
    if holds_shards(path):
        raise TenfoldError(f"{path} holds token shards already; give the text they were made from")
    root = path if path.is_dir() else path.parent
    found = _folder_files(path, progress) if path.is_dir() else [(_checked_file(path), None)]
    parts = [_part(file, text_field, split) for file, split in found]
    packed = any(file.suffix.lower() in (*PACKED_SUFFIXES, *COLUMN_SUFFIXES) for file, _ in found)
    text_bytes = None if packed else sum(file.stat().st_size for file, _ in found)
    return Source(source, _hash([file for file, _ in found], root), parts, text_bytes)


def _part(path: Path, text_field: str, split: SplitName | None = None) -> Part:
    read = read_column if path.suffix.lower() in COLUMN_SUFFIXES else read_text
    return Part(lambda skip: read(path, text_field, skip), split)


def _checked_file(path: Path) -> Path:
    if not path.is_file():
        raise TenfoldError(f"{path} is no regular file; text is read twice, so write it to a file first")
    if path.stat().st_size == 0:
        raise TenfoldError(f"{path} is empty; give a file with text")
    if plain_suffix(path) == ".json":
        raise TenfoldError(f"{path} is one JSON value; write it as JSON lines (one object on each line) named .jsonl")
    if plain_suffix(path) in COLUMN_SUFFIXES and path.suffix.lower() in PACKED_SUFFIXES:
        raise TenfoldError(f"{path} is compressed from outside; {plain_suffix(path)} is read as it is: unpack it first")
    return path


def _folder_files(folder: Path, progress: Progress) -> list[tuple[Path, SplitName | None]]:
    """The files with text under a folder in the order of their relative paths; hidden ones are left out.

    A saved dataset stands where its folder stands, with its files in its own order.
    """
    if is_saved_dataset(folder):
        return saved_files(folder, progress)

    def fail(error: OSError) -> None:
        with reading(Path(error.filename or folder)):
            raise error

    found, skipped = [], 0
    for where, folders, names in os.walk(folder, onerror=fail):
        skipped += sum(Path(where, name).is_symlink() for name in folders)
        folders[:] = [name for name in folders if not name.startswith(".")]
        saved = [name for name in folders if is_saved_dataset(Path(where, name)) and not Path(where, name).is_symlink()]
        folders[:] = [name for name in folders if name not in saved]
        found += [Path(where, name) for name in saved]
        for name in names:
            path = Path(where, name)
            if not name.startswith(".") and path.is_file() and is_text_file(path):
                found.append(path)
            else:
                skipped += 1
    packable = " ".join((*TEXT_SUFFIXES, *RECORD_SUFFIXES))
    known = f"{packable}, each also with {' or '.join(PACKED_SUFFIXES)}, or {' '.join(COLUMN_SUFFIXES)}"
    if not found:
        raise TenfoldError(f"{folder} holds no text: {skipped} files, none of them {known}")
    if skipped:
        progress.note(f"skipped {skipped} of {skipped + len(found)} files: hidden, links to folders, or not {known}")
    files: list[tuple[Path, SplitName | None]] = []
    for path in sorted(found, key=lambda path: path.relative_to(folder).parts):
        files += saved_files(path, progress) if path.is_dir() else [(path, None)]
    return files


def is_text_file(path: Path) -> bool:
    """Whether the name is that of a file whose text is read."""
    return plain_suffix(path) in (*TEXT_SUFFIXES, *RECORD_SUFFIXES) or path.suffix.lower() in COLUMN_SUFFIXES


def _hash(files: list[Path], root: Path) -> str:
    """sha256 over relative paths and content, or, for much data, size and time of change."""
    digest = hashlib.sha256()
    stats = []
    for path in files:
        with reading(path):
            stats.append(path.stat())
    by_content = sum(stat.st_size for stat in stats) <= HASHED_BYTES
    for path, stat in zip(files, stats, strict=True):
        if by_content:
            with reading(path), path.open("rb") as file:
                seen = hashlib.file_digest(file, "sha256").hexdigest()
        else:
            seen = f"{stat.st_size} {stat.st_mtime_ns}"
        digest.update(os.fsencode(f"{path.relative_to(root).as_posix()} {seen}\n"))
    return digest.hexdigest()
