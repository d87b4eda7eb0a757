"""Sources of a mixture opened and prepared: one tokenizer, whatever they are."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tenfold.config.run import DataConfig, PrepareConfig, SourceConfig
from tenfold.data.mixture import data_as_prepared, open_data
from tenfold.data.prepare import prepare
from tenfold.data.shards import sha256_of
from tenfold.errors import TenfoldError


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Two folders of text in two alphabets."""
    chance = random.Random(0)
    for name, letters in (("latin", "abcdefgh"), ("digits", "0123456789")):
        (tmp_path / name).mkdir()
        words = ["".join(chance.choices(letters, k=4)) for _ in range(50)]
        for number in range(30):
            (tmp_path / name / f"{number}.txt").write_text(f"{number} " + " ".join(chance.choices(words, k=80)))
    return tmp_path


def mixture(corpus: Path, *paths: str, weights: tuple[float, ...] = (1.0, 1.0), **fields: object) -> DataConfig:
    sources = [
        SourceConfig(name=Path(path).name, path=str(corpus / path), weight=weight)
        for path, weight in zip(paths, weights, strict=True)
    ]
    told = {"cache": str(corpus / "cache"), "vocab_size": 400, "validation_fraction": 0.1, "workers": 1, **fields}
    return DataConfig(mixture=sources, **told)  # type: ignore[arg-type]


def made(corpus: Path, name: str, out: str, **fields: object) -> Path:
    options = PrepareConfig(**{"vocab_size": 300, "validation_fraction": 0.1, "workers": 1, **fields})  # type: ignore[arg-type]
    prepare(str(corpus / name), corpus / out, options, show_progress=False)
    return corpus / out


def test_texts_without_a_tokenizer_get_one_of_all_of_them(corpus: Path) -> None:
    data = open_data(mixture(corpus, "latin", "digits"), show_progress=False)
    assert list(data.parts) == ["latin", "digits"]
    assert len({part.index.tokenizer.sha256 for part in data.parts.values()}) == 1
    vocabulary = "".join(data.tokenizer().get_vocab())
    merged = [token for token in data.tokenizer().get_vocab() if len(token.strip("Ġ")) >= 3]
    assert any(token.strip("Ġ").isdigit() for token in merged)
    assert any(token.strip("Ġ").isalpha() for token in merged)
    assert vocabulary
    again = open_data(mixture(corpus, "latin", "digits"), show_progress=False)
    assert again.fingerprint == data.fingerprint
    assert len(list((corpus / "cache").glob("tokenizer-*.json"))) == 1


def test_the_tokenizer_is_trained_by_weight(corpus: Path) -> None:
    data = open_data(mixture(corpus, "latin", "digits", weights=(1.0, 0.001)), show_progress=False)
    merged = [token for token in data.tokenizer().get_vocab() if len(token.strip("Ġ")) >= 3]
    assert sum(token.strip("Ġ").isalpha() for token in merged) > 10 * sum(
        token.strip("Ġ").isdigit() for token in merged
    )


def test_text_beside_a_prepared_source_takes_its_tokenizer(corpus: Path) -> None:
    shards = made(corpus, "digits", "shards")
    data = open_data(mixture(corpus, "latin", "shards", vocab_size=8192), show_progress=False)
    assert data.parts["latin"].index.tokenizer.sha256 == sha256_of(shards / "tokenizer.json")
    assert data.parts["shards"].path == shards


def test_sources_of_different_tokenizers_are_refused_by_name(corpus: Path) -> None:
    made(corpus, "digits", "one")
    made(corpus, "latin", "two")
    with pytest.raises(TenfoldError, match=r"data\.mixture: two .* and one .* different tokenizers"):
        open_data(mixture(corpus, "one", "two", vocab_size=8192), show_progress=False)


def test_a_fault_of_one_source_names_it(corpus: Path) -> None:
    with pytest.raises(TenfoldError, match=r"data\.mixture, nothing: .*nothing"):
        open_data(mixture(corpus, "latin", "nothing"), show_progress=False)


def test_what_sources_were_prepared_with_is_told_where_they_agree(corpus: Path) -> None:
    tokenizer = made(corpus, "digits", "one") / "tokenizer.json"
    made(corpus, "latin", "two", tokenizer=str(tokenizer), validation_fraction=0.3)
    section = DataConfig(mixture=[SourceConfig(name=name, path=str(corpus / name)) for name in ("one", "two")])
    data = open_data(section, show_progress=False)
    told = data_as_prepared(section, data)
    assert told.text_field == "text"
    assert told.validation_fraction == section.validation_fraction  # they differ: what the section says stands
    assert open_data(told, show_progress=False).fingerprint == data.fingerprint


def test_the_fingerprint_is_of_all_sources(corpus: Path) -> None:
    before = open_data(mixture(corpus, "latin", "digits"), show_progress=False)
    (corpus / "digits" / "more.txt").write_text("one more document 1234 " * 9)
    tokenizer = before.tokenizer_file
    after = open_data(mixture(corpus, "latin", "digits", tokenizer=str(tokenizer)), show_progress=False)
    assert after.fingerprint != before.fingerprint
    alone = open_data(DataConfig(path=str(before.parts["latin"].path)), show_progress=False)
    assert alone.fingerprint == before.parts["latin"].fingerprint
