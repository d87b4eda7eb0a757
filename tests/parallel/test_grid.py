"""A model over a grid of 2 x 2 tensor ranks against the same model on one."""

from __future__ import annotations

import pytest

from parallel.cases_grid import GRID
from parallel.cases_tensor import SHAPES
from parallel.split_models import BATCH, CHUNK, LENGTH
from ranks import on_ranks
from tenfold.hardware.compiler import missing_for_compile
from tenfold.parallel.mesh import Degrees


def test_loss_and_every_gradient_are_those_of_one_rank():
    names = [name for name, shape in SHAPES.items() if "moe" not in shape]
    on_ranks(4, "parallel.cases_tensor:equal_to_one_rank", GRID, names)


def test_with_context_ranks_too():
    degrees = Degrees(tensor=4, grid=True, context=2)
    on_ranks(8, "parallel.cases_tensor:equal_to_one_rank", degrees, ["documents, learned positions"])


def test_a_layer_talks_along_rows_twice_each_way_and_along_columns_once_for_each_matrix():
    layers, matrices, side, chunks = 3, 7, 2, -(-BATCH // 2 * LENGTH // CHUNK)
    gather, scatter, reduce, broadcast = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "broadcast"
    for forward, loss, backward, without in on_ranks(4, "parallel.cases_grid:counted_collectives"):
        of_blocks = {broadcast: layers * matrices * side}
        embedding = {"all_to_all_single": 1}
        assert forward == {gather: 2 * layers, scatter: 2 * layers + 1, **embedding, **of_blocks}
        assert loss == {gather: 2, reduce: 2 * chunks}  # hidden states, and columns of the output matrix
        scattered = 2 * layers + 2 + layers * matrices
        assert backward == {gather: 2 * layers + 1, scatter: scattered, **embedding, **of_blocks}
        assert without == {reduce: layers * matrices + 1, gather: 2 * layers + 1 + 2}


def test_fp32_bf16_and_text_are_those_of_one_rank():
    on_ranks(4, "parallel.cases_grid:rounded_and_written")


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_for_compile()), reason=f"no {missing_for_compile()}")
def test_layers_compile():
    on_ranks(4, "parallel.cases_tensor:compiled", GRID, {}, False)
