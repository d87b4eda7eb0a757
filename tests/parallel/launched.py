"""A program of several ranks that goes wrong as it is told: `launched.py CASE FOLDER TIMEOUT`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

from tenfold.cli.ranks import on_ranks
from tenfold.errors import TenfoldError
from tenfold.parallel.launch import World, open_world
from tenfold.parallel.logs import RankLog
from tenfold.parallel.watch import doing


def add_up() -> None:
    """What all ranks come to."""
    import torch.distributed as dist

    doing("gradients", 7)
    dist.all_reduce(torch.ones(3))


def made(world: World, path: Path, blind: bool, seconds: float) -> str:
    """A file is made where there is none, which only one rank can do, and takes all of them their time."""
    if blind:
        raise TenfoldError("there is no file")
    found = path.exists()
    if not found:
        path.open("x").close()
    time.sleep(seconds if world.rank < 2 else 0.0)
    return f"rank {world.rank} {'found' if found else 'made'} it"


def work(world: World, log: RankLog | None) -> int:
    """Some turns of all ranks, and then the last one's trouble."""
    case, folder, timeout = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
    last = world.rank == world.size - 1
    assert log is not None
    if case == "alike":
        raise TenfoldError("model.hiden is no key")
    if case == "early" and world.first:
        raise TenfoldError("runs/x exists already")
    with open_world(world, "cpu", timeout):
        log.open(folder, f"rank {world.rank}")
        print(f"rank {world.rank} says this")
        if case == "patient":
            print(world.at_leisure("preparing data", lambda: time.sleep(3 * timeout) or "prepared"))
        if case.startswith("each"):
            blind = last and case == "each-but-last"
            print(world.by_each("reading", lambda: made(world, folder / "made", blind, 3 * timeout)))
        for _ in range(2):
            doing("loading data", 7)
            add_up()
        if case == "blind":
            world.check_seen([str(folder) if world.first else ""], "which is a test")
            world.check_seen([str(folder / "not there")], "which is the run directory")
        doing("loading data", 8)
        if case == "unlike":
            raise TenfoldError(f"shard {world.rank} cannot be read")
        if last and case == "own":
            raise TenfoldError("shard 12 cannot be read")
        if last and case == "fault":
            raise ValueError("a fault of ours")
        if last and case == "hang":
            time.sleep(600)
        if last and (case == "die" or (case == "restart" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0")):
            os.kill(os.getpid(), signal.SIGKILL)
        if last and case == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        add_up()
        add_up()
    return 0


if __name__ == "__main__":
    raise SystemExit(on_ranks(work))
