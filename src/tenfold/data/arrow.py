"""Text out of columns: Parquet and Arrow files, streamed batch by batch through pyarrow, one column alone."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tenfold.data.reading import reading
from tenfold.errors import TenfoldError

COLUMN_SUFFIXES = (".parquet", ".arrow")

_ROWS_AT_ONCE = 256
_BUFFER_BYTES = 1024 * 1024
_ARROW_FILE = b"ARROW1"
"""What an Arrow file begins with; without it, the file is an Arrow stream, as `datasets` writes."""


def read_column(path: Path, column: str, skip: int = 0) -> Iterator[str]:
    """The texts of one column of a Parquet or Arrow file, without the first `skip`; a null is an empty text.

    Parquet is read row group by row group, and within one page by page; an Arrow file record batch by record batch.
    A TenfoldError names the file and what is wrong: no pyarrow, a damaged file, no such column, no strings in it.
    """
    arrow = _module("pyarrow", path)
    with reading(path), path.open("rb") as file:
        try:
            rows = _parquet if path.suffix.lower() == ".parquet" else _arrow
            yield from rows(file, path, column, skip)
        except (arrow.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise TenfoldError(
                f"{path} is damaged or not what its name says: {_first_line(error)}; copy or download it again"
            ) from None


def _parquet(file: BinaryIO, path: Path, column: str, skip: int) -> Iterator[str]:
    parquet = _module("pyarrow.parquet", path)
    table = parquet.ParquetFile(file, buffer_size=_BUFFER_BYTES, pre_buffer=False)
    _check_column(table.schema_arrow, column, path)
    row = 0
    for group in range(table.num_row_groups):
        rows = table.metadata.row_group(group).num_rows
        if row + rows <= skip:
            row += rows
            continue
        for batch in table.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=[column], use_threads=False):
            yield from _texts(batch.column(0), row, skip, path, column)
            row += batch.num_rows


def _arrow(file: BinaryIO, path: Path, column: str, skip: int) -> Iterator[str]:
    ipc = _module("pyarrow.ipc", path)
    is_file = file.read(len(_ARROW_FILE)) == _ARROW_FILE
    file.seek(0)
    reader = ipc.open_file(file) if is_file else ipc.open_stream(file)
    _check_column(reader.schema, column, path)
    batches = (reader.get_batch(number) for number in range(reader.num_record_batches)) if is_file else reader
    row = 0
    for batch in batches:
        texts = batch.column(batch.schema.get_field_index(column))
        for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
            yield from _texts(texts.slice(start, _ROWS_AT_ONCE), row + start, skip, path, column)
        row += batch.num_rows


def _texts(values: Any, row: int, skip: int, path: Path, column: str) -> Iterator[str]:
    """The strings of an array whose first is row `row` of the file, from row `skip` on."""
    if row + len(values) <= skip:
        return
    values = values.slice(max(skip - row, 0))
    try:
        texts = values.to_pylist()
    except UnicodeDecodeError as error:
        raise TenfoldError(
            f"{path}: column {column!r} holds text that is not UTF-8, in rows {row + 1:,} to {row + len(values):,} "
            f"({error.reason}); mend or drop it"
        ) from None
    for text in texts:
        yield text or ""


def _check_column(schema: Any, column: str, path: Path) -> None:
    places = schema.get_all_field_indices(column)
    if len(places) != 1:
        found = "has no column" if not places else "has more than one column"
        columns = ", ".join(map(repr, schema.names)) or "none"
        raise TenfoldError(f"{path} {found} {column!r}; its columns are {columns}: choose one with --text-field")
    kind = schema.field(places[0]).type
    if not _is_text(kind):
        strings = ", ".join(repr(field.name) for field in schema if _is_text(field.type)) or "none"
        raise TenfoldError(
            f"{path}: column {column!r} is of type {kind}, not a string; the columns with text are {strings}: choose "
            "one with --text-field"
        )


def _is_text(kind: Any) -> bool:
    types = importlib.import_module("pyarrow").types
    if types.is_dictionary(kind):
        kind = kind.value_type
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _module(name: str, path: Path) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise TenfoldError(
            f"{path} is read with pyarrow, which is not installed: pip install 'tenfold[arrow]', or write the text as "
            "JSON lines (.jsonl.zst)"
        ) from None


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
