"""Budgets: kept, used, and kept with little traffic."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.models import every_placement, here, part, plain, unlike
from tenfold.errors import TenfoldError
from tenfold.offload.budget import Budgets, choose, device_bytes
from tenfold.offload.placement import tier_bytes, together, traffic

PLENTY = 10**15


def moved(parts, placement, micro_batches=1):
    return sum(sum(traffic(each, kind, micro_batches)) for each in parts for kind in placement.below(each))


def chosen(parts, device, **options):
    """The placement for a budget of the device, or None where there is none."""
    try:
        return choose(parts, Budgets(device, disk=PLENTY), **options)
    except TenfoldError as error:
        if "needs at least" not in str(error):
            raise
        return None


def least_moved(parts, device, micro_batches, activations):
    fitting = [
        each for each in every_placement(parts, ("device", "disk"), activations) if device_bytes(parts, each) <= device
    ]
    return min((moved(parts, each, micro_batches) for each in fitting), default=None)


def test_what_fits_stays():
    parts = plain(4, 100, embedding=50)
    assert chosen(parts, device_bytes(parts, here(parts))) == here(parts)


def away(parts, placement):
    """How many parts' moments, gradients, activations and weights are on disk."""
    kinds = ("moments", "gradients", "activations", "weights")
    return [sum(placement.tier(each.name, kind) == "disk" for each in parts) for kind in kinds]


@pytest.mark.parametrize(
    ("budget", "micro_batches", "counts"),
    [
        (28_100, 1, [2, 0, 0, 0]),
        (16_100, 1, [8, 0, 0, 0]),
        (12_100, 1, [8, 4, 0, 0]),
        (8_100, 1, [8, 8, 0, 0]),
        (7_100, 1, [8, 8, 0, 3]),  # the weights of two layers are there while they pass
        (2_100, 1, [8, 8, 0, 8]),
        (12_100, 4, [8, 4, 0, 0]),  # gradients and weights are moved more often, in the same order
    ],
)
def test_moments_go_first_then_gradients_then_weights(budget, micro_batches, counts):
    parts = plain(8, 1000, piece=1)  # 32,000 bytes
    assert away(parts, chosen(parts, budget, micro_batches=micro_batches)) == counts


def test_activations_leave_where_they_may_and_before_weights():
    parts = plain(8, 100_000, piece=1, activations=40_960)  # of two layers 92,160 bytes are there
    assert away(parts, chosen(parts, 1_100_000, activations=True, micro_batches=2)) == [8, 8, 3, 0]
    assert away(parts, chosen(parts, 900_000, activations=True)) == [8, 8, 8, 0]
    assert away(parts, chosen(parts, 900_000)) == [8, 8, 0, 5]


def test_what_has_to_stay_stays_and_is_told_where_a_budget_is_too_small():
    parts = plain(8, 1000, piece=1)
    why = {"gradients": "parallel.tensor = 2 adds them up"}
    assert away(parts, chosen(parts, 12_100, staying=why)) == [8, 0, 0, 6]
    with pytest.raises(TenfoldError, match=r"gradients have to stay: parallel.tensor = 2 adds them up"):
        choose(parts, Budgets(2_100, 0, 10**9), staying=why)


MODELS = st.builds(
    lambda layers, weights, piece, activations, embedding: plain(
        layers, weights, min(piece, weights), activations, embedding
    ),
    st.integers(2, 3),
    st.integers(10, 60),
    st.integers(1, 20),
    st.sampled_from([0, 0, 4096]),
    st.just(0),
)
UNLIKE = unlike(3)
EXPERTS = st.builds(
    lambda rest, experts, more, piece, seen: [
        part("layers.0", (0,), rest, piece, unit="layers.0"),
        part("layers.0.experts.0-3", (0,), experts, piece, unit="layers.0", experts=(0, 1, 2, 3), seen=seen),
        part("layers.0.experts.4-7", (0,), experts + more, piece, unit="layers.0", experts=(4, 5, 6, 7)),
    ],
    st.integers(5, 60),
    st.integers(10, 60),
    st.sampled_from([0, 0, 30]),
    st.integers(1, 10),
    st.sampled_from([1.0, 0.5, 0.0]),
)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 3), st.integers(12, 60), st.integers(1, 2), st.floats(0.1, 1))
def test_of_alike_parts_no_placement_moves_less(layers, weights, micro_batches, share):
    """Against all 512 placements of three layers."""
    parts = plain(layers, weights, piece=0)
    device = int(share * device_bytes(parts, here(parts)))
    found, least = chosen(parts, device, micro_batches=micro_batches), least_moved(parts, device, micro_batches, False)
    assert (found is None) == (least is None)
    assert found is None or moved(parts, found, micro_batches) == least


@settings(max_examples=60, deadline=None)
@given(st.one_of(MODELS, UNLIKE, EXPERTS), st.integers(1, 2), st.booleans(), st.floats(0.1, 1))
def test_of_any_parts_one_that_fits_is_found_and_moves_little_more_than_the_least(
    parts, micro_batches, activations, share
):
    parts = parts[:3]
    device = int(share * device_bytes(parts, here(parts)))
    found = chosen(parts, device, micro_batches=micro_batches, activations=activations)
    least = least_moved(parts, device, micro_batches, activations)
    assert (found is None) == (least is None)
    if found is not None:
        leaving = [(kind, [each]) for each in parts for kind in each.bytes]
        leaving += [("weights", lot) for lot in together(parts)]
        one = max(sum(sum(traffic(each, kind, micro_batches)) for each in lot) for kind, lot in leaving)
        assert moved(parts, found, micro_batches) <= least + one
        assert device_bytes(parts, found) <= device


@settings(max_examples=40, deadline=None)
@given(
    st.integers(4, 40),
    st.integers(100, 10_000),
    st.integers(0, 3),
    st.sampled_from([0, 8192]),
    st.integers(1, 4),
    st.integers(0, 5000),
)
def test_budgets_from_nothing_to_all_are_kept_used_and_cost_no_less_the_smaller(
    layers, weights, size, activations, micro_batches, other
):
    parts = plain(layers, weights, piece=max(1, weights // 20), activations=activations, embedding=size * weights)
    whole = device_bytes(parts, here(parts), other)
    largest = max(size for each in parts for size in each.bytes.values())
    before = -1
    for share in reversed(range(0, 101, 5)):
        budget = whole * share // 100
        options = {"other": other, "micro_batches": micro_batches, "activations": bool(activations)}
        placement = chosen(parts, budget, **options)
        if placement is None:
            break
        used = device_bytes(parts, placement, other)
        assert budget - largest < used <= budget or share == 100
        assert moved(parts, placement, micro_batches) >= before
        before = moved(parts, placement, micro_batches)
    else:
        raise AssertionError("no budget at all is enough")


def test_of_lots_that_are_alike_gradients_of_cold_ones_leave_first_and_before_moments():
    parts = [
        part(f"layers.{layer}.experts.{lot}", (layer,), 1000, 1, unit=f"layers.{layer}", experts=(lot,), seen=seen)
        for layer in range(4)
        for lot, seen in enumerate((1.0, 0.1, 0.6, 0.1))
    ]
    whole, m = device_bytes(parts, here(parts)), 2  # of 2 micro-batches gradients move 4, 0.4 and 2.4, moments 2 times
    cold = {f"layers.{layer}.experts.{lot}" for layer in range(4) for lot in (1, 3)}
    placement = chosen(parts, whole - 8_000 + 20, micro_batches=m)
    assert {(each.name, kind) for each in parts for kind in placement.below(each)} == {
        (name, "gradients") for name in cold
    }
    assert moved(parts, placement, m) == 8 * 400
    placement = chosen(parts, whole - 40_000 + 20, micro_batches=m)
    assert away(parts, placement)[:2] == [16, 8]
    placement = chosen(parts, whole - 44_000 + 20, micro_batches=m)
    warm = {each.name for each in parts if placement.tier(each.name, "gradients") == "disk"} - cold
    assert warm == {f"layers.{layer}.experts.2" for layer in range(4)}
    assert moved(parts, placement, m) == 8 * 400 + 16 * 4000 + 4 * 2400


def test_weights_of_lots_stay_beside_others_as_far_as_a_budget_reaches():
    parts = [
        part(f"layers.{layer}.experts.{lot}", (layer,), 1000, 1, unit=f"layers.{layer}", experts=(lot,))
        for layer in range(6)
        for lot in range(4)
    ]
    # All but weights leaves; of these three layers do, through copies of two, and there are pieces of all three kinds.
    for spare in (0, 999, 1000, 2500, 3990):
        placement = chosen(parts, 3 * 4000 + 8000 + 12 + spare)
        below = [each.name for each in parts if placement.tier(each.name, "weights") == "disk"]
        assert len(below) == 12 - spare // 1000
        assert len({name.rpartition(".experts")[0] for name in below}) == 3
        assert device_bytes(parts, placement) <= 3 * 4000 + 8000 + 12 + spare


def test_the_least_budget_that_an_error_names_is_one_and_a_byte_less_is_none():
    parts = plain(6, 1000, piece=50, activations=30, embedding=4000)
    with pytest.raises(TenfoldError, match=r"stages\.1\.device_budget allows 5 bytes, and .* 77 of them") as caught:
        choose(parts, Budgets(5, disk=PLENTY), 77, key="stages.1.{}".format)
    least = int(str(caught.value).split("at least ")[1].split(" ")[0].replace(",", ""))
    assert chosen(parts, least, other=77) is not None
    assert chosen(parts, least - 1, other=77) is None


def test_what_leaves_lies_evenly_over_the_depth():
    parts = plain(30, 1000, piece=1)
    for count in range(1, 31):
        placement = chosen(parts, device_bytes(parts, here(parts)) - count * 2000 + 6)
        away = [number for number, each in enumerate(parts) if placement.tier(each.name, "moments") == "disk"]
        gaps = {after - first for first, after in itertools.pairwise(away)}
        assert len(away) == count
        assert not gaps or max(gaps) - min(gaps) <= 1


def test_a_large_unit_that_would_need_more_room_on_its_way_than_it_frees_stays():
    parts = [*plain(6, 100, piece=1), part("layers.6", (6,), 500, piece=1)]
    placement = chosen(parts, 500 + 2 * 100 + 3 * 4)
    assert placement.tier("layers.6", "weights") == "device"
    assert all(placement.tier(f"layers.{number}", "weights") == "disk" for number in range(6))
    assert device_bytes(parts, placement) == 712


def test_the_host_takes_what_is_moved_most_up_to_its_budget():
    parts = plain(4, 1000, piece=1)
    placement = choose(parts, Budgets(2200, host=5500, disk=PLENTY))
    # Four layers' weights, which come twice and go once; of what comes and goes once one that still has room.
    assert all(placement.tier(each.name, "weights") == "host" for each in parts)
    assert tier_bytes(parts, placement) == {"device": 0, "host": 5000, "disk": 11_000}
    assert choose(parts, Budgets(2200, host=PLENTY)).below(parts[0]) == ["weights", "gradients", "moments"]


@pytest.mark.parametrize(
    ("budgets", "told"),
    [
        (
            Budgets(13_000),
            r"device_budget = 13,000 sends 4,000 bytes of state below the device; offload\.disk is not set",
        ),
        (
            Budgets(13_000, host=2500),
            r"4,000 bytes of state below the device, and 2,500 of them fit offload\.host_budget",
        ),
        (Budgets(13_000, disk=3000), r"in the folders of offload\.disk are 3,000: name folders with 4,000 bytes free"),
    ],
)
def test_tiers_below_that_are_too_small_are_told_with_the_bytes(budgets, told):
    with pytest.raises(TenfoldError, match=told):
        choose(plain(4, 1000, piece=1), budgets)


def test_a_step_in_the_backward_pass_needs_few_gradients_and_sends_none_away():
    parts = plain(4, 1000, piece=1)
    placement = choose(parts, Budgets(5_100, disk=PLENTY), step_in_backward=True)
    assert all(placement.tier(each.name, "gradients") == "device" for each in parts)
    assert device_bytes(parts, placement, in_backward=True) <= 5_100
    whole = device_bytes(parts, here(parts), in_backward=True)
    assert whole == 13_000  # weights and moments of four layers, the gradient of one
    accumulated = choose(parts, Budgets(9_000, disk=PLENTY), step_in_backward=True, micro_batches=2)
    assert all(accumulated.tier(each.name, "gradients") == "device" for each in parts)
    assert device_bytes(parts, accumulated) <= 9_000


def test_parts_that_layers_share_are_placed_like_others():
    parts = [part("layers.0-11", tuple(range(12)), 500, piece=1), *plain(12, 100, piece=1)]
    whole = device_bytes(parts, here(parts))
    placement = chosen(parts, whole // 2)
    assert device_bytes(parts, placement) <= whole // 2
