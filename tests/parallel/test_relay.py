"""Regions of a tensor against sets of its indices, and what ranks send each other until each has what it wants."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

from ranks import on_ranks
from tenfold.config.load import build
from tenfold.config.model import ModelConfig
from tenfold.parallel.mesh import Degrees
from tenfold.parallel.pieces import piece_by_rank, pieces
from tenfold.parallel.regions import Region, all_of, common, cut_to, elements, part_of, put, runs_of, shape_of, taken
from tenfold.parallel.relay import Route, route

MODEL: dict[str, Any] = {
    "vocab_size": 53,
    "layers": 2,
    "hidden": 12,
    "heads": 6,
    "kv_heads": 3,
    "ffn": 17,
    "moe": {"experts": 12, "prototypes": 2, "ffn": 10},
}
TENSORS = {  # nothing is even, and of some not every rank has something
    "layers.0.attention.wq.weight": (12, 12),
    "layers.0.attention.wk.weight": (6, 12),
    "layers.0.attention.norm.weight": (5,),
    "layers.0.ffn.experts.up": (12, 12, 10),
    "embedding.weight": (53, 12),
}
EIGHT = [
    Degrees(data_shard=8),
    Degrees(data_shard=8, expert=2),
    Degrees(data_replicate=4, data_shard=2),
    Degrees(data_shard=4, expert=2, tensor=2),
    Degrees(data_shard=2, tensor=2, context=2, expert=2),
    Degrees(tensor=4, data_replicate=2),
    Degrees(tensor=2, pipeline=2, data_shard=2),
    Degrees(pipeline=4, data_shard=2, expert=2),
]


def indices_of(region: Region) -> set[tuple[int, ...]]:
    return set(product(*([at for run in runs for at in run] for runs in region)))


def random_region(generator: torch.Generator, shape: tuple[int, ...]) -> Region:
    kept = [torch.rand(size, generator=generator) < 0.6 for size in shape]
    return tuple(runs_of(each.nonzero().flatten().tolist()) for each in kept)


def test_what_regions_have_in_common_is_what_sets_of_indices_have() -> None:
    generator, shape = torch.Generator().manual_seed(1), (9, 4, 7)
    whole = torch.arange(9 * 4 * 7).view(shape)
    for _ in range(50):
        one, other = random_region(generator, shape), random_region(generator, shape)
        both = common(one, other)
        assert indices_of(both) == indices_of(one) & indices_of(other)
        assert elements(both) == len(indices_of(both))
        mine = taken(whole, all_of(shape), one)
        assert mine.shape == shape_of(one)
        assert sorted(mine.flatten().tolist()) == sorted(int(whole[at]) for at in indices_of(one))
        if elements(both):
            part = taken(mine, one, both)
            assert torch.equal(part, taken(whole, all_of(shape), both))
            there = torch.full(shape_of(other), -1)
            put(there, other, part, both)
            assert set(there.flatten().tolist()) - {-1} == set(part.flatten().tolist())
            assert torch.equal(taken(there, other, both), part)
        parts = list(cut_to(one, 20))
        assert all(elements(each) <= 20 for each in parts)
        assert sum(map(elements, parts)) == elements(one)
        assert set().union(*map(indices_of, parts)) == indices_of(one)


def test_runs_and_parts_of_indices_are_those_of_a_list() -> None:
    listed = [0, 1, 2, 5, 7, 8, 20]
    ranges = runs_of(listed)
    assert ranges == (range(3), range(5, 6), range(7, 9), range(20, 21))
    for begin, end in product(range(8), range(9)):
        assert [at for run in part_of(ranges, range(begin, end)) for at in run] == listed[begin:end]


def by_rank(name: str, degrees: Degrees, stages: tuple[int, ...]) -> list[Region | None]:
    config = build(ModelConfig, MODEL, "model")
    found = piece_by_rank(name, TENSORS[name], config, degrees)
    per = degrees.ranks // degrees.pipeline
    return [piece.region if rank // per in stages else None for rank, piece in enumerate(found)]


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize(("before", "after"), [*pairwise(EIGHT), *pairwise(reversed(EIGHT)), (EIGHT[0], EIGHT[-1])])
def test_every_rank_gets_what_it_lacks_once_and_nothing_else_goes(before: Degrees, after: Degrees, name: str) -> None:
    held = (before.pipeline - 1,)  # by the last pipeline rank alone
    has, wants = by_rank(name, before, held), by_rank(name, after, tuple(range(after.pipeline)))
    routes = [route(has, wants, rank) for rank in range(8)]
    for rank, (mine, wanted) in enumerate(zip(routes, wants, strict=True)):
        assert wanted is not None
        came = [(rank, mine.keeps)] if mine.keeps is not None else []
        came += list(mine.gets.items())
        assert rank not in mine.gets
        assert sum(elements(each) for _, each in came) == elements(wanted)
        assert set().union(*(indices_of(each) for _, each in came)) == indices_of(wanted)
        for other, each in came:
            assert has[other] is not None
            assert indices_of(each) <= indices_of(has[other])  # type: ignore[arg-type]
        for other, each in mine.gets.items():
            assert routes[other].sends[rank] == each
            if mine.has is not None:  # what it has it does not ask for
                assert not indices_of(each) & indices_of(mine.has)
    assert sum(len(each.sends) for each in routes) == sum(len(each.gets) for each in routes)


@pytest.mark.parametrize("degrees", EIGHT, ids=str)
def test_who_has_what_it_wants_exchanges_nothing(degrees: Degrees) -> None:
    everyone = tuple(range(degrees.pipeline))
    for name in TENSORS:
        has, wants = by_rank(name, degrees, everyone), by_rank(name, degrees, everyone[:1])
        for rank in range(8):
            mine = route(has, wants, rank)
            assert not mine.sends
            assert not mine.gets
            assert mine.here == (wants[rank] is not None)


def test_the_pieces_of_ranks_by_number_are_those_that_are_handed_out() -> None:
    config = build(ModelConfig, MODEL, "model")
    for degrees, (name, shape) in product(EIGHT, TENSORS.items()):
        found = piece_by_rank(name, shape, config, degrees)
        assert len(found) == 8
        for rank, piece in pieces(name, shape, config, degrees, degrees.pipeline - 1):
            assert found[rank] == piece


def test_pieces_arrive_in_parts_of_bounded_size() -> None:
    """On real ranks, between layouts that differ, as the whole tensor has them; rank by rank and part by part."""
    for found in on_ranks(4, "parallel.cases_relay:carried"):
        assert found["wrong"] == []
        assert found["largest"] <= 100
        assert found["sends"] > 4


def test_a_route_that_is_here_gives_the_tensor_itself() -> None:
    region = all_of((3, 2))
    tensor: Tensor = torch.randn(3, 2)
    assert Route(region, region, region).carry(tensor, torch.float32, tensor.device) is tensor
    assert Route(region, None).carry(None, torch.float32, tensor.device) is None
