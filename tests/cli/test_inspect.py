"""`tenfold inspect` on every kind of data, at 80 columns."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rich.cells import cell_len

from tenfold.cli.main import main


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    rows = [{"body": f"document {number} 三国 " * (1 + number % 9) + "\x1b[31m"} for number in range(60)]
    rows += rows[:5]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "a.jsonl"


def inspected(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(["inspect", *words]) == 0
    out = capsys.readouterr().out
    assert all(cell_len(line) <= 80 for line in out.splitlines()), out
    assert "\x1b" not in out
    return out


def test_text_that_is_not_prepared(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = inspected(capsys, "a.jsonl", "--text-field", "body")
    assert "a.jsonl: text, not prepared" in out
    assert "documents   65" in out
    assert "5 documents repeat an earlier one" in out
    assert "█" in out
    assert "1  document 0 三国" in out


def test_prepared_text(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "a.jsonl", "out", "--text-field", "body", "--vocab-size", "300", "--dedup"]) == 0
    out = inspected(capsys, "out", "--documents", "1")
    assert "token shards, uint16" in out
    assert "5 documents dropped" in out
    assert "vocabulary" in out
    assert "tokens in a document" in out
    assert "first documents of train:" in out
    told = json.loads(inspected_json(capsys, "out"))
    assert told["splits"]["train"]["documents"] + told["splits"]["validation"]["documents"] == 60
    assert told["duplicates"]["documents"] == 5


def inspected_json(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(["inspect", *words, "--json"]) == 0
    return capsys.readouterr().out


def test_token_files_of_others(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.arange(200, dtype=np.uint16).tofile("train.bin")
    out = inspected(capsys, "train.bin", "--cache", "cache")
    assert "nanoGPT's or llm.c's .bin, read in place, uint16" in out
    assert "not known (data.tokenizer names one)" in out
    assert "1  0 1 2 3" in out
    flags = ["--cache", "cache", "--end-of-text", "4", "--validation-fraction", "0"]
    assert "2  5 6 7" in inspected(capsys, "train.bin", *flags)


def test_the_data_of_a_run_file(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").write_text('[data]\npath = "a.jsonl"\ntext_field = "body"\ncache = "cache"\n')
    assert "text, not prepared" in inspected(capsys, "run.toml")
    with pytest.raises(SystemExit):
        main(["inspect", "run.toml", "--data.no-such-key", "3"])


def test_a_mixture_is_shown_by_stage_and_source(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.arange(200, dtype=np.uint16).tofile("b.bin")
    Path("run.toml").write_text(
        '[data]\ntext_field = "body"\ncache = "cache"\n'
        '[[data.mixture]]\nname = "one"\npath = "a.jsonl"\nweight = 3\n'
        '[[data.mixture]]\nname = "two"\npath = "b.bin"\n'
        '[[stages]]\nname = "first"\nuntil = "50%"\n'
        '[[stages]]\nname = "second"\nmixture = {two = 1}\n'
    )
    out = inspected(capsys, "run.toml")
    shares = [line.split()[1:3] for line in out.splitlines() if line.startswith(("one ", "two "))]
    assert shares == [["75.0%", "0.0%"], ["25.0%", "100.0%"]]
    assert "-- one ---" in out
    assert "a.jsonl: text, not prepared" in out
    assert "nanoGPT's" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "there is no file or folder nowhere"),
        (["a.jsonl"], "has no field 'text'"),
        (["a.jsonl", "--documents", "-1"], "give 0 or more"),
        (["nowhere.toml"], "there is no run file"),
        (["blank.jsonl"], "blank.jsonl holds no text: 2 documents, and all of them are empty"),
        (["a.txt", "--tokenizer", "broken.json"], "broken.json"),
    ],
)
def test_mistakes_are_one_message(
    corpus: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    corpus.with_name("blank.jsonl").write_text('{"text": ""}\n{"text": " "}\n')
    corpus.with_name("a.txt").write_text("some text")
    corpus.with_name("broken.json").write_text("{}")
    assert main(["inspect", *words]) == 2
    err = capsys.readouterr().err
    assert message in " ".join(err.split())
    assert "Traceback" not in err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--help"]) == 0
    assert "tenfold inspect data/corpus" in capsys.readouterr().out
