"""Stages that begin anew on many ranks: what is exchanged, what it takes in memory, and that nothing of it is seen."""

from __future__ import annotations

from typing import Any

import pytest

from distributed.cases_relayout import WINDOW
from distributed.layouts import LAYOUTS, STAGES, below, between, change_file, run_file
from distributed.test_layouts import assert_equal, assert_same, wanted, without_offload
from ranks import on_ranks

FOUR = [name for name, (ranks, degrees) in LAYOUTS.items() if ranks == 4 and "tensor_grid" not in degrees]
WIDE = {"vocab_size": 997, "vocab_multiple": 1, "hidden": 48, "ffn": 85, "embedding_width": None}
"""Of a dense model: tensors that are large beside the windows in which they are worked on."""


def wide(raw: dict[str, Any]) -> dict[str, Any]:
    return raw | {"model": {**raw["model"], **WIDE}}


@pytest.mark.parametrize("model", ["dense", "mixture"])
def test_where_only_the_sharing_changes_nothing_is_exchanged(model: str) -> None:
    layouts = [name for name in FOUR if model == "mixture" or "expert" not in name]
    raws = [run_file(name, model, "delinked", 1) for name in layouts]
    if model == "dense":
        raws += [wide(raws[0]) | {"offload": below("all", "weights", "moments")}]
    for rank in on_ranks(4, "distributed.cases_relayout:delinked", raws):
        for name, found in zip([*layouts, "with offload"], rank, strict=False):
            assert found["calls"] == {}, (name, found["calls"])
            # No copy of a piece is made but where it comes from below the device, and goes there.
            pieces = 3 * found["piece"] if name == "with offload" else 0
            assert found["extra"] <= pieces + 8 * 4 * WINDOW, name


def test_a_block_that_comes_to_another_pipeline_rank_is_sent_by_the_one_that_has_it() -> None:
    """Layers 0 and 1 are on the first pipeline rank, and share; 2 and 3 on the second. Then the first has 0 and 2."""
    stages = [{"name": "pseudo", "sharing": {"groups": 2}, "until": {"steps": 2}}, {"name": "real", "sharing": "none"}]
    first = {"pipeline": 2, "data_shard": 2}
    raw = between("dense", [first, {**first, "pipeline_schedule": "interleaved-1f1b"}], stages)
    raw["training"]["micro_batch_size"] = 1
    found = [rank[0] for rank in on_ranks(4, "distributed.cases_relayout:delinked", [raw])]
    sent, got = ([rank["calls"][kind] for rank in found] for kind in ("send", "recv_"))
    assert sum(sent) == sum(got)
    assert min(*sent, *got) > 0


def test_no_rank_has_more_of_a_tensor_than_its_pieces() -> None:
    """Between layouts of quite other pieces: besides both models there are two moments of one parameter on their way,
    or one and the piece that is made of them."""
    shards, tensor = {"data_shard": 4}, {"data_shard": 2, "tensor": 2}
    changes = [[shards, tensor], [tensor, shards], [shards, {**shards, "reshard": "step"}]]
    raws = [wide(between("dense", change, STAGES["delinked"][::2])) for change in changes]
    raws += [raw | {"offload": below("all", "weights", "moments")} for raw in raws[:2]]
    for rank in on_ranks(4, "distributed.cases_relayout:delinked", raws):
        for number, found in enumerate(rank):
            assert 3.9 * found["piece"] < found["whole"], number
            pieces = (2, 2, 0, 3, 3)[number]
            assert found["extra"] <= pieces * found["piece"] + 12 * 4 * WINDOW, number
            assert (found["sent"] > 0) == (number != 2), number


RELAXED = [
    {"name": "relaxed", "sharing": "all", "rank": 2, "until": {"steps": 2}},
    {"name": "half", "sharing": {"groups": 2}, "rank": 2, "until": {"steps": 4}},
    {"name": "real", "sharing": "none"},
]
SETS = [
    {"name": "sets", "sharing": "all", "experts": "layer", "until": {"steps": 2}},
    {"name": "prototypes", "sharing": {"groups": 2}, "experts": "prototype", "until": {"steps": 4}},
    {"name": "real", "sharing": "none"},
]
PARTS = [
    {"name": "pseudo", "sharing": "all", "until": {"steps": 2}},
    {"name": "parts", "sharing": "all", "parts": ["attention"], "until": {"steps": 4}},
    {"name": "real", "sharing": "none"},
]
KINDS: dict[str, dict[str, Any]] = {
    "differences, shards to tensor x pipeline": between(
        "dense", [{"data_shard": 4}, {"data_shard": 2, "tensor": 2}, {"tensor": 2, "pipeline": 2}], RELAXED
    ),
    "sets of experts, shards to experts x tensor": between(
        "mixture",
        [{"data_shard": 4}, {"data_shard": 2, "tensor": 2}, {"data_shard": 2, "expert": 2, "tensor": 2}],
        SETS,
    ),
    "sets of experts, pipeline to experts": between(
        "mixture",
        [{"data_shard": 2, "pipeline": 2}, {"tensor": 2, "pipeline": 2}, {"data_shard": 4, "expert": 4}],
        SETS,
    ),
    "parts, tensor to shards to pipeline": between(
        "mixture", [{"tensor": 4}, {"data_shard": 4, "expert": 2}, {"pipeline": 4}], PARTS
    ),
}


QUICK = "sets of experts, shards to experts x tensor"


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == QUICK else pytest.mark.slow) for kind in KINDS]
)
def test_what_is_carried_is_as_in_one_process_whatever_lies_otherwise(kind: str) -> None:
    raw = KINDS[kind]
    found = on_ranks(4, "distributed.cases:many", [raw])
    assert not any("refused" in rank[0] for rank in found), found[0][0]
    alone = {**raw, "stages": [{**stage, "parallel": {"data_shard": 1}} for stage in raw["stages"]]}
    assert_equal([rank[0] for rank in found], wanted(alone), kind)


@pytest.mark.slow
def test_where_state_is_on_disk_stages_lie_otherwise_too() -> None:
    raws = [
        change_file("shards, then tensor, then pipeline") | {"offload": below("all", "weights", "moments")},
        change_file("replicas, then experts x tensor, then experts x pipeline") | {"offload": below("all", "moments")},
        {**KINDS["differences, shards to tensor x pipeline"], "offload": below("every 2", "weights", "moments")},
    ]
    found = on_ranks(4, "distributed.cases:many", [*raws, *map(without_offload, raws)])
    for number in range(len(raws)):
        assert not any("refused" in rank[number] for rank in found), found[0][number]
        assert_same([rank[number] for rank in found], [rank[len(raws) + number] for rank in found], str(number))
