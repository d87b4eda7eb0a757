"""One rank as the simulator sees it: what its device does in order, and what it asks of its links meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tenfold.planning.events import Tasks
from tenfold.planning.pricing import Belt, Compute, Exchange, Priced


class Stream:
    """The tasks of one pipeline rank, as they are issued. Compute is in the order of these calls; an exchange that is
    issued begins behind what was computed by then, and compute goes on until it is waited for."""

    def __init__(self, tasks: Tasks, rank: int, together: bool) -> None:
        self.tasks, self.rank, self._together = tasks, rank, together
        self._lane = f"{rank} compute"
        self._last: int | None = None
        self._waits: list[int] = []
        self._pending: list[tuple[str, str, float]] = []

    def compute(self, name: str, seconds: float, kind: str = "compute") -> None:
        """Work of the device."""
        if seconds <= 0:
            return
        if self._pending and self._pending[-1][:2] == (kind, name):
            seconds += self._pending.pop()[2]
        self._pending.append((kind, name, seconds))

    def place(self) -> list[int]:
        """What is to be done before anything that is asked for now."""
        for kind, name, seconds in self._pending:
            self._last = self.tasks.new(kind, name, seconds, self._waits, self._lane)
            self._waits = []
        self._pending = []
        return [*([] if self._last is None else [self._last]), *self._waits]

    def issue(self, exchange: Exchange, after: Sequence[int] | None = None, times: int = 1) -> int:
        """Ask for an exchange, behind what was done by now or `after` something else; its task."""
        place = self.place()
        lane = f"{self.rank} {exchange.lane}"
        seconds = times * exchange.seconds
        behind = place if after is None or not self._together else after
        task = self.tasks.new("communication", exchange.name, seconds, behind, lane)
        if not self._together:
            self._waits.append(task)
        return task

    def wait(self, *tasks: int) -> None:
        """What is computed from now on is behind these."""
        self.place()
        self._waits += tasks

    def go(self, name: str, priced: Iterable[Priced], times: int = 1) -> None:
        """Work and exchanges that it waits for, one after another, each of them so many times."""
        for one in priced:
            if isinstance(one, Compute):
                self.compute(name, times * one.seconds)
            elif isinstance(one, Exchange):
                self.wait(self.issue(one, times=times))
            else:
                self._convey(name, one)

    def _convey(self, name: str, belt: Belt) -> None:
        """`count` portions as few tasks that take as long: all being alike, the first, the last and those between."""
        rest = belt.count - 1
        firsts = [self.issue(each) for each in belt.into]
        lasts = [self.issue(each, times=rest) for each in belt.into] if rest else firsts
        self.go(name, belt.before)
        if not belt.into and not belt.out:
            self.go(name, belt.work, belt.count)
        else:
            going = self._work(name, belt, rest, firsts, lasts)
            self.go(name, belt.behind)
            self.wait(*going)
            return
        self.go(name, belt.behind)

    def _work(self, name: str, belt: Belt, rest: int, firsts: Sequence[int], lasts: Sequence[int]) -> list[int]:
        """The portions worked on, and sent; the tasks in which the last of them goes."""
        if not rest:
            self.wait(*firsts)
            self.go(name, belt.work)
            return [self.issue(each) for each in belt.out]
        self.wait(*firsts)
        self.go(name, belt.work)
        if rest > 1 and belt.out:
            # Those that go while others are worked on: the last but one is behind its own work.
            early = [self.issue(each, times=rest - 1) for each in belt.out]
            if not self._together:
                self.wait(*early)
        self.go(name, belt.work, rest - 1) if rest > 1 else None
        late = [self.issue(each) for each in belt.out]
        self.wait(*lasts)
        self.go(name, belt.work)
        return [*late, *(self.issue(each) for each in belt.out)]
