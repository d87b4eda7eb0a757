"""Many pieces of work on a CPU side by side: threads of Python, each with its share of the OpenMP threads.

Two OpenMP threads on one product wait for each other, and on a product of a few dozen rows gain little; two products,
one on each thread, gain all of it. PyTorch lets go of the interpreter within its operations, so threads of Python will
do.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

Piece = TypeVar("Piece")

# Threads of Python hold the interpreter for some 15 of the 100 to 1000 microseconds of a product: with more of them
# they would wait for it. Beyond, each gets more OpenMP threads instead.
MOST_WORKERS = 8


def workers_of(device: torch.device) -> int:
    """How many pieces of work on `device` are to be done side by side."""
    if device.type != "cpu" or not torch.backends.openmp.is_available():
        return 1
    return min(torch.get_num_threads(), MOST_WORKERS)


def work_off(pieces: Sequence[Piece], work: Callable[[Piece], None], workers: int) -> None:
    """`work` on each of the pieces, begun in their order, by so many workers; no gradients are recorded.

    A piece must not read what another writes. One worker, or one piece, is left to the caller, with all its OpenMP
    threads. An error of one piece is raised when the others are done.
    """
    workers = min(workers, len(pieces))
    if workers <= 1:
        for piece in pieces:
            work(piece)
        return
    left = iter(pieces)

    def drain() -> None:
        # A thread begins with gradients on, whatever its caller had; in this mode it may write to any tensor.
        with torch.inference_mode():
            for piece in left:
                work(piece)

    pool = _pool(workers_of(torch.device("cpu")), torch.get_num_threads())
    futures = [pool.submit(drain) for _ in range(workers)]
    wait(futures)
    for future in futures:
        future.result()


@functools.cache
def _pool(workers: int, threads: int) -> ThreadPoolExecutor:
    """Workers, all of them started, that have `threads` OpenMP threads between them."""

    def begin() -> None:
        torch.get_num_threads()  # the first question gives a thread the number that holds for all: never after ours
        torch.set_num_threads(threads // workers)

    pool = ThreadPoolExecutor(workers, "tenfold-worker", begin)
    started = threading.Barrier(workers)
    wait([pool.submit(started.wait) for _ in range(workers)])
    # The number holds for the thread that sets it, and for all that start later: for those the last word counts.
    torch.set_num_threads(threads)
    return pool


os.register_at_fork(after_in_child=_pool.cache_clear)  # a forked process has none of its parent's threads
