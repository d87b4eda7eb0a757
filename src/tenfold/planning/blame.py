"""Where a lane's time goes: what it does, and what it waits for while it does nothing."""

from __future__ import annotations

from collections.abc import Sequence

from tenfold.planning.events import Played, Tasks

SHARES = ("compute", "communication", "offload", "optimizer", "bubble")


def shares_of(
    tasks: Tasks, played: Played, lane: Sequence[int], rank: int, begin: float, last: int
) -> dict[str, float]:
    """Seconds of each of `SHARES` from `begin` to the end of task `last`, of the lane that does the tasks `lane` of
    pipeline rank `rank`; they add up. What stands still waits for the task that was last to end, and from before that
    began for what that one waited for: exchanges and transfers count as such, what other ranks compute as a bubble."""
    found = dict.fromkeys(SHARES, 0.0)
    here = begin

    def wait(until: float, at: int) -> None:
        """The lane stood still from `here` to `until`, behind task `at`."""
        while until > here and at >= 0:
            first = max(played.begin[at], here)
            if first < until:
                kind, where = tasks.what[at][0], tasks.lane[at]
                own = where is None or where.partition(" ")[0] == str(rank)
                found[_share(kind, own)] += until - first
                until = first
            at = played.behind[at]
        found["bubble"] += max(0.0, until - here)

    for number in lane:
        wait(played.begin[number], played.behind[number])
        kind = tasks.what[number][0]
        found["optimizer" if kind == "optimizer" else "compute"] += played.end[number] - played.begin[number]
        here = played.end[number]
    wait(played.end[last], last)
    return found


def _share(kind: str, own: bool) -> str:
    if kind in ("communication", "message"):
        return "communication" if own or kind == "message" else "bubble"
    return "offload" if kind == "offload" and own else "bubble"
