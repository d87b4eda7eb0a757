"""A model split over tensor ranks against the same model on one."""

from __future__ import annotations

import pytest

from parallel.cases_tensor import SHAPES
from parallel.split_models import BATCH, CHUNK, LENGTH
from ranks import on_ranks
from tenfold.hardware.compiler import missing_for_compile
from tenfold.parallel.mesh import Degrees

TWO, FOUR = Degrees(tensor=2), Degrees(tensor=4)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_loss_and_every_gradient_are_those_of_one_rank(world):
    names = [name for name, shape in SHAPES.items() if world in shape.get("worlds", (2, 3, 4))]
    assert len(names) >= 8
    on_ranks(world, "parallel.cases_tensor:equal_to_one_rank", Degrees(tensor=world), names)


def test_with_context_ranks_too():
    names = [
        "llama, heads and widths uneven",
        "documents, learned positions",
        "encoder, factorised, documents",
        "pseudo",
    ]
    on_ranks(4, "parallel.cases_tensor:equal_to_one_rank", Degrees(tensor=2, context=2), names)


def test_fp32_and_bf16_are_as_close_as_they_can_be():
    names = ["gpt2, biases, learned positions", "multi-query", "encoder"]
    on_ranks(2, "parallel.cases_tensor:single_precision", TWO, names)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_layer_gathers_twice_and_scatters_twice_each_way_and_no_logits_are_gathered(recompute):
    layers, chunks = 3, -(-BATCH * LENGTH // CHUNK)
    gather, scatter, reduce = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"
    # What follows the last kept tensor is not redone; selective keeps sums.
    again = {"none": {}, "selective": {gather: 2 * layers}, "full": {gather: 2 * layers, scatter: layers}}[recompute]
    for forward, loss, backward, without in on_ranks(2, "parallel.cases_tensor:counted_collectives", TWO, recompute):
        assert forward == {gather: 2 * layers, scatter: 2 * layers + 1}  # and the embedding's
        assert loss == {gather: 1, reduce: 2 * chunks}
        assert backward == {
            gather: 2 * layers + 1 + again.get(gather, 0),
            scatter: 2 * layers + 1 + again.get(scatter, 0),
        }
        assert without == {reduce: 2 * layers + 1, gather: 1}


@pytest.mark.parametrize("world", [2, 4])
def test_the_loss_of_split_rows_is_that_of_all(world):
    on_ranks(world, "parallel.cases_tensor:cross_entropies")


def test_text_is_what_one_rank_writes_and_a_rank_keeps_its_own_key_heads():
    on_ranks(4, "parallel.cases_tensor:generated", FOUR)


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_for_compile()), reason=f"no {missing_for_compile()}")
def test_layers_compile_to_one_graph_each():
    on_ranks(2, "parallel.cases_tensor:compiled", TWO, {"recompute": "selective"}, True)
