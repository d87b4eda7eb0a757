"""Files of the disk tier's own: past the page cache, cleared away after a crash and at the end, within limits."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tenfold.errors import TenfoldError
from tenfold.offload.disk import Disk
from tenfold.offload.scratch import open_scratch, remove_leftovers
from tenfold.offload.slab import Slab

SIZE = 4 * 2**20

USE = """
import os, signal, sys
from pathlib import Path
import torch
from tenfold.offload.disk import Disk
from tenfold.offload.slab import Slab

disk = Disk([Path(sys.argv[1])], rank=5, note=print)
data = Slab(2**20, torch.device("cpu")).memory
extent = disk.reserve(2**20)
disk.write(extent, data).wait()
print("written", flush=True)
"""


def run(code: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", USE + code, str(folder)], stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def living(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process with a disk tier in the same folder, which waits."""
    process = run("sys.stdin.read() or signal.pause()", tmp_path)
    assert said(process) == "written"
    yield process
    process.kill()
    process.wait()


def test_what_a_killed_process_left_is_removed_and_told_once(tmp_path: Path, living: subprocess.Popen[str]) -> None:
    notes: list[str] = []
    Disk([tmp_path], note=notes.append).close()
    assert notes == [], "it is alive"
    (left,) = tmp_path.iterdir()
    assert re.fullmatch(rf"tenfold-offload-.+-{living.pid}-5-\w+", left.name)
    assert left.stat().st_mode & 0o777 == 0o700
    living.kill()
    living.wait()
    disk = Disk([tmp_path], note=notes.append)
    assert not left.exists()
    (note,) = notes
    assert re.search(r"1,048,576 bytes left .*: 1$", note), note
    again = Disk([tmp_path], note=notes.append)
    assert len(notes) == 1
    again.close()
    disk.close()
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_ends_without_closing_leaves_nothing(tmp_path: Path) -> None:
    for code in ("", "raise SystemExit(3)", "disk.write(extent, data)", "os.fork() or sys.exit()\nos.wait()"):
        process = run(code, tmp_path)
        assert said(process) == "written"
        process.wait()
        assert list(tmp_path.iterdir()) == [], code


def test_a_forked_process_that_ends_removes_nothing(tmp_path: Path) -> None:
    code = """
if os.fork() == 0:
    sys.exit()
os.wait()
disk.read(extent, data).wait()
print("read", flush=True)
"""
    process = run(code, tmp_path)
    assert said(process) == "written"
    assert said(process) == "read"
    process.wait()


def test_a_directory_whose_file_is_not_locked_yet_is_left_to_its_process(tmp_path: Path) -> None:
    file = open_scratch(tmp_path, 0)
    mine = file.path.parent
    begun = mine.rename(mine.with_name(mine.name + "x"))
    (begun / "data").rename(begun / "data.new")
    assert remove_leftovers(tmp_path) == (0, 0)
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    dead = begun.rename(begun.with_name(begun.name.replace(f"-{os.getpid()}-", f"-{process.pid}-")))
    (tmp_path / "tenfold-offload-elsewhere-1-0-abc").mkdir()
    (tmp_path / f"{dead.name}-of-mine").mkdir()
    assert remove_leftovers(tmp_path)[0] == 1
    assert len(list(tmp_path.iterdir())) == 2
    os.close(file.descriptor)


def test_a_file_system_without_locks_goes_by_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("fcntl.flock", refuse)
    file = open_scratch(tmp_path, 0)
    assert remove_leftovers(tmp_path) == (0, 0)
    file.close()
    assert list(tmp_path.iterdir()) == []


def in_cache(path: Path) -> int:
    """Bytes of a file that the page cache holds (mincore(2))."""
    library = ctypes.CDLL(None, use_errno=True)
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_SHARED, mmap.PROT_READ) as view:
        flags = (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
        # mmap gives a read-only buffer, which ctypes takes no address of; NumPy does
        place = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
        assert library.mincore(ctypes.c_void_p(place), ctypes.c_size_t(size), flags) == 0, ctypes.get_errno()
    return sum(flag & 1 for flag in flags) * mmap.PAGESIZE


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_the_page_cache_does_not_do_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    notes: list[str] = []
    if not direct:
        opened = os.open

        def refuse(name: str, flags: int, *more: int, **named: int) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no direct access")
            return opened(name, flags, *more, **named)

        monkeypatch.setattr(os, "open", refuse)
    (tmp_path / "plain").write_bytes(os.urandom(SIZE))
    assert in_cache(tmp_path / "plain") == SIZE, "this test sees nothing"
    disk = Disk([tmp_path], note=notes.append)
    if disk._lanes[0].file.direct != direct:
        pytest.skip("the file system of temporary files knows no direct access")
    data, back = Slab(SIZE, torch.device("cpu")).memory, Slab(SIZE, torch.device("cpu")).memory
    data.copy_(torch.randint(0, 256, (SIZE,), dtype=torch.uint8))
    extent = disk.reserve(SIZE)
    disk.write(extent, data).wait()
    (path,) = tmp_path.glob("*/data")
    assert in_cache(path) <= SIZE // 64
    disk.read(extent, back).wait()
    assert torch.equal(back, data)
    assert in_cache(path) <= SIZE // 64
    disk.close()
    assert len(notes) == (0 if direct else 1)
    assert all("no direct access" in note for note in notes)


def test_a_file_system_in_memory_is_told() -> None:
    folder = Path("/dev/shm")
    if not os.access(folder, os.W_OK):
        pytest.skip("no file system in memory")
    notes: list[str] = []
    Disk([folder], note=notes.append).close()
    assert any("keeps files in memory" in note for note in notes)


def test_a_limit_of_the_size_of_files_is_told(tmp_path: Path) -> None:
    code = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (2 * 2**20, 2 * 2**20))
try:
    disk.reserve(8 * 2**20)
except Exception as error:
    print(type(error).__name__, error, flush=True)
disk.reserve(2**20)  # within the limit
print("room", flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (2**19, 2 * 2**20))
try:
    disk.write(extent, data).wait()
except Exception as error:
    print(type(error).__name__, error, flush=True)
"""
    process = run(code, tmp_path)
    assert said(process) == "written"
    for words in (r"room for 8,388,608 more bytes", r"room$", r"524,288 bytes at byte 524,288 could not be written"):
        line = said(process)
        assert re.search(words, line), line
        if line != "room":
            assert line.startswith("TenfoldError offload to disk, rank 5")
            assert "ulimit -f" in line
    assert process.wait() == 0


def test_a_folder_without_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o500)
    if os.access(tmp_path, os.W_OK):  # root: then as the system would say it
        monkeypatch.setattr(
            "tempfile.mkdtemp", lambda **_: (_ for _ in ()).throw(PermissionError(13, "Permission denied"))
        )
    try:
        with pytest.raises(TenfoldError, match=r"rank 2: nothing can be written in .*Permission denied.*Name a folder"):
            Disk([tmp_path], rank=2)
    finally:
        tmp_path.chmod(0o700)
