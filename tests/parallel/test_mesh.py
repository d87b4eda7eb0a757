"""Degrees chosen and checked, with messages; places and groups of ranks."""

from __future__ import annotations

import pytest

from ranks import on_ranks
from tenfold.config.model import ModelConfig
from tenfold.config.parallel import ParallelConfig
from tenfold.errors import TenfoldError
from tenfold.parallel.mesh import Degrees, check, degrees_of

MODEL = ModelConfig(vocab_size=100, layers=6, hidden=48, heads=6, kv_heads=2, ffn=10)
MIXTURE = MODEL.model_copy(update={"moe": MODEL.moe.model_copy(update={"experts": 12, "prototypes": 3, "ffn": 5})})


def chosen(world, model=MODEL, **given):
    return degrees_of(ParallelConfig(**given), world, model)


def test_where_one_degree_is_left_it_takes_the_ranks_that_are_left():
    assert chosen(1) == Degrees()
    assert chosen(4, data_replicate=2) == Degrees(data_replicate=2, data_shard=2)
    assert chosen(4, data_shard=1) == Degrees(data_replicate=4)
    assert chosen(3, data_shard=1, data_replicate=1, tensor="auto") == Degrees(tensor=3)
    assert chosen(8, tensor=2, pipeline=4) == Degrees(tensor=2, pipeline=4)
    assert chosen(8, data_shard=4, data_replicate=2, expert=4, model=MIXTURE).expert == 4


def test_where_there_is_a_choice_arithmetic_makes_none():
    axes = ParallelConfig.model_validate("auto")
    assert chosen(4) is None
    assert chosen(8, tensor=2, pipeline=2) is None
    assert degrees_of(axes, 2, MODEL) is None
    assert degrees_of(axes, 1, MIXTURE) == Degrees()


def test_experts_are_a_choice_where_some_degree_divides_them():
    assert chosen(4, data_shard=4, expert="auto", model=MIXTURE) is None  # 1, 2 or 4
    assert chosen(5, data_shard=5, expert="auto", model=MIXTURE) == Degrees(data_shard=5)  # of 4 experts none
    assert chosen(4, data_shard=4, expert="auto") == Degrees(data_shard=4)


def test_degrees_that_do_not_make_the_world_are_refused_with_every_number():
    with pytest.raises(TenfoldError) as told:
        chosen(6, data_replicate=1, data_shard=2, tensor=2)
    assert str(told.value) == (
        "parallel: data_replicate 1 x data_shard 2 x tensor 2 x context 1 x pipeline 1 does not make the 6 ranks that "
        "were started (torchrun's --nproc-per-node x --nnodes): the degrees given multiply to 4. Change one of them, "
        "or the number of ranks"
    )
    with pytest.raises(TenfoldError, match="multiply to 4"):
        chosen(6, tensor=4)  # open axes do not help
    with pytest.raises(TenfoldError, match=r"tensor auto .* make the 5 ranks"):
        degrees_of(ParallelConfig(tensor="auto", pipeline=2), 5, MODEL)


BAD = {
    "batch": (
        {"data_shard": 3},
        "data_replicate = 1 and data_shard = 3 give 3 ranks samples .*batch_size = 8 does not",
    ),
    "micro batch": ({"data_shard": 2, "micro": 3}, "micro_batch_size = 3 does not divide the 4 samples .* of 2 data"),
    "expert": ({"data_shard": 2, "expert": 4}, "parallel.expert = 4 does not divide data_shard x context = 2"),
    "experts": (
        {"data_shard": 8, "expert": 8},
        r"parallel.expert = 8 does not divide the 4 experts.*experts = 12, pro",
    ),
    "heads": ({"tensor": 7, "lengths": [14]}, r"parallel.tensor = 7 is more than model.heads = 6 .*tensor 7, 7 ranks"),
    "key heads": ({"tensor": 3, "lengths": [12]}, "tensor = 3 does not fit model.heads = 6 with kv_heads = 2: ranks"),
    "width": ({"tensor": 6, "lengths": [12]}, "parallel.tensor = 6 is more than model.moe.ffn = 5"),
    "layers": ({"pipeline": 7}, "parallel.pipeline = 7 is more than model.layers = 6"),
    "no square": (
        {"tensor": 6, "grid": True},
        r"tensor = 6 makes no grid .*take 4, 9, 16 .*tensor 6 \(a grid\), 6 ranks",
    ),
    "grid of experts": ({"tensor": 4, "grid": True}, "tensor_grid = true is for dense models, .*experts = 12; set it"),
    "tensor runs": ({"tensor": 2, "lengths": [16, 15]}, "sequences of 15 tokens do not divide into tensor = 2 runs"),
    "zig-zag runs": ({"context": 2, "tensor": 2}, "sequences of 12 tokens .* into 2 x context x tensor = 8 runs"),
}


@pytest.mark.parametrize("case", BAD)
def test_degrees_that_fit_nothing_are_refused_with_key_value_and_reason(case):
    given, message = BAD[case]
    given = dict(given)
    micro, lengths = given.pop("micro", 0), given.pop("lengths", [12])
    with pytest.raises(TenfoldError, match=message):
        check(Degrees(**given), MIXTURE, 8, micro, lengths)


def test_expert_ranks_need_experts():
    with pytest.raises(TenfoldError, match=r"parallel.expert = 2 splits experts, and the model has none .*set it to 1"):
        check(Degrees(data_shard=2, expert=2), MODEL, 8, 0, [12])


def test_degrees_that_fit_are_let_pass_uneven_ones_too():
    check(Degrees(data_shard=4, expert=4, tensor=2, pipeline=5), MIXTURE, 40, 2, [12])
    check(Degrees(context=3, data_shard=4, expert=4), MIXTURE, 8, 0, [12])
    check(Degrees(tensor=4), ModelConfig(heads=5, head_dim=2, vocab_size=9, vocab_multiple=1), 1, 0, [12])
    check(Degrees(tensor=6), MODEL.model_copy(update={"moe": MODEL.moe.model_copy(update={"ffn": 2})}), 1, 0, [12])
    check(Degrees(tensor=4, grid=True, context=2, data_shard=4), MODEL, 8, 2, [8])
    with pytest.raises(TenfoldError, match="tensor = 4 is more than the rows of the vocabulary = 3"):
        check(
            Degrees(tensor=4), MODEL.model_copy(update={"vocab_size": 3, "vocab_multiple": 1, "heads": 8}), 1, 0, [12]
        )


@pytest.mark.parametrize(
    ("given", "micro", "message"),
    [
        ({"pipeline": 2}, 3, "parallel.tensor_grid = true does not go with pipeline = 2; set one"),
        ({}, 3, "tensor = 4 is 2 rows of a grid, which do not divide the samples of a pass, 3; change training.micro"),
        ({"data_shard": 3}, 0, "tensor = 4 is 2 rows of a grid, which do not divide the samples of a pass, 1;"),
        ({"data_shard": 1}, 1, "tensor = 4 is 2 rows of a grid, which do not divide the samples of a pass, 1;"),
    ],
)
def test_a_grid_that_does_not_fit_is_refused(given, micro, message):
    with pytest.raises(TenfoldError, match=message):
        check(Degrees(tensor=4, grid=True, **given), MODEL, 3, micro, [8])
    odd = MODEL.model_copy(update={"hidden": 45, "head_dim": 8})
    with pytest.raises(TenfoldError, match=r"2 rows of a grid, which do not divide model.hidden = 45"):
        check(Degrees(tensor=4, grid=True), odd, 8, 0, [8])


def test_a_grid_is_of_the_tensor_ranks_that_there_are():
    assert chosen(4, tensor=4, tensor_grid=True) == Degrees(tensor=4, grid=True)
    assert chosen(2, data_shard=2, tensor_grid=True) == Degrees(data_shard=2)
    assert (Degrees(tensor=4, grid=True).rows, Degrees(tensor=4).rows) == (2, 1)


def test_tensor_is_innermost_and_experts_fold_over_shards_and_context():
    found = on_ranks(
        8, "parallel.cases_mesh:places", {"data_shard": 2, "context": 2, "tensor": 2, "expert": 2}, [("tensor", (1,))]
    )
    for rank, at in enumerate(found):
        place = {"tensor": rank % 2, "context": rank // 2 % 2, "data_shard": rank // 4, "data_replicate": 0}
        assert at["place"] == {**place, "pipeline": 0, "expert": rank // 2 % 2}
        assert at["data_index"] == rank // 4
        assert at["groups"]["tensor"] == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert at["groups"]["context"] == sorted({rank, rank ^ 2})
        assert at["groups"]["data_shard"] == sorted({rank, rank ^ 4})
        assert at["groups"]["expert"] == sorted({rank, rank ^ 2})
        assert at["fsdp"] == [rank % 2 + 2 * shard for shard in range(4)]
        assert at["expert_fsdp"] == [rank % 4, rank % 4 + 4]
        assert at["parts"] == [[rank] if rank % 2 else None]


def test_parts_of_an_axis_are_those_of_each_line_along_it():
    degrees = {"pipeline": 2, "data_replicate": 2}
    found = on_ranks(4, "parallel.cases_mesh:places", degrees, [("pipeline", (0, 1)), ("data_replicate", (1,))])
    assert [at["place"]["pipeline"] for at in found] == [0, 0, 1, 1]
    assert [at["data_index"] for at in found] == [0, 1, 0, 1]
    assert [at["parts"][0] for at in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [at["parts"][1] for at in found] == [None, [1], None, [3]]
    assert all(at["again"] == [True, True] for at in found)
    assert [at["fsdp"] for at in found] == [[[0], [1]], [[0], [1]], [[2], [3]], [[2], [3]]]
    assert found[0]["expert_fsdp"] == found[0]["fsdp"]


def test_only_those_in_a_part_need_to_ask_for_it():
    assert on_ranks(4, "parallel.cases_mesh:parts_of_their_own") == [[1, 0] * 2, [1, 6] * 2, [5, 6] * 2, [5, 6] * 2]
