"""A rank that nobody answers holds, has at once and exchanges what a real one does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from distributed.layouts import LAYOUTS, STAGES, between, run_file
from ranks import on_ranks
from tenfold.config.load import build
from tenfold.config.run import RunConfig
from tenfold.planning.stages import Stage, plan_stages
from tenfold.planning.terms import Candidate
from tenfold.training.fake_ranks import Counted, rehearse
from tenfold.training.setup import degrees_of_stages

DENSE_ONLY = ("pipeline by tokens", "tensor grid")
QUICK = ("shard", "pipeline")
AXES = ("shard", "replicate", "tensor", "context", "pipeline", "expert", "pipeline by tokens", "replicate x shard")
LAYING = [
    pytest.param(layout, marks=[] if layout in QUICK else pytest.mark.slow)
    for layout in (*AXES, "tensor x expert", "tensor grid")
]
PASSES = {"pseudo": 1, "real": 2}
ADAFACTOR = {"shard": "dense", "tensor grid": "dense", "tensor x expert": "mixture"}
"""Layouts on which a model trains with Adafactor, too."""


def models_of(layout: str) -> list[str]:
    return [
        model
        for model in ("dense", "mixture")
        if (model == "mixture") >= ("expert" in layout) and not (model == "mixture" and layout in DENSE_ONLY)
    ]


def candidate_of(config: RunConfig, stage: Stage, world: int) -> Candidate:
    """The way that a run file says."""
    (degrees,), training, asked = degrees_of_stages(config, [stage], world), config.training, config.parallel
    return Candidate(
        degrees,
        training.micro_batch_size,
        training.recompute,
        training.recompute_layers,
        asked.pipeline_schedule,
        asked.pipeline_chunks,
        asked.pipeline_slices,
        asked.reshard,
        asked.gather,
    )


def calls(found: Counted) -> Counter[tuple[str, int]]:
    made: Counter[tuple[str, int]] = Counter()
    for exchange, count in found.exchanges.items():
        made[exchange.kind, exchange.bytes] += count
    return made


@pytest.mark.parametrize("layout", LAYING)
def test_a_fake_rank_is_as_a_real_one(layout: str) -> None:
    world, models = LAYOUTS[layout][0], models_of(layout)
    raws = [[run_file(layout, model, *each) for each in PASSES.items()] for model in models]
    if layout in ADAFACTOR:
        models.append(ADAFACTOR[layout])
        optim = {"optim": {"name": "adafactor"}}
        raws.append([run_file(layout, models[-1], *each) | optim for each in PASSES.items()])
    real = on_ranks(world, "training.cases_fake_ranks:real", [raw for each in raws for raw in each])
    for at, (model, mine) in enumerate(zip(models, raws, strict=True)):
        first = at * len(PASSES)
        assert_as_real(layout, model, mine, [rank[first : first + len(PASSES)] for rank in real])


def assert_as_real(layout: str, model: str, raws: list[dict[str, Any]], real: list[list[dict[str, Any]]]) -> None:
    """Fake ranks that go through the runs of `raws`, one a stage, are as `real` ones were, by rank and stage."""
    world = len(real)
    configs = [build(RunConfig, raw, "run.toml") for raw in raws]
    stages = [plan_stages(config)[0] for config in configs]
    found = [candidate_of(*each, world) for each in zip(configs, stages, strict=True)]
    for fake in rehearse(configs[0], stages, found, "cpu", delinking=False):
        number, said = list(PASSES).index(fake.stage), (model, fake.stage, fake.rank)
        want = real[fake.rank][number]
        # Padding of shards is memory too, but no gradient is padded.
        for kind in ("weights", "moments", "gradients"):
            assert fake.items[kind] == want[kind], (*said, kind)
        if "expert" not in layout:
            assert calls(fake) == want["calls"], said
            for moment, most in want["peaks"].items():
                assert fake.peaks[moment] == pytest.approx(most, rel=0.01), (*said, moment)
            continue
        # Which rows go where is another matter on real ranks: how often they go is not, nor how many there are of all.
        assert times(calls(fake)) == times(want["calls"]), said
        if layout == "expert":
            everywhere = [rank[number]["calls"] for rank in real]
            assert world * bytes_sent(calls(fake)) == sum(bytes_sent(each) for each in everywhere), said


CHANGES: list[list[dict[str, int]]] = [
    [{"data_shard": 4}, {"data_shard": 4}],
    [{"data_shard": 4}, {"data_shard": 2, "tensor": 2}],
    [{"data_shard": 2, "pipeline": 2}, {"pipeline": 4}],
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "optimizer"), [*((change, "adamw") for change in CHANGES), (CHANGES[1], "adafactor")], ids=str
)
def test_a_delinking_exchanges_as_on_real_ranks(change: list[dict[str, int]], optimizer: str) -> None:
    raw = between("dense", change, STAGES["delinked"][::2]) | {"optim": {"name": optimizer}}
    raw["training"]["micro_batch_size"] = 1
    real = on_ranks(4, "training.cases_fake_ranks:delinked", raw)
    config = build(RunConfig, raw, "run.toml")
    stages = plan_stages(config)
    found = [candidate_of(config, stage, 4) for stage in stages]
    for fake in rehearse(config, stages, found, "cpu"):
        # A new optimizer's first state comes of a step on zeros, in which Adafactor's sums are made whole.
        sent = {each: count for each, count in fake.delinking.items() if each.kind == "send"}
        made = Counter({(each.kind, each.bytes): count for each, count in sent.items()})
        assert dict(made) == ({} if fake.stage == "pseudo" else real[fake.rank])
        if fake.stage == "real":  # both models are there
            assert fake.peaks["delinking"] > fake.items["weights"] + fake.items["moments"]
    assert any(real) == (change[0] != change[1])


def times(made: Mapping[tuple[str, int], int]) -> Counter[str]:
    return Counter({kind: sum(n for (each, _), n in made.items() if each == kind) for kind, _ in made})


def bytes_sent(made: Mapping[tuple[str, int], int]) -> int:
    return sum(size * count for (kind, size), count in made.items() if kind == "all_to_all")
