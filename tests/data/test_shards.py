"""Reading prepared text, and refusing what is damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tenfold.config.run import PrepareConfig
from tenfold.data import encoding, shards, writing
from tenfold.data.prepare import prepare
from tenfold.data.shards import TokenData
from tenfold.errors import TenfoldError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Prepared text of several shards."""
    monkeypatch.setattr(encoding, "_BATCH_CHARACTERS", 100)
    monkeypatch.setattr(writing, "SHARD_TOKENS", 200)
    rows = [json.dumps({"text": f"document {number} " * 5}) for number in range(60)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    options = PrepareConfig(vocab_size=280, validation_fraction=0.2)
    return prepare(str(tmp_path / "a.jsonl"), tmp_path / "out", options, show_progress=False).path


def edit_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))


def test_reads_cross_shards_as_if_they_were_one_row(folder: Path) -> None:
    split = TokenData.open(folder).split("train")
    files = sorted(folder.glob("train-*.bin"))
    whole = np.concatenate([np.fromfile(file, "<u2") for file in files])
    assert len(files) > 3
    assert split.tokens == len(whole)
    edges = [0, 1, 199, 200, 201, len(whole) // 2, len(whole) - 1, len(whole)]
    edges += np.cumsum([file.stat().st_size // 2 for file in files]).tolist()
    for start in edges:
        for stop in edges:
            if start <= stop:
                assert np.array_equal(split.read(start, stop), whole[start:stop])


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (0, 10**9), (5, 4)])
def test_a_read_outside_is_an_index_error(folder: Path, start: int, stop: int) -> None:
    with pytest.raises(IndexError):
        TokenData.open(folder).split("train").read(start, stop)


def test_good_data_is_verified(folder: Path) -> None:
    TokenData.open(folder).verify()


def cut_file(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-2])


def index_change(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], object]:
    return lambda folder: edit_index(folder, change)


DAMAGE: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "truncated": (cut_file("train-00001.bin"), ["train-00001.bin", "bytes, the index says", "prepare it again"]),
    "starts truncated": (cut_file("train-00000.idx"), ["train-00000.idx", "bytes, the index says"]),
    "missing": (lambda folder: (folder / "train-00000.bin").unlink(), ["there is no", "train-00000.bin"]),
    "no index": (lambda folder: (folder / "index.json").unlink(), ["holds no index.json"]),
    "index cut": (lambda folder: (folder / "index.json").write_text('{"format"'), ["index.json is damaged"]),
    "other format": (index_change(lambda index: index.update(format="x")), ["is not an index of token shards"]),
    "other version": (index_change(lambda index: index.update(version=99)), ["version 99", "reads 1"]),
    "unknown key": (index_change(lambda index: index.update(more=1)), ["unknown key `more`"]),
    "other dtype": (index_change(lambda index: index.update(dtype="float32")), ["`dtype`", "float32"]),
    "another tokenizer": (
        lambda folder: (folder / "tokenizer.json").write_text("{}"),
        ["tokenizer.json", "is not the tokenizer that made these shards"],
    ),
    "id outside": (
        index_change(lambda index: index["splits"]["train"][1].update(max_token=280)),
        ["train-00001.bin", "token id 280", "280 entries"],
    ),
    "escaping name": (
        index_change(lambda index: index["splits"]["train"][0].update(file="../a.bin")),
        ["splits.train.0.file"],
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_what_does_not_fit_together_is_refused_when_opened(folder: Path, case: str) -> None:
    damage, words = DAMAGE[case]
    damage(folder)
    with pytest.raises(TenfoldError) as caught:
        TokenData.open(folder)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("name", ["train-00001.bin", "validation-00000.idx"])
def test_a_flipped_bit_is_found(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytearray((folder / name).read_bytes())
    content[9] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(TenfoldError, match=rf"{name} is damaged: its sha256"):
        TokenData.open(folder)
    monkeypatch.setattr(shards, "VERIFIED_BYTES", 0)  # as for data too large to be read whenever it is opened
    data = TokenData.open(folder)
    with pytest.raises(TenfoldError, match=rf"{name} is damaged: its sha256"):
        data.verify()


def test_a_largest_id_that_the_index_hides_is_found_by_verify(folder: Path) -> None:
    edit_index(folder, lambda index: index["splits"]["train"][0].update(max_token=5))
    with pytest.raises(TenfoldError, match=r"train-00000\.bin holds token id \d+, the index says the largest is 5"):
        TokenData.open(folder).verify()


def test_an_id_that_the_index_does_not_allow_is_found_when_it_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "VERIFIED_BYTES", 0)
    file = folder / "train-00001.bin"
    tokens = np.fromfile(file, "<u2")
    tokens[7] = 60_000
    tokens.tofile(file)
    split = TokenData.open(folder).split("train")
    with pytest.raises(TenfoldError, match=r"train-00001\.bin is damaged: it holds token id 60000"):
        split.read(0, split.tokens)


def test_a_place_without_prepared_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name, message in (("nowhere", "there is no folder"), ("file", "is not a folder"), (".", "holds no index.json")):
        with pytest.raises(TenfoldError, match=message):
            TokenData.open(tmp_path / name)
