"""What can be prepared: a file or folder of text, the Python library, a recipe. Each is a stream of documents."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tenfold.data.progress import Progress
from tenfold.data.reading import PACKED_SUFFIXES, RECORD_SUFFIXES, TEXT_SUFFIXES, plain_suffix, read_documents, reading
from tenfold.data.recipes import fetch_recipe
from tenfold.data.shards import holds_shards
from tenfold.data.stdlib import stdlib_documents, stdlib_fingerprint
from tenfold.errors import TenfoldError

HASHED_BYTES = 64 * 1024 * 1024
"""Sources up to this size are told apart by their content, larger ones by path, size and time of change."""


@dataclass(frozen=True)
class Source:
    """A text to prepare. `documents()` streams it from the start each time it is called."""

    name: str
    fingerprint: str
    documents: Callable[[], Iterator[str]]
    about: dict[str, Any] = field(default_factory=dict)
    """What the index records besides name and fingerprint."""


def readable_name(source: str) -> str:
    """A short name for folders: `recipe-three-kingdoms`, `corpus`, `notes.txt`."""
    last = source if source.startswith("recipe:") else Path(source).resolve().name
    return re.sub(r"[^\w.-]+", "-", last).strip("-.") or "text"


def open_source(source: str, text_field: str, recipe_folder: Path, progress: Progress) -> Source:
    """The source that `source` names; a recipe is fetched into `recipe_folder` unless it is there."""
    if source == "python-stdlib":
        return Source(source, stdlib_fingerprint(), stdlib_documents, {"python": platform.python_version()})
    if source.startswith("recipe:"):
        path, packages = fetch_recipe(source.removeprefix("recipe:"), recipe_folder, progress)
        return Source(source, _hash([path], path.parent), lambda: read_documents(path, "text"), {"packages": packages})
    path = Path(source).expanduser()
    with reading(path):
        try:
            path.stat()
        except FileNotFoundError:
            raise TenfoldError(
                f"there is no file or folder {path}; data.path (SOURCE of `tenfold prepare`) is text, python-stdlib or "
                "recipe:NAME"
            ) from None
    if holds_shards(path):
        raise TenfoldError(f"{path} holds token shards already; give the text they were made from")
    files = _folder_files(path, progress) if path.is_dir() else [_checked_file(path)]

    def documents() -> Iterator[str]:
        for file in files:
            yield from read_documents(file, text_field)

    return Source(source, _hash(files, path if path.is_dir() else path.parent), documents)


def _checked_file(path: Path) -> Path:
    if not path.is_file():
        raise TenfoldError(f"{path} is no regular file; text is read twice, so write it to a file first")
    if path.stat().st_size == 0:
        raise TenfoldError(f"{path} is empty; give a file with text")
    if plain_suffix(path) == ".json":
        raise TenfoldError(f"{path} is one JSON value; write it as JSON lines (one object on each line) named .jsonl")
    if plain_suffix(path) == ".parquet":
        raise TenfoldError(f"{path} is Parquet, which is not read; write its text column as JSON lines (.jsonl.zst)")
    return path


def _folder_files(folder: Path, progress: Progress) -> list[Path]:
    """The text files under a folder in the order of their relative paths; hidden ones are left out."""

    def fail(error: OSError) -> None:
        with reading(Path(error.filename or folder)):
            raise error

    files, skipped = [], 0
    for where, folders, names in os.walk(folder, onerror=fail):
        skipped += sum(Path(where, name).is_symlink() for name in folders)
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(where, name)
            if not name.startswith(".") and path.is_file() and plain_suffix(path) in (*TEXT_SUFFIXES, *RECORD_SUFFIXES):
                files.append(path)
            else:
                skipped += 1
    known = f"{' '.join((*TEXT_SUFFIXES, *RECORD_SUFFIXES))}, each also with {' or '.join(PACKED_SUFFIXES)}"
    if not files:
        raise TenfoldError(f"{folder} holds no text: {skipped} files, none of them {known}")
    if skipped:
        progress.note(f"skipped {skipped} of {skipped + len(files)} files: hidden, links to folders, or not {known}")
    return sorted(files, key=lambda path: path.relative_to(folder).parts)


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
