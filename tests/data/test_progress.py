"""What is shown while text is prepared."""

from __future__ import annotations

import sys

import pytest

from tenfold.data import progress
from tenfold.data.progress import Progress


def test_plain_lines_tell_bytes_documents_and_speed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    with Progress(show=True).phase("tokenizing", 2_000_000) as advance:
        advance(500_000, 3, 1000)
        advance(1_500_000, 4, 2000)
    first, second, last = capsys.readouterr().err.splitlines()
    assert first.startswith("tokenizing: 0.5 of 2.0 MB, 3 documents, 1,000 tokens, ")
    assert second.startswith("tokenizing: 2.0 of 2.0 MB, 7 documents, 3,000 tokens, ")
    assert "tokens/s" in last


def test_nothing_is_shown_when_it_is_not_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    quiet = Progress(show=False)
    quiet.note("a note")
    with quiet.phase("reading") as advance:
        advance(1, 1, 1)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_a_bar_that_takes_every_advance(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with Progress(show=True).phase("tokenizing", 10) as advance:
        advance(10, 2, 5)
    assert "tokenizing: 0.0 MB, 2 documents, 5 tokens" in capsys.readouterr().err
