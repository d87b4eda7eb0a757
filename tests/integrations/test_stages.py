"""When a stage begins, and a model brought to it from wherever it is."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from tenfold.errors import TenfoldError
from tenfold.integrations.stages import Stages, find_layers
from tenfold.sharing.patterns import Pattern
from tenfold.sharing.tying import tables, tied_pattern

CHAIN = [("20%", "all"), (50, {"groups": 2}), (0.8, "none", ("ffn",)), ("100%", "none")]


class Model(nn.Module):
    """Layers that stand between other parameters, so that theirs are not in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"layer": nn.Linear(3, 3), "scale": nn.Linear(1, 3, bias=False)}) for _ in range(4)
        )

    @property
    def layers(self):
        return [block["layer"] for block in self.blocks]


def test_a_stage_begins_after_the_step_that_ends_the_one_before():
    stages = Stages(CHAIN)
    assert [stages.at(step, 100) for step in (0, 19, 20, 49, 50, 79, 80, 99, 1000)] == [0, 0, 1, 1, 2, 2, 3, 3, 3]
    assert stages.need_length
    assert not Stages([(5, "all"), ("100%", "none")]).need_length
    assert Stages([(5, "all"), ("100%", "none")]).at(5, float("inf")) == 1


@pytest.mark.parametrize(("start", "end"), list(itertools.product(range(3), repeat=2)))
def test_from_any_stage_to_any_other(start, end):
    stages, blocks = Stages([(1, "all"), (2, {"groups": 2}), (1.0, "none")]), ([0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 2, 3])
    model = Model()
    stages.enter(model, model.layers, start)
    assert stages.of(model.layers) == start
    optimizer = AdamW(model.parameters())
    assert stages.enter(model, model.layers, end, [optimizer]) == (start != end)
    assert stages.of(model.layers) == end
    assert {tied_pattern(column) for column in tables(model.layers).values()} == {Pattern(blocks[end])}
    assert all(
        mine is theirs for mine, theirs in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True)
    )


def test_an_optimizer_with_an_order_of_its_own_keeps_it():
    stages, model = Stages([(1, "all"), (1.0, "none")]), Model()
    stages.enter(model, model.layers, 0)
    layers = list(dict.fromkeys(p for layer in model.layers for p in layer.parameters()))
    scales = [block["scale"].weight for block in model.blocks]
    optimizer = AdamW([*scales, *layers])
    stages.enter(model, model.layers, 1, [optimizer])
    wanted = [*scales, *(p for layer in model.layers for p in layer.parameters())]
    assert all(mine is theirs for mine, theirs in zip(optimizer.param_groups[0]["params"], wanted, strict=True))


def test_layers_are_found_by_name_or_by_a_function():
    model = Model()
    assert find_layers(model, "blocks") == list(model.blocks)
    assert find_layers(model, lambda m: m.layers) == model.layers
    with pytest.raises(TenfoldError, match=r"Model has no list of layers called 'model.layers'; its lists are blocks"):
        find_layers(model, "model.layers")


def test_what_layers_share_that_no_stage_shares_is_none_of_them():
    model = Model()
    model.layers[1].weight = model.layers[0].weight
    assert Stages([("50%", "all"), ("100%", "none")]).of(model.layers) is None
    assert torch.equal(model.layers[1].weight, model.layers[0].weight)


@pytest.mark.parametrize("ends", [(5, 3), (5, 5), ("50%", "20%"), ("50%", 1.0)])
def test_a_stage_that_ends_before_it_begins_is_refused(ends):
    stages = [(ends[0], "all"), (ends[1], {"groups": 2}), ("100%", "none")]
    with pytest.raises(TenfoldError, match=r"stages\.\d would have no steps: it ends at "):
        Stages(stages)


def test_a_stage_may_name_all_parts_that_there_are_and_the_next_none():
    model = Model()  # its layers are a feed-forward
    stages = Stages([(1, "all", ("ffn",)), ("100%", {"groups": 2})])
    stages.enter(model, model.layers, 0)
    stages.enter(model, model.layers, 1)
    assert {tied_pattern(column) for column in tables(model.layers).values()} == {Pattern([0, 0, 1, 1])}
