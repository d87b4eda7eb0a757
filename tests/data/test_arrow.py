"""Text columns of Parquet and Arrow files, written by pyarrow itself."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tenfold.config.run import PrepareConfig
from tenfold.data.arrow import read_column
from tenfold.data.prepare import prepare
from tenfold.errors import TenfoldError

TEXTS = [f"text {number} 三国" for number in range(1000)]
KINDS = [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string()), pa.string_view()]


def write(path: Path, columns: dict[str, Any]) -> Path:
    table = pa.table(columns)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=300)
    elif path.name == "file.arrow":
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=300)
    else:
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=300)
    return path


@pytest.mark.parametrize("name", ["a.parquet", "file.arrow", "stream.arrow"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("skip", [0, 1, 299, 300, 777, 1000, 2000])
def test_the_column_is_read_from_any_row_on(tmp_path: Path, name: str, kind: pa.DataType, skip: int) -> None:
    file = write(tmp_path / name, {"id": range(1000), "text": pa.array(TEXTS, pa.string()).cast(kind)})
    assert list(read_column(file, "text", skip)) == TEXTS[skip:]


@pytest.mark.parametrize("name", ["a.parquet", "stream.arrow"])
def test_nulls_are_empty_texts_and_count_as_rows(tmp_path: Path, name: str) -> None:
    file = write(tmp_path / name, {"body": ["one", None, "", "two"]})
    assert list(read_column(file, "body")) == ["one", "", "", "two"]
    assert list(read_column(file, "body", 2)) == ["", "two"]


def test_a_parquet_file_gives_the_shards_of_its_text(tmp_path: Path) -> None:
    options = PrepareConfig(vocab_size=300, validation_fraction=0.1)
    file = write(tmp_path / "a.parquet", {"text": TEXTS})
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in TEXTS))
    prints = [
        prepare(str(path), tmp_path / path.suffix[1:], options, False).fingerprint
        for path in (file, tmp_path / "a.jsonl")
    ]
    assert prints[0] == prints[1]


@pytest.mark.parametrize("name", ["a.parquet", "file.arrow", "stream.arrow"])
@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"body": ["a"], "id": [1]},
            r"has no column 'text'; its columns are 'body', 'id': choose one with --text-field",
        ),
        ({"text": [1], "body": ["a"]}, r"'text' is of type int64, not a string; the columns with text are 'body'"),
        ({"text": [b"a"]}, r"'text' is of type binary, not a string; the columns with text are none"),
    ],
)
def test_a_column_that_is_not_there_or_no_text_is_an_error(
    tmp_path: Path, name: str, columns: dict[str, Any], message: str
) -> None:
    with pytest.raises(TenfoldError, match=message):
        list(read_column(write(tmp_path / name, columns), "text"))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *itertools.product(["a.parquet", "file.arrow", "stream.arrow"], ["cut", "other", "empty"]),
        ("a.parquet", "middle"),  # the values of an Arrow file have no checksum: other bytes are other text
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, damage: str) -> None:
    file = write(tmp_path / name, {"text": [f"{number}" * 50 for number in range(3000)]})
    content = file.read_bytes()
    if damage == "middle":
        content = content[:900] + bytes(255 - byte for byte in content[900:1400]) + content[1400:]
    changed = {"cut": content[: len(content) // 2], "other": b"text, no table" * 10, "empty": b""}
    file.write_bytes(changed.get(damage, content))
    with pytest.raises(TenfoldError, match=rf"{name} .*(damaged|UTF-8)"):
        list(read_column(file, "text"))


def test_text_that_is_not_utf_8_is_an_error_with_its_rows(tmp_path: Path) -> None:
    array = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff")]
    )
    with pytest.raises(TenfoldError, match=r"'text' holds text that is not UTF-8, in rows 1 to 2"):
        list(read_column(write(tmp_path / "stream.arrow", {"text": array}), "text"))


def test_a_file_that_may_not_be_read_or_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(TenfoldError, match=r"there is no .*none\.parquet"):
        list(read_column(tmp_path / "none.parquet", "text"))


def test_without_pyarrow_the_remedy_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "a.parquet", {"text": TEXTS})
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(TenfoldError, match=r"pip install 'tenfold\[arrow\]'"):
        list(read_column(file, "text"))


def test_reading_takes_memory_for_one_batch_not_for_the_file(tmp_path: Path) -> None:
    text = "a ship sails north " * 500
    file = tmp_path / "a.parquet"
    schema = pa.schema({"text": pa.string()})
    with pq.ParquetWriter(file, schema, use_dictionary=False, compression="none") as writer:
        # One row group, so that not even a row group is held.
        writer.write_table(pa.table({"text": [f"{row} {text}" for row in range(8000)]}), row_group_size=8000)
    before = pa.total_allocated_bytes()
    most = 0
    for number, _ in enumerate(read_column(file, "text")):
        if number % 100 == 0:
            most = max(most, pa.total_allocated_bytes() - before)
    assert file.stat().st_size > 70_000_000
    assert most < 25_000_000
