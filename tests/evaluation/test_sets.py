"""What is read for an evaluation: public formats, in samples written for these tests."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tenfold.config.run import EvaluationOptions, PrepareConfig
from tenfold.data.prepare import prepare
from tenfold.data.progress import Progress
from tenfold.data.vocabulary import for_documents, train_bpe
from tenfold.errors import TenfoldError
from tenfold.evaluation.cloze import read_passages
from tenfold.evaluation.sets import EvaluationSet, TextTokenizer, evaluate, read_set

# The layout of WikiText: a blank between all tokens, headings between equals signs, blank lines that hold a blank.
WIKITEXT = """ 
 = A Small Hill = 
 
 A Small Hill is a hill of 42 @.@ 5 metres in the north of nowhere . It was named in 1901 . 
 
 = = Geography = = 
 
 The hill lies between two rivers , one of which is dry in summer @-@ time . 
"""  # noqa: W291, W293
LAMBADA = [
    "he looked at the clock and then at the door , and when nobody came he wound the clock",
    "she had baked the bread herself , she said , and gave each of them a slice of bread",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_bpe([WIKITEXT, *LAMBADA] * 2, 300).save(str(file))
    return TextTokenizer.of(file)


def reading(data: Path, tokenizer: TextTokenizer, window: int = 16, **options: Any) -> EvaluationSet:
    return read_set(str(data), EvaluationOptions(**options), tokenizer, window, data.parent, Progress(False))


def text_of(found: EvaluationSet, tokenizer: TextTokenizer) -> str:
    assert found.row is not None
    return str(tokenizer.tokenizer.decode(found.row.read(0, found.row.tokens).tolist(), skip_special_tokens=False))


@pytest.mark.parametrize("name", ["wiki.test.raw", "wiki.test.tokens", "text.txt"])
def test_a_wikitext_file_is_one_text(tmp_path: Path, tokenizer: TextTokenizer, name: str) -> None:
    (tmp_path / name).write_text(WIKITEXT * 200)  # longer than what training cuts
    found = reading(tmp_path / name, tokenizer)
    assert text_of(found, tokenizer) == WIKITEXT * 200 + "<|endoftext|>"
    assert found.row is not None
    assert found.row.text_bytes == len(WIKITEXT) * 200
    assert found.words_per_token == pytest.approx(len(WIKITEXT.split()) * 200 / found.row.tokens)
    assert found.work == found.row.tokens - 1


def test_wikitexts_parquet_form_joined_is_the_same_text(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    rows = WIKITEXT.splitlines(keepends=True)
    pyarrow.parquet.write_table(pyarrow.table({"text": rows}), tmp_path / "test.parquet")
    (tmp_path / "wiki.test.raw").write_text(WIKITEXT)
    joined = reading(tmp_path / "test.parquet", tokenizer, joined=True)
    assert text_of(joined, tokenizer) == text_of(reading(tmp_path / "wiki.test.raw", tokenizer), tokenizer)
    apart = text_of(reading(tmp_path / "test.parquet", tokenizer), tokenizer)
    assert apart.count("<|endoftext|>") == sum(bool(row.strip()) for row in rows)


def test_lambada_is_read_from_json_lines_and_from_plain_lines(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    (tmp_path / "test.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in LAMBADA))
    (tmp_path / "plain.txt").write_text("\n".join(LAMBADA) + "\n")
    expected = tuple(read_passages(LAMBADA, tokenizer.tokenizer, 0, 2))
    assert [tokenizer.tokenizer.decode(passage.word) for passage in expected] == [" clock", " bread"]
    for name in ("test.jsonl", "plain.txt"):
        assert reading(tmp_path / name, tokenizer, task="cloze").passages == expected
    assert reading(tmp_path / "plain.txt", tokenizer, task="cloze", limit=1).passages == expected[:1]


def test_a_record_is_a_passage_whatever_lines_it_has(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    (tmp_path / "records.jsonl").write_text(json.dumps({"body": "one two\n\nthree four\nfive"}) + "\n")
    (passage,) = reading(tmp_path / "records.jsonl", tokenizer, task="cloze", text_field="body").passages
    assert tokenizer.tokenizer.decode(passage.word) == "\nfive"
    found = reading(tmp_path / "records.jsonl", tokenizer, task="cloze", text_field="body", passages="lines")
    assert len(found.passages) == 2  # "five" has nothing before it


def test_paragraphs_of_any_text_with_words_enough(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    (tmp_path / "novel.txt").write_text("CHAPTER I\n\nIt was a\ndark night\n\nThe end of the story\n")
    found = reading(tmp_path / "novel.txt", tokenizer, task="cloze", min_words=4)
    assert [tokenizer.tokenizer.decode(passage.word) for passage in found.passages] == [" night", " story"]


@pytest.fixture
def shards(tmp_path: Path, tokenizer: TextTokenizer) -> Path:
    (tmp_path / "texts").mkdir()
    for number in range(9):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"text {number} of nine\n\nthat ends with {number}\n")
    tokenizer.tokenizer.save(str(tmp_path / "t.json"))
    options = PrepareConfig(tokenizer=str(tmp_path / "t.json"), validation_fraction=0.3, workers=1)
    prepare(str(tmp_path / "texts"), tmp_path / "shards", options, show_progress=False)
    return tmp_path / "shards"


def test_shards_give_a_split_its_words_and_its_passages(shards: Path, tokenizer: TextTokenizer) -> None:
    same = TextTokenizer.of(shards / "tokenizer.json")
    for split in ("train", "validation"):
        found = reading(shards, same, split=split)
        text = text_of(found, tokenizer).replace("<|endoftext|>", "\n")
        assert found.row is not None
        assert found.words_per_token == pytest.approx(len(text.split()) / found.row.tokens)
        passages = reading(shards, same, split=split, task="cloze").passages
        assert len(passages) == 2 * text.count("nine")
    with pytest.raises(TenfoldError, match="another tokenizer than the run's"):
        reading(shards, TextTokenizer(tokenizer.tokenizer, "other", 0, tokenizer.file))


def test_token_files_of_other_programs_are_read_whole(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    ids = [token for text in LAMBADA for token in [*tokenizer.tokenizer.encode(text).ids, 0]]
    np.array(ids, dtype="<u2").tofile(tmp_path / "tokens.bin")  # nanoGPT's form
    found = reading(tmp_path / "tokens.bin", tokenizer)
    assert found.row is not None
    assert found.row.read(0, found.row.tokens).tolist() == ids
    passages = reading(tmp_path / "tokens.bin", tokenizer, task="cloze").passages
    assert passages == tuple(read_passages(LAMBADA, tokenizer.tokenizer, 0, 2))


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("", {}, "is empty"),
        (" \n \n", {}, "holds no text"),
        ("one\n\ntwo\n", {"task": "cloze"}, "holds no passage of 2 words or more"),
        ("one two", {"task": "cloze", "min_words": 3}, "holds no passage of 3 words or more"),
        ("a " + "b" * 400, {"task": "cloze"}, "every last word is longer than the model's window of 16 tokens"),
        ("some text", {"task": "strided", "stride": 17}, "stride = 17 is more than the window of 16"),
    ],
)
def test_what_cannot_be_asked_is_told(
    tmp_path: Path, tokenizer: TextTokenizer, content: str, options: dict[str, Any], message: str
) -> None:
    (tmp_path / "text.txt").write_text(content)
    with pytest.raises(TenfoldError, match=message):
        reading(tmp_path / "text.txt", tokenizer, **options)


def test_a_place_where_nothing_is_is_told(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    with pytest.raises(TenfoldError, match="there is no file or folder"):
        reading(tmp_path / "nowhere", tokenizer)


def test_the_numbers_of_a_text_hang_together(tmp_path: Path, tokenizer: TextTokenizer, tiny_decoder: Any) -> None:
    (tmp_path / "wiki.test.raw").write_text(WIKITEXT)
    model = tiny_decoder(vocab_size=300)
    found = reading(tmp_path / "wiki.test.raw", tokenizer)
    values = evaluate(model, found)
    assert found.row is not None
    total = values["loss"] * found.row.tokens
    assert values["perplexity"] == pytest.approx(math.exp(values["loss"]))
    assert values["bits_per_byte"] == pytest.approx(total / math.log(2) / len(WIKITEXT.encode()))
    assert values["word_perplexity"] == pytest.approx(math.exp(total / len(WIKITEXT.split())))
    assert values["tokens"] == found.row.tokens - 1
    strided = evaluate(model, reading(tmp_path / "wiki.test.raw", tokenizer, task="strided"))
    assert strided["stride"] == 8
    assert strided["tokens"] == values["tokens"]
    assert strided["loss"] != values["loss"]


def test_an_encoder_is_asked_what_is_masked_and_nothing_else(
    tmp_path: Path, tokenizer: TextTokenizer, tiny_decoder: Any
) -> None:
    (tmp_path / "text.txt").write_text(WIKITEXT)
    model = tiny_decoder(vocab_size=300, objective="masked", mask_token=299)
    values = evaluate(model, reading(tmp_path / "text.txt", tokenizer))
    assert set(values) == {"loss", "masked_accuracy", "sequences"}
    with pytest.raises(TenfoldError, match="loss alone"):
        evaluate(model, reading(tmp_path / "text.txt", tokenizer, task="strided"))


def test_documents_tokenized_in_batches_are_as_if_alone(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    texts = [f"text {number} " * (number % 5 + 1) for number in range(300)]
    (tmp_path / "many.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    found = reading(tmp_path / "many.jsonl", tokenizer)
    plain = for_documents(tokenizer.tokenizer)
    expected = [token for text in texts for token in [*plain.encode(text, add_special_tokens=False).ids, 0]]
    assert found.row is not None
    assert found.row.read(0, found.row.tokens).tolist() == expected
