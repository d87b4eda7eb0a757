"""Experts that lie apart by the tokens that they saw: only what saw some is moved, and the coldest leave first."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from offload.loops import train
from offload.memory_tier import MemoryTier
from offload.mixtures import (
    EXPERTS,
    LAYERS,
    PATTERNS,
    Layer,
    engine_of,
    inventory_of,
    model_of,
    optimizer_of,
    parts_and_placement,
    read,
)
from offload.test_engine import assert_same_state, clip_of
from tenfold.config.depth import joined
from tenfold.offload import units
from tenfold.offload.budget import Budgets, choose, device_bytes
from tenfold.offload.engine import Offload
from tenfold.offload.experts import by_load, evenly
from tenfold.offload.forecast import Compute, Rates, forecast
from tenfold.offload.loads import Loads
from tenfold.offload.moments import Inventory
from tenfold.offload.parts import parts_of
from tenfold.offload.placement import explicit
from tenfold.offload.units import Entry


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr(units, "PIECE", 2048)  # two experts


class Routed(Layer):
    """Of its experts only those of `chosen` see tokens, in the pass of that number."""

    chosen = ([0, 3], [3, 4], [0, 4], [5, 3])

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def forward(self, x):
        experts, self.number = self.chosen[self.number % 4], self.number + 1
        gates = self.router(self.norm(x)).softmax(-1)
        inner = torch.einsum("btd,edf->ebtf", x, self.up[experts]).tanh()
        return x + torch.einsum("ebtf,efd,bte->btd", inner, self.down[experts], gates[..., experts])


@pytest.mark.parametrize(("accumulation", "written", "added"), [(1, [2, 2, 2, 2], 0), (2, [2, 3, 2, 4], 2 + 2)])
def test_gradients_of_experts_without_tokens_are_not_moved(accumulation, written, added):
    """Each of three layers has two stacks, of experts of a page. `written` are experts in each pass, those that saw
    tokens in this step so far; `added` those that come back to be added to, before all come for the step."""
    rules = [{"layers": "all", "experts": "0-6", "gradients": "disk"}]
    for clipped in (False, True):
        plain = model_of(PATTERNS["none"], Routed)
        wanted = [optimizer_of("adamw", plain)]
        clip = clip_of(plain, clip_grad_norm_) if clipped else None
        losses = train(plain, wanted, 4 // accumulation, accumulation, clip)
        inventory, tier = inventory_of(PATTERNS["none"], lambda _: range(EXPERTS), kind=Routed), MemoryTier(delay=2)
        offload = engine_of(inventory, parts_and_placement(inventory, rules)[1], tier)
        clip = clip_of(offload, Offload.clip_grad_norm_) if clipped else None
        assert train(inventory.model, inventory.optimizers, 4 // accumulation, accumulation, clip) == losses
        assert_same_state(offload, inventory.optimizers, plain, wanted, clipped)
        offload.close()
        assert tier.bytes_written == 3 * 2 * 4096 * sum(written)
        assert tier.bytes_read == 3 * 2 * 4096 * (added + sum(written[accumulation - 1 :: accumulation]))


def loads_of(chosen, passes):
    """Of models whose layers route each pass of a step as `chosen` has it, one token to each expert."""
    loads = Loads(LAYERS, EXPERTS)
    for first in range(0, len(chosen), passes):
        tokens = torch.zeros(LAYERS, EXPERTS)
        for experts in chosen[first : first + passes]:
            tokens[:, experts] += 1
        loads.saw(tokens)
    return loads


def test_what_is_foreseen_of_gradients_of_experts_is_what_is_moved():
    """One pass a step, and an expert a piece: the steps that it saw are the steps that it is moved in."""
    chosen = Routed.chosen
    inventory, tier = inventory_of(PATTERNS["none"], lambda _: range(EXPERTS), kind=Routed), MemoryTier()
    parts = parts_of(inventory, lambda _: ("embedding", "head"), loads=loads_of(chosen, 1))
    placement = explicit(read([{"layers": "all", "experts": "all", "gradients": "disk"}]), parts, LAYERS, EXPERTS)
    compute = Compute((1.0,) * LAYERS, (1.0,) * LAYERS)
    rows = forecast(parts, placement, Rates({"disk": 1.0}, {"disk": 1.0}), compute).rows
    engine_of(inventory, placement, tier)
    train(inventory.model, inventory.optimizers, len(chosen))
    foreseen = [len(chosen) * sum(each) for each in ((row.read for row in rows), (row.written for row in rows))]
    assert foreseen == [tier.bytes_read, tier.bytes_written]
    assert tier.bytes_written == LAYERS * 2 * 4096 * 8


@pytest.fixture
def _three_lots(monkeypatch):
    monkeypatch.setattr(units, "PIECE", 1024)
    monkeypatch.setattr("tenfold.offload.experts.MOST", 3)


@pytest.mark.usefixtures("_three_lots")
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_lots_by_load_are_trained_to_the_same_bits_and_the_cold_ones_leave_first(pattern, accumulation):
    """Experts 1, 2, 6 and 7 see nothing, 5 little, 3 most."""
    pattern = PATTERNS[pattern]
    plain = model_of(pattern, Routed)
    wanted = [optimizer_of("adamw", plain)]
    losses = train(plain, wanted, 4 // accumulation, accumulation, clip_of(plain, clip_grad_norm_))
    loads = loads_of(Routed.chosen, accumulation)
    for share in (96, 80, 50):
        inventory, tier = inventory_of(pattern, by_load(loads, accumulation), kind=Routed), MemoryTier(delay=2)
        for unit in inventory.units[: len(set(pattern))]:
            lots = {portion.experts for portion in unit.portions if portion.experts}
            assert lots == {(1, 2, 6), (0, 5, 7), (3, 4)}
        parts = parts_of(inventory, lambda _: ("embedding", "head"), loads=loads, passes=accumulation)
        budget = device_bytes(parts, explicit([], parts, LAYERS)) * share // 100
        placement = choose(parts, Budgets(budget, disk=10**15), micro_batches=accumulation)
        below = {(part.experts, kind) for part in parts for kind in placement.below(part)}
        assert ((1, 2, 6), "gradients") in below
        assert share < 96 or below == {((1, 2, 6), "gradients")}
        offload = engine_of(inventory, placement, tier)
        clip = clip_of(offload, Offload.clip_grad_norm_)
        assert train(inventory.model, inventory.optimizers, 4 // accumulation, accumulation, clip) == losses
        assert_same_state(offload, inventory.optimizers, plain, wanted, (pattern, accumulation, share))
        assert (tier.bytes_written > 0) == (share < 96)


@pytest.mark.usefixtures("_three_lots")
def test_experts_that_all_see_tokens_in_every_pass_keep_their_order():
    loads = Loads(LAYERS, EXPERTS)
    loads.saw(torch.randint(50, 900, (LAYERS, EXPERTS), generator=torch.Generator().manual_seed(1)))
    for passes in (1, 3):
        by_index, mine = (inventory_of(PATTERNS["none"], lots) for lots in (evenly, by_load(loads, passes)))
        assert [[each.experts for each in unit.portions] for unit in mine.units] == [
            [each.experts for each in unit.portions] for unit in by_index.units
        ]


def test_lots_by_load_are_of_runs_that_end_with_pages(monkeypatch):
    """Experts of 1,536 bytes, eight of which are three pages: a lot is of such eights."""
    monkeypatch.setattr(units, "PIECE", 16 * 384)
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Module()])
    model.layers[0].up = nn.Parameter(torch.zeros(64, 16, 24))
    loads = Loads(1, 64)
    tokens = torch.full((1, 64), 100)
    tokens[0, 16:24] = tokens[0, 40:48] = 0
    tokens[0, 47] = 1
    loads.saw(tokens)

    def entry(name, parameter):
        return Entry(name, parameter, parameter, experts=[range(each, each + 1) for each in range(64)])

    lots = by_load(loads, 4)
    inventory = Inventory(model, list(model.layers), [AdamW(model.parameters())], entry, lots=lots)
    portions = {portion.experts: portion for portion in inventory.units[0].portions}
    coldest = (*range(16, 24), *range(40, 48))
    assert coldest in portions
    assert len(portions) == 4
    assert [len(piece.slices) for piece in portions[coldest].pieces] == [1, 1]
    assert all(piece.begin % 4096 == 0 for piece in inventory.units[0].pieces)


def test_of_many_that_are_no_neighbours_a_name_has_the_first_and_how_many_there_are():
    inventory = inventory_of(PATTERNS["none"], lambda _: [each % 2 for each in range(EXPERTS)])
    assert [portion.name for portion in inventory.units[1].portions if portion.experts] == [
        "layers.1.experts.0,2,4,6",
        "layers.1.experts.1,3,5,7",
    ]
    many = 20
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Module()])
    model.layers[0].up = nn.Parameter(torch.zeros(many, 32, 32))

    def entry(name, parameter):
        return Entry(name, parameter, parameter, experts=[range(each, each + 1) for each in range(many)])

    lots = [each % 2 for each in range(many)]
    inventory = Inventory(model, list(model.layers), [AdamW(model.parameters())], entry, lots=lambda _: lots)
    names = [portion.name for portion in inventory.units[0].portions]
    assert names == ["layers.0.experts.0+9", "layers.0.experts.1+9"]
    assert joined(names) == "20 experts by load of layer 0"
    assert joined(["layers.1.experts.0+9", "layers.1.experts.3-5,8", "layers.2.experts.4+13"]) == (
        "14 experts by load of layers 1-2"
    )
