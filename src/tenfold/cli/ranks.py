"""A command that many processes run together: who tells what went wrong, and with which code each ends."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

from tenfold.cli.help import error_lines
from tenfold.errors import RanksLost, TenfoldError
from tenfold.parallel.launch import World, join, world_of

if TYPE_CHECKING:
    from tenfold.parallel.logs import RankLog
    from tenfold.parallel.watch import Watch

_LINGER = 4.0  # seconds in which others are to hear why this rank ends: torchrun ends them when it has

_STARTING = 15.0  # seconds by which ranks may differ in how long they take to start


def on_ranks(work: Callable[[World, RankLog | None], int]) -> int:
    """The exit code of `work`, which is told of the processes and given this rank's log; a lone process has none.

    On many ranks one message says why they end: what all of them meet alike, or what the first that failed met, with
    its number. After an error the process ends here.
    """
    world = world_of(os.environ)
    if world.size == 1:
        return work(world, None)
    from tenfold.parallel.logs import RankLog

    log = RankLog(world.rank)
    try:
        world = join(world, log)
        former = signal.signal(signal.SIGTERM, _end_by_default)
        _ending.append(world)
        code = work(world, log)
        if world.watch is not None:
            world.watch.stop()
        signal.signal(signal.SIGTERM, former)
    except BaseException as error:
        code = _ended(world, log, error)
        if world.watch is not None:
            world.watch.leave(code)
    return code


_ending: list[World] = []


def _end_by_default(number: int, _frame: FrameType | None) -> None:
    """torchrun ends what is left when a rank failed; those that are about to tell of it go on."""
    if not any(world.watch is not None and world.watch.ending for world in _ending):
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _ended(world: World, log: RankLog, error: BaseException) -> int:
    """Tell of what ended this rank; its exit code."""
    if isinstance(error, Exception):
        error = world.explained(error)
    watch = world.watch
    if watch is not None:
        watch.ending = True
    if isinstance(error, SystemExit):  # what it has to say was said
        return error.code if isinstance(error.code, int) else 2
    if isinstance(error, RanksLost) and watch is not None:
        if watch.lost is None:  # not known to the others yet
            watch.accuse(str(error), "lost")
        watch.say_lost(error)
        time.sleep(_LINGER / 2)
        return error.code
    text, code = _told(error)
    log.write(f"tenfold: {text}")
    if watch is None:
        log.tell(error_lines(f"tenfold: {text}"))
    else:
        _say(world, watch, text, watch.accuse(text, code=code))
    return code


def _told(error: BaseException) -> tuple[str, int]:
    """What is told of an error, and the exit code."""
    if isinstance(error, TenfoldError):
        return str(error), 2
    if isinstance(error, OSError) and error.errno is not None:
        return f"{error.filename or 'a file'}: {error.strerror}", 2
    if isinstance(error, RanksLost):
        return str(error), error.code
    if isinstance(error, KeyboardInterrupt):
        return "stopped", 130
    return f"{type(error).__name__}: {error}\n" + "".join(traceback.format_exception(error)), 1


def _say(world: World, watch: Watch, text: str, first: bool) -> None:
    """Print an error of this rank: by rank 0, if all have it alike; else by the `first` that had any, by number."""
    key = f"error/{hashlib.sha256(text.encode()).hexdigest()}"
    having = 1
    with contextlib.suppress(RuntimeError):  # where the store went with its keeper
        watch.store.add(key, 1)
        began = time.monotonic()
        patience = _LINGER / 2 if watch.peers else _STARTING
        while (having := watch.store.add(key, 0)) < world.size and time.monotonic() - began < patience:
            if not watch.is_shared():
                break
            time.sleep(0.1)
    if having == world.size:
        watch.say(error_lines(f"tenfold: {text}"), yields=not world.first)
    else:
        others = f" and {having - 1} others" if having > 1 else ""
        name = watch.named([world.rank]) if watch.peers else f"rank {world.rank}"
        watch.say(error_lines(f"tenfold: {name}{others}: {text}"), yields=not first)
    time.sleep(_LINGER / 2)
