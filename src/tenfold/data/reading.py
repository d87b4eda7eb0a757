"""From bytes on disk to documents: plain text and JSON lines, as they are or compressed, in constant memory."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import itertools
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import zstandard

from tenfold.errors import TenfoldError

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
RECORD_SUFFIXES = (".jsonl", ".ndjson", ".json-lines")
PACKED_SUFFIXES = (".gz", ".zst")

WHOLE_CHARACTERS = 64 * 1024
"""A plain text up to this long is one document."""
PIECE_CHARACTERS = 16 * 1024
"""A longer one is cut at the first blank line after this many characters, again and again."""
LONGEST_PIECE_CHARACTERS = 1024 * 1024
"""Without a blank line it is cut here, at the end of a line when there is one."""
LONGEST_RECORD_BYTES = 16 * 1024 * 1024

_BLOCK_BYTES = 1024 * 1024
_PACKED_BLOCK_BYTES = 16 * 1024
_BLANK_LINE = re.compile(r"\n\r?\n")


def plain_suffix(path: Path) -> str:
    """The suffix that tells the kind of text: `.jsonl` of `a.jsonl.gz`."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if suffixes and suffixes[-1] in PACKED_SUFFIXES:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def read_text(path: Path, text_field: str, skip: int = 0) -> Iterator[str]:
    """The documents of one file of plain text or JSON lines, in order, without the first `skip`.

    JSON lines give one document a record. Any other file is plain text: one document, or, when it is longer than
    `WHOLE_CHARACTERS`, pieces that end at blank lines and together are the file.
    """
    if plain_suffix(path) in RECORD_SUFFIXES:
        return _records(path, text_field, skip)
    return itertools.islice(cut_text(_text_blocks(path)), skip, None)


def cut_text(blocks: Iterable[str]) -> Iterator[str]:
    """One text, given in blocks of any size, as documents; where it is cut does not depend on the blocks."""
    buffer, is_long = "", False
    for block in blocks:
        buffer += block
        is_long = is_long or len(buffer) > WHOLE_CHARACTERS
        start = 0
        while is_long and (end := _cut_point(buffer, start)) is not None:
            yield buffer[start:end]
            start = end
        buffer = buffer[start:]
    if buffer:
        yield buffer


def _cut_point(text: str, start: int) -> int | None:
    """Where the document that begins at `start` ends, or None while that cannot be told yet."""
    limit = start + LONGEST_PIECE_CHARACTERS
    blank = _BLANK_LINE.search(text, start + PIECE_CHARACTERS, limit)
    if blank is not None:
        return blank.end()
    if len(text) < limit:
        return None
    return text.rfind("\n", start, limit) + 1 or limit


def _text_blocks(path: Path) -> Iterator[str]:
    """The file decoded from UTF-8 block by block, without a byte-order mark."""
    rest, offset = b"", 0
    for block in byte_blocks(path):
        data = rest + block
        text, used = _decode(data, offset, path, final=False)
        yield text.removeprefix("\ufeff") if offset == 0 else text
        rest, offset = data[used:], offset + used
    _decode(rest, offset, path, final=True)


def _decode(data: bytes, offset: int, path: Path, final: bool) -> tuple[str, int]:
    if (nul := data.find(b"\0")) >= 0:
        raise TenfoldError(
            f"{path} is not plain text: it holds a NUL byte at byte {offset + nul:,}, so it is binary or in another "
            "encoding such as UTF-16; convert it to UTF-8 (iconv -t UTF-8) or leave it out"
        )
    try:
        return codecs.utf_8_decode(data, "strict", final)
    except UnicodeDecodeError as error:
        raise TenfoldError(
            f"{path} is not valid UTF-8 at byte {offset + error.start:,} ({error.reason}); convert it to UTF-8 "
            "(iconv -f LATIN1 -t UTF-8, with the encoding it has) or leave it out"
        ) from None


def _records(path: Path, field: str, skip: int) -> Iterator[str]:
    for number, offset, line in _lines(path):
        text, _ = _decode(line, offset, path, final=True)
        if offset == 0:
            text = text.removeprefix("\ufeff")
        if not text.strip():
            continue
        if skip:
            skip -= 1
        else:
            yield _field(text, field, f"{path}:{number}")


def _field(line: str, field: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        said = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else "nested too deep"
        raise TenfoldError(
            f"{where} is not valid JSON ({said}); JSON lines hold one whole object on each line"
        ) from None
    if not isinstance(record, dict):
        raise TenfoldError(
            f'{where} is of type {type(record).__name__}; each line must be an object such as {{"{field}": ...}}'
        )
    if field not in record:
        fields = ", ".join(map(repr, record)) or "none"
        raise TenfoldError(f"{where} has no field {field!r}; its fields are {fields}: choose one with --text-field")
    text = record[field]
    if not isinstance(text, str):
        strings = ", ".join(repr(key) for key, value in record.items() if isinstance(value, str)) or "none"
        raise TenfoldError(
            f"{where}: field {field!r} is of type {type(text).__name__}, not a string; the fields with text are "
            f"{strings}: choose one with --text-field"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TenfoldError(
            f"{where}: field {field!r} holds half of a surrogate pair (\\u{ord(text[error.start]):04x}), which is no "
            "character; repair or drop this record"
        ) from None
    return text


def _lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Each line of the file with its number from 1 and its byte offset."""
    rest, offset, number = b"", 0, 0
    for block in byte_blocks(path):
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            number += 1
            yield number, offset, line
            offset += len(line) + 1
        if len(rest) > LONGEST_RECORD_BYTES:
            raise TenfoldError(
                f"{path}:{number + 1} is a record of more than {LONGEST_RECORD_BYTES >> 20} MiB; split it into several"
            )
    yield number + 1, offset, rest


def byte_blocks(path: Path) -> Iterator[bytes]:
    """The bytes of a file, unpacked where its name ends in .gz or .zst."""
    with reading(path):
        suffix = path.suffix.lower()
        with path.open("rb") as file:
            if suffix == ".zst":
                yield from _zstd_blocks(file, path)
            elif suffix == ".gz":
                with gzip.GzipFile(fileobj=file) as unpacked:
                    yield from iter(lambda: unpacked.read(_BLOCK_BYTES), b"")
            else:
                yield from iter(lambda: file.read(_BLOCK_BYTES), b"")


def _zstd_blocks(file: BinaryIO, path: Path) -> Iterator[bytes]:
    decompressor = zstandard.ZstdDecompressor()
    frame = None
    while packed := file.read(_PACKED_BLOCK_BYTES):
        while packed:
            frame = frame or decompressor.decompressobj()
            if unpacked := frame.decompress(packed):
                yield unpacked
            packed = b""
            if frame.eof:
                packed, frame = frame.unused_data, None
    if frame is not None:
        raise EOFError


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns what can go wrong while `path` is read into one clear error."""
    try:
        yield
    except FileNotFoundError:
        raise TenfoldError(f"there is no {path}") from None
    except PermissionError:
        raise TenfoldError(f"{path} cannot be read: permission denied; allow it (chmod u+r) or leave it out") from None
    except EOFError:
        raise TenfoldError(
            f"{path} is truncated: its compressed data ends too early; copy or download it again"
        ) from None
    except (gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise TenfoldError(f"{path} is damaged or not compressed as its name says: {error}") from None
