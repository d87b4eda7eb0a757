"""The disk tier on real files: what comes back, in which order, what it says when the disk fails, what it leaves."""

from __future__ import annotations

import errno
import gc
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tenfold.errors import TenfoldError
from tenfold.offload import lane
from tenfold.offload.disk import Disk
from tenfold.offload.slab import Slab
from tenfold.offload.tiers import ALIGN, Extent, Tier

MIB = 2**20


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Pieces of four pages, so that small extents have many."""
    for module in (lane, __import__("tenfold.offload.disk", fromlist=["BLOCK"])):
        monkeypatch.setattr(module, "BLOCK", 4 * ALIGN)
    return 4 * ALIGN


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk([tmp_path / "a"], rank=3)
    yield disk
    disk.close()


def memory(size: int, fill: int | None = None) -> Tensor:
    """Page-aligned, random or all the same."""
    block = Slab(size, torch.device("cpu")).take(size)
    assert block is not None
    if fill is None:
        block.bytes.copy_(torch.randint(0, 256, (size,), dtype=torch.uint8))
    else:
        block.bytes.fill_(fill)
    return block.bytes


def file_of(folder: Path) -> Path:
    (found,) = folder.glob("tenfold-offload-*/data")
    return found


def store(disk: Disk, data: Tensor) -> Extent:
    extent = disk.reserve(len(data))
    disk.write(extent, data).wait()
    return extent


def test_what_was_written_is_read(disk: Disk) -> None:
    tier: Tier = disk  # a type checker's question, too
    data, back = memory(3 * lane.BLOCK + 5 * ALIGN), memory(3 * lane.BLOCK + 5 * ALIGN, 0)
    extent = tier.reserve(len(data))
    assert tier.held == len(data)
    writing = tier.write(extent, data)
    writing.wait()
    writing.wait()
    assert writing.done
    tier.read(extent, back).wait()
    assert torch.equal(back, data)
    part = memory(2 * ALIGN, 0)
    tier.read(extent, part, begin=lane.BLOCK - ALIGN).wait()
    assert torch.equal(part, data[lane.BLOCK - ALIGN : lane.BLOCK + ALIGN])
    assert (tier.bytes_written, tier.bytes_read) == (len(data), len(data) + 2 * ALIGN)
    tier.release(extent)
    assert tier.held == 0


def test_memory_that_is_not_aligned_goes_through_staging(disk: Disk) -> None:
    data, back = memory(3 * ALIGN)[64 : 64 + 2 * ALIGN], torch.zeros(3 * ALIGN, dtype=torch.uint8)
    back = back[1 : 1 + 2 * ALIGN]
    disk.read(store(disk, data), back).wait()
    assert torch.equal(back, data)


def test_an_extent_of_nothing_is_there_at_once(disk: Disk) -> None:
    extent = disk.reserve(0)
    nothing = memory(ALIGN)[:0]
    disk.write(extent, nothing).wait()
    disk.read(extent, nothing).wait()
    disk.release(extent)


def test_a_long_extent_lies_on_all_folders(tmp_path: Path, small_blocks: int) -> None:
    disk = Disk([tmp_path / name for name in "abc"])
    data, back = memory(10 * small_blocks + ALIGN), memory(10 * small_blocks + ALIGN, 0)
    disk.read(store(disk, data), back).wait()
    assert torch.equal(back, data)
    sizes = [file_of(tmp_path / name).stat().st_size for name in "abc"]
    assert sum(sizes) == len(data)
    assert max(sizes) - min(sizes) <= small_blocks
    disk.close()


@pytest.mark.parametrize("seed", range(4))
def test_reads_see_the_writes_before_them_and_no_later_ones(tmp_path: Path, small_blocks: int, seed: int) -> None:
    """A random program, asked for without waiting, against one that does each thing at once on plain bytes."""
    draw = random.Random(seed)
    disk = Disk([tmp_path / "a", tmp_path / "b"], threads_per_folder=3)
    extents: dict[Extent, bytearray] = {}
    checks: list[tuple[Any, Tensor, bytes]] = []
    kept: list[Any] = []
    for step in range(300):
        if step % 30 == 0:  # new ones, on room that old ones may still be written to
            for extent in draw.sample(list(extents), len(extents) // 2):
                disk.release(extent)
                del extents[extent]
            while len(extents) < 4:
                size = draw.randrange(1, 14) * ALIGN
                data = memory(size)
                extent = disk.reserve(size)
                extents[extent] = bytearray(data.numpy().tobytes())
                kept.append((disk.write(extent, data), data))
        extent = draw.choice(list(extents))
        pages = extent.size // ALIGN
        begin = draw.randrange(pages) * ALIGN
        end = draw.randrange(begin // ALIGN + 1, pages + 1) * ALIGN
        if draw.random() < 0.5:
            data = memory(end - begin)
            extents[extent][begin:end] = data.numpy().tobytes()
            kept.append((disk.write(extent, data, begin), data))
        else:
            into = memory(end - begin, 0)
            checks.append((disk.read(extent, into, begin), into, bytes(extents[extent][begin:end])))
    for transfer, into, expected in checks:
        transfer.wait()
        assert into.numpy().tobytes() == expected
    for transfer, _ in kept:
        transfer.wait()
    assert disk.held == sum(extent.size for extent in extents)
    disk.close()


def test_transfers_of_different_extents_go_on_at_the_same_time(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    data, others = memory(ALIGN), memory(ALIGN)
    first, second = disk.reserve(ALIGN), disk.reserve(ALIGN)
    held, write = threading.Event(), os.pwritev
    place = first.place[0].begin

    def slow(descriptor: int, buffers: Any, at: int) -> int:
        if at == place:
            assert held.wait(60)
        return write(descriptor, buffers, at)

    monkeypatch.setattr(os, "pwritev", slow)
    waits = disk.write(first, data)
    disk.write(second, others).wait()
    again = memory(ALIGN, 0)
    reading = disk.read(first, again)
    assert not waits.done
    assert not reading.done
    held.set()
    reading.wait()
    assert torch.equal(again, data)


def test_released_room_is_used_again_and_the_file_does_not_grow(disk: Disk, tmp_path: Path) -> None:
    data = memory(5 * ALIGN)
    sizes = set()
    for _ in range(20):
        disk.release(store(disk, data))
        sizes.add(file_of(tmp_path / "a").stat().st_size)
    assert sizes == {len(data)}


def test_room_of_a_write_under_way_is_not_given_to_another(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    held, write = threading.Event(), os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda *given: held.wait(5) and write(*given))
    old, new, back = memory(ALIGN), memory(ALIGN), memory(ALIGN, 0)
    first = disk.reserve(ALIGN)
    late = disk.write(first, old)
    disk.release(first)
    second = disk.reserve(ALIGN)
    assert second.place[0].begin != first.place[0].begin
    disk.write(second, new)
    held.set()
    disk.read(second, back).wait()
    late.wait()
    assert torch.equal(back, new)
    assert disk.reserve(ALIGN).place[0].begin == first.place[0].begin


# What goes wrong


def raises_from_now_on(disk: Disk, transfer: Any, *words: str) -> None:
    for ask in (
        transfer.wait,
        transfer.wait,
        lambda: disk.reserve(ALIGN),
        lambda: disk.read(Extent(0, []), memory(ALIGN)[:0]),
        lambda: disk.write(Extent(0, []), memory(ALIGN)[:0]),
    ):
        with pytest.raises(TenfoldError) as raised:
            ask()
        for word in words:
            assert word in str(raised.value)
    assert transfer.done


@pytest.mark.parametrize("bit", [0, 13, 31, 32, 63])
def test_a_flipped_bit_is_found(disk: Disk, tmp_path: Path, bit: int) -> None:
    data = memory(6 * ALIGN)
    extent = store(disk, data)
    path = file_of(tmp_path / "a")
    place = 3 * ALIGN + 808
    with path.open("r+b") as file:
        file.seek(place + bit // 8)
        byte = file.read(1)[0]
        file.seek(place + bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))
        file.flush()
        os.fsync(file.fileno())
    disk.read(extent, memory(3 * ALIGN)).wait()  # the pages before it are whole
    raises_from_now_on(
        disk,
        disk.read(extent, memory(2 * ALIGN), begin=2 * ALIGN),
        "rank 3",
        str(path),
        "12,288",
        "checkpoint is whole",
    )


def test_a_page_that_is_anothers_is_found(disk: Disk, tmp_path: Path) -> None:
    extent = store(disk, memory(2 * ALIGN))
    path = file_of(tmp_path / "a")
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.write(content[ALIGN:] + content[:ALIGN])
        file.flush()
        os.fsync(file.fileno())
    raises_from_now_on(disk, disk.read(extent, memory(2 * ALIGN)), "does not give back what was written")


def test_a_file_cut_short_is_told(disk: Disk, tmp_path: Path) -> None:
    extent = store(disk, memory(8 * ALIGN))
    os.truncate(file_of(tmp_path / "a"), 5 * ALIGN)
    raises_from_now_on(
        disk,
        disk.read(extent, memory(8 * ALIGN)),
        "12,288 bytes at byte 20,480 could not be read",
        "ends at byte 20,480",
    )


def test_a_removed_directory_is_told(disk: Disk, tmp_path: Path) -> None:
    extent = store(disk, memory(ALIGN))
    path = file_of(tmp_path / "a")
    path.unlink()
    path.parent.rmdir()
    raises_from_now_on(disk, disk.write(extent, memory(ALIGN)), "it was removed", str(path), "4,096 bytes", "rank 3")


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.ENOSPC, "Make room"), (errno.EIO, "kernel's log"), (errno.EROFS, "Read-only"), (errno.EDQUOT, "quota")],
)
@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_an_error_of_the_system_is_told(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str, call: str
) -> None:
    data = memory(2 * ALIGN)
    extent = store(disk, data)

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    transfer = disk.write(extent, data) if call == "pwritev" else disk.read(extent, data)
    doing = "written" if call == "pwritev" else "read"
    raises_from_now_on(disk, transfer, f"8,192 bytes at byte 0 could not be {doing}", str(tmp_path / "a"), words)


def test_short_reads_and_writes_go_on(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write, counts = os.preadv, os.pwritev, [0, 0]

    def short(call: Callable[..., int], which: int) -> Callable[..., int]:
        def some(descriptor: int, buffers: Any, place: int) -> int:
            counts[which] += 1
            call(descriptor, [buffers[0][: 2 * ALIGN]], place)
            return min(len(buffers[0]), ALIGN + 77)  # not even whole pages

        return some

    monkeypatch.setattr(os, "preadv", short(read, 0))
    monkeypatch.setattr(os, "pwritev", short(write, 1))
    data, back = memory(5 * ALIGN), memory(5 * ALIGN, 0)
    disk.read(store(disk, data), back).wait()
    assert torch.equal(back, data)
    assert counts == [5, 5]


def test_a_write_of_nothing_at_all_is_an_error(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    extent = disk.reserve(ALIGN)
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    raises_from_now_on(disk, disk.write(extent, memory(ALIGN)), "4,096 bytes at byte 0 could not be written", "nothing")


def test_a_disk_without_room_is_told_when_room_is_asked_for_and_keeps_none(disk: Disk, tmp_path: Path) -> None:
    system = os.statvfs(tmp_path)
    kept = store(disk, memory(ALIGN))
    too_much = (system.f_bavail * system.f_frsize + 2**30) // ALIGN * ALIGN

    def full(descriptor: int, begin: int, size: int) -> None:
        if begin + size > 3 * lane.BLOCK:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(descriptor, begin + size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)  # not to fill this machine's disk
        with pytest.raises(TenfoldError, match=r"rank 3: room for [\d,]+ more bytes.*No space left.*Make room"):
            disk.reserve(too_much)
    assert disk.held == ALIGN
    assert file_of(tmp_path / "a").stat().st_size == ALIGN, "what could not be had whole is given back"
    disk.read(kept, memory(ALIGN)).wait()  # it can go on
    store(disk, memory(4 * ALIGN))


def test_little_free_space_is_seen_before_it_is_used(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    found = os.fstatvfs

    def little(descriptor: int) -> Any:
        system = found(descriptor)
        return type("Little", (), {"f_bavail": 8192 // system.f_frsize, "f_frsize": system.f_frsize})

    monkeypatch.setattr(os, "fstatvfs", little)
    with pytest.raises(TenfoldError, match=r"only 8,192 bytes are free"):
        disk.reserve(3 * ALIGN)


def test_a_file_system_that_cannot_keep_room_is_used_all_the_same(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    data, back = memory(3 * ALIGN), memory(3 * ALIGN, 0)
    disk.read(store(disk, data), back).wait()
    assert torch.equal(back, data)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "not" / "there"):
        with pytest.raises(TenfoldError, match=f"rank 7.*{folder}") as raised:
            Disk([tmp_path / "good", folder], rank=7)
        assert "Name a folder" in str(raised.value)
    assert list((tmp_path / "good").iterdir()) == [], "the folder before it is left clean"
    with pytest.raises(TenfoldError, match="none was named"):
        Disk([])


def test_closing_wakes_those_who_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk([tmp_path / "a"], threads_per_folder=1)
    held, begun, write = threading.Event(), threading.Event(), os.pwritev

    def slow(*given: Any) -> int:
        begun.set()
        assert held.wait(60)
        return write(*given)

    monkeypatch.setattr(os, "pwritev", slow)
    extent, data = disk.reserve(2 * ALIGN), memory(2 * ALIGN)
    disk.write(extent, data[:ALIGN])
    waits = disk.write(extent, data[ALIGN:], ALIGN)
    assert begun.wait(60)
    threading.Timer(0.2, held.set).start()
    disk.close()
    with pytest.raises(TenfoldError, match="closed"):
        waits.wait()
    with pytest.raises(TenfoldError, match="closed"):
        disk.reserve(ALIGN)


def test_nothing_is_left_and_nothing_grows(tmp_path: Path) -> None:
    before_threads, before_files = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
    disk = Disk([tmp_path / "a", tmp_path / "b"], threads_per_folder=2)
    data, back = memory(64 * ALIGN), memory(64 * ALIGN)
    kept = store(disk, data)

    def state() -> tuple[int, int, int, int]:
        gc.collect()
        sizes = sum(file_of(tmp_path / name).stat().st_size for name in "ab")
        return threading.active_count(), len(os.listdir("/proc/self/fd")), len(gc.get_objects()), sizes

    def round_trip() -> None:
        passing = disk.reserve(32 * ALIGN)
        disk.write(passing, data[: 32 * ALIGN])
        disk.write(kept, data)
        disk.read(kept, back)
        disk.read(passing, back[: 32 * ALIGN]).wait()
        disk.release(passing)

    for _ in range(5):
        round_trip()
    disk.read(kept, back).wait()
    begin = state()
    for _ in range(200):
        round_trip()
    disk.read(kept, back).wait()
    end = state()
    assert end[:2] == begin[:2]
    assert end[2] - begin[2] < 40
    assert end[3] == begin[3]
    disk.close()
    disk.close()
    assert set(threading.enumerate()) == before_threads
    assert set(os.listdir("/proc/self/fd")) == before_files
    assert list((tmp_path / "a").iterdir()) == list((tmp_path / "b").iterdir()) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_bytes_come_back_in_order(disk: Disk) -> None:
    data = torch.randint(0, 256, (3 * lane.BLOCK + ALIGN,), dtype=torch.uint8, device="cuda")
    back = torch.zeros_like(data)
    extent = disk.reserve(len(data))
    for turn in range(5):
        torch.cuda._sleep(10_000_000)  # what is written is made late
        data.add_(turn)
        disk.write(extent, data).wait()
        expected = data.clone()
        disk.read(extent, back).wait()
        assert torch.equal(back, expected)
