"""Checkpoints: whole or not at all, every kind of damage named, the newest whole one found."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tenfold.checkpoint import store
from tenfold.checkpoint.store import (
    latest_checkpoint,
    list_checkpoints,
    load_checkpoint,
    read_manifest,
    retire_checkpoints,
    save_checkpoint,
)
from tenfold.errors import TenfoldError

FILES = ["weights.safetensors", "optimizer.safetensors", "manifest.json"]
TENSORS = FILES[:2]
PLACE = {"stage": 1, "tokens": 4096, "pattern": [0, 0, 1, 1]}


def tensors(step):
    generator = torch.Generator().manual_seed(step)
    weights = {
        "embedding.weight": torch.randn(8, 4, generator=generator),
        "layers.0.ffn.up.weight": torch.randn(6, 4, generator=generator),
        "half": torch.randn(3, generator=generator).bfloat16(),
    }
    return weights, {"embedding.weight/exp_avg": torch.randn(8, 4, generator=generator), "x/step": torch.tensor(7.0)}


def save(folder, step):
    return save_checkpoint(folder, step, *tensors(step), PLACE)


def latest(folder):
    warnings = []
    return latest_checkpoint(folder, warnings.append), warnings


def equal(found, expected):
    return found.keys() == expected.keys() and all(
        torch.equal(found[key], expected[key]) and found[key].dtype == expected[key].dtype for key in found
    )


def test_what_is_saved_comes_back_to_the_last_bit(tmp_path):
    path = save(tmp_path, 12)
    manifest, weights, optimizer = load_checkpoint(path)
    expected_weights, expected_optimizer = tensors(12)
    assert path.name == "step-00000012"
    assert equal(weights, expected_weights)
    assert equal(optimizer, expected_optimizer)
    assert manifest["step"] == 12
    assert {key: manifest[key] for key in PLACE} == PLACE


def test_transposed_and_strided_tensors_come_back_as_what_they_show(tmp_path):
    weights = {"transposed": torch.arange(12.0).view(3, 4).t(), "column": torch.arange(12.0).view(3, 4)[:, 2]}
    path = save_checkpoint(tmp_path, 1, weights, {}, {})
    assert equal(load_checkpoint(path)[1], weights)


def test_a_trained_parameter_is_saved_by_its_value(tmp_path):
    parameter = torch.nn.Parameter(torch.arange(3.0))
    path = save_checkpoint(tmp_path, 1, {"p": parameter}, {}, {})
    assert torch.equal(load_checkpoint(path)[1]["p"], parameter)


def test_a_checkpoint_is_safetensors_and_json_and_no_pickle(tmp_path):
    path = save(tmp_path, 1)
    assert sorted(file.name for file in path.iterdir()) == sorted(FILES)
    json.loads((path / "manifest.json").read_text())
    for name in TENSORS:
        raw = (path / name).read_bytes()
        length = int.from_bytes(raw[:8], "little")
        json.loads(raw[8 : 8 + length])  # a safetensors file is a length, a JSON header, and plain numbers


def test_the_library_never_pickles():
    root = Path(store.__file__).parents[1]
    for file in root.rglob("*.py"):
        text = file.read_text()
        assert "import pickle" not in text, file
        assert "torch.load(" not in text, file
        assert "torch.save(" not in text, file


@pytest.mark.parametrize("name", TENSORS)
def test_any_flipped_bit_of_the_tensors_is_found_and_the_file_named(tmp_path, name):
    file = save(tmp_path, 1) / name
    whole = file.read_bytes()
    for position in range(0, len(whole), 17):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        file.write_bytes(damaged)
        with pytest.raises(TenfoldError, match=rf"{name} is damaged"):
            load_checkpoint(file.parent)


def test_any_flipped_bit_of_the_manifest_is_found_and_the_file_named(tmp_path):
    file = save(tmp_path, 1) / "manifest.json"
    whole = file.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 7
        file.write_bytes(damaged)
        with pytest.raises(TenfoldError, match="step-00000001"):
            read_manifest(file.parent)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("keep", [0, 10, -1])
def test_a_file_cut_short_is_named(tmp_path, name, keep):
    file = save(tmp_path, 1) / name
    whole = file.read_bytes()
    left = keep if keep >= 0 else len(whole) - 3
    file.write_bytes(whole[:left])
    with pytest.raises(TenfoldError, match=rf"{name} is damaged") as caught:
        load_checkpoint(file.parent)
    assert name == "manifest.json" or f"it has {left} bytes, not {len(whole)}" in str(caught.value)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(tmp_path, name):
    path = save(tmp_path, 1)
    (path / name).unlink()
    with pytest.raises(TenfoldError, match=name) as caught:
        load_checkpoint(path)
    assert str(path) in str(caught.value)


def test_a_manifest_that_is_no_object_is_named(tmp_path):
    path = save(tmp_path, 12)
    (path / "manifest.json").write_text("[]")
    with pytest.raises(TenfoldError, match=r"manifest\.json is damaged"):
        read_manifest(path)


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path):
    with pytest.raises(TenfoldError, match="nothing is not a checkpoint"):
        load_checkpoint(tmp_path / "nothing")


def test_a_checkpoint_of_another_format_is_refused_with_both_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "FORMAT", 7)
    path = save(tmp_path, 1)
    monkeypatch.undo()
    with pytest.raises(TenfoldError, match=r"format 7.* reads format 1"):
        load_checkpoint(path)


def test_the_newest_is_found_by_step_and_not_by_name_or_time(tmp_path):
    for step in (100_000_000, 99_999_999, 3):
        save(tmp_path, step)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000003", "step-99999999", "step-100000000"]
    assert latest(tmp_path) == (tmp_path / "step-100000000", [])


def test_other_files_and_folders_are_no_checkpoints(tmp_path):
    (tmp_path / "step-latest").mkdir()
    (tmp_path / "step-00000009").write_text("a file")
    (tmp_path / "step-00000008.bak").mkdir()
    save(tmp_path, 1)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000001"]


def test_without_checkpoints_there_is_no_newest(tmp_path):
    assert latest(tmp_path) == (None, [])
    assert latest(tmp_path / "nothing") == (None, [])


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_newest_is_passed_over_with_a_warning_that_names_it(tmp_path, name, damage):
    save(tmp_path, 1)
    file = save(tmp_path, 2) / name
    whole = bytearray(file.read_bytes())
    if damage == "flip":
        whole[len(whole) // 2] ^= 4
        file.write_bytes(whole)
    elif damage == "cut":
        file.write_bytes(whole[:-4])
    else:
        file.unlink()
    path, warnings = latest(tmp_path)
    assert path == tmp_path / "step-00000001"
    assert len(warnings) == 1
    assert "step-00000002" in warnings[0]
    assert name in warnings[0]


def test_when_all_are_damaged_every_one_is_told(tmp_path):
    for step in (1, 2):
        (save(tmp_path, step) / "weights.safetensors").write_bytes(b"")
    path, warnings = latest(tmp_path)
    assert path is None
    assert len(warnings) == 2


class KilledError(BaseException):
    """The process ends here: nothing after it runs."""


def die_at(monkeypatch, number, error):
    """Raise at the `number`-th file written."""
    real, calls = store.write_tensors, []

    def write_tensors(path, *args):
        calls.append(1)
        if len(calls) == number:
            path.write_bytes(b"half a file")
            raise error
        return real(path, *args)

    monkeypatch.setattr(store, "write_tensors", write_tensors)


@pytest.mark.parametrize("number", [1, 2])
def test_a_crash_in_the_middle_leaves_the_previous_whole_and_the_next_save_cleans_up(tmp_path, monkeypatch, number):
    save(tmp_path, 1)
    die_at(monkeypatch, number, KilledError())
    with pytest.raises(KilledError):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert latest(tmp_path) == (tmp_path / "step-00000001", [])
    assert equal(load_checkpoint(tmp_path / "step-00000001")[1], tensors(1)[0])
    save(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


def test_a_crash_before_the_rename_leaves_no_checkpoint_of_that_name(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def rename(*_):
        raise KilledError

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(KilledError):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert latest(tmp_path) == (tmp_path / "step-00000001", [])


def test_a_crash_while_the_same_step_is_replaced_leaves_it_whole(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def rmtree(path, **_):
        (path / "manifest.json").unlink()
        raise KilledError

    monkeypatch.setattr(store.shutil, "rmtree", rmtree)
    with pytest.raises(KilledError):
        save(tmp_path, 1)
    monkeypatch.undo()
    assert latest(tmp_path) == (tmp_path / "step-00000001", [])
    save(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_files_are_on_the_disk_before_the_folder_gets_its_name(tmp_path, monkeypatch):
    events = []
    real_flush, real_rename = store.flush, Path.rename
    monkeypatch.setattr(store, "flush", lambda path: events.append(path.name) or real_flush(path))
    monkeypatch.setattr(Path, "rename", lambda path, to: events.append("rename") or real_rename(path, to))
    save(tmp_path, 2)
    assert sorted(events[: events.index("rename")]) == sorted([*FILES, ".writing-step-00000002"])
    assert events[events.index("rename") + 1 :] == [tmp_path.name]


def test_the_same_step_again_replaces_the_first(tmp_path):
    save(tmp_path, 2)
    save_checkpoint(tmp_path, 2, {"w": torch.ones(1)}, {}, {})
    assert list(load_checkpoint(tmp_path / "step-00000002")[1]) == ["w"]


def test_a_full_disk_is_told_before_anything_is_written_with_the_last_whole_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(TenfoldError) as caught:
        save(tmp_path, 2)
    told = str(caught.value)
    assert "step 2" in told
    assert "100 free" in told
    assert f"last whole checkpoint is {tmp_path / 'step-00000001'}" in told
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("number", [1, 2])
def test_a_disk_that_fills_up_while_writing_leaves_nothing_behind(tmp_path, monkeypatch, number):
    save(tmp_path, 1)
    die_at(monkeypatch, number, OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(TenfoldError, match=r"No space left on device.*step-00000001"):
        save(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_failed_save_does_not_name_a_damaged_checkpoint_as_whole(tmp_path, monkeypatch):
    save(tmp_path, 1)
    (save(tmp_path, 2) / "weights.safetensors").write_bytes(b"")
    die_at(monkeypatch, 1, OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(TenfoldError, match=r"last whole checkpoint is .*step-00000001\."):
        save(tmp_path, 3)


def test_a_failed_first_save_says_that_there_is_no_earlier_one(tmp_path, monkeypatch):
    die_at(monkeypatch, 2, OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(TenfoldError, match="There is no earlier checkpoint"):
        save(tmp_path, 1)


def test_a_place_that_is_not_a_folder_is_told(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(TenfoldError, match="cannot write the checkpoint of step 1"):
        save(tmp_path / "checkpoints", 1)


@pytest.mark.parametrize(
    ("keep", "protected", "left"),
    [
        (2, set(), [4, 5]),
        (1, {2}, [2, 5]),
        (2, {1, 5}, [1, 4, 5]),
        (9, set(), [1, 2, 3, 4, 5]),
        (1, {77}, [5]),
    ],
)
def test_retention_keeps_the_newest_and_the_protected(tmp_path, keep, protected, left):
    for step in range(1, 6):
        save(tmp_path, step)
    retire_checkpoints(tmp_path, 5, keep, protected)
    assert [int(path.name[5:]) for path in list_checkpoints(tmp_path)] == left


def test_a_later_damaged_checkpoint_does_not_take_the_place_of_the_one_just_saved(tmp_path):
    for step in (3, 6, 9):
        save(tmp_path, step)
    (tmp_path / "step-00000009" / "weights.safetensors").write_bytes(b"")
    retire_checkpoints(tmp_path, 6, 1, set())
    assert latest(tmp_path)[0] == tmp_path / "step-00000006"
