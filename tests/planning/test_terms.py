from __future__ import annotations

import itertools

import pytest

from tenfold.parallel.mesh import Degrees
from tenfold.planning.terms import group_of


@pytest.mark.parametrize("axis", ["tensor", "context", "data_shard", "data_replicate", "pipeline"])
def test_ranks_of_a_group_differ_along_its_axis_alone(axis: str) -> None:
    degrees = Degrees(data_replicate=2, data_shard=3, tensor=2, context=2, pipeline=2, expert=3)
    order = ["pipeline", "data_replicate", "data_shard", "context", "tensor"]  # as `parallel.mesh` numbers ranks
    places = list(itertools.product(*(range(getattr(degrees, each)) for each in order)))
    size, apart = group_of(axis, degrees)  # type: ignore[arg-type]
    ranks = [places[at * apart] for at in range(size)]
    assert [place[order.index(axis)] for place in ranks] == list(range(getattr(degrees, axis)))
    assert all(not any(place[at] for at in range(5) if order[at] != axis) for place in ranks)


def test_expert_ranks_and_those_that_have_the_same_experts_are_the_shards() -> None:
    degrees = Degrees(data_replicate=2, data_shard=4, tensor=2, context=3, expert=6)
    (experts, apart), (copies, further) = group_of("expert", degrees), group_of("expert_shard", degrees)
    shards, step = group_of("shard", degrees)
    mine = sorted(at * apart + copy * further for at in range(experts) for copy in range(copies))
    assert mine == [at * step for at in range(shards)]


@pytest.mark.parametrize(("degrees", "row"), [(Degrees(tensor=9, grid=True), 3), (Degrees(tensor=8), 8)])
def test_rows_and_columns_of_a_grid_are_the_tensor_ranks(degrees: Degrees, row: int) -> None:
    (columns, apart), (rows, further) = group_of("row", degrees), group_of("column", degrees)
    assert columns == row
    mine = sorted(at * apart + each * further for at in range(columns) for each in range(rows))
    assert mine == list(range(degrees.tensor))
