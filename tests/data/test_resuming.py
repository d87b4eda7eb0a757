"""A preparation that was stopped goes on where it was, and ends with the same bytes as one that was not."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tenfold.config.run import PrepareConfig
from tenfold.data import encoding, tokenizing, writing
from tenfold.data.prepare import prepare
from tenfold.data.shards import TokenData
from tenfold.data.survey import document_key
from tenfold.data.vocabulary import train_bpe
from tenfold.errors import TenfoldError

SMALL = {"_BATCH_CHARACTERS": 300, "SHARD_TOKENS": 700, "JOURNAL_TOKENS": 250}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder of several kinds of files with duplicates, and a tokenizer beside it."""
    draw = random.Random(0)
    lines = [
        " ".join(draw.choices(["sea", "ship", "north", "wind", "三国"], k=draw.randint(1, 20))) for _ in range(150)
    ]
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(4):
        rows = [json.dumps({"text": line}) for line in draw.choices(lines, k=60)]
        (folder / f"{number}.jsonl").write_text("\n".join(rows))
        (folder / f"{number}.txt").write_text(" ".join(draw.choices(lines, k=10)))
    train_bpe(lines, 300).save(str(tmp_path / "tokenizer.json"))
    return folder


def small(corpus: Path, given: bool, **more: Any) -> PrepareConfig:
    tokenizer = {"tokenizer": str(corpus.parent / "tokenizer.json")} if given else {}
    return PrepareConfig(**{"vocab_size": 300, "validation_fraction": 0.2, "workers": 2, **tokenizer, **more})


def make_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_BATCH_CHARACTERS", SMALL["_BATCH_CHARACTERS"])
    monkeypatch.setattr(writing, "SHARD_TOKENS", SMALL["SHARD_TOKENS"])
    monkeypatch.setattr(tokenizing, "JOURNAL_TOKENS", SMALL["JOURNAL_TOKENS"])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# A process of its own that sends itself a signal at the given call of ShardWriter.add.
STOPPED = """
import os, signal, sys
from pathlib import Path
from tenfold.config.run import PrepareConfig
from tenfold.data import encoding, prepare, tokenizing, writing
source, out, options, number, at = sys.argv[1:]
signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background of a shell ignore it
encoding._BATCH_CHARACTERS, writing.SHARD_TOKENS, tokenizing.JOURNAL_TOKENS = {small}
add, calls = writing.ShardWriter.add, 0
def stop(self, *arguments):
    global calls
    add(self, *arguments)
    calls += 1
    if calls == int(at):
        os.kill(os.getpid(), int(number))
writing.ShardWriter.add = stop
prepare.prepare(source, Path(out), PrepareConfig.model_validate_json(options), show_progress=False)
"""


def stop_at(corpus: Path, out: Path, options: PrepareConfig, number: signal.Signals, at: int) -> int:
    code = STOPPED.format(small=tuple(SMALL.values()))
    command = [sys.executable, "-c", code, str(corpus), str(out), options.model_dump_json(), str(int(number)), str(at)]
    return subprocess.run(command, capture_output=True, timeout=60).returncode


@pytest.mark.parametrize(("given", "dedup"), [(True, True), (True, False), (False, True)])
def test_killed_again_and_again_it_ends_with_the_same_bytes(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: bool, dedup: bool
) -> None:
    make_small(monkeypatch)
    options = small(corpus, given, dedup=dedup)
    whole = prepare(str(corpus), tmp_path / "whole", options, show_progress=False)
    out = tmp_path / "out"
    for at in (9, 7):
        assert stop_at(corpus, out, options, signal.SIGKILL, at) == -signal.SIGKILL
        assert not out.exists()
        assert (tmp_path / ".out.partial" / "journal.json").is_file()
    again = prepare(str(corpus), out, options, show_progress=False)
    assert len(again.index.splits["train"]) >= 3
    assert contents(out) == contents(whole.path)
    assert not (tmp_path / ".out.partial").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_what_is_done(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    make_small(monkeypatch)
    options = small(corpus, given=True)
    assert stop_at(corpus, tmp_path / "out", options, signal.Signals(number), 12) != 0
    taken = []
    encode = encoding._encode

    def counted(batch: encoding.Batch, *arguments: Any) -> list[encoding.Encoded]:
        taken.append(batch.tally.documents)
        return encode(batch, *arguments)

    monkeypatch.setattr(encoding, "_encode", counted)
    data = prepare(str(corpus), tmp_path / "out", options)
    assert "going on after " in capsys.readouterr().err
    documents = sum(data.split(name).documents for name in ("train", "validation"))  # type: ignore[arg-type]
    assert 0 < sum(taken) < documents
    data.verify()


@pytest.mark.parametrize("change", ["options", "text", "journal", "shard"])
def test_what_was_left_of_something_else_is_not_taken_up(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    make_small(monkeypatch)
    out, partial = tmp_path / "out", tmp_path / ".out.partial"
    options = small(corpus, given=True)
    stop_at(corpus, out, options, signal.SIGKILL, 9)
    if change == "options":
        options = small(corpus, given=True, validation_fraction=0.3)
    elif change == "text":
        (corpus / "1.txt").write_text("other text")
    elif change == "journal":
        (partial / "journal.json").write_bytes((partial / "journal.json").read_bytes()[:-10])
    else:
        (partial / "train-00000.bin").unlink()
    prepare(str(corpus), out, options, show_progress=False)
    prepare(str(corpus), tmp_path / "whole", options, show_progress=False)
    assert contents(out) == contents(tmp_path / "whole")


def test_a_given_tokenizer_makes_one_pass_over_the_text(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_survey(*_: object) -> None:
        raise AssertionError("the text was read before")

    monkeypatch.setattr(tokenizing, "survey", no_survey)
    data = prepare(str(corpus), tmp_path / "out", small(corpus, given=True), show_progress=False)
    assert data.split("validation").documents > 0


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_one_pass_leaves_each_split_a_document_too(corpus: Path, tmp_path: Path, fraction: float) -> None:
    given = small(corpus, given=True, validation_fraction=fraction)
    data = prepare(str(corpus), tmp_path / "out", given, show_progress=False)
    lone = data.split("validation" if fraction < 0.5 else "train")
    parts = np.split(lone.read(0, lone.tokens), lone.document_starts()[1:])
    found = {data.tokenizer().decode(part[:-1].tolist(), skip_special_tokens=False) for part in parts}
    documents = [
        json.loads(line)["text"] if path.suffix == ".jsonl" else line
        for path in corpus.iterdir()
        for line in path.read_text().split("\n")
    ]
    assert found == {(min if fraction < 0.5 else max)(documents, key=lambda text: document_key(text.encode()))}


def test_a_fault_of_the_text_after_hours_leaves_the_work_done(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_small(monkeypatch)
    (corpus / "3.txt").chmod(0)
    if os.access(corpus / "3.txt", os.R_OK):
        reads = encoding.document_key

        def fail(encoded: bytes) -> int:
            if fail.left == 0:  # type: ignore[attr-defined]
                raise TenfoldError("it cannot be read: permission denied")
            fail.left -= 1  # type: ignore[attr-defined]
            return reads(encoded)

        fail.left = 200  # type: ignore[attr-defined]
        monkeypatch.setattr(encoding, "document_key", fail)
    options = small(corpus, given=True)
    with pytest.raises(TenfoldError, match="permission denied"):
        prepare(str(corpus), tmp_path / "out", options, show_progress=False)
    assert (tmp_path / ".out.partial" / "journal.json").is_file()
    (corpus / "3.txt").chmod(0o600)
    monkeypatch.setattr(encoding, "document_key", document_key)
    assert TokenData.open(prepare(str(corpus), tmp_path / "out", options, False).path).split("train").documents > 100
