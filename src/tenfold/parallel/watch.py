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
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from tenfold.errors import RanksLost

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from tenfold.parallel.logs import RankLog

GRACE = 30.0
"""Seconds beyond `parallel.timeout` after which exchanges give up by themselves."""

_HANDLING = 3.0  # seconds that a main thread has to notice by itself what the watch was told
_SILENT = 6.0  # seconds without a word after which a rank is missed that others lost a connection to


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


@dataclass(frozen=True)
class Peer:
    """What the others know of a rank from the first."""

    host: str
    pid: int
    space: str = ""  # of process ids: those of another are not to be looked up
    cores: str = ""  # that it may run on, one bit each
    threads: int = 0  # asked for; 0: none
    device: str = "cpu"
    gpu: str = ""

    @classmethod
    def here(cls, **known: Any) -> Peer:
        """This process."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            space = f"{boot} {os.readlink('/proc/self/ns/pid')}"
        except OSError:
            space = ""
        return cls(socket.gethostname(), os.getpid(), space, **known)

    def is_gone(self) -> bool:
        """Whether the process ended; never said of one that cannot be seen from here."""
        if not self.space or self.space != Peer.here().space:
            return False
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        except (OSError, IndexError):
            return True


@dataclass
class State:
    """What a rank says of itself. `still` is for how many seconds nothing moved; `exchange`: it waits in one."""

    rank: int
    beat: int
    turn: int
    what: str
    step: int | None
    still: float
    at: str
    exchange: bool
    time: float

    def __str__(self) -> str:
        where = f"step {self.step}, {self.what}" if self.step is not None else self.what
        return f"{where} ({self.at})" if self.at else where


class Watch:
    """The thread that tells and watches, of one rank. `store` must be a connection of its own; `keeper` serves it."""

    def __init__(self, rank: int, size: int, store: Store, log: RankLog, keeper: str = "rank 0") -> None:
        self.rank, self.size, self.store, self.log, self._keeper = rank, size, store, log, keeper
        self.serves = rank == 0 and keeper == "rank 0"
        self._gone = 0
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
        self._suspicion: tuple[float, str] | None = None  # since when, and what the main thread met with
        self._judging = 0.0  # when this rank may judge, where another was first to
        self._found, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="tenfold-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End: this rank needs the others no more, nor they it."""
        self._over.set()
        self._thread.join()
        with contextlib.suppress(RuntimeError):  # where the store's keeper was done earlier
            self.store.set(f"done{self.rank}", "")

    def meet(self, me: Peer, timeout: float) -> list[Peer]:
        """All ranks, once they are there; RanksLost names those that are not within `timeout` seconds."""
        self.store.set(f"peer{self.rank}", json.dumps(asdict(me)))
        keys, began = [f"peer{rank}" for rank in range(self.size)], time.monotonic()
        while not self.store.check(keys):
            if time.monotonic() - began > timeout:
                missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
                raise RanksLost(
                    f"{ranks_named(missing)} of {self.size} did not come within {timeout:g} s. Look at why "
                    f"{'they do' if len(missing) > 1 else 'it does'} not start; parallel.timeout may be set higher"
                )
            time.sleep(0.1)
        self.peers = [Peer(**json.loads(told)) for told in self.store.multi_get(keys)]
        return self.peers

    def explain(self, error: BaseException) -> RanksLost:
        """Why an exchange with other ranks failed here."""
        if self.lost is None:
            self._suspicion = (time.monotonic(), (str(error).splitlines() or [type(error).__name__])[0])
        self.ending = True
        self._found.wait(3 * _SILENT)
        return self.lost or RanksLost(
            f"the connection to other ranks was lost: {self._suspicion and self._suspicion[1]}"
        )

    def accuse(self, text: str, kind: str = "error", code: int = RanksLost.code, gone: int = 0) -> None:
        """Tell all ranks to end, for a reason of this one or one that it found; the first of all is heard. Of them
        `gone` cannot hear it."""
        if self.store.add("faults", 1) == 1:
            self.store.set(
                "fault", json.dumps({"kind": kind, "rank": self.rank, "text": text, "code": code, "gone": gone})
            )

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
                        {"kind": "lost", "rank": self.rank, "text": text, "code": RanksLost.code, "gone": 1}
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
        state = State(self.rank, self._beat, now.turn, now.what, now.step, still, at, exchange, time.time())
        self.store.set(f"rank{self.rank}", json.dumps(asdict(state)))

    def _judge(self) -> None:
        """Say who is missing, where this rank waits for another."""
        still = time.monotonic() - max(self._moved, _now.since)
        if still > 2 * self._interval or self._suspicion:
            near = enumerate(self.peers)
            gone = [rank for rank, peer in near if rank != self.rank and peer.is_gone() and not self._is_done(rank)]
            if gone and not self.store.check(["fault"]):
                self._find(gone, {}, "is gone: its process ended without a word (killed, perhaps for memory)")
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
        after = {rank: state for rank, state in self._states().items() if not self._is_done(rank)}
        mine = after[self.rank]
        silent = [rank for rank, state in after.items() if rank != self.rank and state.beat == before[rank].beat]
        behind = [rank for rank, state in after.items() if state.turn < mine.turn and not _now.patient]
        elsewhere = [rank for rank, state in after.items() if not state.exchange and state.turn == mine.turn]
        if silent:
            self._find(silent, after, "does not answer (stopped, or its machine or network is gone)")
        elif behind:
            self._find(behind, after, f"did not come in {still:.0f} s to where others wait")
        elif elsewhere and mine.exchange and not _now.patient:
            self._find(elsewhere, after, f"did not come in {still:.0f} s to an exchange that others wait in")
        elif self._suspicion:
            self._find([], after, self._suspicion[1])
        elif still > self.timeout + GRACE / 2 and not _now.patient:
            self._find([], after, f"no rank moved for {still:.0f} s")
        else:
            self._judging = time.monotonic() + GRACE / 4

    def _is_done(self, rank: int) -> bool:
        return self.store.check([f"done{rank}"])

    def _states(self) -> dict[int, State]:
        """What every rank said last."""
        keys = [f"rank{rank}" for rank in range(self.size)]
        if not self.store.check(keys):
            keys = [key for key in keys if self.store.check([key])]
        states = [State(**json.loads(told)) for told in (self.store.multi_get(keys) if keys else [])]
        unheard = {rank: State(rank, 0, 0, "starting", None, 0.0, "", False, time.time()) for rank in range(self.size)}
        return unheard | {state.rank: state for state in states}

    def _find(self, missing: Sequence[int], states: dict[int, State], why: str) -> None:
        states = states or self._states()
        text = describe(list(missing), why, states, self.peers, self.timeout)
        self.accuse(
            f"{text}\nStacks of the ranks: {self.log.folder}" if self.log.folder else text, "lost", gone=len(missing)
        )

    def _end(self, fault: dict[str, Any]) -> None:
        """End this rank: the main thread does, if it notices itself; else this one."""
        text, self._gone = fault["text"], fault["gone"]
        if fault["kind"] == "error":
            if fault["rank"] == self.rank or self.ending:
                return
            text = f"{self.named([fault['rank']])} stopped, and so does the run: {text.splitlines()[0]}"
        self.log.write(f"tenfold: {text}")
        faulthandler.dump_traceback(self.log.file)
        self.lost = RanksLost(text)
        self.lost.code = fault["code"]
        self._found.set()
        began, patience = time.monotonic(), 3 * _HANDLING if self.peers else 6 * _HANDLING
        while not self.ending and time.monotonic() - began < patience:
            time.sleep(self._interval / 4)
            self._look()
            if time.monotonic() - self._moved > _HANDLING:
                break
        if self.ending:
            self._over.wait(4 * _SILENT)
            if self._over.is_set():
                return
        self.say_lost(self.lost)
        self.leave(self.lost.code)

    def say_lost(self, lost: RanksLost) -> None:
        """On the terminal, by one rank of all."""
        if self.speaks("lost"):
            self.log.tell(f"tenfold: {lost}")

    def leave(self, code: int) -> None:
        """End the process now: what is open between ranks that are lost must not be waited for.

        Only that of the store waits for those that still have to ask it something.
        """
        with contextlib.suppress(RuntimeError):
            self.store.add("left", 1)
            began = time.monotonic()
            while self.serves and time.monotonic() - began < 2 * _SILENT:
                if self.store.add("left", 0) >= self.size - self._gone:
                    break
                time.sleep(0.1)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)

    def named(self, ranks: Sequence[int]) -> str:
        """Ranks with their hosts."""
        return ranks_named(ranks, self.peers)


def describe(missing: list[int], why: str, states: dict[int, State], peers: list[Peer], timeout: float) -> str:
    """Who is missing, where each rank was last seen, and what to do."""
    lines = [f"{ranks_named(missing, peers)} {why}" if missing else f"ranks wait for each other: {why}"]
    latest = max((state.time for state in states.values()), default=0.0)
    for rank in missing:
        if rank in states:
            ago = latest - states[rank].time + states[rank].still
            lines.append(f"  {ranks_named([rank], peers)}: last seen {ago:.0f} s ago in {states[rank]}")
    others: dict[str, list[int]] = {}
    for rank, state in states.items():
        if rank not in missing:
            others.setdefault(str(state), []).append(rank)
    for where, ranks in others.items():
        longest = max(states[rank].still for rank in ranks)
        lines.append(f"  {ranks_named(ranks, peers)}: {where}, for {longest:.0f} s")
    lines.append(
        "Look at what became of it, and start again with --resume. Where a rank may really take that long, set "
        f"parallel.timeout (now {timeout:g} s) higher"
    )
    return "\n".join(lines)


def ranks_named(ranks: Sequence[int], peers: Sequence[Peer] = ()) -> str:
    """ "rank 3 on host a", "ranks 0-2, 7"."""
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    told = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)
    hosts = list(dict.fromkeys(peers[rank].host for rank in ranks)) if peers else []
    where = f" on {', '.join(hosts[:4])}{' and others' if len(hosts) > 4 else ''}" if hosts else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {told}{where}"


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


def is_of_exchange(error: BaseException) -> bool:
    """Whether an error is of the talk between ranks, and not of this one's own."""
    import torch.distributed as dist

    if isinstance(error, dist.DistError):
        return True
    words = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe", "Timed out", "Socket", "store")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)
