"""What data is said to hold, against plain loops over it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from tenfold.config.run import DataConfig, PrepareConfig
from tenfold.data import inspection
from tenfold.data.inspection import Lengths, as_json, inspect_text, inspect_tokens
from tenfold.data.prepare import ensure_prepared, prepare
from tenfold.data.progress import Progress
from tenfold.data.sources import open_source


def no_advance(*_: int) -> None:
    pass


def corpus(folder: Path) -> tuple[Path, list[str]]:
    draw = random.Random(0)
    texts = [" ".join(draw.choices(["sea", "ship", "三国"], k=draw.randint(1, 60))) for _ in range(300)]
    texts += ["", "  ", *texts[:40]]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder / "a.jsonl", texts


@pytest.mark.parametrize("at_once", [1, 7, 1000])
def test_lengths_are_counted_by_powers_of_two_in_any_portions(at_once: int) -> None:
    values = [3, 1, 1, 2, 4, 7, 8, 1023, 1024, 1025, 2**40, 2**40, 5]
    lengths = Lengths()
    for start in range(0, len(values), at_once):
        lengths.add(np.array(values[start : start + at_once], np.int64))
    expected = [sum(2**place <= value < 2 ** (place + 1) for value in values) for place in range(64)]
    assert lengths.counts.tolist() == expected
    assert (lengths.shortest, lengths.longest) == ((1, 1), (2**40, 10))
    assert (lengths.documents, lengths.total) == (len(values), sum(values))


def test_tokens_are_counted_as_a_plain_loop_counts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "_TOKENS_AT_ONCE", 100)
    source, texts = corpus(tmp_path)
    data = prepare(str(source), tmp_path / "out", PrepareConfig(vocab_size=290, validation_fraction=0.1), False)
    facts = inspect_tokens(data, 2, no_advance)
    streams = [split.read(0, split.tokens).tolist() for split in facts.splits]
    full = [text for text in texts if text.strip()]
    assert facts.used == len({token for stream in streams for token in stream})
    assert facts.lengths.documents == len(full)
    assert facts.lengths.total == sum(map(len, streams))
    encoded = [len(data.tokenizer().encode(text, add_special_tokens=False).ids) + 1 for text in full]
    assert facts.lengths.shortest is not None
    assert facts.lengths.longest is not None
    assert (facts.lengths.shortest[0], facts.lengths.longest[0]) == (min(encoded), max(encoded))
    assert len(facts.first) == 2
    assert all(text in full and not goes_on for text, goes_on in facts.first)
    assert json.loads(json.dumps(as_json(facts)))["vocab_used"] == facts.used


def test_ids_are_shown_where_no_tokenizer_is_known_and_long_documents_go_on(tmp_path: Path) -> None:
    np.arange(3000, dtype=np.uint16).tofile(tmp_path / "a.bin")
    config = DataConfig(path=str(tmp_path / "a.bin"), cache=str(tmp_path / "cache"), validation_fraction=0.0)
    facts = inspect_tokens(ensure_prepared(config, False), 3, no_advance)
    assert not facts.documents_known
    ((text, goes_on),) = facts.first
    assert text.startswith("0 1 2 3 4 ")
    assert goes_on


@pytest.mark.parametrize("at_once", [1, 64])
def test_text_is_counted_as_a_plain_loop_counts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(inspection, "_DOCUMENTS_AT_ONCE", at_once)
    source, texts = corpus(tmp_path)
    parts = open_source(str(source), "text", tmp_path, Progress(False)).parts
    facts = inspect_text(parts, 3, no_advance)
    full = [text for text in texts if text.strip()]
    assert (facts.empty, facts.characters) == (2, sum(map(len, full)))
    assert (facts.lengths.documents, facts.lengths.total) == (len(full), sum(len(text.encode()) for text in full))
    assert facts.repeated == len(full) - len(set(full))
    assert facts.repeated_bytes == sum(len(text.encode()) for text in full) - sum(len(t.encode()) for t in set(full))
    assert [text for text, _ in facts.first] == full[:3]
    assert as_json(facts)["text_bytes"] == facts.lengths.total
