"""The host tier: its bookkeeping with copies of the test's own, limits and NUMA nodes from made-up file trees.

What pins and copies on streams is tested where there is a GPU.
"""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tenfold.errors import TenfoldError
from tenfold.offload.host import Host
from tenfold.offload.pinned import check_pinnable, locked_limit, pci_cpus, pinnable_bytes, touch_near
from tenfold.offload.slab import Slab
from tenfold.offload.tiers import ALIGN, Extent, Tier, Transfer

CPU, GIB = torch.device("cpu"), 2**30


class Copy:
    """A copy that is done when something comes behind it, and then all before it in its direction."""

    def __init__(self, queue: list[Copy], into: Tensor, source: Tensor, after: list[Transfer]) -> None:
        self.queue, self.into, self.source, self.after, self.done = queue, into, source, after, False

    def wait(self) -> None:
        while not self.done:
            first = self.queue[0]
            for earlier in first.after:
                earlier.wait()
            first.into.copy_(first.source)
            first.done = True
            self.queue.remove(first)


class LateCopies:
    """Copies in two queues, done as late as can be; with `draw`, one queue runs ahead of the other now and then."""

    def __init__(self, draw: random.Random | None = None) -> None:
        self.draw = draw
        self.queues: dict[bool, list[Copy]] = {True: [], False: []}
        self.pinned: list[int] = []

    def prepare(self, memory: Tensor) -> None:
        self.pinned.append(memory.data_ptr())

    def start(self, into: Tensor, source: Tensor, reading: bool, after: list[Transfer]) -> Copy:
        copy = Copy(self.queues[reading], into, source, after)
        self.queues[reading].append(copy)
        if self.draw and self.draw.random() < 0.2:
            self.drain(reading=self.draw.random() < 0.2)
        return copy

    def drain(self, reading: bool) -> None:
        while self.queues[reading]:
            self.queues[reading][-1].wait()

    def finish(self, memory: Tensor) -> None:
        self.drain(True)
        self.drain(False)
        self.pinned.remove(memory.data_ptr())


def test_what_was_written_is_read_and_all_is_let_go() -> None:
    copies = LateCopies()
    host = Host(10 * ALIGN, CPU, copies)
    tier: Tier = host
    assert len(copies.pinned) == 1
    extent, data, back = tier.reserve(4 * ALIGN), torch.randint(0, 256, (4 * ALIGN,), dtype=torch.uint8), torch.zeros(0)
    assert tier.held == 4 * ALIGN
    back = torch.zeros(2 * ALIGN, dtype=torch.uint8)
    writing = tier.write(extent, data)
    assert not writing.done
    tier.read(extent, back, begin=ALIGN).wait()
    assert writing.done
    assert torch.equal(back, data[ALIGN : 3 * ALIGN])
    assert (tier.bytes_written, tier.bytes_read) == (4 * ALIGN, 2 * ALIGN)
    tier.release(extent)
    assert tier.held == 0
    tier.close()
    tier.close()
    assert copies.pinned == []


@pytest.mark.parametrize("seed", range(4))
def test_reads_see_the_writes_before_them_and_no_later_ones(seed: int) -> None:
    """A random program over room that is used again and again, against one on plain bytes."""
    draw = random.Random(seed)
    host = Host(24 * ALIGN, CPU, LateCopies(random.Random(seed)))
    extents: dict[Extent, bytearray] = {}
    checks: list[tuple[Transfer, Tensor, bytes]] = []
    for step in range(300):
        if step % 12 == 0:
            for extent in draw.sample(list(extents), len(extents) // 2):
                host.release(extent)
                del extents[extent]
            while len(extents) < 4:
                data = torch.full((draw.randrange(1, 4) * ALIGN,), step % 256, dtype=torch.uint8)
                extent = host.reserve(len(data))
                extents[extent] = bytearray(data.numpy().tobytes())
                host.write(extent, data)
        extent = draw.choice(list(extents))
        pages = extent.size // ALIGN
        begin = draw.randrange(pages) * ALIGN
        end = draw.randrange(begin // ALIGN + 1, pages + 1) * ALIGN
        if draw.random() < 0.5:
            data = torch.randint(0, 256, (end - begin,), dtype=torch.uint8)
            extents[extent][begin:end] = data.numpy().tobytes()
            host.write(extent, data, begin)
        else:
            into = torch.zeros(end - begin, dtype=torch.uint8)
            checks.append((host.read(extent, into, begin), into, bytes(extents[extent][begin:end])))
        if draw.random() < 0.1:
            draw.choice(checks)[0].wait() if checks else None
    host.close()
    for transfer, into, expected in checks:
        assert transfer.done
        assert into.numpy().tobytes() == expected


def test_a_full_tier_names_bytes() -> None:
    host = Host(4 * ALIGN, CPU, LateCopies())
    kept = host.reserve(3 * ALIGN)
    with pytest.raises(TenfoldError, match=r"no 8,192 bytes.*16,384 bytes, 4,096 of them free"):
        host.reserve(2 * ALIGN)
    host.release(kept)
    host.release(host.reserve(4 * ALIGN))
    host.release(host.reserve(0))
    host.close()


def test_mistakes_of_the_caller_are_found() -> None:
    host = Host(4 * ALIGN, CPU, LateCopies())
    extent, page = host.reserve(ALIGN), torch.zeros(ALIGN, dtype=torch.uint8)
    with pytest.raises(AssertionError):
        host.write(extent, page, begin=ALIGN)
    host.release(extent)
    with pytest.raises(AssertionError, match="after its release"):
        host.write(extent, page)
    with pytest.raises(AssertionError, match="twice"):
        host.release(extent)
    host.close()


def test_there_is_no_host_tier_without_an_accelerator() -> None:
    with pytest.raises(TenfoldError, match=r'"host" is RAM beside an accelerator.*"cpu"'):
        Host(ALIGN, CPU)


@pytest.fixture
def tree(tmp_path: Path) -> Callable[[dict[str, str]], Path]:
    def make(files: dict[str, str]) -> Path:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    return make


MACHINE = {"proc/meminfo": f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {48 * GIB // 1024} kB\n"}
GROUP = {
    "proc/self/cgroup": "0::/job\n",
    "sys/fs/cgroup/job/memory.max": str(20 * GIB),
    "sys/fs/cgroup/job/memory.current": str(7 * GIB),
    "sys/fs/cgroup/job/memory.stat": f"inactive_file {GIB}\n",
}


def test_the_smallest_limit_is_what_can_be_pinned(tree: Callable[[dict[str, str]], Path]) -> None:
    root = tree(MACHINE)
    assert pinnable_bytes(root) == (48 * GIB, "the memory that the machine has free")
    check_pinnable(48 * GIB, root)
    root = tree(GROUP)
    assert pinnable_bytes(root)[0] == 14 * GIB
    check_pinnable(14 * GIB, root)
    with pytest.raises(TenfoldError, match=r"15,032,385,537 bytes .* 15,032,385,536 can be pinned: .*control group"):
        check_pinnable(14 * GIB + 1, root)
    tree({"sys/fs/cgroup/job/memory.max": str(100 * GIB)})
    assert pinnable_bytes(root)[0] == 48 * GIB


def test_more_than_the_machine_has_is_refused_before_it_is_taken() -> None:
    copies = LateCopies()
    with pytest.raises(TenfoldError, match=r"can be pinned"):
        Host(2**50, CPU, copies)
    assert copies.pinned == []


LIMITS = (
    "Limit  Soft Limit  Hard Limit  Units\nMax processes  100 100 processes\nMax locked memory         {} {} bytes\n"
)


@pytest.mark.parametrize(
    ("limit", "capabilities", "found"),
    [
        ("8388608", "0000000000000000", 8388608),
        ("8388608", "0000000000004000", None),  # CAP_IPC_LOCK
        ("unlimited", "0000000000000000", None),
    ],
)
def test_the_limit_of_locked_memory(
    tree: Callable[[dict[str, str]], Path], limit: str, capabilities: str, found: int | None
) -> None:
    root = tree(
        {
            "proc/self/limits": LIMITS.format(limit, limit),
            "proc/self/status": f"Name: x\nCapPrm:\tffff\nCapEff:\t{capabilities}\n",
        }
    )
    assert locked_limit(root) == found


def test_the_cpus_near_a_device(tree: Callable[[dict[str, str]], Path]) -> None:
    root = tree(
        {
            "sys/bus/pci/devices/0000:3b:00.0/numa_node": "1\n",
            "sys/bus/pci/devices/0000:5e:00.0/numa_node": "-1\n",
            "sys/devices/system/node/node0/cpulist": "0-3\n",
            "sys/devices/system/node/node1/cpulist": "4-6,12,14-15\n",
        }
    )
    assert pci_cpus("0000:3b:00.0", root) == {4, 5, 6, 12, 14, 15}
    assert pci_cpus("0000:5e:00.0", root) == set()
    assert pci_cpus("0000:00:00.0", root) == set()


def test_pages_are_touched_by_threads_that_are_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = os.sched_getaffinity(0)
    chosen, bound, zero = {min(mine)}, [], ctypes.memset

    def watch(place: int, value: int, size: int) -> None:
        bound.append((os.sched_getaffinity(0), size))
        zero(place, value, size)

    monkeypatch.setattr(ctypes, "memset", watch)
    memory = Slab(5 * ALIGN, CPU).memory
    memory.fill_(7)
    touch_near(memory, {*chosen, 10**6})
    assert bound == [(chosen, 5 * ALIGN)]
    assert not memory.any()
    assert os.sched_getaffinity(0) == mine
    touch_near(memory, {10**6})
    touch_near(memory, set())
    assert len(bound) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_bytes_come_back_in_order() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    host = Host(256 * 2**20, device)
    data = torch.randint(0, 256, (64 * 2**20,), dtype=torch.uint8, device=device)
    back = torch.zeros_like(data)
    extent = host.reserve(len(data))
    for turn in range(10):
        torch.cuda._sleep(10_000_000)  # what is written is made late
        data.add_(turn)
        host.write(extent, data).wait()
        expected = data.clone()
        data.zero_()
        host.read(extent, back).wait()
        assert torch.equal(back, expected)
        data.copy_(expected)
    host.release(extent)
    host.close()
