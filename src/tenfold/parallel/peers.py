"""What ranks know of each other: who they are, what each says it is about, and how that is told."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
