"""What was counted beside what was planned: equal where the planner is right, and told where it is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from distributed.layouts import LAYOUTS, run_file
from tenfold.config.load import build
from tenfold.config.run import RunConfig
from tenfold.planning.memory import RankMemory, memory_of
from tenfold.planning.stages import plan_stages
from tenfold.planning.terms import Candidate
from tenfold.planning.work import work_of
from tenfold.training.dry_run import Row, dry_run, rows_of
from tenfold.training.fake_ranks import Counted
from tenfold.training.tally import Exchange
from training.test_fake_ranks import candidate_of


def of(layout: str, model: str) -> tuple[RunConfig, Any, Candidate]:
    """A run of one stage, whose tensors are large beside the pages that state is laid out in."""
    raw = run_file(layout, model, "real", 2)
    raw["model"] = {**raw["model"], "hidden": 192, "ffn": 500, "vocab_size": 800, "embedding_width": None}
    raw["data"]["sequence_length"] = 64
    config = build(RunConfig, raw, "run.toml")
    (stage,) = plan_stages(config)
    return config, stage, candidate_of(config, stage, LAYOUTS[layout][0])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["shard", "replicate x shard", "tensor x context", "pipeline"])
def test_state_activations_and_exchanges_are_as_planned(layout: str) -> None:
    config, stage, candidate = of(layout, "dense")
    found = dry_run(config, [stage], [candidate], "cpu")
    exact = [row for row in found.rows if not row.what.startswith("peak")]
    assert len(exact) > 6
    assert not [row for row in exact if not row.agrees]


def planned_as_counted() -> tuple[Counted, RankMemory, list[Any], Candidate]:
    """A rank of which exactly that is counted which is planned."""
    config, stage, candidate = of("shard", "dense")
    (memory,), work = memory_of(config, stage, candidate, device="cpu"), work_of(config, stage, candidate)
    exchanges: dict[Exchange, int] = {}
    for item, count in work[0].items():
        if hasattr(item, "axis"):
            exchange = Exchange(item.kind, 2, 1, round(item.bytes))
            exchanges[exchange] = exchanges.get(exchange, 0) + count
    return Counted(0, "real", 0, 0, dict(memory.items), dict(memory.peaks), exchanges), memory, work, candidate


def apart(counted: Counted, memory: RankMemory, work: list[Any], candidate: Candidate) -> list[Row]:
    return [row for row in rows_of(counted, memory, work[0], candidate) if not row.agrees]


def test_what_is_equal_is_no_disagreement() -> None:
    counted, memory, work, candidate = planned_as_counted()
    assert apart(counted, memory, work, candidate) == []


def test_a_number_more_than_three_hundredths_apart_is_told_with_both() -> None:
    counted, memory, work, candidate = planned_as_counted()
    activations = memory.items["activations"]
    for factor, told in ((1.02, 0), (1.05, 1)):
        other = replace(memory, items={**memory.items, "activations": round(activations * factor)})
        rows = apart(counted, other, work, candidate)
        assert len(rows) == told
    assert (rows[0].counted, rows[0].planned, rows[0].unit) == (activations, round(activations * 1.05), "bytes")


def test_an_exchange_that_is_not_planned_is_told_and_one_that_is_not_made() -> None:
    counted, memory, work, candidate = planned_as_counted()
    more = {**counted.exchanges, Exchange("all_to_all", 2, 1, 2**20): 3}
    rows = apart(replace(counted, exchanges=more), memory, work, candidate)
    assert [(row.what, row.counted, row.planned) for row in rows] == [
        ("all_to_all over 2 ranks", 3 * 2**20, 0),
        ("calls of all_to_all over 2 ranks", 3, 0),
    ]
    fewer = {each: count for each, count in counted.exchanges.items() if each.kind != "reduce_scatter"}
    rows = apart(replace(counted, exchanges=fewer), memory, work, candidate)
    assert {row.what for row in rows} == {"reduce_scatter over 2 ranks", "calls of reduce_scatter over 2 ranks"}
    assert [row.counted for row in rows] == [0, 0]
