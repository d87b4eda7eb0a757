"""Experts whose state lies apart from that of others: placed by number, moved as foreseen, trained to the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adafactor, AdamW

from offload.loops import train
from offload.memory_tier import MemoryTier
from offload.test_engine import assert_same_state, clip_of
from tenfold.config.depth import joined
from tenfold.config.offload import PlacementRule
from tenfold.errors import TenfoldError
from tenfold.offload import units
from tenfold.offload.budget import Budgets, choose, device_bytes
from tenfold.offload.engine import Offload
from tenfold.offload.experts import by_load, by_rules, evenly
from tenfold.offload.forecast import Compute, Rates, forecast
from tenfold.offload.loads import Loads
from tenfold.offload.moments import Inventory
from tenfold.offload.parts import parts_of
from tenfold.offload.placement import explicit, tier_bytes, together, working_bytes
from tenfold.offload.units import Entry
from tenfold.sharing.patterns import Pattern
from tenfold.sharing.tying import Sharing, tie

WIDTH, LAYERS, EXPERTS, VOCABULARY = 32, 3, 8, 61
PATTERNS = {"none": [0, 1, 2], "all": [0, 0, 0], "cycle": [0, 1, 0]}
EVERYTHING = {"weights": "disk", "gradients": "disk", "moments": "disk"}
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


class Layer(nn.Module):
    """Two stacks of experts, each of a page, and what is in no stack."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH)

    def forward(self, x):
        gates = self.router(self.norm(x)).softmax(-1)
        inner = torch.einsum("btd,edf->ebtf", x, self.up).tanh()
        return x + torch.einsum("ebtf,efd,bte->btd", inner, self.down, gates)


class Model(nn.Module):
    def __init__(self, pattern, kind=Layer) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(kind() for _ in pattern)

    def forward(self, tokens):
        x = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy((x @ self.embedding.weight.t()).flatten(0, 1), tokens[:, 1:].flatten())


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr(units, "PIECE", 2048)  # two experts


def model_of(pattern, kind=Layer):
    torch.manual_seed(1)
    model = Model(pattern, kind)
    tie(model.layers, Sharing(Pattern(pattern)))
    return model


def optimizer_of(name, model):
    kinds = {"adamw": lambda each: AdamW(each, 3e-3, fused=True), "sgd": lambda each: SGD(each, 3e-2, momentum=0.9)}
    kinds["adafactor"] = lambda each: Adafactor(each, 3e-3)
    return kinds[name](model.parameters())


def entry_of(name, parameter):
    stack = parameter.dim() == 3
    return Entry(
        name, parameter, parameter, experts=[range(each, each + 1) for each in range(EXPERTS)] if stack else ()
    )


def inventory_of(pattern, lots, optimizer="adamw", form="fp32", kind=Layer):
    model = model_of(pattern, kind)
    return Inventory(
        model, list(model.layers), [optimizer_of(optimizer, model)], entry_of, form=form, seed=3, lots=lots
    )


def read(rules):
    return [PlacementRule.model_validate(rule) for rule in rules]


def lots_of(rules):
    return by_rules(read(rules), LAYERS, EXPERTS, "offload.placement.{}".format)


def parts_and_placement(inventory, rules):
    parts = parts_of(inventory, lambda _: ("embedding", "head"))
    return parts, explicit(read(rules), parts, LAYERS, EXPERTS)


def engine_of(inventory, placement, tier, **options):
    return Offload(inventory, lambda portion, kind: placement.tier(portion.name, kind), {"disk": tier}, **options)


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


def test_parts_are_told_by_experts_and_layers():
    names = [f"layers.{layer}.experts.{some}" for layer in range(3) for some in ("0-1", "4")]
    assert joined(names) == "experts 0-1, 4 of layers 0-2"
    names = ["layers.0", "layers.1.experts.3", "layers.0-3,8.experts.0-7,9", "embedding"]
    assert joined(names) == "layer 0, expert 3 of layer 1, experts 0-7, 9 of layers 0-3, 8 (shared), embedding"
