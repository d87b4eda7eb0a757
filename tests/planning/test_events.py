"""The simulator, against times worked out by hand and against a plain search for the longest way."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenfold.planning.events import Played, Tasks, play


def way_to(task: int, played: Played) -> list[int]:
    """Back from a task, to what it waited for last, and so on."""
    way: list[int] = []
    while task >= 0:
        way.append(task)
        task = played.behind[task]
    return way[::-1]


def test_two_lanes_go_on_side_by_side_until_one_waits_for_the_other() -> None:
    tasks = Tasks()
    first = tasks.new("compute", "a", 2.0, (), "device")
    sent = tasks.new("communication", "b", 5.0, (first,), "link")
    beside = tasks.new("compute", "c", 3.0, (), "device")
    last = tasks.new("compute", "d", 1.0, (sent,), "device")
    played = play(tasks)
    assert played.begin == [0.0, 2.0, 2.0, 7.0]
    assert played.end == [2.0, 7.0, 5.0, 8.0]
    assert way_to(last, played) == [first, sent, last]
    assert way_to(beside, played) == [first, beside]


def test_a_lane_does_its_tasks_in_the_order_of_issue_and_not_of_their_numbers() -> None:
    tasks = Tasks()
    late = tasks.new("compute", "late", 1.0)
    tasks.new("compute", "early", 2.0, (), "device")
    tasks.enter("device", late)
    assert play(tasks).begin == [2.0, 0.0]


def test_tasks_that_wait_for_each_other_are_told_by_name() -> None:
    tasks = Tasks()
    one = tasks.new("message", "hidden states", 1.0, (), "link")
    other = tasks.new("compute", "layer", 1.0, (one,), "device")
    tasks.after[one].append(other)
    with pytest.raises(ValueError, match="hidden states"):
        play(tasks)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b", "c"]),
            st.floats(0, 10),
            st.lists(st.integers(0, 30), max_size=3),
        ),
        max_size=30,
    )
)
def test_every_task_ends_by_the_longest_way_to_it(given: list[tuple[str, float, list[int]]]) -> None:
    tasks = Tasks()
    for number, (lane, seconds, after) in enumerate(given):
        tasks.new("compute", str(number), seconds, [each for each in after if each < number], lane)

    @cache
    def end(number: int) -> float:
        lane, seconds, after = given[number]
        before = [other for other in range(number) if given[other][0] == lane][-1:]
        return max((end(each) for each in {*before, *(each for each in after if each < number)}), default=0.0) + seconds

    played = play(tasks)
    assert played.end == [end(number) for number in range(len(given))]
    for number, ends in enumerate(played.end):
        assert sum(tasks.seconds[each] for each in way_to(number, played)) == pytest.approx(ends)
