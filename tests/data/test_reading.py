"""Bytes to documents: compression, cutting, and every way a file can be bad."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tenfold.data import reading
from tenfold.data.reading import cut_text, read_text
from tenfold.errors import TenfoldError

LONG = "".join(f"Paragraph {number} says something.\nAnd more of it.\n\n" for number in range(4000))


def documents(path: Path, field: str = "text") -> list[str]:
    return list(read_text(path, field))


def test_a_short_text_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\nthree")
    assert documents(tmp_path / "a.txt") == ["one\n\ntwo\n\nthree"]


def test_a_long_text_is_cut_at_blank_lines_and_nothing_is_lost(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(LONG)
    pieces = documents(tmp_path / "a.md")
    assert "".join(pieces) == LONG
    assert len(pieces) > 5
    assert all(piece.endswith("\n\n") and len(piece) >= reading.PIECE_CHARACTERS for piece in pieces[:-1])
    assert max(map(len, pieces)) < 2 * reading.PIECE_CHARACTERS


def test_a_text_without_blank_lines_is_cut_at_line_ends_or_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "WHOLE_CHARACTERS", 10)
    monkeypatch.setattr(reading, "PIECE_CHARACTERS", 5)
    monkeypatch.setattr(reading, "LONGEST_PIECE_CHARACTERS", 12)
    assert list(cut_text(["abcdefgh\nijklmnop\nq"])) == ["abcdefgh\n", "ijklmnop\nq"]
    assert list(cut_text(["x" * 30])) == ["x" * 12, "x" * 12, "x" * 6]


@given(st.text("ab\n", min_size=0, max_size=80), st.lists(st.integers(0, 80), max_size=6))
def test_where_a_text_is_cut_does_not_depend_on_the_blocks(text: str, cuts: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "WHOLE_CHARACTERS", 20)
        patch.setattr(reading, "PIECE_CHARACTERS", 6)
        patch.setattr(reading, "LONGEST_PIECE_CHARACTERS", 15)
        edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
        blocks = [text[start:stop] for start, stop in itertools.pairwise(edges)]
        assert list(cut_text(blocks)) == list(cut_text([text]))
        assert "".join(cut_text(blocks)) == text


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_gzip_and_zstd_give_the_documents_of_the_plain_file(tmp_path: Path, name: str) -> None:
    rows = [json.dumps({"text": f"row {number} é 三国"}, ensure_ascii=False) for number in range(3000)]
    content = ("\n".join(rows) if name.endswith("jsonl") else LONG).encode()
    (tmp_path / name).write_bytes(content)
    half = len(content) // 2
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content[:half]) + gzip.compress(content[half:]))
    packed = [zstandard.compress(part) for part in (content[:half], content[half:])]
    (tmp_path / f"{name}.zst").write_bytes(b"".join(packed))
    expected = documents(tmp_path / name)
    assert documents(tmp_path / f"{name}.gz") == expected
    assert documents(tmp_path / f"{name}.zst") == expected


def test_characters_that_cross_blocks_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_BLOCK_BYTES", 2)
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + "三国é🙂".encode())
    assert documents(tmp_path / "a.txt") == ["三国é🙂"]


def test_a_jsonl_record_is_a_document_and_blank_lines_are_none(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one\\n\\ntwo"}\n\n{"text": "三", "id": 2}\n')
    assert documents(tmp_path / "a.jsonl") == ["one\n\ntwo", "三"]


def test_another_field_can_hold_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.ndjson").write_text('{"body": "one"}')
    assert documents(tmp_path / "a.ndjson", "body") == ["one"]


GOOD = b'{"text": "fine"}\n'
BAD = {
    "binary": ("a.txt", b"text\n\x00\x01", ["a.txt", "byte 5", "UTF-8"]),
    "utf-8": ("a.txt", b"x" * 20 + b"\xff abc", ["a.txt", "byte 20", "iconv"]),
    "utf-8 cut short": ("a.txt", b"abc\xe4\xb8", ["a.txt", "byte 3"]),
    "utf-8 in jsonl": ("a.jsonl", GOOD + b'{"text": "\xff"}', ["a.jsonl", "byte 27"]),
    "malformed": ("a.jsonl", GOOD + b'{"text": "x"', ["a.jsonl:2", "not valid JSON", "column"]),
    "deeply nested": ("a.jsonl", b"[" * 100_000, ["a.jsonl:1", "nested"]),
    "not an object": ("a.jsonl", GOOD + b"[1]", ["a.jsonl:2", "list", "object"]),
    "field missing": ("a.jsonl", GOOD + b'{"body": "x", "id": 1}', ["a.jsonl:2", "'text'", "'body'", "'id'"]),
    "field not a string": ("a.jsonl", b'{"text": 3, "body": "x"}', ["a.jsonl:1", "int", "'body'", "--text-field"]),
    "half a surrogate": ("a.jsonl", b'{"text": "\\ud800"}', ["a.jsonl:1", "surrogate", "d800"]),
    "gzip truncated": ("a.txt.gz", gzip.compress(LONG.encode())[:-200], ["a.txt.gz", "truncated"]),
    "gzip damaged": ("a.txt.gz", b"no gzip at all", ["a.txt.gz", "damaged"]),
    "zstd truncated": ("a.txt.zst", zstandard.compress(LONG.encode())[:-200], ["a.txt.zst", "truncated"]),
    "zstd damaged": ("a.txt.zst", b"no zstd at all", ["a.txt.zst", "damaged"]),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_one_error_that_names_the_place(tmp_path: Path, case: str) -> None:
    name, content, words = BAD[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TenfoldError) as caught:
        documents(tmp_path / name)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_record_that_is_too_long_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LONGEST_RECORD_BYTES", 1000)
    (tmp_path / "a.jsonl").write_bytes(GOOD + b'{"text": "' + b"x" * 2000)
    with pytest.raises(TenfoldError, match=r"a\.jsonl:2 is a record of more than"):
        documents(tmp_path / "a.jsonl")


def test_a_file_that_may_not_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *_: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(TenfoldError, match=r"a\.txt cannot be read: permission denied"):
        documents(tmp_path / "a.txt")
