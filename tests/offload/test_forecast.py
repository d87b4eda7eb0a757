"""Forecasts against steps played through by hand."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.models import part, plain
from tenfold.config.offload import PlacementRule
from tenfold.errors import TenfoldError
from tenfold.offload.budget import Budgets, choose
from tenfold.offload.forecast import Compute, Rates, describe, forecast
from tenfold.offload.placement import explicit, tier_bytes, traffic, working_bytes

FAST = 1e12
TEN = Rates({"disk": 10.0}, {"disk": 10.0})


def by_rules(parts, depth, *rules):
    return explicit([PlacementRule.model_validate(rule) for rule in rules], parts, depth)


def rows(cost):
    """(read, written, seconds moved, stalled) of each row."""
    return {
        (row.part, row.kind): (
            row.read,
            row.written,
            pytest.approx(row.seconds, abs=1e-9),
            pytest.approx(row.stalled, abs=1e-9),
        )
        for row in cost.rows
    }


def test_nothing_below_is_compute_alone():
    parts = plain(3, 10)
    cost = forecast(parts, by_rules(parts, 3), TEN, Compute((1, 1, 1), (2, 2, 2), 0.5), micro_batches=4)
    assert cost.seconds == pytest.approx(36.5)
    assert (cost.compute, cost.rows, cost.floor) == (36.5, (), 36.5)


def test_moments_stream_through_the_step():
    """Two pieces: read 2-3 and 3-4, updated 3-3.5 and 4-4.5, written 3.5-4.5 and 4.5-5.5, in the next step's forward
    pass."""
    parts = plain(1, 10, piece=5)
    cost = forecast(parts, by_rules(parts, 1, {"layers": "0", "moments": "disk"}), TEN, Compute((1,), (1,), 1))
    assert cost.seconds == pytest.approx(4.5)
    assert rows(cost) == {("layers.0", "moments"): (20, 20, 4, 1.5)}
    assert cost.rows[0].hidden == pytest.approx(2.5)
    assert cost.lanes == {"disk read": 2.0, "disk write": 2.0}


def test_weights_come_one_ahead_and_stay_while_there_is_room():
    """Room for two of three layers. At the end of a step 0 and 1 are here. Layer 2 comes while 1 runs forward, layer 0
    while 1 runs backward, both hidden; the step reads layer 2 again, a second in which nothing is left to compute."""
    parts = plain(3, 10)
    cost = forecast(
        parts,
        by_rules(parts, 3, {"layers": "all", "weights": "disk"}),
        Rates({"disk": 10.0}, {"disk": FAST}),
        Compute((1, 1, 1), (1, 1, 1)),
    )
    assert cost.seconds == pytest.approx(7)
    assert rows(cost) == {
        ("layers.0", "weights"): (10, 10, 1, 0),
        ("layers.1", "weights"): (0, 10, 0, 0),
        ("layers.2", "weights"): (20, 10, 2, 1),
    }


def test_one_layer_alone_stays_once_it_has_come():
    parts = plain(3, 10)
    cost = forecast(parts, by_rules(parts, 3, {"layers": "1", "weights": "disk"}), TEN, Compute((1, 1, 1), (2, 2, 2)))
    assert cost.seconds == pytest.approx(9)
    assert rows(cost) == {("layers.1", "weights"): (0, 10, 1, 0)}


def test_gradients_leave_and_come_back_to_be_added_to():
    """Written 2-3 while the second micro-batch runs; read 4-5 and written 5-6 with nothing to compute, read 6-7 for the
    step."""
    parts = plain(1, 10)
    cost = forecast(
        parts, by_rules(parts, 1, {"layers": "0", "gradients": "disk"}), TEN, Compute((1,), (1,)), micro_batches=2
    )
    assert cost.seconds == pytest.approx(7)
    assert rows(cost) == {("layers.0", "gradients"): (20, 20, 4, 3)}


def test_activations_leave_behind_the_next_layer_and_come_back_one_ahead():
    """Of four layers 0, 1 and 2 leave while the next one runs; 2 is still here when the backward pass wants it."""
    parts = plain(4, 1, activations=10)
    placement = by_rules(parts, 4, {"layers": "all", "activations": "disk"})
    hidden = forecast(parts, placement, TEN, Compute((1,) * 4, (1,) * 4))
    assert hidden.seconds == pytest.approx(8)
    assert [(row.read, row.written, row.stalled) for row in hidden.rows] == [
        (10, 10, 0),
        (10, 10, 0),
        (0, 10, 0),
        (0, 0, 0),
    ]
    shared = [part("layers.0-3", (0, 1, 2, 3), 1, activations=40)]
    together = by_rules(shared, 4, {"layers": "all", "activations": "disk"})
    (row,) = forecast(shared, together, TEN, Compute((1,) * 4, (1,) * 4)).rows
    assert (row.read, row.written, row.stalled) == (20, 30, 0)
    faster = forecast(parts, placement, TEN, Compute((1,) * 4, (0.5,) * 4))
    assert faster.seconds == pytest.approx(7)
    assert [row.stalled for row in faster.rows] == pytest.approx([0.5, 0.5, 0, 0])


def test_a_step_in_the_backward_pass_moves_no_gradients_and_hides_behind_it():
    """Both layers' moments, 20 bytes each, in one piece: layer 1's are read and written while layer 0 goes on where the
    step waits for nothing but its own."""
    parts = plain(2, 10)
    placement = by_rules(parts, 2, {"layers": "1", "moments": "disk"})
    cost = forecast(parts, placement, Rates({"disk": 10.0}, {"disk": 10.0}), Compute((1, 1), (1, 1)), 1, True)
    # Backward of layer 1 ends at 3; its moments come until 5 and go until 7, beside layer 0's pass and the next step.
    assert cost.seconds == pytest.approx(6)
    assert rows(cost) == {("layers.1", "moments"): (20, 20, 4, 2)}


def test_compute_of_layers_is_what_counting_says():
    """Three multiply-adds a token of an ordinary layer are one forward; of four where it recomputes, one."""
    compute = Compute.of([30.0, 40.0], [False, True], tokens=100, flops=1000.0, step=0.25)
    assert compute.forward == pytest.approx((2.0, 2.0))
    assert compute.backward == pytest.approx((4.0, 6.0))
    assert compute.step == 0.25


def test_rates_of_disks_add_up_and_are_shared_by_ranks():
    disk = {"read_bytes_per_second": 10.0, "write_bytes_per_second": 20.0, "direct": True}
    rates = Rates.of([disk, disk], host=50.0, ranks=4)
    assert (rates.read, rates.write) == ({"host": 50.0, "disk": 5.0}, {"host": 50.0, "disk": 10.0})
    assert Rates.of([]).read == {}


def test_the_event_is_json_and_says_where_the_bytes_are():
    parts = plain(3, 100, piece=10, embedding=70)
    placement = by_rules(parts, 3, {"layers": "1", "moments": "disk", "weights": "disk"})
    event = describe(parts, placement, forecast(parts, placement, TEN, Compute((1,) * 3, (2,) * 3)), other=5)
    assert json.loads(json.dumps(event)) == event
    assert event["tier_bytes"] == tier_bytes(parts, placement)
    assert event["kind_bytes"]["disk"] == {"weights": 100, "moments": 200}
    assert (event["working_bytes"], event["other_bytes"]) == (working_bytes(parts, placement), 5)
    assert [(row["part"], row["kind"], row["bytes"]) for row in event["forecast"]["rows"]] == [
        ("layers.1", "weights", 100),
        ("layers.1", "moments", 200),
    ]


SOME = st.floats(0.1, 100)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 8),
    st.integers(1, 30),
    st.floats(0.3, 1),
    st.integers(1, 3),
    st.booleans(),
    SOME,
    SOME,
    st.floats(0, 3),
    st.booleans(),
)
def test_a_step_is_compute_and_stalls_never_under_the_floor_and_faster_disks_never_slow_it(
    layers, piece, share, micro_batches, activations, read, write, update, shared
):
    parts = plain(layers, 30, piece, activations=10, embedding=45)
    if shared:
        parts.append(part("layers.0," + str(layers - 1), (0, layers - 1) if layers > 1 else (0,), 20, piece))
    whole = sum(each.bytes[kind] for each in parts for kind in each.bytes)
    placement = choose_somehow(parts, int(share * whole), micro_batches, activations)
    compute = Compute((1.0,) * layers, (2.0,) * layers, update)
    cost = forecast(parts, placement, Rates({"disk": read}, {"disk": write}), compute, micro_batches)
    assert cost.seconds == pytest.approx(cost.compute + sum(row.stalled for row in cost.rows))
    assert cost.seconds >= cost.floor - 1e-6
    for row in cost.rows:
        most = traffic(next(each for each in parts if each.name == row.part), row.kind, micro_batches)
        assert row.read <= most[0]
        assert row.written <= most[1]
        assert row.written == most[1] or row.kind == "activations"
    faster = forecast(parts, placement, Rates({"disk": 2 * read}, {"disk": 3 * write}), compute, micro_batches)
    assert faster.seconds <= cost.seconds + 1e-6
    at_once = forecast(parts, placement, Rates({"disk": FAST}, {"disk": FAST}), compute, micro_batches)
    assert at_once.seconds == pytest.approx(compute_alone(compute, micro_batches))


def choose_somehow(parts, budget, micro_batches, activations):
    """For a budget, or if it is too small the placement with all below that may be."""
    try:
        return choose(parts, Budgets(budget, disk=10**9), micro_batches=micro_batches, activations=activations)
    except TenfoldError:
        rule = {"layers": "all", "weights": "disk", "gradients": "disk", "moments": "disk"}
        rule |= {"activations": "disk"} if activations else {}
        return by_rules(parts, max(len(each.layers) and max(each.layers) + 1 for each in parts), rule)


def compute_alone(compute, micro_batches):
    return micro_batches * (sum(compute.forward) + sum(compute.backward)) + compute.step
