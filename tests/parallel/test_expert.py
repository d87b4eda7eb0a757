"""Experts on many ranks against the same model on one: whatever goes where, nothing changes."""

from __future__ import annotations

import pytest
import torch

from parallel.cases_expert import SHAPES
from ranks import on_ranks
from tenfold.parallel.mesh import Degrees
from tenfold.parallel.zigzag import order_of_runs, own_chunks

LAYOUTS = [
    Degrees(data_shard=2, expert=2),
    Degrees(tensor=2),
    Degrees(context=2, expert=2),
    Degrees(data_shard=2, tensor=2, expert=2),
    Degrees(data_shard=4, expert=2),
    Degrees(context=2, tensor=2),
    Degrees(context=2, tensor=2, expert=2),
    Degrees(data_shard=2, context=2, expert=4),
]


@pytest.mark.parametrize(
    "degrees",
    [pytest.param(each, marks=pytest.mark.slow if each.ranks > 2 else (), id=str(each)) for each in LAYOUTS],
)
def test_loss_statistics_and_every_gradient_are_those_of_one_rank(degrees):
    names = [name for name in SHAPES if degrees.expert < 4 or "many" not in name]  # four ranks, of two experts each
    on_ranks(degrees.ranks, "parallel.cases_expert:equal_to_one_rank", degrees, names)


@pytest.mark.parametrize("degrees", [LAYOUTS[0], LAYOUTS[1], LAYOUTS[3]], ids=str)
def test_a_layer_by_itself_in_float64_and_bf16(degrees):
    on_ranks(degrees.ranks, "parallel.cases_expert:layers_alone", degrees)


@pytest.mark.parametrize(("prototypes", "recompute"), [(1, "none"), (4, "full")])
def test_a_prototype_costs_two_exchanges_each_way(prototypes, recompute):
    exchange = "alltoall_base_"
    for forward, backward, without in on_ranks(2, "parallel.cases_expert:counted", prototypes, recompute, 1, 2):
        assert forward == {exchange: 2 * prototypes + 1}  # and the counts'
        assert backward == {exchange: 2 * prototypes * (1 if recompute == "none" else 2)}  # counts are kept
        assert without == forward


def test_tensor_ranks_gather_what_arrives_and_scatter_the_sums():
    gather, scatter, reduce = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"
    exchange, of_rows = "alltoall_base_", "_reduce_scatter_base_"
    for forward, backward, without in on_ranks(4, "parallel.cases_expert:counted", 2, "none", 2, 2):
        assert forward == {exchange: 5, gather: 3, of_rows: 2, reduce: 1}  # counts and loads too
        assert backward == {exchange: 4, gather: 2, of_rows: 4}  # rows and their gates
        assert without == {exchange: 5, reduce: 1}
    for forward, backward, without in on_ranks(2, "parallel.cases_expert:counted", 2, "none", 2, 1):
        assert forward == {gather: 3, scatter: 1, reduce: 1}  # tokens, gates, choices
        assert backward == {gather: 1, scatter: 2}
        assert without == {reduce: 1}


@pytest.mark.parametrize(("context", "tensor"), [(1, 1), (1, 3), (2, 1), (2, 2), (2, 3), (3, 4)])
def test_runs_are_told_in_the_order_of_the_sequence(context, tensor):
    order = order_of_runs(context, tensor)
    length = 4 * context * tensor  # two positions in each half of what a tensor rank has, of one context rank four
    positions = torch.arange(length)[None]
    for rank in range(context):
        mine = positions[0] if context == 1 else own_chunks(positions, context, rank)[0]
        runs = mine.view(*order.shape[1:], -1)
        assert (runs.diff(dim=-1) == 1).all()
        assert torch.equal(runs[..., 0] // runs.shape[-1], order[rank])
    assert torch.equal(order.flatten().sort().values, torch.arange(order.numel()))
