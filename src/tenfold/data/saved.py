"""Hugging Face datasets as `save_to_disk` leaves them: which Arrow files a folder is, and which split each is of.

A saved `Dataset` is a folder with `state.json`, which names its Arrow files in order, and `dataset_info.json`; a saved
`DatasetDict` is a folder with `dataset_dict.json`, which names its splits, and one saved `Dataset` for each.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tenfold.data.progress import Progress
from tenfold.data.reading import reading
from tenfold.data.shards import SplitName
from tenfold.errors import TenfoldError

_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"


def is_saved_dataset(folder: Path) -> bool:
    """Whether the folder is a saved Dataset or DatasetDict."""
    return (folder / _SPLITS).is_file() or ((folder / _STATE).is_file() and (folder / _INFO).is_file())


def saved_files(folder: Path, progress: Progress) -> list[tuple[Path, SplitName | None]]:
    """Its Arrow files in order, each with the split it belongs to; None where the documents decide.

    Of a DatasetDict, `train` and `validation` are taken as such; with no `validation`, some of `train` is held out as
    of any text. Other splits are left out, and told. Without `train` it is an error.
    """
    if not (folder / _SPLITS).is_file():
        return [(file, None) for file in _files(folder)]
    splits = _json(folder / _SPLITS).get("splits")
    if not isinstance(splits, list) or not all(isinstance(name, str) for name in splits):
        raise TenfoldError(f"{folder / _SPLITS} is damaged: it has no list `splits`; save the dataset again")
    if "train" not in splits:
        known = ", ".join(splits) or "none"
        raise TenfoldError(
            f"{folder} is a DatasetDict without a split `train` (it has {known}): give the folder of one split, such "
            f"as {folder / (splits[0] if splits else 'train')}"
        )
    has_validation = "validation" in splits
    files: list[tuple[Path, SplitName | None]] = []
    files += [(file, "train" if has_validation else None) for file in _files(folder / "train")]
    if has_validation:
        files += [(file, "validation") for file in _files(folder / "validation")]
        progress.note(f"{folder}: train and validation are taken as the dataset has them")
    if others := [name for name in splits if name not in ("train", "validation")]:
        progress.note(f"{folder}: left out {', '.join(others)}; only train and validation are read")
    return files


def _files(folder: Path) -> list[Path]:
    state = _json(folder / _STATE)
    if state.get("_indices_data_files"):
        raise TenfoldError(
            f"{folder} is saved with its rows in another order than its files (an indices mapping): load it with "
            "`datasets`, call flatten_indices() and save it again"
        )
    try:
        names = [entry["filename"] for entry in state["_data_files"]]
    except (KeyError, TypeError):
        raise TenfoldError(f"{folder / _STATE} is damaged: it names no data files; save the dataset again") from None
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise TenfoldError(f"{folder / _STATE} names {name!r}, which is not in {folder}; save the dataset again")
    return [folder / name for name in names]


def _json(file: Path) -> dict[str, Any]:
    with reading(file):
        content = file.read_bytes()
    try:
        found = json.loads(content)
    except ValueError as error:
        raise TenfoldError(f"{file} is damaged: {error}; save the dataset again") from None
    if not isinstance(found, dict):
        raise TenfoldError(f"{file} is damaged: it holds no object; save the dataset again")
    return found
