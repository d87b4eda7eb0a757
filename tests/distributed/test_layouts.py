"""Whatever the layout: loss, gradient norm and weights of five steps are those of one process."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch

from distributed.cases import steps
from distributed.layouts import LAYOUTS, entries, run_file
from ranks import on_ranks


@functools.cache
def on_one_rank(raw: str) -> dict[str, Any]:
    return steps(json.loads(raw), 1)


def wanted(raw: dict[str, Any]) -> dict[str, Any]:
    """One process on the same run file; how it cuts the batch does not matter, and is left to others to show."""
    training = {**raw["training"], "micro_batch_size": 0}
    alone = {key: value for key, value in raw.items() if key != "parallel"} | {"training": training}
    return on_one_rank(json.dumps(alone))


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=pytest.mark.slow if ranks > 4 else ()) for name, (ranks, _) in LAYOUTS.items()],
)
def test_a_layout_trains_as_one_process_does(layout: str) -> None:
    ranks, _ = LAYOUTS[layout]
    listed = entries(layout)
    raws = [run_file(layout, *entry) for entry in listed]
    found = on_ranks(ranks, "distributed.cases:many", raws)
    for number, (entry, raw) in enumerate(zip(listed, raws, strict=True)):
        want, said = wanted(raw), f"{layout}: {entry}"
        for rank in found:
            assert rank[number]["losses"] == pytest.approx(want["losses"], abs=4e-6), said
            assert rank[number]["norms"] == pytest.approx(want["norms"], rel=2e-5), said
            for mine, theirs in zip(rank[number]["statistics"], want["statistics"], strict=True):
                torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-5, msg=said)
        weights = found[0][number]["weights"]
        assert weights.keys() == want["weights"].keys()
        for name, weight in weights.items():
            error = (weight - want["weights"][name]).abs().max().item()
            assert error < 1e-5, f"{said}: {name} is off by {error}"
