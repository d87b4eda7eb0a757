"""Functions run on several ranks, which are processes of this machine joined by gloo."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import queue
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

TIMEOUT = 300.0  # seconds in which every rank must have answered
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["ranks", "tenfold.training.run", "tenfold.training.fake_run"])


def on_ranks(world: int, function: str, *arguments: Any) -> list[Any]:
    """What `function` ("module:name", importable from tests/) returns on each of `world` ranks, by rank.

    It is called as `function(*arguments)` in a process of its own, with the process group open. What it is given and
    returns is pickled. The first rank that raises, or does not answer, fails the test with its traceback, and with the
    codes of those that died.
    """
    answers: Any = _context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes = [
            _context.Process(target=_rank, args=(rank, world, store, function, arguments, answers), daemon=True)
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        results: dict[int, Any] = {}
        try:
            while len(results) < world:
                rank, raised, value = answers.get(timeout=TIMEOUT)
                if raised:
                    codes = {number: process.exitcode for number, process in enumerate(processes)}
                    died = "".join(f"rank {number} ended with {code}\n" for number, code in codes.items() if code)
                    raise AssertionError(f"{died}rank {rank} of {world}:\n{value}")
                results[rank] = pickle.loads(value)
        except queue.Empty:
            missing = sorted(set(range(world)) - results.keys())
            raise AssertionError(f"ranks {missing} of {world} did not answer in {TIMEOUT} s") from None
        finally:
            for process in processes:
                if len(results) < world:
                    process.kill()
                process.join()
    return [results[rank] for rank in range(world)]


def _rank(rank: int, world: int, store: str, function: str, arguments: tuple[Any, ...], answers: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), OMP_NUM_THREADS="1"
    )
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=TIMEOUT / 2),
        )
        module, _, name = function.partition(":")
        answer = getattr(importlib.import_module(module), name)(*arguments)
        dist.barrier()
        answers.put(
            (rank, False, pickle.dumps(answer))
        )  # torch's own pickling would share memory of a process that ends
        dist.destroy_process_group()
    except BaseException:
        answers.put((rank, True, traceback.format_exc()))
