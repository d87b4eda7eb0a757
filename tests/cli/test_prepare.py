"""`tenfold prepare` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tenfold.cli.prepare import main
from tenfold.data.shards import TokenData
from tenfold.errors import TenfoldError


@pytest.fixture
def source(tmp_path: Path) -> str:
    rows = [json.dumps({"body": f"document {number} of a small text"}) for number in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    return str(tmp_path / "a.jsonl")


def test_it_makes_shards_and_says_what_they_hold(
    tmp_path: Path, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--text-field", "body", "--vocab-size", "270", "--validation-fraction", "25%"]
    assert main([source, str(tmp_path / "out"), *flags]) == 0
    data = TokenData.open(tmp_path / "out")
    assert data.vocab_size == 270
    assert data.split("validation").documents + data.split("train").documents == 40
    shown = capsys.readouterr()
    assert f"train: {data.split('train').tokens:,} tokens" in shown.out
    assert "40 documents" in shown.err
    assert main([source, str(tmp_path / "out"), *flags]) == 0
    assert "holds just this already" in capsys.readouterr().err


def test_help_shows_examples_and_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    for word in ("tenfold prepare python-stdlib", "three-kingdoms", "--vocab-size", "--validation-fraction"):
        assert word in shown


@pytest.mark.parametrize("argv", [[], ["only-one"], ["--vocab-size", "300"]])
def test_without_source_and_out_it_shows_the_usage(argv: list[str]) -> None:
    with pytest.raises(TenfoldError, match="needs a SOURCE and an OUT"):
        main(argv)


def test_a_value_out_of_range_is_an_error(tmp_path: Path, source: str) -> None:
    for size in ("5", "1000000000"):
        with pytest.raises(TenfoldError, match="vocab_size"):
            main([source, str(tmp_path / "out"), "--vocab-size", size])
