"""What placements and forecasts say of a model, against what the engine does with it."""

from __future__ import annotations

import pytest
import torch

from offload.loops import LAYERS, WIDTH, Model, optimizers_of, train
from offload.memory_tier import MemoryTier
from tenfold.config.offload import PlacementRule
from tenfold.offload.engine import Offload
from tenfold.offload.forecast import Compute, Rates, forecast
from tenfold.offload.moments import Inventory
from tenfold.offload.parts import parts_of
from tenfold.offload.placement import explicit, tier_bytes, working_bytes
from tenfold.sharing.patterns import Pattern
from tenfold.sharing.tying import Sharing, tie

ALL = {"layers": "all", "weights": "disk", "gradients": "disk", "moments": "disk"}
RULES = {
    "moments": [{"layers": "all", "moments": "disk"}],
    "gradients": [{"layers": "all", "gradients": "disk"}],
    "weights": [{"layers": "all", "weights": "disk"}],
    "all": [ALL],
    "some": [
        {"layers": "every 2", "weights": "disk", "moments": "disk"},
        {"layers": "1-2,embedding", "gradients": "disk"},
    ],
}
PATTERNS = {"none": range(LAYERS), "all": [0] * LAYERS, "groups": [0, 0, 1, 1, 1], "cycle": [0, 1, 0, 1, 0]}


pytestmark = pytest.mark.usefixtures("small_pieces")


def inventory_of(pattern):
    torch.manual_seed(1)
    model = Model()
    tie(model.layers, Sharing(Pattern(pattern)))
    return Inventory(model, model.layers, optimizers_of("adamw", model))


def parts_of_model(pattern):
    ends = {"embedding": ("embedding", "head"), "norm": ("head",)}
    return parts_of(inventory_of(pattern), lambda unit: ends[unit.name])


def engine_with(placement, pattern, tier, in_backward=False):
    def place(unit, kind):
        return placement.tier(unit.name, kind)

    return Offload(inventory_of(pattern), place, {"disk": tier}, step_in_backward=in_backward)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("rules", RULES)
def test_bytes_in_the_tier_in_working_memory_and_on_their_way_are_as_foreseen(rules, pattern):
    pattern = list(PATTERNS[pattern])
    parts = parts_of_model(pattern)
    placement = explicit([PlacementRule.model_validate(rule) for rule in RULES[rules]], parts, LAYERS)
    for accumulation in (1, 3):
        tier = MemoryTier()
        engine = engine_with(placement, pattern, tier)
        assert tier.held == tier_bytes(parts, placement)["disk"]
        assert engine.weights.size + engine.space.slab.size == working_bytes(parts, placement)
        train(engine.inventory.model, engine.inventory.optimizers, 2, accumulation)
        before = tier.bytes_read, tier.bytes_written
        train(engine.inventory.model, engine.inventory.optimizers, 1, accumulation)
        cost = forecast(
            parts,
            placement,
            Rates({"disk": 1.0}, {"disk": 1.0}),
            Compute((1.0,) * LAYERS, (1.0,) * LAYERS),
            accumulation,
        )
        found = tier.bytes_read - before[0], tier.bytes_written - before[1]
        assert (sum(row.read for row in cost.rows), sum(row.written for row in cost.rows)) == found, accumulation


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_step_in_the_backward_pass_moves_what_is_foreseen(pattern):
    pattern = list(PATTERNS[pattern])
    parts = parts_of_model(pattern)
    rule = PlacementRule(layers="all", weights="disk", moments="disk")
    placement, tier = explicit([rule], parts, LAYERS), MemoryTier()
    engine = engine_with(placement, pattern, tier, in_backward=True)
    assert tier.held == tier_bytes(parts, placement)["disk"]
    assert engine.weights.size + engine.space.slab.size == working_bytes(parts, placement)
    train(engine.inventory.model, engine.inventory.optimizers, 2)
    before = tier.bytes_read, tier.bytes_written
    train(engine.inventory.model, engine.inventory.optimizers, 1)
    rates, compute = Rates({"disk": 1.0}, {"disk": 1.0}), Compute((1.0,) * LAYERS, (1.0,) * LAYERS)
    rows = forecast(parts, placement, rates, compute, step_in_backward=True).rows
    found = tier.bytes_read - before[0], tier.bytes_written - before[1]
    assert (sum(row.read for row in rows), sum(row.written for row in rows)) == found


def test_activations_are_counted_once_with_the_unit_of_the_fewest_layers():
    model = Model()
    tie(model.layers, Sharing(Pattern([0] * LAYERS)))
    model.layers[2].up = torch.nn.Linear(WIDTH, 3 * WIDTH)  # one layer has something of its own
    parts = parts_of(
        Inventory(model, model.layers, optimizers_of("adamw", model)), lambda _: ("head",), [1, 2, 4, 8, 16]
    )
    found = {each.name: each.bytes["activations"] for each in parts if "activations" in each.bytes}
    assert found == {"layers.2": 4, "layers.0-1,3-4": 27}
