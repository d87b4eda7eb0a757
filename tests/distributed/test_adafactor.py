"""Adafactor's sums are whole wherever ranks have pieces of rows, of columns, or of a stack's matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distributed.cases_adafactor import moved
from distributed.layouts import change_file, offload_file, run_file
from distributed.test_layouts import assert_equal, assert_same, wanted, without_offload
from ranks import on_ranks

ADAFACTOR = {"optim": {"name": "adafactor", "lr": 0.03}}


def test_on_four_ranks_it_trains_as_on_one_and_goes_on_in_any_layout() -> None:
    # Of 4 shards of the embedding's 5 columns one is empty; of a grid both dimensions of a matrix are split.
    runs = [
        run_file("tensor grid", "dense", "pseudo", 1),
        run_file("tensor x expert", "mixture", "real", 1),
        change_file("shards, then tensor, then pipeline"),
        change_file("replicas, then experts x tensor, then experts x pipeline"),
        offload_file("shard x expert", "mixture", "all", "weights", "gradients", "moments"),
        offload_file("shard x tensor", "dense", "every 2", "weights", "moments"),
    ]
    runs = [raw | ADAFACTOR for raw in runs]
    offloaded = [raw for raw in runs if "offload" in raw]
    pairs = [("shard x tensor", "tensor grid", "dense"), ("tensor x expert", "expert x pipeline", "mixture")]
    moves = [[run_file(layout, model, "real", 1) | ADAFACTOR for layout in pair] for *pair, model in pairs]
    found = on_ranks(4, "distributed.cases_adafactor:all_of", [*runs, *map(without_offload, offloaded)], moves)
    for number, raw in enumerate(runs):
        said, ranks = str(raw["parallel"]), [rank["runs"][number] for rank in found]
        assert not any("refused" in rank for rank in ranks), (said, ranks)
        assert_equal(ranks, wanted(one_rank(raw)), said)
        if "offload" in raw:
            at = len(runs) + offloaded.index(raw)
            assert_same(ranks, [rank["runs"][at] for rank in found], said)
    for number, raws in enumerate(moves):
        want = moved([one_rank(raw) for raw in raws], 1)
        for rank in found:
            mine = rank["moved"][number]
            assert mine["losses"] == pytest.approx(want["losses"], abs=4e-6)
            for kind in ("weights", "state"):
                assert mine[kind].keys() == want[kind].keys()
                for name, tensor in mine[kind].items():
                    torch.testing.assert_close(tensor, want[kind][name], atol=1e-5, rtol=1e-4, msg=name)


def one_rank(raw: dict[str, Any]) -> dict[str, Any]:
    """The run file, for one process."""
    alone = {"parallel": {"data_shard": 1}}
    stages = [{**stage, **alone} if "parallel" in stage else stage for stage in raw["stages"]]
    return without_offload(raw) | alone | {"stages": stages}
