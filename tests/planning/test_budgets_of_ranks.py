"""A budget on ranks: state leaves, and the run is the one that keeps it."""

from __future__ import annotations

from typing import Any

import torch

from planning.test_memory import RANKED, SHARED, run_file
from ranks import on_ranks

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "shards": (run_file(RANKED, micro_batch_size=2, recompute="full"), {"data_shard": 2}),
    "tensor": (run_file(RANKED, micro_batch_size=2, recompute="full"), {"tensor": 2}),
    "pipeline, shared": (run_file(RANKED, SHARED, micro_batch_size=2, recompute="full"), {"pipeline": 2}),
}


def test_a_budget_on_ranks_changes_nothing() -> None:
    one = {"data_replicate": 1, "data_shard": 1}
    raws = [raw | {"parallel": one | degrees} for raw, degrees in LAYOUTS.values()]
    for answers in on_ranks(2, "planning.cases_memory:within_budgets", raws):
        for name, told in zip(LAYOUTS, answers, strict=True):
            here, away = told["here"], told["away"]
            assert not here["below"], name
            assert away["below"], name
            assert away["said"] == here["said"], name
            assert all(torch.equal(away["weights"][key], tensor) for key, tensor in here["weights"].items()), name
