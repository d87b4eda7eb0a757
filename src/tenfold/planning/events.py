"""A small simulator of events: tasks that wait for others, and lanes that do one task at a time, in the order of issue.

A task begins when the one before it in its lane is done, and all that it waits for. So the end of every task is the
longest way to it, and the same tasks always give the same times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass
class Tasks:
    """What is to be done. A task is known by its number."""

    seconds: list[float] = field(default_factory=list)
    after: list[list[int]] = field(default_factory=list)
    """What each waits for besides the one before it in its lane."""
    what: list[tuple[str, str]] = field(default_factory=list)
    """A kind, and a name for people."""
    lane: list[str | None] = field(default_factory=list)
    lanes: dict[str, list[int]] = field(default_factory=dict)
    """The tasks of each lane, in the order of issue."""

    def new(self, kind: str, name: str, seconds: float, after: Sequence[int] = (), lane: str | None = None) -> int:
        """A task, in a lane or, until it `enters` one, in none: then it only waits."""
        number = len(self.seconds)
        self.seconds.append(seconds)
        self.after.append(list(after))
        self.what.append((kind, name))
        self.lane.append(None)
        if lane is not None:
            self.enter(lane, number)
        return number

    def enter(self, lane: str, number: int) -> None:
        """A task is issued: it is behind all that are in the lane."""
        self.lane[number] = lane
        self.lanes.setdefault(lane, []).append(number)

    def __len__(self) -> int:
        return len(self.seconds)


@dataclass(frozen=True)
class Played:
    """When each task begins and ends, in seconds, and which task it waited for last (-1: none)."""

    begin: list[float]
    end: list[float]
    behind: list[int]

    @property
    def seconds(self) -> float:
        """Until all is done."""
        return max(self.end, default=0.0)


def play(tasks: Tasks) -> Played:
    """The times of all tasks. Raises ValueError, with one of them, where tasks wait for each other in a ring."""
    count = len(tasks)
    begin, end, behind = [0.0] * count, [0.0] * count, [-1] * count
    left = [len(waits) for waits in tasks.after]
    then: list[list[int]] = [[] for _ in range(count)]
    for number, waits in enumerate(tasks.after):
        for before in waits:
            then[before].append(number)
    for lane in tasks.lanes.values():
        for one, other in pairwise(lane):
            then[one].append(other)
            left[other] += 1
    ready = deque(number for number in range(count) if not left[number])
    done = 0
    seconds = tasks.seconds
    while ready:
        number = ready.popleft()
        done += 1
        finished = end[number] = begin[number] + seconds[number]
        for each in then[number]:
            if finished >= begin[each]:
                begin[each], behind[each] = finished, number
            left[each] -= 1
            if not left[each]:
                ready.append(each)
    if done < count:
        stuck = next(number for number in range(count) if left[number])
        raise ValueError(f"tasks wait for each other: {tasks.what[stuck]} in lane {tasks.lane[stuck]}, for one")
    return Played(begin, end, behind)
