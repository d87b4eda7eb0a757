"""Whatever the layout: loss, gradient norm and weights of five steps are those of one process."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.cases import steps
from distributed.layouts import (
    CHANGES,
    LAYOUTS,
    LOOSER,
    REFUSED,
    SINGLE,
    change_file,
    entries,
    feature_file,
    features,
    matrix,
    offload_file,
    run_file,
    slow,
)
from ranks import on_ranks


@functools.cache
def on_one_rank(raw: str) -> dict[str, Any]:
    return steps(json.loads(raw), 1)


def without_offload(raw: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key != "offload"}


def wanted(raw: dict[str, Any]) -> dict[str, Any]:
    """One process on the same run file; how it cuts the batch does not matter, and is left to others to show."""
    training = {**raw["training"], "micro_batch_size": 0}
    alone = {key: value for key, value in without_offload(raw).items() if key != "parallel"} | {"training": training}
    return on_one_rank(json.dumps(alone))


def assert_equal(found: list[dict[str, Any]], want: dict[str, Any], said: str, looser: float = 1.0) -> None:
    """What every rank says of a run is what one process does."""
    for rank in found:
        assert rank["losses"] == pytest.approx(want["losses"], abs=4e-6 * looser), said
        assert rank["norms"] == pytest.approx(want["norms"], rel=2e-5 * looser), said
        for mine, theirs in zip(rank["statistics"], want["statistics"], strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-5, msg=said)
    weights = found[0]["weights"]
    assert weights.keys() == want["weights"].keys()
    for name, weight in weights.items():
        error = (weight - want["weights"][name]).abs().max().item()
        assert error < 1e-5 * looser, f"{said}: {name} is off by {error}"


def assert_same(found: list[dict[str, Any]], want: list[dict[str, Any]], said: str) -> None:
    """Every rank says of a run with offload, to the last bit, what it says of the same without; and there was some."""
    assert any(rank["below"] for rank in found), said
    for mine, theirs in zip(found, want, strict=True):
        assert not theirs["below"], said
        assert mine["losses"] == theirs["losses"], said
        assert mine["norms"] == theirs["norms"], said
        assert all(map(torch.equal, mine["statistics"], theirs["statistics"])), said
        assert mine["weights"].keys() == theirs["weights"].keys()
        for name, weight in mine["weights"].items():
            assert torch.equal(weight, theirs["weights"][name]), f"{said}: {name}"


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=pytest.mark.slow if slow(name) else ()) for name in LAYOUTS],
)
def test_a_layout_trains_as_one_process_does(layout: str) -> None:
    ranks, _ = LAYOUTS[layout]
    listed = entries(layout)
    raws = [run_file(layout, *entry) for entry in listed]
    found = on_ranks(ranks, "distributed.cases:many", raws)
    for number, (entry, raw) in enumerate(zip(listed, raws, strict=True)):
        assert_equal([rank[number] for rank in found], wanted(raw), f"{layout}: {entry}")


@pytest.mark.parametrize("layout", SINGLE)
def test_what_a_run_may_ask_works_along_every_axis_or_is_refused(layout: str) -> None:
    ranks, _ = LAYOUTS[layout]
    listed = features(layout)
    raws = [feature_file(layout, feature) for feature in listed]
    offloaded = [number for number, raw in enumerate(raws) if "offload" in raw]
    plain = [without_offload(raws[number]) for number in offloaded]
    found = on_ranks(ranks, "distributed.cases:many", raws + plain)
    for number, (feature, raw) in enumerate(zip(listed, raws, strict=True)):
        results = [rank[number] for rank in found]
        refused = REFUSED.get((feature, layout))
        if refused is None:
            assert not any("refused" in result for result in results), (feature, results)
            assert_equal(results, wanted(raw), f"{layout}: {feature}", LOOSER.get(feature, 1.0))
        else:
            assert all(refused in result["refused"] for result in results), (feature, results)
        if "offload" in raw and refused is None:
            same = [rank[len(raws) + offloaded.index(number)] for rank in found]
            assert_same(results, same, f"{layout}: {feature}")


@pytest.mark.slow
def test_offload_changes_nothing_on_four_ranks() -> None:
    raws = [
        offload_file("replicate x shard", "dense", "all", "weights", "gradients", "moments"),
        offload_file("shard x context", "dense", "all", "weights", "gradients", "moments"),  # one of 4 shards is empty
        offload_file("shard x expert", "mixture", "all", "weights", "gradients", "moments"),
        offload_file("tensor x expert", "mixture", "every 2", "weights", "gradients", "moments"),
        offload_file("tensor x pipeline", "dense", "all", "weights", "gradients", "moments"),  # ends are tied
        offload_file("tensor x pipeline", "mixture", "all", "gradients", schedule="interleaved-1f1b"),
        offload_file("tensor x pipeline", "dense", "all", "gradients", schedule="terapipe"),
        offload_file("expert x pipeline", "mixture", "2-3", "weights", "gradients", "moments"),
    ]
    found = on_ranks(4, "distributed.cases:many", [*raws, *map(without_offload, raws)])
    for number, raw in enumerate(raws):
        said = str(raw["parallel"])
        assert not any("refused" in rank[number] for rank in found), (said, found[0][number])
        assert_same([rank[number] for rank in found], [rank[len(raws) + number] for rank in found], said)
    # Rules go by numbers in the whole model.
    assert [bool(rank[len(raws) - 1]["below"]) for rank in found] == [False, False, True, True]


def test_a_stage_may_lie_otherwise_than_the_one_before() -> None:
    raws = {change: change_file(change) for change in CHANGES}
    found = on_ranks(4, "distributed.cases:many", list(raws.values()))
    for number, (change, raw) in enumerate(raws.items()):
        alone = {**raw, "stages": [{**stage, "parallel": {"data_shard": 1}} for stage in raw["stages"]]}
        assert_equal([rank[number] for rank in found], wanted(alone), change)


def test_the_page_has_the_tables_of_these_tests() -> None:
    page = Path(__file__).parents[2] / "docs" / "parallel.md"
    assert matrix() in page.read_text(encoding="utf-8")
