"""Text to shards: the token stream against a plain loop, held-out documents, refusals, interruptions, memory."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from tokenizers import Tokenizer, models

from tenfold.config.run import DataConfig, PrepareConfig
from tenfold.data import encoding, survey, tokenizing, writing
from tenfold.data.prepare import as_prepared, ensure_prepared, prepare
from tenfold.data.shards import TokenData
from tenfold.data.sources import Part
from tenfold.data.survey import Survey, document_key
from tenfold.data.vocabulary import for_documents, train_bpe
from tenfold.errors import TenfoldError

WORDS = ["the", "sea", "a", "ship", "sails", "north", "三国", "演义", "naïve", "42", "<|endoftext|>", "\n", "wind,"]


def texts(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 40))) + f" {number}" for number in range(count)]


def write_jsonl(path: Path, documents: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


def small(**changes: object) -> PrepareConfig:
    return PrepareConfig(**{"vocab_size": 300, "validation_fraction": 0.1, **changes})  # type: ignore[arg-type]


def tokens_of(data: TokenData, split: str) -> list[int]:
    found = data.split(split)  # type: ignore[arg-type]
    return found.read(0, found.tokens).tolist()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def plain_reference(documents: list[str], tokenizer: Tokenizer, fraction: float) -> dict[str, list[int]]:
    """The token stream as the shortest loop makes it."""
    streams: dict[str, list[int]] = {"train": [], "validation": []}
    for text in documents:
        first_bytes = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        split = "validation" if int(first_bytes, 16) / 2**64 < fraction else "train"
        streams[split] += [*tokenizer.encode(text, add_special_tokens=False).ids, 0]
    return streams


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_shards_equal_a_plain_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    monkeypatch.setattr(encoding, "_BATCH_CHARACTERS", 300)
    monkeypatch.setattr(writing, "SHARD_TOKENS", 900)
    documents = texts(200)
    data = prepare(str(write_jsonl(tmp_path / "a.jsonl", documents)), tmp_path / "out", small(workers=workers), False)
    data.verify()
    expected = plain_reference(documents, data.tokenizer(), 0.1)
    assert len(data.index.splits["train"]) > 2
    for split in ("train", "validation"):
        found = data.split(split)
        assert tokens_of(data, split) == expected[split]
        assert found.tokens == len(expected[split])
        assert found.documents == expected[split].count(0)
        assert found.max_token == max(expected[split])
        ends = np.flatnonzero(np.array(expected[split]) == 0) + 1
        assert found.document_starts().tolist() == [0, *ends[:-1].tolist()]
    assert sum(data.split(name).text_bytes for name in ("train", "validation")) == len("".join(documents).encode())


def test_the_number_of_workers_changes_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_BATCH_CHARACTERS", 200)
    source = str(write_jsonl(tmp_path / "a.jsonl", texts(300)))
    for workers in (1, 2, 7):
        prepare(source, tmp_path / str(workers), small(workers=workers), False)
    assert contents(tmp_path / "1") == contents(tmp_path / "2") == contents(tmp_path / "7")


def test_training_a_tokenizer_twice_gives_the_same() -> None:
    assert train_bpe(texts(300), 400).to_str() == train_bpe(texts(300), 400).to_str()


def test_text_comes_back_from_its_tokens(tmp_path: Path) -> None:
    documents = texts(50)
    data = prepare(str(write_jsonl(tmp_path / "a.jsonl", documents)), tmp_path / "out", small(), False)
    tokenizer = data.tokenizer()
    for text in [*documents, "\t\u00e9\U0001f642  中文字字字字字字\r\n", "x" * 500]:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


def test_end_of_text_written_inside_a_document_is_ordinary_text(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["a <|endoftext|> b"] * 3)
    data = prepare(str(source), tmp_path / "out", small(validation_fraction=0.0), False)
    assert tokens_of(data, "train").count(data.end_of_text) == 3


def test_compressed_sources_give_the_same_shards(tmp_path: Path) -> None:
    plain = write_jsonl(tmp_path / "a.jsonl", texts(100)).read_bytes()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(plain))
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(plain))
    made = [
        prepare(str(tmp_path / name), tmp_path / f"out{number}", small(), False)
        for number, name in enumerate(["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
    ]
    assert len({data.fingerprint for data in made}) == 1


def test_a_folder_is_read_in_order_and_tells_what_it_skips(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "corpus"
    (folder / "b").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / "b" / "one.md").write_text("second")
    (folder / "a.txt").write_text("first")
    (folder / "c.jsonl").write_text('{"text": "third"}\n{"text": "fourth"}')
    (folder / "empty.py").write_text("")
    (folder / "picture.png").write_bytes(b"\0")
    (folder / "index.json").write_text("{}")
    (folder / "link").symlink_to(folder / "b")
    (folder / ".git" / "config.txt").write_text("hidden")
    data = prepare(str(folder), tmp_path / "out", small(validation_fraction=0.0))
    text = data.tokenizer().decode(tokens_of(data, "train"), skip_special_tokens=False)
    assert text == "".join(f"{word}<|endoftext|>" for word in ("first", "second", "third", "fourth"))
    assert "skipped 3 of 7 files" in capsys.readouterr().err


# Held-out documents


def test_equal_documents_share_a_side_wherever_they_stand(tmp_path: Path) -> None:
    documents = texts(200)
    forward = prepare(str(write_jsonl(tmp_path / "a.jsonl", documents * 2)), tmp_path / "a", small(), False)
    other = random.Random(1).sample(documents, 200)
    backward = prepare(str(write_jsonl(tmp_path / "b.jsonl", other * 2)), tmp_path / "b", small(), False)

    def sides(data: TokenData, split: str) -> list[str]:
        parts = np.split(np.array(tokens_of(data, split)), data.split(split).document_starts()[1:])  # type: ignore[arg-type]
        return sorted(data.tokenizer().decode(part[:-1].tolist(), skip_special_tokens=False) for part in parts)

    assert sorted(sides(forward, "train") + sides(forward, "validation")) == sorted(documents * 2)
    held_out, trained = sides(forward, "validation"), sides(forward, "train")
    assert not set(held_out) & set(trained)
    assert held_out == sides(backward, "validation")
    assert 10 <= len(held_out) / 2 <= 32  # 10 % of 200


@pytest.mark.parametrize(("fraction", "lone"), [(1e-9, "validation"), (1 - 1e-9, "train")])
def test_a_share_between_0_and_1_leaves_each_split_a_document(tmp_path: Path, fraction: float, lone: str) -> None:
    documents = texts(20)
    source = write_jsonl(tmp_path / "a.jsonl", documents)
    data = prepare(str(source), tmp_path / "out", small(validation_fraction=fraction), False)
    assert data.split(lone).documents == 1  # type: ignore[arg-type]
    extreme = (min if lone == "validation" else max)(documents, key=lambda text: document_key(text.encode()))
    assert tokens_of(data, lone)[:-1] == data.tokenizer().encode(extreme, add_special_tokens=False).ids


@pytest.mark.parametrize(("count", "fraction"), [(1, 0.5), (1, 0.99), (5, 0.0)])
def test_a_single_document_or_no_share_gives_no_validation(tmp_path: Path, count: int, fraction: float) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(count))
    data = prepare(str(source), tmp_path / "out", small(validation_fraction=fraction), False)
    assert data.split("train").documents == count
    with pytest.raises(TenfoldError, match="has no validation split"):
        data.split("validation")


def test_the_tokenizer_is_trained_on_a_bounded_sample_that_does_not_depend_on_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(survey, "SAMPLE_BYTES", 4000)
    documents = texts(500)

    def sample(order: list[str]) -> Survey:
        return survey.survey([Part.of(lambda: order)], dedup=False, advance=lambda *_: None)

    found = sample(documents)
    assert 500 < sum(len(text.encode()) for _, text in found.sample) <= 4000
    assert sorted(found.sample) == sorted(sample(documents[::-1]).sample)
    assert found.tally.documents == 500


# Given tokenizers


def given_tokenizer(path: Path, end: str) -> Path:
    tokenizer = train_bpe(texts(100), 300)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    path.write_text(tokenizer.to_str().replace('"<|endoftext|>"', json.dumps(end)))
    return path


def test_a_given_tokenizer_is_used_and_does_not_truncate_or_pad(tmp_path: Path) -> None:
    path = given_tokenizer(tmp_path / "given.json", end="</s>")
    documents = texts(60)
    source = write_jsonl(tmp_path / "a.jsonl", documents)
    data = prepare(str(source), tmp_path / "out", small(tokenizer=str(path)), False)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == path.read_bytes()
    assert data.end_of_text == 0
    reference = for_documents(Tokenizer.from_file(str(path)))
    assert tokens_of(data, "train") == plain_reference(documents, reference, 0.1)["train"]


def test_a_large_vocabulary_is_written_as_uint32(tmp_path: Path) -> None:
    tokenizer = train_bpe(texts(100), 300)
    tokenizer.add_tokens([f"extra{number}" for number in range(66_000)])
    tokenizer.save(str(tmp_path / "given.json"))
    source = write_jsonl(tmp_path / "a.jsonl", ["extra65999", "the sea"])
    options = small(tokenizer=str(tmp_path / "given.json"), validation_fraction=0.0)
    data = prepare(str(source), tmp_path / "out", options, False)
    assert data.index.dtype == "uint32"
    assert data.split("train").max_token > 65535
    assert tokens_of(data, "train")[0] == data.split("train").max_token


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"model": 1}', "is not a tokenizer.json"),
        ("not JSON", "is not a tokenizer.json"),
        (None, "there is no"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_an_error(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "t.json").write_text(content)
    source = write_jsonl(tmp_path / "a.jsonl", texts(3))
    with pytest.raises(TenfoldError, match=message):
        prepare(str(source), tmp_path / "out", small(tokenizer=str(tmp_path / "t.json")), False)


def test_a_tokenizer_that_cannot_encode_the_text_is_an_error(tmp_path: Path) -> None:
    vocabulary = {"<|endoftext|>": 0, "word": 1}
    Tokenizer(models.WordLevel(vocabulary)).save(str(tmp_path / "t.json"))
    source = write_jsonl(tmp_path / "a.jsonl", texts(3))
    with pytest.raises(TenfoldError, match="cannot encode this text"):
        prepare(str(source), tmp_path / "out", small(tokenizer=str(tmp_path / "t.json")), False)


def test_file_names_that_are_not_utf_8_are_read(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    Path(os.fsdecode(os.fsencode(tmp_path / "texts") + b"/caf\xe9.txt")).write_text("a few words of text")
    assert prepare(str(tmp_path / "texts"), tmp_path / "out", small(), False).split("train").documents == 1


def test_a_tokenizer_without_an_end_of_document_is_an_error(tmp_path: Path) -> None:
    path = given_tokenizer(tmp_path / "given.json", end="<|stop|>")
    source = write_jsonl(tmp_path / "a.jsonl", texts(3))
    with pytest.raises(TenfoldError, match="no token that ends a document"):
        prepare(str(source), tmp_path / "out", small(tokenizer=str(path)), False)
    assert not (tmp_path / "out").exists()


def test_a_vocabulary_larger_than_the_text_gives_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = prepare(str(write_jsonl(tmp_path / "a.jsonl", texts(3))), tmp_path / "out", small(vocab_size=5000))
    assert data.vocab_size < 1000
    assert f"a BPE of {data.vocab_size:,} entries, not 5,000" in capsys.readouterr().err


# Refusals and interruptions


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "there is no"),
        ("empty.txt", b"", "is empty"),
        ("blank.txt", b" \n\n ", "holds no text"),
        ("one.json", b"[]", "JSON lines"),
        ("table.parquet", b"PAR1", "is damaged or not what its name says"),
        ("table.parquet.gz", b"PAR1", "unpack it first"),
        ("binary.txt", b"PAR1\0", "binary"),
        ("/dev/null", None, "no regular file"),
        ("folder", None, "holds no text: 1 files"),
    ],
)
def test_a_source_without_text_is_an_error_and_leaves_nothing(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    if name == "folder":
        (tmp_path / name).mkdir()
        (tmp_path / name / "picture.png").write_bytes(b"")
    before = set(tmp_path.iterdir())
    with pytest.raises(TenfoldError, match=message):
        prepare(str(tmp_path / name), tmp_path / "out", small(), False)
    assert set(tmp_path.iterdir()) == before


def test_the_same_command_again_changes_nothing_and_another_is_refused(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(30))
    first = prepare(str(source), tmp_path / "out", small(), False)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    again = prepare(str(source), tmp_path / "out", small(workers=3), False)
    assert again.fingerprint == first.fingerprint
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    with pytest.raises(TenfoldError, match=r"made with another vocab_size; choose a new folder"):
        prepare(str(source), tmp_path / "out", small(vocab_size=290), False)
    write_jsonl(source, texts(31))
    with pytest.raises(TenfoldError, match=r"made with another text"):
        prepare(str(source), tmp_path / "out", small(), False)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("precious")
    with pytest.raises(TenfoldError, match="holds other files"):
        prepare(str(source), tmp_path / "other", small(), False)
    with pytest.raises(TenfoldError, match="is the folder you are in"):
        prepare(str(source), Path("."), small(), False)
    with pytest.raises(TenfoldError, match="holds token shards already"):
        prepare(str(tmp_path / "out"), tmp_path / "new", small(), False)


def test_text_that_changes_while_it_is_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(30))
    found = survey.survey

    def then_append(*arguments: object, **named: object) -> Survey:
        result = found(*arguments, **named)  # type: ignore[arg-type]
        write_jsonl(source, texts(40))
        return result

    monkeypatch.setattr("tenfold.data.tokenizing.survey", then_append)
    with pytest.raises(TenfoldError, match="changed while it was read"):
        prepare(str(source), tmp_path / "out", small(), False)


def test_memory_does_not_grow_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_BATCH_CHARACTERS", 4000)
    monkeypatch.setattr(survey, "SAMPLE_BYTES", 20_000)
    tokenizer = for_documents(train_bpe(texts(200), 300))

    def peak(repeats: int) -> int:
        def stream() -> Iterator[str]:
            for number in range(repeats):
                yield from texts(50, seed=number)

        parts = [Part.of(stream)]
        tracemalloc.start()
        survey.survey(parts, dedup=False, advance=lambda *_: None)
        for _ in encoding.encode_documents(parts, tokenizer, 0, 0, workers=2):
            pass
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    peak(5)
    assert peak(80) < 1.5 * peak(20)


# The cache


def test_shards_are_made_once_and_anew_when_text_or_options_change(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(30))

    def ensure(**changes: object) -> TokenData:
        told = {"path": str(source), "cache": str(tmp_path / "cache"), "vocab_size": 300, **changes}
        return ensure_prepared(DataConfig(**told), show_progress=False)  # type: ignore[arg-type]

    first = ensure()
    assert first.path.parent == tmp_path / "cache"
    assert first.path.name.startswith("a.jsonl-")
    made = (first.path / "index.json").stat().st_mtime_ns
    assert ensure(workers=2, sequence_length=7).path == first.path
    assert (first.path / "index.json").stat().st_mtime_ns == made
    os.utime(source, ns=(1, 1))  # a copy or a checkout: the same text at another time
    assert ensure().path == first.path
    assert ensure(vocab_size=290).path != first.path
    write_jsonl(source, texts(31))
    assert ensure().path != first.path


def test_a_prepared_folder_is_opened_as_it_is(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(30))
    made = prepare(str(source), tmp_path / "out", small(), False)
    opened = ensure_prepared(DataConfig(path=str(tmp_path / "out"), cache=str(tmp_path / "cache")))
    assert opened.path == made.path
    assert not (tmp_path / "cache").exists()


def test_the_fingerprint_tells_tokens_apart_and_not_places(tmp_path: Path) -> None:
    one = write_jsonl(tmp_path / "a.jsonl", texts(30))
    two = write_jsonl(tmp_path / "b.jsonl", texts(30))
    other = write_jsonl(tmp_path / "c.jsonl", texts(30, seed=1))
    prints = [prepare(str(path), tmp_path / path.stem, small(), False).fingerprint for path in (one, two, other)]
    assert prints[0] == prints[1] != prints[2]


def test_options_that_prepared_shards_were_not_made_with_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two three four " * 50)
    out = tmp_path / "shards"
    prepare(str(tmp_path / "a.txt"), out, PrepareConfig(vocab_size=260, workers=1), show_progress=False)
    plain = ensure_prepared(DataConfig(path=str(out)))
    assert ensure_prepared(DataConfig(path=str(out), vocab_size=260)).fingerprint == plain.fingerprint
    assert as_prepared(DataConfig(path=str(out)), plain).vocab_size == 260
    with pytest.raises(TenfoldError, match=r"data\.vocab_size = 300, but .* were prepared with 260"):
        ensure_prepared(DataConfig(path=str(out), vocab_size=300))
    other = tmp_path / "tokenizer.json"
    other.write_text("{}")
    with pytest.raises(TenfoldError, match=r"data\.tokenizer"):
        ensure_prepared(DataConfig(path=str(out), tokenizer=str(other)))


def test_text_that_is_rewritten_at_the_same_length_while_it_is_read_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one two three four " * 50)
    trained = tokenizing.train_tokenizer

    def rewrite(*arguments: Any) -> Tokenizer:
        file.write_text("one two three five " * 50)
        return trained(*arguments)

    monkeypatch.setattr(tokenizing, "train_tokenizer", rewrite)
    with pytest.raises(TenfoldError, match="changed while it was read"):
        prepare(str(file), tmp_path / "shards", PrepareConfig(vocab_size=260, workers=1), show_progress=False)
