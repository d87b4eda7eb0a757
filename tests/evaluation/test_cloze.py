"""Last words against a loop that scores one passage, one token, at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tenfold.data.vocabulary import for_documents, train_bpe
from tenfold.evaluation.cloze import Passage, cloze, cut_passages, read_passages
from tenfold.nn.decoder import Decoder

TEXTS = [
    "the cat sat on the mat",
    "the dog sat  on the\nlog",
    "a mat is a mat is a mat is a mat",
    "the log is naïve and the dog is 中文",
    "cat dog",
]
TOKENIZER = for_documents(train_bpe(TEXTS * 3, 290))
SHAPES: dict[str, dict[str, Any]] = {
    "dense": {},
    "moe with capacity": {"moe": {"experts": 4, "ffn": 8, "capacity": "k", "capacity_factor": 0.5}},
    "documents": {"document_end": 0},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [32, 9])
def test_cloze_equals_a_loop_over_passages(tiny_decoder: Callable[..., Decoder], shape: str, window: int) -> None:
    model = tiny_decoder(sharing="all", vocab_size=290, max_positions=32, **SHAPES[shape])
    losses, right, cut = [], 0, 0
    model.eval()
    passages = list(read_passages(TEXTS, TOKENIZER, 0, 2))
    # So that some are right: the bias towards one passage's word is put into the model.
    model.embedding.weight.data[passages[0].word[0]] *= 3
    for text in TEXTS:
        head = text[: len(text.rsplit(None, 1)[0])]
        given = [0, *TOKENIZER.encode(head).ids]
        word = TOKENIZER.encode(text[len(head) :]).ids
        seen, loss, hit = given, 0.0, True
        cut += len(given) + len(word) - 1 > window
        # What the window has room for when the last token is asked for; the earlier ones see no more than that.
        first = max(0, len(given) + len(word) - 1 - window)
        for token in word:
            with torch.no_grad():
                logits = model.logits(model(torch.tensor([seen[first:]]))[0])[0, -1]
            loss -= float(logits.log_softmax(0)[token])
            hit = hit and int(logits.argmax()) == token
            seen = [*seen, token]
        losses.append(loss)
        right += hit
    model.train()
    for batch_size in (1, 2, 10):
        found = cloze(model, passages, batch_size, window=window)
        assert found["accuracy"] == right / len(TEXTS)
        assert found["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)
        assert found["perplexity"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)
        assert (found["passages"], found["cut"], found["too_long"]) == (len(TEXTS), cut, 0)
    assert cut == 0 if window == 32 else cut > 0


def test_a_model_that_knows_every_word_is_right_every_time(tiny_decoder: Callable[..., Decoder]) -> None:
    model = tiny_decoder(vocab_size=290, tie_embeddings=False)
    for block in model.layers:
        for parameter in (block.attention.wo.weight, block.ffn.down.weight):
            parameter.data.zero_()
    passages = [Passage([0, 5], [6, 7]), Passage([0, 8], [9])]
    # With idle layers what follows is a function of the last token alone: 5 -> 6 -> 7, 8 -> 9.
    model.head.weight.data.zero_()
    for before, after in ((5, 6), (6, 7), (8, 9)):
        direction = model.embedding.weight.data[before]
        model.head.weight.data[after] = direction * 100 / direction.square().sum()
    found = cloze(model, passages)
    assert found["accuracy"] == 1.0
    assert found["perplexity"] < 1.1
    wrong = cloze(model, [*passages, Passage([0, 5], [6, 9])])  # its second token is not what the model would say
    assert wrong["accuracy"] == pytest.approx(2 / 3)


def test_a_word_longer_than_the_window_is_left_out_and_told(tiny_decoder: Callable[..., Decoder]) -> None:
    model = tiny_decoder(max_positions=4)
    found = cloze(model, [Passage([0, 1], [2]), Passage([0, 1], [2, 3, 4, 5, 6])])
    assert (found["passages"], found["too_long"]) == (1, 1)
    with pytest.raises(ValueError, match="fits the window"):
        cloze(model, [Passage([0], [1] * 5)])


@given(st.lists(st.text(alphabet="ab é中\n.", max_size=12), max_size=5), st.integers(2, 4))
def test_given_and_word_are_the_text(texts: list[str], min_words: int) -> None:
    expected = [text.rstrip() for text in texts if len(text.split()) >= min_words]
    found = list(read_passages(texts, TOKENIZER, 0, min_words))
    assert len(found) == len(expected)
    for passage, text in zip(found, expected, strict=True):
        assert passage.given[0] == 0
        assert TOKENIZER.decode(passage.given[1:] + passage.word, skip_special_tokens=False) == text
        assert TOKENIZER.decode(passage.word).split() == text.split()[-1:]


def test_a_tokenizer_that_marks_words_otherwise_is_cut_at_the_word_too() -> None:
    words = {"[UNK]": 0, "▁the": 1, "▁cat": 2, "▁s": 3, "at": 4, "<eos>": 5}
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "▁the": 1, "▁cat": 2}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    assert list(read_passages(["the the cat"], tokenizer, 9, 2)) == [Passage([9, 1, 1], [2])]
    pieces = Tokenizer(models.BPE(words | {c: 10 + n for n, c in enumerate("▁thecas")}, [], unk_token="[UNK]"))
    pieces.pre_tokenizer = pre_tokenizers.Metaspace()
    (passage,) = read_passages(["the cat"], pieces, 5, 2)
    assert pieces.decode(passage.word).replace("▁", "").replace(" ", "") == "cat"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("documents", ["one two\nthree\n\n four five \n \nsix"]),
        ("lines", ["one two", "three", "", " four five ", " ", "six"]),
        ("paragraphs", ["one two\nthree", " four five ", "six"]),
        ("auto", ["one two\nthree", " four five ", "six"]),
    ],
)
def test_passages_are_cut_as_asked(kind: str, expected: list[str]) -> None:
    assert list(cut_passages("\none two\nthree\n\n four five \n \nsix\n", kind)) == expected


def test_without_blank_lines_each_line_is_a_passage() -> None:
    assert list(cut_passages("one two\nthree four\n", "auto")) == ["one two", "three four"]
