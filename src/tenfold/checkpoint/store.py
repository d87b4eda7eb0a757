"""Checkpoints on disk: safetensors and JSON, written whole or not at all, checked when read.

A checkpoint is a folder `step-00000500` with `weights.safetensors`, `optimizer.safetensors` and `manifest.json`,
which holds the run's place, the sharing pattern, the length and SHA-256 of both files, and its own SHA-256. Names
are canonical by layer; a shared block is stored once, under the first layer that uses it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from tenfold.checkpoint.tensors import Stored, write_tensors
from tenfold.errors import TenfoldError

FORMAT = 1
WEIGHTS, OPTIMIZER = "weights.safetensors", "optimizer.safetensors"
_NAME = re.compile(r"step-(\d{8,})")


def save_checkpoint(
    folder: Path,
    step: int,
    weights: Mapping[str, Tensor | Stored],
    optimizer: Mapping[str, Tensor | Stored],
    place: dict[str, Any],
) -> Path:
    """Write the checkpoint of `step` into `folder` and return its path.

    Files go to a temporary folder and to the disk itself before the folder gets its name, so whatever happens, what
    has the name is whole. Raises TenfoldError, leaving nothing behind, when the disk is full or cannot be written.
    """
    final = folder / f"step-{step:08d}"
    temporary = folder / f".writing-{final.name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".writing-*"):
            shutil.rmtree(leftover)
        write_checkpoint(temporary, step, weights, optimizer, place)
        replaced = folder / f".writing-over-{final.name}"
        if final.exists():  # the same step again, after a resume: out of the way at once, since removing takes time
            final.rename(replaced)
        temporary.rename(final)
        flush(folder)
        shutil.rmtree(replaced, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        kept = latest_checkpoint(folder, lambda _: None) if folder.is_dir() else None
        raise TenfoldError(
            f"cannot write the checkpoint of step {step} in {folder}: {error}. "
            + (f"The last whole checkpoint is {kept}." if kept else "There is no earlier checkpoint.")
        ) from None
    return final


def write_checkpoint(
    folder: Path,
    step: int,
    weights: Mapping[str, Tensor | Stored],
    optimizer: Mapping[str, Tensor | Stored],
    place: dict[str, Any],
    advance: Callable[[int], None] = lambda _: None,
) -> None:
    """Write a checkpoint's files, to the disk itself, into `folder`, which must be new and of a name that no one reads.

    Tensors are had from their device, and written, piece by piece; `advance` is told of the bytes. Raises OSError,
    before anything is written where the disk has too little room.
    """
    contents = {
        name: {key: Stored.of(tensor) for key, tensor in tensors.items()}
        for name, tensors in ((WEIGHTS, weights), (OPTIMIZER, optimizer))
    }
    needed = sum(stored.bytes for tensors in contents.values() for stored in tensors.values())
    if needed > (free := shutil.disk_usage(folder.parent).free):
        raise OSError(f"{needed} bytes needed, {free} free")
    folder.mkdir()
    files = {name: write_tensors(folder / name, tensors, advance) for name, tensors in contents.items()}
    manifest = {"format": FORMAT, "step": step, **place, "files": files}
    manifest["sha256"] = _manifest_digest(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    for path in [*folder.iterdir(), folder]:
        flush(path)


def load_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """Manifest, weights and optimizer state of a checkpoint whose files are all as they were written."""
    manifest = read_manifest(path)
    return manifest, load_file(path / WEIGHTS), load_file(path / OPTIMIZER)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, after its files are checked; raises TenfoldError that names what is damaged."""
    try:
        manifest: dict[str, Any] = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TenfoldError(f"{path} is not a checkpoint: it has no manifest.json") from None
    except (ValueError, OSError) as error:
        raise TenfoldError(f"{path / 'manifest.json'} is damaged: {error}") from None
    if not isinstance(manifest, dict):
        raise TenfoldError(f"{path / 'manifest.json'} is damaged: it is no JSON object")
    if manifest.get("format", FORMAT) != FORMAT:
        raise TenfoldError(f"{path} has checkpoint format {manifest['format']}; this Tenfold reads format {FORMAT}")
    if manifest.get("sha256") != _manifest_digest(manifest):
        raise TenfoldError(f"{path / 'manifest.json'} is damaged: its SHA-256 is not the one written in it")
    for name, told in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise TenfoldError(f"{file} is missing")
        if file.stat().st_size != told["bytes"]:
            raise TenfoldError(f"{file} is damaged: it has {file.stat().st_size} bytes, not {told['bytes']}")
        if _digest(file) != told["sha256"]:
            raise TenfoldError(f"{file} is damaged: its SHA-256 is not the one written with it")
    return manifest


def list_checkpoints(folder: Path) -> list[Path]:
    """All checkpoints by step, oldest first, unchecked."""
    found = [path for path in folder.glob("step-*") if path.is_dir() and _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def latest_checkpoint(folder: Path, warn: Callable[[str], None]) -> Path | None:
    """The newest whole checkpoint; damaged ones are told to `warn` and passed over."""
    for path in reversed(list_checkpoints(folder)):
        try:
            read_manifest(path)
        except TenfoldError as error:
            warn(f"skipping a damaged checkpoint: {error}")
        else:
            return path
    return None


def retire_checkpoints(folder: Path, step: int, keep: int, protected: set[int]) -> None:
    """Remove all but the newest `keep` checkpoints up to `step`, which was just saved, and those in `protected`.

    A later one is damaged, or the run would have gone on from it: it takes nobody's place among the newest.
    """
    steps = {int(path.name.removeprefix("step-")): path for path in list_checkpoints(folder)}
    for old in [number for number in steps if number <= step][:-keep]:
        if old not in protected:
            shutil.rmtree(steps[old])


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _manifest_digest(manifest: dict[str, Any]) -> str:
    told = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def flush(path: Path) -> None:
    """Have a file or folder on the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
