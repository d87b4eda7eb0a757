"""What ranks of this machine do to each other: latency and rate of each exchange, and how they slow each other down.

Measured between processes that are started for it, as training's are: by gloo, or by NCCL where each has a GPU.
"""

from __future__ import annotations

import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from tenfold.errors import TenfoldError
from tenfold.hardware.memory import keep_freed_memory
from tenfold.nn.attend import Context, attend
from tenfold.parallel import collectives
from tenfold.planning.stopwatch import Stopwatch
from tenfold.planning.terms import CollectiveKind, OperationKind

_ANSWER_SECONDS = 300.0
_ROUNDS = 5
_KINDS: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "broadcast")


@dataclass(frozen=True)
class Between:
    """What was measured: of every exchange (latency in seconds, bytes a second), as `planning.exchange` has them; how
    many times as long each kind of work takes when all ranks do it."""

    paces: dict[CollectiveKind, tuple[float, float]]
    crowding: dict[OperationKind, float]


@dataclass(frozen=True)
class RankSizes:
    """At which sizes it is measured."""

    bytes: Sequence[int] = (4096, 2**16, 2**20, 2**23)
    side: int = 512
    seconds: float = 0.08
    """Of each measurement, about."""

    @classmethod
    def of(cls, device: torch.device) -> RankSizes:
        """Such as training exchanges between ranks on such devices."""
        return cls() if device.type == "cpu" else cls(bytes=(2**16, 2**20, 2**24, 2**28), side=4096)


def measure_between(
    ranks: int, device: str, threads: int, sizes: RankSizes, say: Callable[[str], None] = lambda _: None
) -> Between:
    """Start `ranks` processes of `threads` OpenMP threads that compute on `device` ("cpu" or "cuda"), and measure.

    Raises TenfoldError where one fails or does not answer.
    """
    say(f"exchanges between {ranks} processes")
    context = multiprocessing.get_context("spawn")
    answers: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        given = (ranks, device, threads, sizes, str(Path(folder) / "store"), answers)
        processes = [context.Process(target=_rank, args=(rank, *given), daemon=True) for rank in range(ranks)]
        for process in processes:
            process.start()
        found: Between | None = None
        try:
            for _ in range(ranks):
                rank, fault, value = answers.get(timeout=_ANSWER_SECONDS)
                if fault:
                    raise TenfoldError(f"measuring between processes failed on rank {rank}:\n{value}")
                found = value if rank == 0 else found
        except queue.Empty:
            raise TenfoldError(f"of {ranks} processes one did not answer in {_ANSWER_SECONDS:.0f} s") from None
        finally:
            for process in processes:
                if found is None:
                    process.kill()
                process.join()
    assert found is not None
    return found


def _rank(rank: int, ranks: int, device: str, threads: int, sizes: RankSizes, store: str, answers: Any) -> None:
    try:
        from torch.distributed import FileStore  # type: ignore[attr-defined]

        torch.set_num_threads(threads)
        os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
        if device == "cuda":
            torch.cuda.set_device(rank)
        keep_freed_memory()  # as training does
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
            store=FileStore(store, ranks),
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=_ANSWER_SECONDS),
        )
        found = _Rank(torch.device(device), rank, ranks, sizes).measure()
        dist.barrier()
        answers.put((rank, False, found))
        dist.destroy_process_group()
    except BaseException:
        answers.put((rank, True, traceback.format_exc()))


class _Rank:
    def __init__(self, device: torch.device, rank: int, ranks: int, sizes: RankSizes) -> None:
        self.device, self.rank, self.ranks, self.sizes = device, rank, ranks, sizes
        self.watch = Stopwatch(device, sizes.seconds)
        assert dist.group.WORLD is not None
        self.group = dist.group.WORLD

    def measure(self) -> Between:
        paces = {kind: self._pace(kind) for kind in _KINDS}
        crowding = {kind: self._crowding(work) for kind, work in self._works().items()}
        return Between(paces, crowding)

    def _pace(self, kind: CollectiveKind) -> tuple[float, float]:
        """Latency of a hop and rate of a link, such that `exchange_seconds` gives what was measured."""
        points = []
        for size in self.sizes.bytes:
            x = torch.ones(size // 4, device=self.device)
            points.append((float(size), self._exchange_seconds(kind, x)))
        start, each_byte = fit_line(points)
        turns = 2 if kind == "all_reduce" else 1
        hops = self.ranks - 1 if kind not in ("send", "all_to_all") else 1
        share = 1.0 if kind in ("send", "broadcast") else (self.ranks - 1) / self.ranks
        return start / (turns * hops), turns * share / each_byte

    def _exchange_seconds(self, kind: CollectiveKind, x: Tensor) -> float:
        group, ranks = self.group, self.ranks
        parts = x[: len(x) // ranks * ranks].view(ranks, -1)
        if kind == "send":
            return self._message_seconds(x)
        work: dict[CollectiveKind, Callable[[], Any]] = {
            "all_gather": lambda: collectives.all_gather(parts[0], group),
            "reduce_scatter": lambda: collectives.reduce_scatter(parts, group),
            "all_reduce": lambda: collectives.all_reduce(x, group),
            "all_to_all": lambda: collectives.exchange(parts, group),
            "broadcast": lambda: dist.broadcast(x, 0),
        }
        return self._together(work[kind])

    def _together(self, work: Callable[[], Any]) -> float:
        """Seconds of `work`, which all ranks do equally often: rank 0 says how often. Of several rounds the fastest, in
        which no other process was in the way."""

        def round_of(times: int) -> float:
            self._wait()
            begin = time.perf_counter()
            for _ in range(times):
                work()
            self._wait()
            return (time.perf_counter() - begin) / times

        work()
        each = self.sizes.seconds / _ROUNDS / max(round_of(2), 1e-6)
        times = torch.tensor([max(2, min(50, round(each)))])
        dist.broadcast(times, 0)
        return min(round_of(int(times)) for _ in range(_ROUNDS))

    def _message_seconds(self, x: Tensor) -> float:
        """To the next rank and back, halved; others than the first two have nothing to do."""

        def there_and_back() -> None:
            if self.rank == 0:
                dist.send(x, 1)
                dist.recv(x, 1)
            elif self.rank == 1:
                dist.recv(x, 0)
                dist.send(x, 0)

        return self._together(there_and_back) / 2

    def _works(self) -> dict[OperationKind, Callable[[], Any]]:
        side = self.sizes.side
        left, right = torch.randn(2, side, side, device=self.device).unbind()
        large = torch.randn(2, 16 * side * side, device=self.device)
        q = torch.randn(2, 4, side, 64, device=self.device, requires_grad=True)

        def attention() -> None:
            torch.autograd.grad(attend(q, q, q, Context(None)).sum(), q)

        def product() -> Tensor:
            return left @ right

        return {
            "matrix": product,
            "grouped": product,
            "attention": attention,
            "memory": lambda: large[0] + large[1],
            "update": lambda: large[0].addcmul_(large[1], large[1], value=1e-9),
        }

    def _crowding(self, work: Callable[[], Any]) -> float:
        alone = 0.0
        for turn in range(self.ranks):
            dist.barrier()
            if turn == self.rank:
                alone = self.watch.time(lambda _: work())
        dist.barrier()
        together = torch.tensor(self.watch.time(lambda _: work()) / alone)
        dist.all_reduce(together)
        return max(1.0, float(together) / self.ranks)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(start, slope) of seconds = start + slope * bytes with the least squares of relative errors; both positive."""
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    mean_size = sum(weight * size for weight, (size, _) in zip(weights, points, strict=True)) / total
    mean = sum(weight * seconds for weight, (_, seconds) in zip(weights, points, strict=True)) / total
    spread = sum(weight * (size - mean_size) ** 2 for weight, (size, _) in zip(weights, points, strict=True))
    along = sum(
        weight * (size - mean_size) * (each - mean) for weight, (size, each) in zip(weights, points, strict=True)
    )
    largest, longest = max(points)
    slope = along / spread if spread else 0.0
    slope = min(max(slope, 0.01 * longest / largest), longest / largest)
    return max(mean - slope * mean_size, 1e-7), slope
