"""Experts whose state lies apart from that of others: placed by number, moved as foreseen, trained to the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from offload.loops import train
from offload.memory_tier import MemoryTier
from offload.mixtures import (
    EVERYTHING,
    EXPERTS,
    LAYERS,
    PATTERNS,
    Model,
    engine_of,
    entry_of,
    inventory_of,
    lots_of,
    model_of,
    optimizer_of,
    parts_and_placement,
    read,
)
from offload.test_engine import assert_same_state, clip_of
from tenfold.config.depth import joined
from tenfold.errors import TenfoldError
from tenfold.offload import units
from tenfold.offload.budget import Budgets, choose, device_bytes
from tenfold.offload.engine import Offload
from tenfold.offload.experts import by_rules, evenly
from tenfold.offload.forecast import Compute, Rates, forecast
from tenfold.offload.moments import Inventory
from tenfold.offload.parts import parts_of
from tenfold.offload.placement import explicit, tier_bytes, together, working_bytes
from tenfold.offload.units import Entry

RULES = {
    "moments": [{"layers": "all", "experts": "2-5", "moments": "disk"}],
    "gradients": [{"layers": "all", "experts": "2-7", "gradients": "disk"}],
    "both, of some": [
        {"layers": "0-1", "experts": "every 2", "gradients": "disk", "moments": "disk"},
        {"layers": "1", "experts": "0", "gradients": "device"},
    ],
    "under weights": [{"layers": "all", "weights": "disk"}, {"layers": "all", "experts": "all", "moments": "disk"}],
    "all but some": [{"layers": "all", **EVERYTHING}, {"layers": "all", "experts": "0-2", "moments": "device"}],
    "weights": [{"layers": "all", "experts": "2-5", "weights": "disk"}],
    "weights of all but some": [
        {"layers": "0,2", **EVERYTHING},
        {"layers": "0-2", "experts": "0,6-7", "weights": "device", "gradients": "device"},
        {"layers": "2", "experts": "3", "moments": "device"},
    ],
}


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr(units, "PIECE", 2048)  # two experts


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("rules", RULES)
def test_training_is_the_same_to_the_last_bit(rules, pattern):
    pattern, rules = PATTERNS[pattern], RULES[rules]
    for optimizer, accumulation, clipped in (("adamw", 1, True), ("adamw", 3, True), ("sgd", 2, False)):
        plain = model_of(pattern)
        wanted = [optimizer_of(optimizer, plain)]
        losses = train(plain, wanted, 3, accumulation, clip_of(plain, clip_grad_norm_) if clipped else None)
        for put_off in (False, True):
            inventory, tier = inventory_of(pattern, lots_of(rules), optimizer), MemoryTier(delay=2)
            parts, placement = parts_and_placement(inventory, rules)
            offload = engine_of(inventory, placement, tier, put_off=put_off)
            clip = clip_of(offload, Offload.clip_grad_norm_) if clipped else None
            case = (optimizer, accumulation, clipped, put_off)
            assert train(inventory.model, inventory.optimizers, 3, accumulation, clip) == losses, case
            assert_same_state(offload, inventory.optimizers, plain, wanted, case)
            assert (tier.bytes_written > 0) == any(placement.below(part) for part in parts)


def test_a_step_in_the_backward_pass_is_the_same():
    plain = model_of(PATTERNS["none"])
    wanted = [optimizer_of("adamw", plain)]
    rules = [{"layers": "all", "experts": "3-5", "moments": "disk"}]
    inventory, tier = inventory_of(PATTERNS["none"], lots_of(rules)), MemoryTier(delay=2)
    offload = engine_of(inventory, parts_and_placement(inventory, rules)[1], tier, step_in_backward=True)
    assert train(inventory.model, inventory.optimizers, 3) == train(plain, wanted, 3)
    assert_same_state(offload, inventory.optimizers, plain, wanted, "in backward")


@pytest.mark.parametrize("form", ["bf16", "int8"])
def test_moments_in_fewer_bits_are_those_of_a_model_that_is_not_cut(form):
    rules = [{"layers": "all", "experts": "1-2,7", "moments": "disk"}]
    found = []
    for lots in (lambda _: (), lots_of(rules)):
        inventory, tier = inventory_of(PATTERNS["none"], lots, form=form), MemoryTier()
        offload = engine_of(inventory, parts_and_placement(inventory, rules)[1], tier)
        losses = train(inventory.model, inventory.optimizers, 3)
        tensors = [inventory.tensors(entry) for unit in offload.units for entry in unit.entries]
        names = [entry.name for unit in offload.units for entry in unit.entries]
        state = {
            f"{name}/{key}": offload.tensor_of(f"{name}/{key}", each)
            for name, mine in zip(names, tensors, strict=True)
            for key, each in mine.items()
        }
        found.append((losses, state, tier.held))
    (losses, state, nothing), (mine, ours, held) = found
    assert (losses, state.keys(), nothing) == (mine, ours.keys(), 0)
    assert held > 0
    assert all(torch.equal(state[name], ours[name]) for name in state)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("rules", RULES)
def test_bytes_in_the_tier_in_working_memory_and_on_their_way_are_as_foreseen(rules, pattern):
    pattern, rules = PATTERNS[pattern], RULES[rules]
    for accumulation in (1, 3):
        inventory, tier = inventory_of(pattern, lots_of(rules)), MemoryTier()
        parts, placement = parts_and_placement(inventory, rules)
        engine = engine_of(inventory, placement, tier)
        assert tier.held == tier_bytes(parts, placement)["disk"]
        assert engine.weights.size + engine.space.slab.size == working_bytes(parts, placement)
        train(inventory.model, inventory.optimizers, 2, accumulation)
        before = tier.bytes_read, tier.bytes_written
        train(inventory.model, inventory.optimizers, 1, accumulation)
        found = tier.bytes_read - before[0], tier.bytes_written - before[1]
        compute = Compute((1.0,) * LAYERS, (1.0,) * LAYERS)
        rows = forecast(parts, placement, Rates({"disk": 1.0}, {"disk": 1.0}), compute, accumulation).rows
        assert (sum(row.read for row in rows), sum(row.written for row in rows)) == found, accumulation


def test_all_goes_below_for_a_delinking_and_can_be_read():
    rules = [
        {"layers": "all", "experts": "0-2", "moments": "disk"},
        {"layers": "0", "experts": "6", "gradients": "disk"},
        {"layers": "1-2", "experts": "1-6", "weights": "disk"},
    ]
    inventory, tier = inventory_of(PATTERNS["none"], lots_of(rules)), MemoryTier(delay=3)
    offload = engine_of(inventory, parts_and_placement(inventory, rules)[1], tier)
    plain = model_of(PATTERNS["none"])
    wanted = [optimizer_of("adamw", plain)]
    assert train(inventory.model, inventory.optimizers, 2) == train(plain, wanted, 2)
    offload.put_all_away(tier)
    assert_same_state(offload, inventory.optimizers, plain, wanted, "put away")
    for homes in (offload.moments.homes, offload.weights.homes):
        assert all(homes[portion] is tier for unit in offload.units for portion in unit.portions)


def test_portions_are_named_by_their_experts_and_hold_their_bytes():
    rules = [{"layers": "1", "experts": "4-7", "moments": "disk"}]
    parts, placement = parts_and_placement(inventory_of(PATTERNS["none"], lots_of(rules)), rules)
    page, whole = 4096, 2 * EXPERTS * 4096
    sizes = {part.name: part.bytes["moments"] for part in parts if part.experts}
    assert sizes == {"layers.1.experts.0-3": whole, "layers.1.experts.4-7": whole}
    assert [name for name, kinds in placement.tiers if dict(kinds)["moments"] == "disk"] == ["layers.1.experts.4-7"]
    assert str(placement) == "experts 4-7 of layer 1: moments disk"
    (rest,) = [part for part in parts if part.name == "layers.1"]
    assert 0 < rest.bytes["weights"] < 2 * page
    assert {part.unit for part in parts if part.layers == (1,)} == {"layers.1"}


def test_what_several_experts_share_leaves_only_if_all_of_them_are_sent_off():
    """Of a prototype's four experts one stands for all, as long as they share their weights."""

    def shared(name, parameter):
        stack = parameter.dim() == 3
        return Entry(
            name, parameter, parameter, experts=[range(4 * at, 4 * at + 4) for at in range(2)] if stack else ()
        )

    rules = [{"layers": "all", "experts": "2-7", "moments": "disk"}]
    torch.manual_seed(1)
    model = Model([0])
    for name in ("up", "down"):
        setattr(model.layers[0], name, nn.Parameter(model.layers[0].get_parameter(name)[:2].detach().clone()))
    inventory = Inventory(
        model, list(model.layers), [optimizer_of("adamw", model)], shared, lots=by_rules(read(rules), 1, 8, str)
    )
    parts = parts_of(inventory, lambda _: ("embedding",))
    placement = explicit(read(rules), parts, 1, EXPERTS)
    assert {part.name for part in parts if part.experts} == {"layers.0.experts.0-3", "layers.0.experts.4-7"}
    assert placement.tier("layers.0.experts.0-3", "moments") == "device"
    assert placement.tier("layers.0.experts.4-7", "moments") == "disk"


def test_an_optimizer_that_wants_all_of_a_stack_has_it_whole():
    inventory = inventory_of(PATTERNS["none"], lambda _: [0] * 4 + [1] * 4, "adafactor")
    assert all(unit.portions == [unit.main] and not unit.main.experts for unit in inventory.units)


def test_what_a_rank_has_of_a_stack_is_cut_where_another_lot_begins():
    """A rank with the experts 4-7 and 12-15, and a row that pads them."""
    here = [range(at, at + 1) for at in (4, 5, 6, 7, 12, 13, 14, 15)]
    entry = Entry("up", nn.Parameter(torch.zeros(8, 2)), torch.zeros(8, 2), torch.zeros(18), experts=here)
    lots = [0] * 6 + [1] * 8 + [2] * 2
    assert entry.runs(lots) == [(0, (4, 5), 0, 4), (1, (6, 7, 12, 13), 4, 12), (2, (14, 15), 12, 18)]
    assert entry.runs([0] * 9 + [1] * 7) == [(0, (4, 5, 6, 7), 0, 8), (1, (12, 13, 14, 15), 8, 18)]
    assert entry.runs([1] * 16) == [(1, (4, 5, 6, 7, 12, 13, 14, 15), 0, 18)]
    lots[5] = lots[13] = 2
    assert entry.runs(lots) == [
        (0, (4,), 0, 2),
        (2, (5,), 2, 4),
        (1, (6, 7, 12), 4, 10),
        (2, (13, 14, 15), 10, 18),
    ]


def test_a_cut_within_a_page_is_refused_by_the_name_of_its_rule():
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Module()])
    model.layers[0].up = nn.Parameter(torch.zeros(8, 16, 24))  # 1,536 bytes each: eight are three pages
    rules = read([{"layers": "0", "moments": "disk"}, {"layers": "0", "experts": "3-7", "moments": "disk"}])
    with pytest.raises(TenfoldError, match=r"offload\.placement\.1\.experts: .* 1,536 bytes .* expert 3 .* runs of 8"):
        Inventory(
            model,
            list(model.layers),
            [AdamW(model.parameters())],
            entry_of,
            lots=by_rules(rules, 1, 8, "offload.placement.{}".format),
        )


def test_budgets_cut_experts_in_few_portions_of_a_piece_at_least(monkeypatch):
    def portions():
        unit = inventory_of(PATTERNS["none"], evenly).units[0]
        return [portion.experts for portion in unit.portions]

    assert portions() == [(), (0, 1), (2, 3), (4, 5), (6, 7)]
    monkeypatch.setattr(units, "PIECE", 1)
    assert portions() == [(), *((each,) for each in range(8))]
    monkeypatch.setattr("tenfold.offload.experts.MOST", 3)
    assert portions() == [(), (0, 1, 2), (3, 4, 5), (6, 7)]
    monkeypatch.setattr(units, "PIECE", 8 * 1024)
    assert portions() == [()]


def test_a_budget_is_used_to_a_portion_and_an_engine_keeps_it():
    inventory = inventory_of(PATTERNS["none"], evenly)
    parts = parts_of(inventory, lambda _: ("embedding", "head"))
    whole = device_bytes(parts, explicit([], parts, LAYERS))
    portion = max(part.bytes["moments"] for part in parts if part.experts)
    passing = 3 * max(sum(part.piece.values()) for part in parts)
    least, apart = whole, set()
    for share in range(96, 0, -4):
        budget = whole * share // 100
        try:
            placement = choose(parts, Budgets(budget, disk=10**15))
        except TenfoldError:
            break
        least = budget
        assert budget - portion - passing < device_bytes(parts, placement) <= budget
        several = 0
        for lot in together(parts):
            found = {kind for kind in EVERYTHING if len({placement.tier(part.name, kind) for part in lot}) > 1}
            several += "weights" in found
            apart |= found
        assert several <= 1  # of other layers all or nothing
        tier = MemoryTier()
        engine = engine_of(inventory_of(PATTERNS["none"], evenly), placement, tier)
        assert tier.held == tier_bytes(parts, placement)["disk"]
        assert engine.weights.size + engine.space.slab.size == working_bytes(parts, placement)
    assert least < whole // 2
    assert apart == {*EVERYTHING}


def test_parts_are_told_by_experts_and_layers():
    names = [f"layers.{layer}.experts.{some}" for layer in range(3) for some in ("0-1", "4")]
    assert joined(names) == "experts 0-1, 4 of layers 0-2"
    names = ["layers.0", "layers.1.experts.3", "layers.0-3,8.experts.0-7,9", "embedding"]
    assert joined(names) == "layer 0, expert 3 of layer 1, experts 0-7, 9 of layers 0-3, 8 (shared), embedding"
