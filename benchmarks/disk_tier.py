"""Rate of offload's disk tier beside plain loops of direct I/O, and how much of it hides behind compute.

In every round the same bytes are written and read, in turn, by one thread in a loop of `os.pwritev` and `os.preadv`
with O_DIRECT, by as many threads as the tier has in such loops, and by the tier, which also sums every page. The
tables hold medians over rounds; the ratio is the median of each round's own. Other work on the machine and on the disk
moves all of them; it moves the processor time, and the best round, less. Then products are done alone, transfers (a
write of one half, a read of the other) alone, and both at once: what it takes against the longer of the two.

    python benchmarks/disk_tier.py [--folder .] [--megabytes 512] [--rounds 5] [--threads 4]
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from tenfold.hardware.disk import open_direct
from tenfold.offload.disk import THREADS, Disk
from tenfold.offload.lane import BLOCK
from tenfold.offload.slab import Slab
from tenfold.offload.tiers import ALIGN

MIB = 2**20


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """How long it takes, and how much processor time of this process."""
    began, began_process = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - began_process


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    return timed(work)[0]


def in_loops(move: Callable[..., int], descriptor: int, memory: Tensor, threads: int) -> None:
    """All of `memory` to or from the begin of a file, by so many threads, each with every n-th block."""

    def loop(first: int) -> None:
        for place in range(first * BLOCK, len(memory), threads * BLOCK):
            part = memory[place : place + BLOCK].numpy()
            if move(descriptor, [part], place) != len(part):
                raise OSError("fewer bytes were moved than asked for")

    workers = [threading.Thread(target=loop, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def compare(folder: Path, size: int, rounds: int, threads: int) -> None:
    """Print the rates of all three."""
    data, back = (Slab(size, torch.device("cpu")).memory for _ in range(2))
    data.copy_(torch.randint(0, 256, (size,), dtype=torch.uint8))
    back.zero_()
    disk = Disk([folder], note=print, threads_per_folder=threads)
    extent = disk.reserve(size)
    (folder / "plain").touch()
    with mmap.mmap(-1, ALIGN) as page:
        descriptor, direct = open_direct(folder / "plain", page)
    os.posix_fallocate(descriptor, 0, size)
    print(f"{size / MIB:.0f} MiB, blocks of {BLOCK / MIB:.0f} MiB, {'' if direct else 'no '}direct I/O")
    ways: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        f"{count} thread{'s' * (count > 1)} in a loop": (
            lambda count=count: in_loops(os.pwritev, descriptor, data, count),
            lambda count=count: in_loops(os.preadv, descriptor, back, count),
        )
        for count in dict.fromkeys((1, threads))
    }
    ways[f"the tier, {threads} threads"] = (
        lambda: disk.write(extent, data).wait(),
        lambda: disk.read(extent, back).wait(),
    )
    taken: dict[tuple[str, int], list[tuple[float, float]]] = {(name, which): [] for name in ways for which in (0, 1)}
    for turn in range(rounds + 1):
        for which in (0, 1):
            for name, moves in ways.items():
                spent = timed(moves[which])
                if turn:  # the first writes to room that was never written to
                    taken[name, which].append(spent)
        assert torch.equal(back, data)
    *_, plain, tier = ways
    for which, doing in enumerate(("write", "read")):
        for name in ways:
            rate = [size / wall / 1e9 for wall, _ in taken[name, which]]
            process = statistics.median(process for _, process in taken[name, which])
            print(
                f"  {doing:5} {name:22} {statistics.median(rate):5.2f} GB/s (best {max(rate):5.2f}), "
                f"{process / size * 1e9:.3f} s of processor time a GB"
            )
        ratios = [p / t for (t, _), (p, _) in zip(taken[tier, which], taken[plain, which], strict=True)]
        print(f"  {doing:5} tier / loops of {threads}: {statistics.median(ratios):.2f}")
    os.close(descriptor)
    disk.close()


def overlap(folder: Path, size: int, rounds: int, threads: int) -> None:
    """Print what transfers cost beside products."""
    half = size // 2 // ALIGN * ALIGN
    disk = Disk([folder], threads_per_folder=threads)
    out, into = (Slab(half, torch.device("cpu")).memory for _ in range(2))
    out.copy_(torch.randint(0, 256, (half,), dtype=torch.uint8))
    first, second = disk.reserve(half), disk.reserve(half)
    matrix = torch.randn(1024, 1024)
    product = torch.empty_like(matrix)

    def transfers() -> None:
        moving = [disk.write(first, out), disk.read(second, into)]
        for transfer in moving:
            transfer.wait()

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(matrix, matrix, out=product)

    def both(count: int) -> None:
        moving = [disk.write(first, out), disk.read(second, into)]
        products(count)
        for transfer in moving:
            transfer.wait()

    disk.write(second, out).wait()
    transfers()
    count = max(1, round(seconds(transfers) / (seconds(lambda: products(10)) / 10)))  # about as long as the transfers
    found = []
    for _ in range(rounds):
        compute, moving, together = seconds(lambda: products(count)), seconds(transfers), seconds(lambda: both(count))
        found.append((together / max(compute, moving), compute, moving, together))
    ratio, compute, moving, together = sorted(found)[rounds // 2]
    _, process = timed(transfers)
    print(
        f"{count} products of 1024 on {torch.get_num_threads()} of {os.cpu_count()} cores, the round of median ratio:"
    )
    print(
        f"  products {compute:.2f} s, transfers {moving:.2f} s ({process:.2f} s of it on a processor), "
        f"both {together:.2f} s: {ratio:.2f} of the longer one"
    )
    disk.close()


def main() -> None:
    """Measure in a folder of its own, which goes away."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("."))
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=THREADS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix=".disk-tier-", dir=options.folder) as folder:
        compare(Path(folder), options.megabytes * MIB, options.rounds, options.threads)
        overlap(Path(folder), options.megabytes * MIB, options.rounds, options.threads)


if __name__ == "__main__":
    main()
