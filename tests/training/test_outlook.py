"""What is foreseen of a stage beside what is measured of it."""

from __future__ import annotations

import pytest
import torch

from tenfold.planning.foreseen import Foreseen
from tenfold.training.outlook import Memory, Outlook, foreseen_by

PLAN = Foreseen(0.5, 1000, "plan", "2:cpu")


def test_steps_are_counted_but_the_first_and_told_twice_and_at_the_end() -> None:
    outlook, due = Outlook(PLAN), []
    for seconds in (9.0, 0.4, 0.6, 0.8, 1.0):
        outlook.step(seconds)
        due.append(outlook.is_due(last=False))
    assert due == [False, True, True, False, False]
    assert outlook.is_due(last=True)
    told = outlook.told(1200, True, {"seconds": 7.0, "stalled_seconds": 0.1})
    assert told["foreseen"] == {"seconds": 0.5, "device_bytes": 1000, "by": "plan", "cluster": "2:cpu"}
    measured = told["measured"]
    assert measured["seconds"] == pytest.approx((0.4 + 0.6 + 0.8 + 1.0) / 4)
    assert (measured["steps"], measured["device_bytes"], measured["stalled_seconds"]) == (4, 1200, 0.1)


def test_a_stage_of_one_step_tells_nothing() -> None:
    outlook = Outlook(PLAN)
    outlook.step(1.0)
    assert not outlook.is_due(last=True)


def test_a_plan_goes_before_the_forecast_of_a_placement() -> None:
    placed = {
        "forecast": {"seconds": 2.0, "rows": []},
        "tier_bytes": {"device": 10, "host": 5, "disk": 5},
        "working_bytes": 3,
        "other_bytes": 4,
    }
    assert foreseen_by(PLAN, placed) == PLAN
    assert foreseen_by(None, placed) == Foreseen(2.0, 17, "offload")
    assert foreseen_by(None, None) is None


def test_memory_is_what_a_process_takes_since_and_each_stage_has_a_peak_of_its_own() -> None:
    cpu, size = torch.device("cpu"), 2**26
    memory = Memory(cpu)
    large = torch.ones(3 * size // 4)
    del large
    first = memory.most
    assert first is not None
    assert 3 * size * 0.9 < first < 3 * size * 1.5
    memory.begin()
    small = torch.ones(size // 4)
    second = memory.most
    if second is not None and second < first:  # where the system forgets peaks
        assert size * 0.9 < second < size * 2
    assert small.numel() == size // 4
