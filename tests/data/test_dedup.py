"""Exact duplicates: against a plain set, in bounded memory, and through a whole preparation."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tenfold.config.run import PrepareConfig
from tenfold.data import dedup
from tenfold.data.dedup import SeenDocuments, document_digest
from tenfold.data.prepare import prepare
from tenfold.data.shards import TokenData


def plain(digests: list[bytes]) -> list[bool]:
    seen: set[bytes] = set()
    return [not (digest in seen or seen.add(digest)) for digest in digests]  # type: ignore[func-returns-value]


@pytest.mark.parametrize("alike", [0, 8, 15])
def test_new_digests_are_those_a_plain_set_finds_new(monkeypatch: pytest.MonkeyPatch, alike: int) -> None:
    monkeypatch.setattr(dedup, "_FRESH_AT_LEAST", 7)
    monkeypatch.setattr(dedup, "_BLOCK", 11)
    draw = random.Random(alike)
    prefix = bytes(alike)  # halves that agree, so that the other must decide; zeros, so that none stands out
    digests = [prefix + draw.randbytes(2)[: 16 - alike].rjust(16 - alike, b"\0") for _ in range(900)]
    digests += [b"\xff" * 16, b"\0" * 16, b"\xff" * 16]
    seen, found = SeenDocuments(), []
    start = 0
    while start < len(digests):
        stop = start + draw.randint(0, 40)
        found += seen.add(digests[start:stop])
        start = stop
    assert found == plain(digests)
    assert len(seen) == sum(found)


def test_restored_digests_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedup, "_BLOCK", 13)
    digests = [document_digest(str(number).encode()) for number in range(500)]
    seen = SeenDocuments()
    seen.restore(np.frombuffer(b"".join(digests[:300]), np.uint8))
    assert seen.add(digests) == [False] * 300 + [True] * 200


def test_memory_stays_within_24_bytes_a_document_and_a_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedup, "_FRESH_AT_LEAST", 64)
    monkeypatch.setattr(dedup, "_BLOCK", 4096)

    def peak(count: int) -> int:
        seen, draw = SeenDocuments(), random.Random(0)
        tracemalloc.start()
        for _ in range(count // 500):
            seen.add([draw.randbytes(16) for _ in range(500)])
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    few, many = 20_000, 120_000
    assert (peak(many) - peak(few)) / (many - few) < 24


def documents_of(data: TokenData, split: str) -> list[str]:
    found = data.split(split)  # type: ignore[arg-type]
    parts = np.split(found.read(0, found.tokens), found.document_starts()[1:])
    return [data.tokenizer().decode(part[:-1].tolist(), skip_special_tokens=False) for part in parts]


def test_equal_documents_are_kept_once_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(0)
    texts = [f"a ship sails {number} miles" for number in range(80)]
    # Nearly equal is not equal: not one space or letter's case more.
    order = [*draw.choices(texts, k=300), texts[0] + " ", texts[0].upper()]
    rows = "".join(json.dumps({"text": text}) + "\n" for text in order)
    (tmp_path / "a.jsonl").write_text(rows)
    options = PrepareConfig(vocab_size=300, validation_fraction=0.2, dedup=True)
    data = prepare(str(tmp_path / "a.jsonl"), tmp_path / "out", options)
    first_once = list(dict.fromkeys(order))
    trained, held_out = documents_of(data, "train"), documents_of(data, "validation")
    assert Counter(trained + held_out) == Counter(first_once)
    assert trained == [text for text in first_once if text not in set(held_out)]
    dropped = len(order) - len(first_once)
    assert data.index.duplicates is not None
    assert data.index.duplicates.documents == dropped
    dropped_bytes = sum(map(len, order)) - sum(map(len, first_once))
    assert data.index.duplicates.text_bytes == dropped_bytes
    assert f"dropped {dropped} documents that repeat an earlier one" in capsys.readouterr().err
    whole = prepare(str(tmp_path / "a.jsonl"), tmp_path / "all", options.model_copy(update={"dedup": False}), False)
    assert set(documents_of(whole, "validation")) == set(held_out)
    assert whole.index.duplicates is None
