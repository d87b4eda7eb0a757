"""Placements: by rules, written and read again, and what they weigh."""

from __future__ import annotations

import json

import pytest

from offload.models import part, plain
from tenfold.config.offload import PlacementRule
from tenfold.errors import TenfoldError
from tenfold.offload.placement import Placement, explicit, joined, kind_bytes, tier_bytes, traffic, working_bytes


def rules(*given):
    return [PlacementRule.model_validate(rule) for rule in given]


def test_later_rules_win_and_what_no_rule_names_stays():
    placement = explicit(
        rules(
            {"layers": "all", "moments": "disk", "weights": "disk"},
            {"layers": "1-2", "moments": "host", "activations": "host"},
            {"layers": "2", "weights": "device", "activations": "keep"},
        ),
        plain(4, 100, activations=10, embedding=50),
        4,
    )
    moments = [placement.tier(f"layers.{layer}", "moments") for layer in range(4)]
    weights = [placement.tier(f"layers.{layer}", "weights") for layer in range(4)]
    activations = [placement.tier(f"layers.{layer}", "activations") for layer in range(4)]
    assert moments == ["disk", "host", "host", "disk"]
    assert weights == ["disk", "disk", "device", "disk"]
    assert activations == ["device", "host", "device", "device"]
    assert placement.tier("layers.0", "gradients") == "device"
    assert placement.tier("embedding", "moments") == "disk"
    assert placement.tier("embedding", "weights") == "device"  # used at any time
    assert str(placement) == (
        "layers 0, 3: moments disk, weights disk; layer 1: activations host, moments host, weights disk; "
        "layer 2: moments host; embedding: moments disk"
    )


def test_a_shared_part_leaves_only_if_rules_send_it_off_for_every_layer():
    parts = [part("layers.0-3", (0, 1, 2, 3), 100)]
    assert str(explicit(rules({"layers": "1-3", "moments": "disk"}), parts, 4)) == "all on the device"
    both = rules({"layers": "1-3", "moments": "disk"}, {"layers": "0", "moments": "host"})
    assert str(explicit(both, parts, 4)) == "layers 0-3 (shared): moments host"


def test_a_tied_embedding_goes_by_rules_for_either_end():
    parts = [part("embedding", (), 100, ends=("embedding", "head"))]
    for end in ("embedding", "head", "all"):
        assert explicit(rules({"layers": end, "moments": "disk"}), parts, 4).tier("embedding", "moments") == "disk"
    later = rules({"layers": "embedding", "moments": "disk"}, {"layers": "head", "moments": "device"})
    assert explicit(later, parts, 4).tier("embedding", "moments") == "device"


def test_a_placement_comes_back_from_json_and_is_one_in_a_set():
    placement = explicit(rules({"layers": "every 2", "moments": "disk"}), plain(5, 100, embedding=7), 5)
    again = Placement.load(json.loads(json.dumps(placement.dump())))
    assert again == placement
    assert len({placement, again, explicit([], plain(5, 100), 5)}) == 2


@pytest.mark.parametrize(
    "wrong", [None, [], {"layers.0": "disk"}, {"layers.0": {"moments": "tape"}}, {"a": {"b": "disk"}}]
)
def test_what_is_no_placement_is_refused(wrong):
    with pytest.raises(TenfoldError, match="a saved placement has"):
        Placement.load(wrong)


def test_a_part_of_another_model_is_told_by_name():
    with pytest.raises(TenfoldError, match=r"does not know layers\.9.*layers\.0, layers\.1"):
        explicit([], plain(2, 100), 2).tier("layers.9", "moments")


def test_parts_are_named_as_people_say_it():
    names = ["layers.2", "layers.0", "layers.1", "layers.7", "embedding", "layers.3-5,9"]
    assert joined(names) == "layers 0-2, 7, embedding, layers 3-5, 9 (shared)"
    assert joined(["layers.4"]) == "layer 4"


def test_traffic_is_that_of_the_passes_of_a_step():
    one, cycle = part("layers.0", (0,), 100), part("layers.0,2", (0, 2), 100)
    assert traffic(one, "moments", 4) == (200, 200)
    assert traffic(one, "gradients", 1) == (100, 100)
    assert traffic(one, "gradients", 4) == (400, 400)  # out four times; back three times to add, once for the step
    assert traffic(one, "weights", 1) == (300, 100)
    assert traffic(one, "weights", 4) == (900, 100)
    assert traffic(cycle, "weights", 1) == (500, 100)  # twice forward, twice backward
    assert traffic(part("layers.0-1", (0, 1), 100), "weights", 1) == (300, 100)


def test_working_memory_is_two_layers_weights_three_pieces_and_two_layers_activations():
    parts = plain(3, 100, piece=10, activations=32_768, embedding=500)

    def needed(*given):
        return working_bytes(parts, explicit(rules(*given), parts, 3))

    assert needed() == 0
    assert needed({"layers": "1", "moments": "disk"}) == 3 * 20
    assert needed({"layers": "1", "moments": "disk"}, {"layers": "2", "gradients": "disk"}) == 3 * 20
    assert needed({"layers": "1", "moments": "disk", "gradients": "disk"}) == 3 * 30
    assert needed({"layers": "1", "weights": "disk"}) == 2 * 100 + 3 * 10
    assert needed({"layers": "all", "weights": "host", "moments": "disk", "gradients": "disk"}) == 2 * 100 + 3 * 40
    assert needed({"layers": "1", "activations": "disk"}) == 36_864
    assert (
        needed({"layers": "all", "activations": "disk"}) == 2 * 36_864
    )  # an eighth more, since room is not always in one piece


def test_of_activations_of_a_shared_part_two_layers_are_there():
    parts = [part("layers.0-3", (0, 1, 2, 3), 100, piece=0, activations=4 * 32_768)]
    placement = explicit(rules({"layers": "all", "activations": "disk"}), parts, 4)
    assert working_bytes(parts, placement) == 2 * 36_864


def test_weights_that_one_layer_uses_together_are_there_together():
    parts = [part("layers.0-1", (0, 1), 30, piece=1), part("layers.0", (0,), 50, piece=1)]
    assert working_bytes(parts, explicit(rules({"layers": "all", "weights": "disk"}), parts, 2)) == 2 * 80 + 3


def test_bytes_are_counted_by_tier_and_gradients_that_are_used_at_once_are_few():
    parts = [*plain(3, 100), part("embedding", (), 50, ends=("embedding", "head"))]
    placement = explicit(rules({"layers": "0", "moments": "disk"}, {"layers": "1", "moments": "host"}), parts, 3)
    assert tier_bytes(parts, placement) == {"device": 3 * 400 + 200 - 400, "host": 200, "disk": 200}
    state = {"weights": 350, "gradients": 350, "moments": 300}
    assert kind_bytes(parts, placement) == {"device": state, "host": {"moments": 200}, "disk": {"moments": 200}}
    # Of gradients one layer's, and the tied embedding's, which is made at both ends of the pass.
    assert tier_bytes(parts, placement, in_backward=True)["device"] == 3 * 400 + 200 - 400 - 200
    assert kind_bytes(parts, placement, in_backward=True)["device"] == {**state, "gradients": 150}
