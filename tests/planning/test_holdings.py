"""What ranks hold, by arithmetic, is what real ranks hold."""

from __future__ import annotations

from typing import Any

import pytest

from distributed.layouts import LAYOUTS, run_file
from ranks import on_ranks
from tenfold.config.load import build
from tenfold.config.run import RunConfig
from tenfold.parallel.mesh import Degrees
from tenfold.planning.holdings import Holdings
from tenfold.planning.stages import plan_stages
from tenfold.planning.terms import Candidate

SHARINGS: list[dict[str, Any]] = [
    {"sharing": "none"},
    {"sharing": "all"},
    {"sharing": {"groups": 2}},
    {"sharing": {"cycle": 2}},
    {"sharing": "all", "parts": ["attention"]},
    {"sharing": "all", "rank": 1},
]


def candidate_of(degrees: dict[str, Any]) -> Candidate:
    mine = dict(degrees)
    schedule, slices = mine.pop("pipeline_schedule", "1f1b"), mine.pop("pipeline_slices", 4)
    grid = mine.pop("tensor_grid", False)
    return Candidate(Degrees(**mine, grid=grid), 1, schedule=schedule, slices=slices)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_rank_holds_what_is_said(world: int) -> None:
    cases: list[tuple[Candidate, dict[str, Any]]] = []
    for layout, (ranks, degrees) in LAYOUTS.items():
        if ranks != world:
            continue
        unfit = "dense" if "expert" in layout else "mixture" if "grid" in layout or "tokens" in layout else ""
        for model in ("dense", "mixture"):
            for sharing in SHARINGS if model != unfit else ():
                raw = run_file(layout, model, "real", 1) | {"stages": [sharing]}
                cases.append((candidate_of(degrees), raw))
    answers = on_ranks(world, "planning.cases_holdings:held", [raw for _, raw in cases])
    for number, (candidate, raw) in enumerate(cases):
        config = build(RunConfig, raw, "run.toml")
        (stage,) = plan_stages(config)
        holdings = Holdings(config, stage.sharing, candidate)
        most = [0] * candidate.degrees.pipeline
        for answer in answers:
            real = answer[number]
            place, context = real["place"], candidate.degrees.context
            shard = place["data_shard"] * context + place["context"]
            found = holdings.at(place["pipeline"], place["tensor"], shard)
            assert [(each.name, each.shape, each.room) for each in found] == real["held"], raw
            groups = sorted((sorted(group.names), group.elements) for group in holdings.groups(found))
            assert groups == real["groups"], raw
            most[place["pipeline"]] = max(most[place["pipeline"]], sum(room for *_, room in real["held"]))
        for pipeline, elements in enumerate(most):
            assert sum(each.room for each in holdings.most(pipeline)) == elements
