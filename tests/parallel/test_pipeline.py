"""Pipeline ranks: where models are cut, what ranks hold, and that they train and answer as one process does."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch

from distributed.layouts import DENSE, MIXTURE
from distributed.test_layouts import assert_equal
from parallel.cases_pipeline import many, questions
from ranks import on_ranks
from tenfold.config.parallel import ParallelConfig
from tenfold.errors import TenfoldError
from tenfold.parallel.mesh import Degrees, check
from tenfold.parallel.pipeline import cut_by_cost, holders_of

UNTIED = {"tie_embeddings": False, "embedding_width": None}
ENCODER = {"objective": "masked"}
ROTARY = {"positions": "rotary"}
DOCUMENTS = {"document_end": 5}


def run_file(model: dict[str, Any], sharing: Any, schedule: str, layers: int = 4, **asked: Any) -> dict[str, Any]:
    degrees = {"pipeline": 2, **asked.pop("degrees", {})}
    samples = 8 // degrees.get("data_shard", 1)
    return {
        "known": asked.pop("known", {}),
        "model": {**model, "layers": layers},
        "data": {"sequence_length": 16},
        "training": {
            "steps": 5,
            "batch_size": 8,
            "micro_batch_size": samples // 4,
            "precision": "fp32",
            "device": "cpu",
            **asked,
        },
        "optim": {"lr": 1e-2, "eps": 1e-3},
        "parallel": {"data_replicate": 1, "data_shard": 1, "pipeline_schedule": schedule, **degrees},
        "stages": [{"name": "one", "sharing": sharing}],
    }


TWO_RANKS = [
    run_file(DENSE, "none", "gpipe"),
    run_file(DENSE | ENCODER, {"cycle": 2}, "1f1b", known={"mask_token": 3}),
    run_file(DENSE | UNTIED | ROTARY, "sandwich", "interleaved-1f1b", known=DOCUMENTS),
    run_file(DENSE, "all", "interleaved-zero-bubble"),
    run_file(DENSE | UNTIED, {"groups": 2}, "zbv", layers=6),
    run_file(MIXTURE, "all", "gpipe", recompute="full"),
    run_file(MIXTURE, "sandwich", "1f1b", layers=5, recompute="selective"),
    run_file(MIXTURE | {"tie_embeddings": True}, "none", "interleaved-1f1b"),
    run_file(MIXTURE, {"cycle": 2}, "interleaved-zero-bubble", recompute="full"),
    run_file(MIXTURE | {"tie_embeddings": True}, {"cycle": 2}, "zbv"),
]
FOUR_RANKS = [
    run_file(MIXTURE, {"cycle": 2}, "1f1b", degrees={"pipeline": 4}),
    run_file(DENSE, "all", "zbv", layers=9, degrees={"pipeline": 4}),
    run_file(MIXTURE | {"tie_embeddings": True}, "all", "1f1b", degrees={"data_shard": 2}),
    run_file(DENSE, "sandwich", "interleaved-1f1b", degrees={"data_shard": 2}),
    run_file(MIXTURE, "all", "zbv", degrees={"data_shard": 2, "expert": 2}),
    run_file(MIXTURE, {"groups": 2}, "interleaved-zero-bubble", degrees={"tensor": 2}),
]


@functools.cache
def alone(raw: str) -> dict[str, Any]:
    return many([{key: value for key, value in json.loads(raw).items() if key != "parallel"}], 1)[0]


@pytest.mark.parametrize(("ranks", "raws"), [(2, TWO_RANKS), pytest.param(4, FOUR_RANKS, marks=pytest.mark.slow)])
def test_stages_train_as_one_process_does(ranks: int, raws: list[dict[str, Any]]) -> None:
    found = on_ranks(ranks, "parallel.cases_pipeline:many", raws, ranks)
    for number, raw in enumerate(raws):
        assert_equal([rank[number] for rank in found], alone(json.dumps(raw)), f"{raw['stages']}, {raw['parallel']}")


@pytest.mark.parametrize(
    ("ranks", "raw"),
    [
        (2, run_file(MIXTURE | {"tie_embeddings": True}, "all", "1f1b")),
        (2, run_file(DENSE | ROTARY, "sandwich", "zbv", layers=5, known=DOCUMENTS)),
        (4, run_file(MIXTURE, {"cycle": 2}, "interleaved-1f1b", degrees={"data_shard": 2})),
    ],
)
def test_every_rank_has_the_answers_of_one_process(ranks: int, raw: dict[str, Any]) -> None:
    want = questions({key: value for key, value in raw.items() if key != "parallel"}, 1)
    for found in on_ranks(ranks, "parallel.cases_pipeline:questions", raw, ranks):
        assert found.keys() == want.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, want[name], atol=2e-5, rtol=1e-5, msg=name)


def test_a_stage_holds_what_its_layers_use_and_names_it_as_the_whole_model_does() -> None:
    raw = run_file(MIXTURE | {"tie_embeddings": True}, "sandwich", "1f1b", layers=6)
    first, last = on_ranks(2, "parallel.cases_pipeline:held", raw)
    wq = "attention.wq.weight"
    assert first["stages"] == last["stages"]
    assert {name: first["stages"][name] for name in ("embedding.weight", "norm.weight")} == {
        "embedding.weight": (0, 1),
        "norm.weight": (1,),
    }
    assert [first["stages"][f"layers.{layer}.{wq}"] for layer in (0, 1, 5)] == [(0,), (0, 1), (1,)]
    assert {name for name in last["names"] if name.endswith(wq)} == {f"layers.1.{wq}", f"layers.5.{wq}"}
    assert f"layers.3.{wq}" in last["own names"]
    assert last["users"][f"layers.1.{wq}"] == first["users"][f"layers.1.{wq}"] == [1, 2, 3, 4]
    assert "norm.weight" not in first["names"]
    assert sorted({*first["names"], *last["names"]}) == sorted(first["stages"])


def test_a_step_sends_hidden_states_and_their_gradients_once_a_micro_batch_and_adds_shared_gradients_once() -> None:
    for schedule, crossings in (("1f1b", 1), ("interleaved-1f1b", 3), ("zbv", 2)):
        raw = run_file(MIXTURE, "all", schedule)
        for rank in on_ranks(2, "parallel.cases_pipeline:sent", raw):
            assert rank["send"] == rank["recv_"] == 4 * crossings
            # The block that both hold; then how many tokens count, the loss with statistics, the norm.
            assert rank["allreduce_"] == 1 + 3


def test_cuts_go_by_cost_and_fall_on_borders_of_segments_where_that_costs_little() -> None:
    assert cut_by_cost([1.0] * 8, 2, set(range(8))) == [range(4), range(4, 8)]
    assert cut_by_cost([1.0] * 7 + [5.0], 2, set(range(8))) == [range(6), range(6, 8)]
    assert cut_by_cost([1.0] * 20, 2, {0, 9}) == [range(9), range(9, 20)]
    assert cut_by_cost([1.0] * 20, 2, {0, 6}) == [range(10), range(10, 20)]
    assert cut_by_cost([1.0] * 4, 4, {0}) == [range(layer, layer + 1) for layer in range(4)]


def test_a_v_comes_back_to_the_first_rank_and_a_loop_goes_round() -> None:
    assert holders_of(ParallelConfig(pipeline_schedule="zbv"), 3) == [0, 1, 2, 2, 1, 0]
    assert holders_of(ParallelConfig(pipeline_schedule="interleaved-1f1b", pipeline_chunks=3), 2) == [0, 1] * 3
    assert holders_of(ParallelConfig(pipeline_schedule="interleaved-1f1b"), 1) == [0]


@pytest.mark.parametrize(
    ("schedule", "ranks", "batch", "micro", "said"),
    [
        (
            "1f1b",
            4,
            8,
            0,
            "needs 4 micro-batches or more, and 8 samples a rank .* all at once, are 1: set it to 2 or less",
        ),
        ("zbv", 2, 8, 8, "micro_batch_size = 8 are 1: set it to 4 or less, or take gpipe"),
        ("interleaved-1f1b", 4, 8, 1, "2 stages a rank makes 8 stages, more than model.layers = 6"),
        ("interleaved-1f1b", 3, 7, 1, "through 7 micro-batches in 2 rounds.* so that there are 6, say"),
        ("gpipe", 7, 8, 1, "pipeline = 7 is more than model.layers = 6"),
    ],
)
def test_stages_that_do_not_fit_are_refused(schedule: str, ranks: int, batch: int, micro: int, said: str) -> None:
    from tenfold.config.model import ModelConfig

    model = ModelConfig(**{**DENSE, "layers": 6})
    config = ParallelConfig(pipeline_schedule=schedule, pipeline=ranks)
    with pytest.raises(TenfoldError, match=said):
        check(Degrees(pipeline=ranks), model, batch, micro, [16], config)
