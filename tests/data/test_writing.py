"""What is written appears whole or not at all, and a disk's faults are told clearly."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path

import pytest

from tenfold.config.run import PrepareConfig
from tenfold.data import encoding, writing
from tenfold.data.prepare import prepare
from tenfold.errors import TenfoldError

OPTIONS = PrepareConfig(vocab_size=300, validation_fraction=0.1)


def source_in(folder: Path) -> Path:
    """A hundred short documents."""
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"a ship sails north {number} times"}) + "\n" for number in range(100)))
    return path


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), MemoryError()])
def test_an_interruption_leaves_nothing_but_work_to_go_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: BaseException
) -> None:
    monkeypatch.setattr(encoding, "_BATCH_CHARACTERS", 300)
    calls = 0
    add = writing.ShardWriter.add

    def stop_at_third(self: writing.ShardWriter, *arguments: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise fault
        add(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(writing.ShardWriter, "add", stop_at_third)
    source = source_in(tmp_path)
    with pytest.raises(type(fault)):
        prepare(str(source), tmp_path / "out", OPTIONS, False)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.partial", "a.jsonl"]
    assert (tmp_path / ".out.partial" / "journal.json").is_file()
    assert "TOKENIZERS_PARALLELISM" not in os.environ


def test_what_a_killed_process_left_is_cleared(tmp_path: Path) -> None:
    left = tmp_path / ".out.partial"
    (left / "deep").mkdir(parents=True)
    (left / "index.json").write_text("{}")
    (left / "train-00000.bin").write_bytes(b"half")
    source = source_in(tmp_path)
    data = prepare(str(source), tmp_path / "out", OPTIONS, False)
    data.verify()
    assert not left.exists()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "index.json",
        "tokenizer.json",
        "train-00000.bin",
        "train-00000.idx",
        "validation-00000.bin",
        "validation-00000.idx",
    ]
    assert not (tmp_path / "out" / "deep").exists()


def test_two_processes_do_not_write_the_same_folder(tmp_path: Path) -> None:
    partial = tmp_path / ".out.partial"
    partial.mkdir()
    lock = os.open(partial, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        with pytest.raises(TenfoldError, match="another process is preparing"):
            prepare(str(source_in(tmp_path)), tmp_path / "out", OPTIONS, False)
        assert partial.exists()
    finally:
        os.close(lock)


def test_a_full_disk_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object, array: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writing._HashedFile, "write", full)
    source = source_in(tmp_path)
    with pytest.raises(TenfoldError, match=r"disk is full: .*out cannot be written \(it needs about [\d,]+ bytes, "):
        prepare(str(source), tmp_path / "out", OPTIONS, False)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_may_not_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    source = source_in(tmp_path)
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(TenfoldError, match="cannot be written: Permission denied"):
        prepare(str(source), tmp_path / "out", OPTIONS, False)
