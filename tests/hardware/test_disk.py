"""Disks: mounts from a made-up table, and a measurement that leaves nothing behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tenfold.hardware.disk import describe_disk, measure_disk

MIB = 2**20


def test_the_innermost_mount_holds_the_folder(tmp_path: Path) -> None:
    root, folder = tmp_path / "root", tmp_path / "with space" / "runs"
    folder.mkdir(parents=True)
    (root / "proc/self").mkdir(parents=True)
    outer, inner = tmp_path, str(tmp_path / "with space").replace(" ", "\\040")
    lines = ["/dev/sda1 / ext4 rw 0 0", f"/dev/sdb {outer} xfs rw 0 0", f"over {inner} overlay rw 0 0", "cut"]
    (root / "proc/self/mounts").write_text("\n".join([*lines, f"/dev/sdc {tmp_path}/elsewhere nfs rw 0 0"]))
    found = describe_disk(folder, measure=False, root=root)
    assert (found["device"], found["filesystem"]) == ("over", "overlay")
    assert found["folder"] == str(folder)
    assert 0 < found["free_bytes"] <= found["total_bytes"]
    assert "write_bytes_per_second" not in found
    assert describe_disk(folder, measure=False, root=tmp_path / "none")["filesystem"] is None


def test_speed_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    found = measure_disk(tmp_path, 32 * MIB, seconds=5.0)
    assert found["write_bytes_per_second"] > 0
    assert found["read_bytes_per_second"] > 0
    assert list(tmp_path.iterdir()) == []


def test_no_more_is_written_than_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    write = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda *given: ends.append(given[2] + 8 * MIB) or write(*given))
    measure_disk(tmp_path, 20 * MIB, seconds=60.0)
    assert max(ends) == 16 * MIB


@pytest.mark.parametrize("when", ["open", "write"])
def test_a_file_system_without_direct_access_is_measured_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    opened, direct = os.open, set()

    def refuse_open(name, flags, *more, **named):
        if flags & os.O_DIRECT:
            if when == "open":
                raise OSError(errno.EINVAL, "no direct access")
            descriptor = opened(name, flags, *more, **named)
            direct.add(descriptor)
            return descriptor
        return opened(name, flags, *more, **named)

    write = os.pwritev

    def refuse_write(descriptor, buffers, place):
        if descriptor in direct:
            direct.clear()
            raise OSError(errno.EINVAL, "no direct access")
        return write(descriptor, buffers, place)

    monkeypatch.setattr(os, "open", refuse_open)
    monkeypatch.setattr(os, "pwritev", refuse_write)
    found = measure_disk(tmp_path, 16 * MIB, seconds=5.0)
    assert found["direct"] is False
    assert found["read_bytes_per_second"] > 0
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OSError, match="No space"):
        measure_disk(tmp_path, 16 * MIB)
    assert list(tmp_path.iterdir()) == []
