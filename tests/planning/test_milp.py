"""The exact placement: no other that keeps within budgets waits less."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from offload.models import every_placement, here, part, plain, unlike
from tenfold.errors import TenfoldError
from tenfold.offload.budget import Budgets, choose, device_bytes
from tenfold.offload.forecast import Rates
from tenfold.offload.placement import Placement, tier_bytes, together, traffic
from tenfold.planning.milp import Lacking, place
from tenfold.planning.traffic import Hiding, Traffic

EVEN = Rates({"host": 10.0, "disk": 2.0}, {"host": 8.0, "disk": 1.0})


def seconds(parts, placement, asked):
    """What `place` makes least, by the lanes that it fills one by one."""
    lanes = Counter()
    for each in parts:
        for kind in placement.below(each):
            tier = placement.tier(each.name, kind)
            for (moment, way), moved in asked.bytes_of(each, kind).items():
                lanes[moment, tier, way] += moved / asked.rate(tier, way)
    waits = Counter()
    for (moment, *_), busy in lanes.items():
        waits[moment] = max(waits[moment], busy - asked.hidden(moment))
    return sum(waits.values()) + 0.01 * sum(lanes.values())


def fits(parts, placement, budgets, other=0):
    tiers = tier_bytes(parts, placement)
    return (
        device_bytes(parts, placement, other) <= budgets.device
        and tiers["host"] <= budgets.host
        and tiers["disk"] <= budgets.disk
    )


ALIKE = st.builds(
    lambda layers, weights, piece, activations: plain(layers, weights, min(piece, weights), activations),
    st.integers(1, 2),
    st.integers(10, 60),
    st.integers(1, 20),
    st.sampled_from([0, 0, 4096, 9000]),
)
UNLIKE = unlike(2)
SEVERAL = st.builds(  # what two layers share, beside what is each one's own
    lambda shared, own, piece: [
        part("shared", (0, 1), shared, piece),
        *(part(f"layers.{number}", (number,), own, piece) for number in range(2)),
    ],
    st.integers(10, 100),
    st.integers(10, 100),
    st.integers(1, 10),
)


def lots(layer, rest, experts, piece, number=2, seen=1.0):
    """A layer with lots of experts beside the rest of it."""
    unit = f"layers.{layer}"
    return [
        part(unit, (layer,), rest, piece, unit=unit),
        *(
            part(f"{unit}.experts.{each}", (layer,), experts, piece, unit=unit, experts=(each,), seen=seen)
            for each in range(number)
        ),
    ]


EXPERTS = st.builds(
    lambda rest, experts, piece, seen: lots(0, rest, experts, piece, seen=seen),
    st.integers(5, 60),
    st.integers(10, 100),
    st.integers(1, 10),
    st.sampled_from([1.0, 1.0, 0.2]),
)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    st.one_of(ALIKE, UNLIKE, SEVERAL, EXPERTS),
    st.integers(1, 3),
    st.booleans(),
    st.tuples(st.floats(0.1, 1), st.floats(0, 1), st.floats(0, 1)),
    st.sampled_from([Hiding(), Hiding(40.0, 5.0), Hiding(1000.0, 0.0)]),
)
def test_no_placement_within_budgets_waits_less(parts, micro_batches, activations, shares, hiding):
    whole = device_bytes(parts, here(parts), 3)
    budgets = Budgets(*(int(share * whole) for share in shares))
    asked = Traffic(EVEN, micro_batches, hiding)
    fitting = [
        each
        for each in every_placement(parts, ("device", "host", "disk"), activations)
        if fits(parts, each, budgets, 3)
    ]
    found = place(parts, budgets, asked, 3, activations=activations)
    if not fitting:
        assert isinstance(found, Lacking)
        return
    assert isinstance(found, Placement)
    assert fits(parts, found, budgets, 3)
    assert seconds(parts, found, asked) <= min(seconds(parts, each, asked) for each in fitting) * (1 + 1e-5) + 1e-9


@settings(max_examples=30, deadline=None)
@given(
    st.integers(4, 48),
    st.integers(10**6, 10**8),
    st.integers(0, 10**8),
    st.integers(1, 4),
    st.booleans(),
    st.floats(0.15, 1),
    st.floats(0, 1),
)
def test_it_never_waits_longer_than_what_a_budget_alone_would_choose(
    layers, weights, activations, micro_batches, may_leave, device, host
):
    parts = plain(layers, weights, 2**22, activations, embedding=3 * weights)
    whole = device_bytes(parts, here(parts))
    budgets = Budgets(int(device * whole), int(host * whole), 10**15)
    rates = Rates({"host": 1.2e10, "disk": 2e9}, {"host": 1.2e10, "disk": 1e9})
    asked = Traffic(rates, micro_batches, Hiding(0.5, 0.05))
    try:
        chosen = choose(parts, budgets, micro_batches=micro_batches, activations=may_leave)
    except TenfoldError:
        return
    found = place(parts, budgets, asked, activations=may_leave)
    assert isinstance(found, Placement)
    assert fits(parts, found, budgets)
    assert seconds(parts, found, asked) <= seconds(parts, chosen, asked) * (1 + 1e-5)


@pytest.mark.parametrize("kind", ["weights", "gradients", "moments", "activations"])
@pytest.mark.parametrize("in_backward", [False, True])
def test_what_is_moved_is_what_offload_moves(kind, in_backward):
    (one,) = parts = [part("a", (0, 1, 4), 7, activations=30)]
    for micro_batches in (1, 2, 5):
        asked = Traffic(EVEN, micro_batches, in_backward=in_backward)
        moved = Counter()
        for (_, way), size in asked.bytes_of(one, kind).items():
            moved[way] += size
        assert (moved["read"], moved["write"]) == traffic(one, kind, micro_batches), parts


def test_what_waits_is_what_the_busiest_lane_takes_beyond_compute():
    parts = plain(2, 100, 10)
    placed = Placement.of(
        {
            "layers.0": {"moments": "host", "weights": "disk", "gradients": "device"},
            "layers.1": {"moments": "disk", "weights": "device", "gradients": "device"},
        }
    )
    # Passes: 4 x 100 weights read (two micro-batches) at 2. Update: host 200 / 10 and 200 / 8, disk 300 / 2 and 300.
    lanes = [400 / 2, 200 / 10, 200 / 8, 300 / 2, 300 / 1]
    asked = Traffic(EVEN, 2, Hiding(150.0, 70.0))
    assert seconds(parts, placed, asked) == pytest.approx((200 - 150) + (300 - 70) + 0.01 * sum(lanes))
    assert seconds(parts, here(parts), asked) == 0


def test_weights_of_lots_leave_with_the_layer_and_their_moments_apart():
    """Of four layers alike, at every budget."""
    parts = [each for layer in range(4) for each in lots(layer, 1000, 4000, 50, number=4)]
    whole, apart = device_bytes(parts, here(parts)), set()
    for share in range(95, 20, -5):
        for host in (0, whole // 3):
            found = place(parts, Budgets(whole * share // 100, host, 10**9), Traffic(EVEN, 2))
            assert isinstance(found, Placement), share
            assert fits(parts, found, Budgets(whole * share // 100, host, 10**9))
            for unit in together(parts):
                tiers = {kind: {found.tier(each.name, kind) for each in unit} for kind in unit[0].bytes}
                assert len(tiers["weights"]) == 1
                apart |= {kind for kind, each in tiers.items() if len(each) > 1}
    assert apart == {"gradients", "moments"}
    # A lot's moments are 8,000 bytes and three pieces of all three kinds at most 600: lots are what is left to.
    found = place(parts, Budgets(whole - 8_000 + 600, 0, 10**9), Traffic(EVEN))
    assert sum(len(found.below(each)) for each in parts) <= 2


def mixture(layers):
    parts = [each for layer in range(layers) for each in lots(layer, 10**8, 10**10, 2**24, number=8)]
    return [*parts, part("embedding", (), 10**9, 2**24, ends=("embedding",))]


def test_a_mixture_of_many_layers_and_lots_is_placed():
    parts = mixture(48)
    whole = device_bytes(parts, here(parts))
    for share in (80, 50, 20):
        budgets = Budgets(whole * share // 100, whole // 4, 10**15)
        found = place(parts, budgets, Traffic(EVEN, 4, Hiding(1e10, 1e9)))
        assert isinstance(found, Placement)
        assert fits(parts, found, budgets)


def test_the_program_for_many_layers_that_are_alike_is_as_large_as_for_few(monkeypatch):
    solve, shapes = optimize.milp, []

    def milp(costs, **rest):
        shapes.append(rest["constraints"].A.shape)
        return solve(costs, **rest)

    monkeypatch.setattr(optimize, "milp", milp)
    for layers in (4, 48):
        parts = mixture(layers)
        whole = device_bytes(parts, here(parts))
        place(parts, Budgets(whole // 2, whole // 4, 10**15), Traffic(EVEN, 4))
    few, *_, many = shapes
    assert few == many


def test_what_fits_stays():
    parts = plain(4, 100, embedding=50)
    assert place(parts, Budgets(device_bytes(parts, here(parts))), Traffic(EVEN)) == here(parts)


def test_alike_parts_leave_spread_over_the_depth():
    parts = plain(8, 10**6, 10)
    found = place(parts, Budgets(20 * 10**6 + 10**5, 10**9, 0), Traffic(EVEN))
    assert isinstance(found, Placement)
    below = [number for number, each in enumerate(parts) if found.below(each)]
    assert len(below) > 1
    assert max(b - a for a, b in itertools.pairwise(below)) <= math.ceil(8 / len(below))


def test_what_compute_hides_is_let_go_first():
    """Gradients leave beside the backward pass; moments come and go when nothing but the update is computed."""
    parts = plain(16, 1000, 1)
    budgets = Budgets(16 * 4000 - 12_000 + 100, 10**9)
    slow = place(parts, budgets, Traffic(EVEN, 1, Hiding()))
    hidden = place(parts, budgets, Traffic(EVEN, 1, Hiding(10**6, 0.0)))

    def away(placement, kind):
        return sum(placement.tier(each.name, kind) != "device" for each in parts)

    assert away(slow, "moments") >= 5
    assert away(hidden, "moments") <= 2
    assert away(hidden, "gradients") >= 8


@pytest.mark.parametrize(
    ("budgets", "tier", "needed"),
    [
        (Budgets(30_000), "device", 32_000),
        (Budgets(1_500, 10**6, 10**6), "device", 2_000 + 12),  # working copies of one layer's weights, and pieces
        (Budgets(28_000, 2_000), "host", 5_000),  # moments of two layers, and for the pieces gradients of one
        (Budgets(28_000, 2_000, 1_000), "disk", 3_000),
    ],
)
def test_what_is_lacking_is_told(budgets, tier, needed):
    parts = plain(8, 1000, 1)
    found = place(parts, budgets, Traffic(EVEN))
    assert isinstance(found, Lacking)
    assert (found.tier, found.there) == (tier, getattr(budgets, tier))
    assert found.needed == needed


def test_what_has_to_stay_stays():
    parts = plain(8, 1000, 1)
    found = place(parts, Budgets(17_000, 10**6), Traffic(EVEN), staying=["gradients"])
    assert isinstance(found, Placement)
    assert not any("gradients" in found.below(each) for each in parts)
    assert isinstance(place(parts, Budgets(7_000, 10**6), Traffic(EVEN), staying=["gradients"]), Lacking)
