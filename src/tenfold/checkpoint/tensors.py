"""Safetensors files in pieces: written and read without a whole tensor, let alone a whole file, in memory.

The format: eight bytes with the header's length, little-endian; a JSON header with dtype, shape and place of each
tensor; the tensors, row by row, with nothing between them. Its own library writes what it has in memory, all of it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tenfold.errors import TenfoldError

PIECE = 2**20
"""Elements of a piece; the last of a tensor may have fewer."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LARGEST_HEADER = 100_000_000  # bytes; the library's own limit


@dataclass(frozen=True)
class Stored:
    """A tensor that is had piece by piece: `pieces()` gives its elements in order, flat, `PIECE` at a time."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[Tensor]]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: Tensor | Stored) -> Stored:
        """A tensor in memory as one in pieces."""
        if isinstance(tensor, Stored):
            return tensor
        return cls(tensor.dtype, tuple(tensor.shape), lambda: iter(tensor.detach().reshape(-1).split(PIECE)))


def writing_order(tensors: Mapping[str, Stored]) -> list[str]:
    """The order in which a file has tensors: the widest elements first, as the library has it, so that each tensor
    begins at a multiple of its element."""
    return sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))


def write_tensors(path: Path, tensors: Mapping[str, Stored], advance: Callable[[int], None]) -> dict[str, Any]:
    """Write a safetensors file; its `bytes` and `sha256`. `advance` is told of the bytes as they are written."""
    names = writing_order(tensors)
    places, end = {}, 0
    for name in names:
        stored = tensors[name]
        begin, end = end, end + stored.bytes
        places[name] = {"dtype": _NAMES[stored.dtype], "shape": stored.shape, "data_offsets": (begin, end)}
    header = json.dumps(places, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in (len(header).to_bytes(8, "little"), header):
            file.write(part)
            digest.update(part)
        for name in names:
            written = 0
            for piece in tensors[name].pieces():
                raw = piece.cpu().contiguous().view(torch.uint8).numpy().data
                file.write(raw)
                digest.update(raw)
                written += raw.nbytes
                advance(raw.nbytes)
            assert written == tensors[name].bytes, name
    return {"bytes": 8 + len(header) + end, "sha256": digest.hexdigest()}


def open_tensors(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file. Each call of `pieces` reads anew; nothing stays open, nothing is mapped.

    Raises TenfoldError, naming the file, when it is no such file or is cut short.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            if not 2 <= length <= min(size - 8, _LARGEST_HEADER):
                raise ValueError(f"its header would be {length} bytes long, and the file has {size}")
            header = json.loads(file.read(length))
        found = {}
        for name, told in header.items():
            if name == "__metadata__":
                continue
            shape, (begin, end) = tuple(told["shape"]), told["data_offsets"]
            if told["dtype"] not in _DTYPES:
                raise ValueError(f"{name} has elements of kind {told['dtype']}, which are not known here")
            stored = Stored(
                _DTYPES[told["dtype"]], shape, _reader(path, name, 8 + length + begin, told["dtype"], shape)
            )
            if not (begin >= 0 and end <= size - 8 - length and end - begin == stored.bytes):
                raise ValueError(f"{name} does not lie where the header tells")
            found[name] = stored
    except FileNotFoundError:
        raise TenfoldError(f"{path} is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TenfoldError(f"{path} is damaged: {error}") from None
    return found


def _reader(path: Path, name: str, begin: int, kind: str, shape: tuple[int, ...]) -> Callable[[], Iterator[Tensor]]:
    dtype, elements = _DTYPES[kind], math.prod(shape)

    def pieces() -> Iterator[Tensor]:
        with path.open("rb", buffering=0) as file:
            file.seek(begin)
            for first in range(0, elements, PIECE):
                wanted = min(PIECE, elements - first) * dtype.itemsize
                raw = bytearray(wanted)  # fresh each time: the piece is the caller's to keep
                view, read = memoryview(raw), 0
                while read < wanted:
                    if not (got := file.readinto(view[read:])):
                        raise TenfoldError(f"{path} is damaged: it ends in {name}")
                    read += got
                yield torch.frombuffer(raw, dtype=dtype)

    return pieces
