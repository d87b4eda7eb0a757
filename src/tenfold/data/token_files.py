"""Token files that other programs wrote, and what their headers say: Megatron .bin/.idx, nanoGPT .bin, OLMo .npy.

- Megatron (`MMapIndexedDataset`, version 1): `X.bin` holds token ids end to end; `X.idx` holds, little-endian, the nine
  bytes `MMIDIDX\\0\\0`, version (uint64), dtype code (uint8), the number of sequences (uint64) and of document bounds
  (uint64), then each sequence's length in tokens (int32) and place in bytes (int64), then the bounds: the first
  sequence of each document, and at last the number of sequences (int64).
- nanoGPT: ids alone, uint16 unless told otherwise. llm.c and modded-nanoGPT put 256 int32 before them: a magic number
  that tells the dtype, the version, and the number of tokens.
- OLMo: ids alone, in files named .npy that are no NumPy files; real NumPy files of one dimension are read too.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from tenfold.data.reading import reading
from tenfold.data.shards import SplitName
from tenfold.data.sources import is_text_file
from tenfold.errors import TenfoldError

Layout = Literal["megatron", "nanogpt", "olmo"]
_MEGATRON = b"MMIDIDX\0\0"
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
_MEGATRON_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_LLMC_DTYPES = {20240520: "uint16", 20240801: "uint32"}
_LLMC_HEADER_BYTES = 256 * 4
_NUMPY = b"\x93NUMPY"
_VALIDATION = re.compile(r"(^|[_.-])(val|valid|validation)([_.-]|$)")
_ENTRIES_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class TokenFile:
    """Token ids that lie end to end in a file."""

    path: Path
    dtype: str
    offset_bytes: int
    tokens: int
    document_starts: npt.NDArray[np.int64] | None
    """Where documents begin, from 0 on; None where the file does not say."""
    split: SplitName | None
    """The split its name puts it in; None: not told."""


def find_token_files(path: Path) -> tuple[Layout, list[Path]] | None:
    """The token files that `path` names, a file, a prefix or a folder, in order; None if it names none.

    A folder with both text and .npy or .bin files is text, unless it holds a `train.bin` or a Megatron index.
    """
    if path.is_dir():
        return _in_folder(path)
    stem = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    if _is_megatron(_with(stem, ".idx")):
        return "megatron", [_with(stem, ".bin")]
    if path.is_file() and path.suffix in (".bin", ".npy"):
        return ("nanogpt" if path.suffix == ".bin" else "olmo"), [path]
    return None


def _in_folder(folder: Path) -> tuple[Layout, list[Path]] | None:
    found: dict[str, list[Path]] = {".idx": [], ".bin": [], ".npy": []}
    holds_text = False
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(where, name)
            if not name.startswith("."):
                holds_text = holds_text or (is_text_file(path) and not name.lower().startswith(("readme", "license")))
                found.get(path.suffix, []).append(path)
    for files in found.values():
        files.sort(key=lambda path: path.relative_to(folder).parts)
    if indexed := [_with(path.with_suffix(""), ".bin") for path in found[".idx"] if _is_megatron(path)]:
        return "megatron", indexed
    if found[".bin"] and (folder / "train.bin" in found[".bin"] or not holds_text):
        return "nanogpt", found[".bin"]
    return ("olmo", found[".npy"]) if found[".npy"] and not holds_text else None


def _with(stem: Path, suffix: str) -> Path:
    return stem.parent / (stem.name + suffix)


def _is_megatron(index: Path) -> bool:
    try:
        with index.open("rb") as file:
            return file.read(len(_MEGATRON)) == _MEGATRON
    except OSError:
        return False


def read_headers(layout: Layout, paths: Sequence[Path], dtype: str | None) -> list[TokenFile]:
    """What the files' headers and names say; `dtype` is that of files without one (None: uint16).

    Where some files' names hold `val`, `valid` or `validation` as a word and others' do not, those are the validation
    split. A TenfoldError names what is damaged, cut short, of a kind that holds no ids, or of another dtype.
    """
    read = {"megatron": _megatron, "nanogpt": _nanogpt, "olmo": _olmo}[layout]
    held_out = [_VALIDATION.search(path.stem) is not None for path in paths]
    files = []
    for path, is_held_out in zip(paths, held_out, strict=True):
        split: SplitName | None = None if len(set(held_out)) == 1 else "validation" if is_held_out else "train"
        with reading(path):
            files.append(read(path, dtype, split))
        if not files[-1].tokens:
            raise TenfoldError(f"{path} holds no tokens; leave it out")
        if files[-1].dtype != files[0].dtype:
            raise TenfoldError(
                f"{path} is of {files[-1].dtype} and {paths[0]} of {files[0].dtype}: files that are read together are "
                "of one dtype; give them as two sources, or write one anew"
            )
    return files


def _megatron(path: Path, dtype: str | None, split: SplitName | None) -> TokenFile:
    index = path.with_suffix(".idx")
    size = index.stat().st_size
    with index.open("rb") as file:
        header = file.read(_MEGATRON_HEADER.size)
    if len(header) < _MEGATRON_HEADER.size:
        raise TenfoldError(f"{index} is cut short within its header: copy or make it again")
    _, version, code, sequences, bounds = _MEGATRON_HEADER.unpack(header)
    if version != 1:
        raise TenfoldError(f"{index} is an index of version {version}; version 1 is read")
    if code not in _MEGATRON_DTYPES:
        known = ", ".join(f"{code} {name}" for code, name in _MEGATRON_DTYPES.items())
        raise TenfoldError(f"{index} has dtype code {code}; codes of token ids are {known}")
    _check_dtype(index, _MEGATRON_DTYPES[code], dtype)
    expected = _MEGATRON_HEADER.size + 12 * sequences + 8 * bounds
    # Multimodal files have a mode of one byte for each sequence after this.
    if size not in (expected, expected + sequences):
        raise TenfoldError(f"{index} has {size:,} bytes, its header says {expected:,}: copy or make it again")
    itemsize = np.dtype(_MEGATRON_DTYPES[code]).itemsize
    at = _MEGATRON_HEADER.size
    lengths = np.memmap(index, "<i4", "r", at, (sequences,)) if sequences else np.empty(0, "<i4")
    places = np.memmap(index, "<i8", "r", at + 4 * sequences, (sequences,)) if sequences else np.empty(0, "<i8")
    first = np.memmap(index, "<i8", "r", at + 12 * sequences, (bounds,)) if bounds else np.zeros(1, "<i8")
    end = 0
    for start in range(0, sequences, _ENTRIES_AT_ONCE):
        here = lengths[start : start + _ENTRIES_AT_ONCE].astype(np.int64) * itemsize
        ends = end + np.cumsum(here)
        if (here < 0).any() or not np.array_equal(places[start : start + _ENTRIES_AT_ONCE], ends - here):
            raise TenfoldError(
                f"{index}: sequences {start:,} to {start + len(here):,} do not lie end to end in {path.name}; only "
                "files whose sequences do are read in place: write it anew with Megatron's preprocess_data or merge"
            )
        end = int(ends[-1])
    if (found := path.stat().st_size) != end:
        raise TenfoldError(f"{path} has {found:,} bytes, {index.name} says {end:,}: the two do not belong together")
    if int(first[0]) != 0 or int(first[-1]) != sequences or (np.diff(first) < 0).any():
        raise TenfoldError(f"{index}: the documents do not begin and end with the sequences: make it again")
    begins = np.append(places, end)[np.asarray(first)] // itemsize
    starts = np.unique(begins[begins * itemsize < end])  # an empty document begins where the next one does
    return TokenFile(path, _MEGATRON_DTYPES[code], 0, end // itemsize, starts.astype(np.int64), split)


def _nanogpt(path: Path, dtype: str | None, split: SplitName | None) -> TokenFile:
    with path.open("rb") as file:
        header = file.read(12)
    if len(header) == 12 and (magic := struct.unpack("<iii", header))[0] in _LLMC_DTYPES:
        kind, tokens = _LLMC_DTYPES[magic[0]], magic[2]
        _check_dtype(path, kind, dtype)
        expected = _LLMC_HEADER_BYTES + tokens * np.dtype(kind).itemsize
        if (size := path.stat().st_size) != expected:
            raise TenfoldError(f"{path} has {size:,} bytes, its header says {expected:,}: copy or make it again")
        return TokenFile(path, kind, _LLMC_HEADER_BYTES, tokens, None, split)
    return _raw(path, dtype, split)


def _olmo(path: Path, dtype: str | None, split: SplitName | None) -> TokenFile:
    with path.open("rb") as file:
        if file.read(len(_NUMPY)) != _NUMPY:
            return _raw(path, dtype, split)
        file.seek(0)
        try:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, kind = read(file)
        except (ValueError, EOFError) as error:
            raise TenfoldError(f"{path} has a damaged NumPy header ({error}): copy or make it again") from None
        offset = file.tell()
    if len(shape) != 1 or kind.kind not in "iu" or kind != kind.newbyteorder("<"):
        raise TenfoldError(
            f"{path} is a NumPy array of {kind.str} with {len(shape)} dimension(s); token ids are little-endian whole "
            "numbers in one dimension: write array.ravel().astype('uint32')"
        )
    _check_dtype(path, kind.name, dtype)
    expected = offset + shape[0] * kind.itemsize
    if (size := path.stat().st_size) != expected:
        raise TenfoldError(f"{path} has {size:,} bytes, its header says {expected:,}: copy or make it again")
    return TokenFile(path, kind.name, offset, shape[0], None, split)


def _raw(path: Path, told: str | None, split: SplitName | None) -> TokenFile:
    dtype = told or "uint16"
    size, itemsize = path.stat().st_size, np.dtype(dtype).itemsize
    if size % itemsize:
        raise TenfoldError(
            f"{path} has {size:,} bytes, no multiple of the {itemsize} of {dtype}: set data.dtype to what it was "
            "written with, or copy it again"
        )
    file = TokenFile(path, dtype, 0, size // itemsize, None, split)
    if told is None and file.tokens and _looks_wider(np.memmap(path, dtype, "r", shape=(min(file.tokens, 1 << 20),))):
        raise TenfoldError(
            f'{path} read as {dtype} has nothing in every second place, as uint32 would: set data.dtype = "uint32"'
        )
    return file


def _looks_wider(ids: npt.NDArray[np.generic]) -> bool:
    """Whether ids read as uint16 are the halves of uint32 ones: upper halves of next to nothing, lower ones of a lot.

    A vocabulary that needs uint32 has more than 65,536 entries, so that its lower halves lie all over uint16. One that
    does not need it has upper halves of nothing at all.
    """
    lower, upper = ids[0::2], ids[1::2]
    least = 2**14 if upper.any() else 1
    return len(upper) >= 256 and int(upper.max()) < 64 and int(lower.max()) >= least


def _check_dtype(path: Path, found: str, told: str | None) -> None:
    if told is not None and told != found:
        raise TenfoldError(f"{path} says that it is of {found}, and data.dtype is {told!r}: leave data.dtype out")
