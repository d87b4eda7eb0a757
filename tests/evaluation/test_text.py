"""Text as tokens come, with a byte-level tokenizer that cuts characters apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tenfold.data.vocabulary import train_bpe
from tenfold.evaluation.text import WrittenText

TOKENIZER: Tokenizer = train_bpe(["the cat sat on the mat, the dog sat on the log"], 280)


def stream(text: str, stops: list[str]) -> tuple[WrittenText, list[str]]:
    written = WrittenText(TOKENIZER, stops)
    shown = []
    for token in TOKENIZER.encode(text).ids:
        if written.stopped:
            break
        shown.append(written.add(token))
    return written, [*shown, written.end()]


def test_no_part_of_a_character_is_shown() -> None:
    written, shown = stream("na\u00efve 中文 😀!", [])
    assert "".join(shown) == written.text == "naïve 中文 😀!"
    assert all("\ufffd" not in piece for piece in shown)
    assert "" in shown  # a character of several tokens had to wait


def test_bytes_that_are_no_character_are_shown_at_the_end() -> None:
    written = WrittenText(TOKENIZER)
    first = TOKENIZER.encode("中").ids[0]
    assert written.add(first) == ""
    assert written.end() == "\ufffd"


@pytest.mark.parametrize("stop", ["sat", " on t", "t", "\n"])
def test_a_text_ends_before_the_first_stop(stop: str) -> None:
    text = "the cat sat on the mat"
    written, shown = stream(text, [stop, "dog"])
    expected = text.split(stop)[0]
    assert "".join(shown) == written.text == expected
    assert written.stopped == (stop in text)


@given(
    text=st.text(alphabet="abc é中", max_size=20),
    stops=st.lists(st.text(alphabet="abc中", min_size=1, max_size=3), max_size=2),
)
def test_what_is_shown_is_the_text_before_the_earliest_stop(text: str, stops: list[str]) -> None:
    written, shown = stream(text, stops)
    # The earliest that is whole: a longer stop may begin before a shorter one and end after it.
    whole = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if whole:
        seen = text[: min(whole)]
        assert written.stopped
        assert seen.startswith(written.text)
        assert any(seen[len(written.text) :].startswith(stop) for stop in stops)
    else:
        assert written.text == text
    assert "".join(shown) == written.text
