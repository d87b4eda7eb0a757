"""How long work takes on a device, and how many passes over memory it makes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_COLD_BYTES = 48 * 2**20
_SAMPLE_SECONDS = 3e-4  # so long that the clock itself does not matter

T = TypeVar("T")


class Stopwatch:
    """Takes the time of work on `device`, each for about `seconds`, and longer only where it takes so long twice.

    On a GPU by its own events, over calls that follow each other without a wait. On a CPU, of one OpenMP thread, by its
    own time, so that other processes which take its core do not count; of several by the clock.
    """

    def __init__(self, device: torch.device, seconds: float = 0.1) -> None:
        self.device, self._seconds = device, seconds
        self._clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def time(self, work: Callable[[int], Any], calls: int = 1) -> float:
        """Median seconds of `work(number)`, which is called with the numbers from 0 to `calls` - 1 over and over."""
        number = 0

        def sample(times: int) -> float:
            nonlocal number
            begin = self._now()
            for _ in range(times):
                work(number)
                number = (number + 1) % calls
            return self._since(begin) / times

        first = sample(1)
        if first < 10 * self._seconds:  # else it stands for itself, though it was the first
            first = sample(1)
        times = max(1, round(_SAMPLE_SECONDS / max(first, 1e-7)))
        end = time.perf_counter() + self._seconds
        samples = [first] if times == 1 else []
        while not samples or (time.perf_counter() < end and len(samples) < 25):
            samples.append(sample(times))
        return statistics.median(samples)

    def over(self, make: Callable[[], T], work: Callable[[T], Any], size: float) -> float:
        """Median seconds of `work` on operands of `size` bytes in all, as cold as training finds them: of so many sets
        of them that no cache holds all."""
        sets = [make() for _ in range(max(1, min(12, int(_COLD_BYTES / max(size, 1)))))]
        return self.time(lambda number: work(sets[number]), len(sets))

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _since(self, begin: Any) -> float:
        if self.device.type != "cuda":
            return float(self._clock() - begin)
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000


class Passes(TorchDispatchMode):
    """Counts the operations that go over memory, and the bytes that they read and write; views and small ones not."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.count, self.bytes, self._least = 0, 0, least

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read = {id(each): each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        written = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        if func.is_view or torch.Tag.inplace_view in func.tags:
            return out
        moved = sum(map(_bytes, read.values())) + sum(map(_bytes, written))
        if moved >= self._least:
            self.count, self.bytes = self.count + 1, self.bytes + moved
        return out


def _bytes(tensor: Tensor) -> int:
    """Of the elements that it has in memory: one that is seen as many counts once."""
    numel = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numel *= size if stride else 1
    return numel * tensor.element_size()
