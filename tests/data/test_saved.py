"""Datasets that `datasets` itself saved to disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from tenfold.config.run import PrepareConfig
from tenfold.data.prepare import prepare
from tenfold.data.shards import TokenData
from tenfold.errors import TenfoldError

OPTIONS = PrepareConfig(vocab_size=300, validation_fraction=0.0)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    datasets.disable_progress_bars()


def texts(name: str, count: int = 30) -> list[str]:
    return [f"{name} sails {number} miles" for number in range(count)]


def saved(path: Path, *names: str) -> Path:
    if len(names) == 1:
        datasets.Dataset.from_dict({"text": texts(names[0])}).save_to_disk(path, num_shards=3)
    else:
        parts = {name: datasets.Dataset.from_dict({"text": texts(name)}) for name in names}
        datasets.DatasetDict(parts).save_to_disk(path)
    return path


def written(data: TokenData, split: Any) -> list[str]:
    found = data.split(split)
    text = data.tokenizer().decode(found.read(0, found.tokens).tolist(), skip_special_tokens=False)
    return text.split("<|endoftext|>")[:-1]


def test_a_saved_dataset_is_read_in_its_own_order(tmp_path: Path) -> None:
    data = prepare(str(saved(tmp_path / "d", "ship")), tmp_path / "out", OPTIONS, False)
    assert len(list((tmp_path / "d").glob("*.arrow"))) == 3
    assert written(data, "train") == texts("ship")


def test_train_and_validation_are_taken_as_the_dataset_has_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = PrepareConfig(vocab_size=300, validation_fraction=0.5)
    data = prepare(str(saved(tmp_path / "d", "train", "validation", "test")), tmp_path / "out", options)
    assert written(data, "train") == texts("train")
    assert written(data, "validation") == texts("validation")
    said = capsys.readouterr().err
    assert "train and validation are taken as the dataset has them" in said
    assert "left out test" in said


def test_without_a_validation_split_some_of_train_is_held_out(tmp_path: Path) -> None:
    options = PrepareConfig(vocab_size=300, validation_fraction=0.3)
    data = prepare(str(saved(tmp_path / "d", "train", "test")), tmp_path / "out", options, False)
    assert sorted(written(data, "train") + written(data, "validation")) == sorted(texts("train"))
    assert written(data, "validation")


def test_a_given_tokenizer_leaves_the_dataset_s_splits_as_they_are(tmp_path: Path) -> None:
    first = prepare(str(saved(tmp_path / "d", "train", "validation")), tmp_path / "a", OPTIONS, False)
    options = PrepareConfig(tokenizer=str(first.path / "tokenizer.json"), validation_fraction=0.0, dedup=True)
    again = prepare(str(tmp_path / "d"), tmp_path / "b", options, False)
    assert written(again, "validation") == texts("validation")


def test_a_saved_dataset_inside_a_folder_stands_among_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    saved(folder / "b", "ship")
    (folder / "a.txt").write_text("first")
    (folder / "c.txt").write_text("last")
    data = prepare(str(folder), tmp_path / "out", OPTIONS, False)
    assert written(data, "train") == ["first", *texts("ship"), "last"]


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: change(d / "dataset_dict.json", splits=["test"]), r"without a split `train` \(it has test\)"),
        (lambda d: change(d / "dataset_dict.json", splits=3), "has no list `splits`"),
        (lambda d: (d / "dataset_dict.json").write_text("{"), r"dataset_dict\.json is damaged"),
        (lambda d: change(d / "train" / "state.json", _indices_data_files=[{}]), r"flatten_indices\(\)"),
        (lambda d: change(d / "train" / "state.json", _data_files=None), "names no data files"),
        (lambda d: next((d / "train").glob("*.arrow")).unlink(), "which is not in"),
        (lambda d: (d / "train" / "state.json").unlink(), r"there is no .*state\.json"),
    ],
)
def test_what_is_damaged_or_missing_is_told(tmp_path: Path, damage: Any, message: str) -> None:
    folder = saved(tmp_path / "d", "train", "test")
    damage(folder)
    with pytest.raises(TenfoldError, match=message):
        prepare(str(folder), tmp_path / "out", OPTIONS, False)
