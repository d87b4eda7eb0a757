"""What every rank is doing, told to a store that all of them read; and who is named when one does not come.

A thread of each rank puts into the store, about once a second, what its main thread is about. Where that stands still
longer than `parallel.timeout`, or lost a connection, one rank compares them all: a rank is missing whose process is
gone, whose thread is silent, that is at an earlier turn than this one, or that is the only one not in an exchange.
Its name goes into the store, and every rank ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from tenfold.errors import RanksLost
from tenfold.parallel.peers import Peer, State, describe, ranks_named

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from tenfold.parallel.logs import RankLog

GRACE = 30.0
"""Seconds beyond `parallel.timeout` after which exchanges give up by themselves."""

_HANDLING = 3.0  # seconds that a main thread has to notice by itself what the watch was told
_SILENT = 6.0  # seconds without a word after which a rank is missed that others lost a connection to
_YIELDING = 20.0  # seconds in which another rank is to say why all end
_STAYING = 60.0  # seconds at most for which the keeper of the store stays for other ranks


class Doing(NamedTuple):
    """What the main thread is about, since when, and the how-manieth such turn it is: all ranks go through the same."""

    turn: int
    what: str
    step: int | None
    since: float
    patient: bool


_now = Doing(0, "starting", None, time.monotonic(), False)


def doing(what: str, step: int | None = None, patient: bool = False) -> None:
    """Say what this process is about, in `step` or the one before; a `patient` wait may be longer than any timeout.

    Every rank must say the same number of turns: one that is behind is missed.
    """
    global _now
    _now = Doing(_now.turn + 1, what, _now.step if step is None else step, time.monotonic(), patient)


class Watch:
    """The thread that tells and watches, of one rank. `store` must be a connection of its own; `keeper` serves it."""

    def __init__(self, rank: int, size: int, store: Store, log: RankLog, keeper: str = "rank 0") -> None:
        self.rank, self.size, self.store, self.log, self._keeper = rank, size, store, log, keeper
        self.serves = rank == 0 and keeper == "rank 0"
        self.timeout = float("inf")
        self.lost: RanksLost | None = None
        """What was found, once it was."""
        self.ending = False
        """The main thread is at ending this process, and signals change nothing."""
        self.peers: list[Peer] = []
        self._interval = max(1.0, size / 500)  # one store serves all
        self._main = threading.main_thread().ident
        self._position: object = None
        self._moved = time.monotonic()
        self._beat = 0
        self._suspicion: str | None = None  # what the main thread met with in an exchange
        self._met_at = ""  # the line where
        self._gone: list[int] = []  # ranks that can hear no more
        self._yields = False  # why all end is another rank's to say
        self._judging = 0.0  # when this rank may judge, where another was first to
        self._found, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="tenfold-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End: this rank needs the others no more, nor they it."""
        self._over.set()
        self._thread.join()
        self._take_leave()

    def meet(self, me: Peer, timeout: float) -> list[Peer]:
        """All ranks, once they are there; RanksLost names those that are not within `timeout` seconds."""
        self.store.set(f"peer{self.rank}", json.dumps(asdict(me)))
        keys, began = [f"peer{rank}" for rank in range(self.size)], time.monotonic()

        def are_there() -> bool:
            if self.store.check(keys):
                return True
            if time.monotonic() - began > timeout:
                missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
                raise RanksLost(
                    f"{ranks_named(missing)} of {self.size} did not come within {timeout:g} s. Look at why "
                    f"{'they do' if len(missing) > 1 else 'it does'} not start; parallel.timeout may be set higher"
                )
            return False

        self.wait_until(are_there, 0.1)
        self.peers = [Peer(**json.loads(told)) for told in self.store.multi_get(keys)]
        return self.peers

    def wait_until(self, ready: Callable[[], bool], pause: float = 0.5) -> None:
        """Ask every `pause` seconds; RanksLost once it is known that the run ends."""
        while not ready():
            if self.lost is not None:
                raise self.lost
            time.sleep(pause)

    def explain(self, error: BaseException) -> RanksLost:
        """Why an exchange with other ranks failed here."""
        if self.lost is None:
            self._met_at = _place_met(error)
            self._suspicion = (str(error).strip().splitlines() or [type(error).__name__])[0]
        self.ending = True
        self._found.wait(3 * _SILENT)
        return self.lost or RanksLost(f"the connection to other ranks was lost: {self._suspicion}")

    def accuse(self, text: str, kind: str = "error", code: int = RanksLost.code, gone: Sequence[int] = ()) -> bool:
        """Tell all ranks to end, for a reason of this one or one that it found; ranks that are `gone` cannot hear it.

        The first of all is heard: whether it is this.
        """
        try:
            if self.store.add("faults", 1) > 1:
                return False
            fault = {"kind": kind, "rank": self.rank, "text": text, "code": code, "gone": list(gone)}
            self.store.set("fault", json.dumps(fault))
        except RuntimeError:  # the store went with its rank
            return False
        return True

    def speaks(self, subject: str) -> bool:
        """Whether this rank is the one of all that says `subject` on the terminal: the first that asks."""
        try:
            return self.store.add(f"said/{subject}", 1) == 1
        except RuntimeError:  # the store went with its rank
            return self.rank < 2

    def _run(self) -> None:
        failing = 0.0
        while not self._over.wait(self._interval if self._beat else 0.0):
            try:
                self._look()
                self._tell()
                if self.store.check(["fault"]):
                    return self._end(json.loads(self.store.get("fault")))
                self._judge()
                failing = 0.0
            except RuntimeError as error:  # the store does not answer
                failing = failing or time.monotonic()
                if self._suspicion or (time.monotonic() - max(failing, self._moved) > _SILENT):
                    where = f" on {self.peers[0].host}" if self.peers else ""
                    text = f"{self._keeper}{where} is gone, and with it the store of the run: {error}".splitlines()[0]
                    return self._end(
                        {"kind": "lost", "rank": self.rank, "text": text, "code": RanksLost.code, "gone": [0]}
                    )
        return None

    def _look(self) -> None:
        """Note whether the main thread moved."""
        frame = sys._current_frames().get(self._main or 0)
        position = []
        while frame is not None:
            position.append((id(frame), frame.f_lasti))
            frame = frame.f_back
        if position != self._position:
            self._position, self._moved = position, time.monotonic()

    def _tell(self) -> None:
        now, self._beat = _now, self._beat + 1
        still = time.monotonic() - max(self._moved, now.since)
        at, exchange = _place_of(sys._current_frames().get(self._main or 0))
        at = self._met_at or at
        state = State(self.rank, self._beat, now.turn, now.what, now.step, still, at, exchange, time.time())
        self.store.set(f"rank{self.rank}", json.dumps(asdict(state)))

    def _judge(self) -> None:
        """Say who is missing, where this rank waits for another."""
        still = time.monotonic() - max(self._moved, _now.since)
        if still > 2 * self._interval or self._suspicion:
            near = enumerate(self.peers)
            gone = [rank for rank, peer in near if rank != self.rank and peer.is_gone() and not self._is_done(rank)]
            if gone and not self.store.check(["fault"]):
                why = "is gone: its process ended without a word (killed, perhaps for memory)"
                self._find(gone, self._heard_anew(gone), why, gone)
                return
        due = still > self.timeout or self._suspicion is not None
        if not due or time.monotonic() < self._judging:
            return
        if not self.speaks("judgement") and not self._judging:
            self._judging = time.monotonic() + GRACE / 2  # another does; if it fails, this one
            return
        self._compare(still)

    def _compare(self, still: float) -> None:
        """Look at all ranks twice: who is silent, behind, or not where the others wait?"""
        before = self._states()
        began, patience = time.monotonic(), 3 * self._interval if still > self.timeout else _SILENT
        while time.monotonic() - began < patience and not self._over.wait(self._interval):
            self._tell()
            if self.store.check(["fault"]):
                return
        after = {rank: state for rank, state in self._states().items() if rank == self.rank or not self._is_done(rank)}
        mine = after[self.rank]
        silent = [rank for rank, state in after.items() if rank != self.rank and state.beat == before[rank].beat]
        behind = [rank for rank, state in after.items() if state.turn < mine.turn and not _now.patient]
        elsewhere = [rank for rank, state in after.items() if not state.exchange and state.turn == mine.turn]
        if silent:
            self._find(silent, after, "does not answer (stopped, or its machine or network is gone)", silent)
        elif behind:
            self._find(behind, after, f"did not come in {still:.0f} s to where others wait")
        elif elsewhere and mine.exchange and not _now.patient:
            self._find(elsewhere, after, f"did not come in {still:.0f} s to an exchange that others wait in")
        elif self._suspicion:
            self._find([], after, self._suspicion)
        elif still > self.timeout + GRACE / 2 and not _now.patient:
            self._find([], after, f"no rank moved for {still:.0f} s")
        else:
            self._judging = time.monotonic() + GRACE / 4

    def _is_done(self, rank: int) -> bool:
        """Whether a rank needs the store no more."""
        return self.store.check([f"done{rank}"])

    def _heard_anew(self, gone: Sequence[int]) -> dict[int, State]:
        """What every rank says now: all but those `gone` have a few moments to say it."""
        before, began = self._states(), time.monotonic()
        while True:
            self._tell()
            states = self._states()
            late = [rank for rank, state in states.items() if state.beat == before[rank].beat and rank not in gone]
            if all(self._is_done(rank) for rank in late) or time.monotonic() - began > 3 * self._interval:
                return states
            time.sleep(self._interval / 4)

    def _states(self) -> dict[int, State]:
        """What every rank said last."""
        keys = [f"rank{rank}" for rank in range(self.size)]
        if not self.store.check(keys):
            keys = [key for key in keys if self.store.check([key])]
        states = [State(**json.loads(told)) for told in (self.store.multi_get(keys) if keys else [])]
        unheard = {rank: State(rank, 0, 0, "starting", None, 0.0, "", False, time.time()) for rank in range(self.size)}
        return unheard | {state.rank: state for state in states}

    def _find(self, missing: list[int], states: dict[int, State], why: str, gone: Sequence[int] = ()) -> None:
        text = describe(missing, why, states, self.peers, self.timeout)
        self.accuse(f"{text}\nStacks of the ranks: {self.log.folder}" if self.log.folder else text, "lost", gone=gone)

    def _end(self, fault: dict[str, Any]) -> None:
        """End this rank: the main thread does, if it notices itself; else this one."""
        text, self._gone = fault["text"], fault["gone"]
        if fault["kind"] == "error":
            if fault["rank"] == self.rank or (self.ending and self._suspicion is None):
                self._linger()  # the main thread is about to say what it met itself
                return
            self._yields = True
            text = f"{self.named([fault['rank']])} stopped, and so does the run: {text.splitlines()[0]}"
        self.log.write(f"tenfold: {text}")
        faulthandler.dump_traceback(self.log.file)
        self.lost = RanksLost(text)
        self.lost.code = fault["code"]
        self._found.set()
        began, patience = time.monotonic(), 3 * _HANDLING if self.peers else 6 * _HANDLING
        while not self.ending and time.monotonic() - began < patience:
            self._linger(self._interval / 4)
            self._look()
            if time.monotonic() - self._moved > _HANDLING:
                break
        if self.ending and self._linger(4 * _SILENT):
            return
        self.say_lost(self.lost)
        self.leave(self.lost.code)

    def _linger(self, seconds: float = float("inf")) -> bool:
        """Only tell that this rank is there, so that the store stays; whether it is over before `seconds` are."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            with contextlib.suppress(RuntimeError):
                self._tell()
            if self._over.wait(min(left, self._interval)):
                return True
        return False

    def say_lost(self, lost: RanksLost) -> None:
        """On the terminal, by one rank of all; an error that another has is that one's to say."""
        if self._yields:
            with contextlib.suppress(RuntimeError):
                self.store.add("spared", 1)
        self.say(f"tenfold: {lost}", self._yields)

    def is_shared(self) -> bool:
        """Whether all ranks may still come to the error that is to be said: none has said that it was spared it."""
        return self.store.add("spared", 0) == 0

    def say(self, text: str, yields: bool = False) -> None:
        """Why the run ends, on the terminal, by one rank of all. One that `yields` does only if no other gets to it."""
        began = time.monotonic()
        with contextlib.suppress(RuntimeError):
            while yields and time.monotonic() - began < _YIELDING and not self.store.add("said/end", 0):
                self._tell()
                time.sleep(self._interval / 4)
        if self.speaks("end"):
            self.log.tell(text)

    def leave(self, code: int) -> None:
        """End the process now: what is open between ranks that are lost must not be waited for."""
        self._take_leave()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # where the disk is full
                stream.flush()
        os._exit(code)

    def _take_leave(self) -> None:
        """Say that this rank needs the store no more. Its keeper stays for all that do, as long as they speak."""
        beats: dict[int, int] = {}
        heard: dict[int, float] = {}
        with contextlib.suppress(RuntimeError):  # where the store's keeper was gone before
            self.store.set(f"done{self.rank}", "")
            began = now = time.monotonic()
            while self.serves and now - began < _STAYING:
                for rank, state in self._states().items():
                    if beats.get(rank) != state.beat:
                        beats[rank], heard[rank] = state.beat, now
                silent = [rank for rank in beats if now - heard[rank] > (_SILENT if beats[rank] else 2 * _SILENT)]
                ended = [rank for rank, peer in enumerate(self.peers) if peer.is_gone()]
                if all(self._is_done(rank) for rank in set(beats) - {*silent, *ended, *self._gone}):
                    return
                time.sleep(self._interval / 4)
                now = time.monotonic()

    def named(self, ranks: Sequence[int]) -> str:
        """Ranks with their hosts."""
        return ranks_named(ranks, self.peers)


def _place_of(frame: FrameType | None) -> tuple[str, bool]:
    """The innermost line of Tenfold's that a thread is at, and whether it is in an exchange between ranks."""
    exchange = False
    while frame is not None:
        file = frame.f_code.co_filename
        exchange = exchange or "/torch/distributed/" in file
        if "/tenfold/" in file and file != __file__:
            return f"{file.rpartition('/tenfold/')[2]}:{frame.f_lineno}", exchange
        frame = frame.f_back
    return "", exchange


def _place_met(error: BaseException) -> str:
    """The innermost line of Tenfold's that an error came through."""
    place, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if "/tenfold/" in file:
            place = f"{file.rpartition('/tenfold/')[2]}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def is_of_exchange(error: BaseException) -> bool:
    """Whether an error is of the talk between ranks, and not of this one's own."""
    import torch.distributed as dist

    if isinstance(error, dist.DistError):
        return True
    words = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe", "Timed out", "Socket", "store")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)
