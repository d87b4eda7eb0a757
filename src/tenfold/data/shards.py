"""Prepared text: a folder of token shards, an index and the tokenizer.

A shard is a flat little-endian file of uint16 or uint32 token ids; beside it lies a flat little-endian int64 file of
the places in it where documents begin. The index names every file with its counts and sha256.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field
from tokenizers import Tokenizer

from tenfold.config.base import Section
from tenfold.config.load import build
from tenfold.data.reading import reading
from tenfold.data.vocabulary import load_tokenizer, mask_token
from tenfold.errors import TenfoldError

SplitName = Literal["train", "validation"]
INDEX = "index.json"
VERSION = 1
VERIFIED_BYTES = 2 * 1024**3
"""Data up to this size is checked to the last bit whenever it is opened."""
_AGAIN = "delete the folder and prepare it again"


class ShardEntry(Section):
    """One shard of a split."""

    file: str = Field(pattern=r"^(/.*|[\w.-]+)$", description="Name of the token file; a whole path elsewhere.")
    documents_file: str = Field(pattern=r"^[\w.-]+$", description="Name of the file of document starts.")
    offset_bytes: int = Field(0, ge=0, description="Where the tokens begin in the file.")
    tokens: int = Field(gt=0, description="Tokens, with the one that ends each document.")
    documents: int = Field(gt=0, description="Documents; none crosses shards.")
    text_bytes: int | None = Field(ge=0, description="Bytes of the text in UTF-8; null: not known.")
    max_token: int = Field(ge=0, description="Largest token id.")
    sha256: str = Field(description="Of the tokens as they are in the file.")
    documents_sha256: str = Field(description="Of the file of document starts.")


class TokenizerEntry(Section):
    """The tokenizer that made the shards."""

    file: str = Field(pattern=r"^[\w.-]+$", description="Its name in the folder.")
    sha256: str = Field(description="Of that file.")


class Duplicates(Section):
    """What was dropped because its text was equal to an earlier document's."""

    documents: int = Field(ge=0, description="Documents dropped.")
    text_bytes: int = Field(ge=0, description="Bytes of their text in UTF-8.")


class Index(Section):
    """What index.json holds."""

    format: Literal["tenfold-tokens"] = "tenfold-tokens"
    version: int = VERSION
    layout: Literal["tenfold", "megatron", "nanogpt", "olmo"] = Field(
        "tenfold", description="Who wrote the token files; those of others lie where they were found."
    )
    tokenizer: TokenizerEntry | None = Field(description="Null: not known.")
    vocab_size: int = Field(gt=0, description="One more than the largest id the tokenizer gives.")
    end_of_text: int | None = Field(ge=0, description="The token after each document; null: there is none.")
    dtype: Literal["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"] = Field(
        description="Of the token files, little-endian."
    )
    splits: dict[SplitName, list[ShardEntry]]
    duplicates: Duplicates | None = Field(None, description="What was dropped as such; null: nothing was looked for.")
    source: dict[str, Any] = Field(description="Name and fingerprint of the text.")
    options: dict[str, Any] = Field(description="How it was prepared.")


class TokenSplit:
    """The tokens of one split as one long row, memory-mapped over its shards."""

    def __init__(self, path: Path, name: str, dtype: str, shards: Sequence[ShardEntry]) -> None:
        self.path = path
        self.name = name
        self.tokens = sum(shard.tokens for shard in shards)
        self.documents = sum(shard.documents for shard in shards)
        known = [shard.text_bytes for shard in shards if shard.text_bytes is not None]
        self.text_bytes = sum(known) if len(known) == len(shards) else None
        """Bytes of the text; None where the tokens were made elsewhere and no tokenizer tells."""
        self.max_token = max(shard.max_token for shard in shards)
        self._shards = shards
        self._maps = [_tokens_of(path, shard, dtype) for shard in shards]
        self._plain = [tokens.view(np.ndarray) for tokens in self._maps]  # whose slices are made far quicker
        self._limits = np.array([shard.max_token for shard in shards], dtype=np.int64)
        self._starts = np.cumsum([0, *(shard.tokens for shard in shards)])

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Tokens start .. stop - 1; they may lie in several shards. An id that the index does not allow is an error."""
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"tokens {start}..{stop} of {self.tokens}")
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        parts: list[npt.NDArray[Any]] = []
        for entry, shard, offset in zip(
            self._shards[first:], self._maps[first:], self._starts[first:].tolist(), strict=False
        ):
            if offset >= stop and parts:
                break
            parts.append(shard[max(start - offset, 0) : stop - offset])
            if parts[-1].size and (largest := int(parts[-1].max())) > entry.max_token:
                raise TenfoldError(
                    f"{self.path / entry.file} is damaged: it holds token id {largest}, and the index says the "
                    f"largest is {entry.max_token}; {_AGAIN}"
                )
        return np.concatenate(parts) if parts else self._maps[0][:0]

    def rows(self, starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
        """The `length` tokens from each of `starts` on: int64 [starts, length]. Checked as `read` does."""
        rows = np.empty((len(starts), length), dtype=np.int64)
        numbers = np.searchsorted(self._starts, starts, side="right") - 1
        places = (starts - self._starts[numbers]).tolist()
        within = (starts >= 0) & (starts + length <= self._starts[np.minimum(numbers + 1, len(self._maps))])
        limits = self._limits[np.minimum(numbers, len(self._maps) - 1)]
        for row, start, number, place, whole in zip(
            rows, starts.tolist(), numbers.tolist(), places, within.tolist(), strict=True
        ):
            row[:] = self._plain[number][place : place + length] if whole else self.read(start, start + length)
        damaged = within & (rows.max(axis=1, initial=0) > limits)
        for start in starts[damaged].tolist():
            self.read(start, start + length)  # which tells the file
        return rows

    def document_starts(self) -> npt.NDArray[np.int64]:
        """Where each document begins: int64 [documents]."""
        parts = []
        for shard, offset in zip(self._shards, self._starts, strict=False):
            parts.append(np.fromfile(self.path / shard.documents_file, dtype="<i8") + offset)
        return np.concatenate(parts)


class TokenData:
    """A folder of prepared text."""

    def __init__(self, path: Path, index: Index) -> None:
        self.path = path
        self.index = index
        self.vocab_size = index.vocab_size
        self.end_of_text = index.end_of_text
        told = index.model_dump(mode="json", exclude={"source", "options", "duplicates"})
        for shard in (shard for shards in told["splits"].values() for shard in shards):
            shard["file"] = Path(shard["file"]).name
        self.fingerprint = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
        """sha256 over all that decides which tokens are read; where the text came from is not part of it."""

    @classmethod
    def open(cls, path: Path) -> TokenData:
        """Open the folder; files that are missing, cut short or do not fit together raise a TenfoldError.

        Up to `VERIFIED_BYTES` of tokens are also read and compared with their checksums (some seconds at most).
        """
        data = cls(path, _read_index(path))
        data._check_files()
        if sum(shard.tokens for shard in data._shards()) * np.dtype(data.index.dtype).itemsize <= VERIFIED_BYTES:
            data.verify()
        return data

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the shards; a TenfoldError where it is not known."""
        if self.index.tokenizer is None:
            raise TenfoldError(f"the tokenizer of the tokens in {self.path} is not known; name it as data.tokenizer")
        return load_tokenizer(self.path / self.index.tokenizer.file)

    def mask_token(self) -> int | None:
        """The tokenizer's id for a masked token, if it has one."""
        return None if self.index.tokenizer is None else mask_token(self.tokenizer())

    def split(self, name: SplitName) -> TokenSplit:
        """The tokens of one split; a TenfoldError when it holds none."""
        shards = self.index.splits.get(name)
        if not shards:
            other = ", ".join(key for key, value in self.index.splits.items() if value)
            raise TenfoldError(
                f"{self.path} has no {name} split (it has {other or 'none'}): prepare the text with "
                f"validation_fraction {'above 0, from two documents or more' if name == 'validation' else 'below 1'}"
            )
        return TokenSplit(self.path, name, self.index.dtype, shards)

    def verify(self) -> None:
        """Read every file and compare it with the index: checksums, largest ids and document starts."""
        for shard in self._shards():
            tokens = _tokens_of(self.path, shard, self.index.dtype)
            for name, found, expected in (
                (shard.file, hashlib.sha256(tokens.data).hexdigest(), shard.sha256),
                (shard.documents_file, sha256_of(self.path / shard.documents_file), shard.documents_sha256),
            ):
                if found != expected:
                    raise TenfoldError(
                        f"{self.path / name} is damaged: its sha256 is {found}, the index says {expected}; {_AGAIN}"
                    )
            if (largest := int(tokens.max())) != shard.max_token:
                raise TenfoldError(
                    f"{self.path / shard.file} holds token id {largest}, the index says the largest is "
                    f"{shard.max_token}; {_AGAIN}"
                )

    def _shards(self) -> list[ShardEntry]:
        return [shard for shards in self.index.splits.values() for shard in shards]

    def _check_files(self) -> None:
        itemsize = np.dtype(self.index.dtype).itemsize
        for shard in self._shards():
            needed = shard.offset_bytes + shard.tokens * itemsize
            _check_size(self.path / shard.file, needed, exactly=self.index.layout == "tenfold")
            _check_size(self.path / shard.documents_file, shard.documents * 8)
            if shard.max_token >= self.vocab_size:
                raise TenfoldError(
                    f"{self.path / shard.file} holds token id {shard.max_token}, but the vocabulary has "
                    f"{self.vocab_size} entries; {_AGAIN}, with the tokenizer that belongs to it"
                )
        if self.end_of_text is not None and self.end_of_text >= self.vocab_size:
            raise TenfoldError(f"{self.path / INDEX}: end_of_text = {self.end_of_text} >= vocab_size; {_AGAIN}")
        if self.index.tokenizer is None:
            return
        tokenizer = self.path / self.index.tokenizer.file
        if sha256_of(tokenizer) != self.index.tokenizer.sha256:
            raise TenfoldError(f"{tokenizer} is not the tokenizer that made these shards (other sha256); {_AGAIN}")


def holds_shards(path: Path) -> bool:
    """Whether `path` is a folder of prepared text, in whatever state and version."""
    try:
        with (path / INDEX).open("rb") as file:
            return b"tenfold-tokens" in file.read(100)
    except OSError:
        return False


def _read_index(path: Path) -> Index:
    file = path / INDEX
    if not path.is_dir():
        raise TenfoldError(f"there is no folder {path}" if not path.exists() else f"{path} is not a folder of shards")
    if not file.is_file():
        raise TenfoldError(f"{path} holds no {INDEX}: it is no prepared text, or was not finished; run tenfold prepare")
    with reading(file):
        content = file.read_bytes()
    try:
        raw = json.loads(content)
    except ValueError as error:
        raise TenfoldError(f"{file} is damaged: {error}; {_AGAIN}") from None
    if not isinstance(raw, dict) or raw.get("format") != "tenfold-tokens":
        raise TenfoldError(f"{file} is not an index of token shards; run tenfold prepare to make one")
    if raw.get("version") != VERSION:
        raise TenfoldError(f"{file} has version {raw.get('version')!r}, this Tenfold reads {VERSION}; {_AGAIN}")
    return build(Index, raw, str(file))


def _tokens_of(path: Path, shard: ShardEntry, dtype: str) -> npt.NDArray[Any]:
    kind = np.dtype(dtype).newbyteorder("<")
    return np.memmap(path / shard.file, kind, "r", shard.offset_bytes, (shard.tokens,))


def _check_size(file: Path, expected: int, exactly: bool = True) -> None:
    with reading(file):
        found = file.stat().st_size
    if found < expected or (exactly and found != expected):
        raise TenfoldError(f"{file} has {found:,} bytes, the index says {expected:,}; {_AGAIN}")


def sha256_of(file: Path) -> str:
    """sha256 of a file's content."""
    with reading(file), file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
