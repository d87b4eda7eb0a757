"""What experts saw of late, and how often their gradients are zero therefore."""

from __future__ import annotations

import json
import random

import pytest
import torch

from tenfold.offload.loads import HORIZON, Loads


def seen_in(steps, experts, passes):
    """By looking: of all passes the share behind which any of the experts had a token in its step."""
    count = 0
    for step in steps:
        had = False
        for chosen in step:
            had |= not experts.isdisjoint(chosen)
            count += had
    return count / (len(steps) * passes)


def loads_of(steps, experts):
    loads = Loads(1, experts)
    for step in steps:
        tokens = torch.zeros(1, experts)
        for chosen in step:
            for expert in chosen:
                tokens[0, expert] += 1
        loads.saw(tokens)
    return loads


def test_of_one_pass_a_step_the_share_of_an_expert_is_exact():
    steps = [[[0, 0, 2]], [[0, 2, 2]], [[0]], [[0, 0, 0, 0, 0, 1]]]
    arrivals = loads_of(steps, 4).of([0])
    for expert, share in enumerate([1.0, 0.25, 0.5, 0.0]):
        assert arrivals.seen([expert], 1) == pytest.approx(share) == seen_in(steps, {expert}, 1)


@pytest.mark.parametrize("passes", [1, 2, 4, 8])
def test_of_tokens_that_come_at_random_the_share_is_that_which_is_seen(passes):
    chance = random.Random(passes)
    weights = [1 / (1 + each) ** 2 for each in range(16)]
    steps = [[chance.choices(range(16), weights, k=12) for _ in range(passes)] for _ in range(HORIZON)]
    arrivals = loads_of(steps, 16).of([0])
    for experts in ({0}, {3}, {8}, {15}, {2, 9}, {12, 13, 14, 15}, set(range(8, 16))):
        assert arrivals.seen(experts, passes) == pytest.approx(seen_in(steps, experts, passes), abs=0.1), experts


def test_many_tokens_at_once_now_and_then_are_seen_now_and_then():
    """Their mean is more than one a step, and most steps have none."""
    steps = [[[1] * 10, [1] * 10, [0] * 40 if number % 16 == 0 else [1]] for number in range(32)]
    arrivals = loads_of(steps, 2).of([0])
    assert arrivals.seen([0], 3) < 0.1
    assert arrivals.seen([1], 3) == pytest.approx(1, abs=0.01)


def test_experts_that_layers_share_see_what_comes_to_any_of_them():
    loads = Loads(3, 2)
    loads.saw(torch.tensor([[0, 5], [1, 5], [0, 5]]))
    assert loads.of([1]).seen([0], 1) == loads.of([0, 1, 2]).seen([0], 1) == 1
    assert loads.of([0, 2]).seen([0], 1) == 0


def test_what_is_long_ago_counts_no_more_and_what_is_not_routed_says_nothing():
    loads = Loads(1, 2)
    for _ in range(HORIZON):
        loads.saw(torch.tensor([[3, 1]]))
    for _ in range(8 * HORIZON):
        loads.saw(torch.zeros(1, 2))  # experts that share
    assert loads.of([0]).seen([0], 1) == 1
    for _ in range(8 * HORIZON):
        loads.saw(torch.tensor([[0, 1]]))
    assert loads.of([0]).seen([0], 1) < 1e-3


def test_they_go_on_from_a_checkpoint():
    loads, other = Loads(2, 3), Loads(2, 3)
    for number in range(5):
        loads.saw(torch.tensor([[number, 0, 7], [0, 1, number % 2]]))
    other.load(json.loads(json.dumps(loads.dump())))
    for each in (loads, other):
        each.saw(torch.tensor([[0, 1, 2], [3, 0, 0]]))
    for layer, expert, passes in [(0, 0, 1), (0, 1, 4), (1, 0, 2), (1, 2, 1)]:
        assert other.of([layer]).seen([expert], passes) == pytest.approx(
            loads.of([layer]).seen([expert], passes), rel=1e-3
        )
