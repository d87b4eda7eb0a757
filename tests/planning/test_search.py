"""The search of plans: it finds what looking at everything finds, keeps what is fixed, and tells what is lacking."""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenfold.config.load import build
from tenfold.config.run import RunConfig
from tenfold.errors import TenfoldError
from tenfold.parallel.mesh import Degrees, check
from tenfold.planning.candidates import MODES, RESHARDS, Choices, beside, layouts, ways
from tenfold.planning.cluster import Cluster, load_cluster
from tenfold.planning.holdings import parallel_of
from tenfold.planning.memory import memory_of
from tenfold.planning.plans import Alternative, Plan
from tenfold.planning.search import plan, table
from tenfold.planning.stages import plan_stages
from tenfold.planning.step import play_step
from tenfold.planning.terms import Candidate

MIB = 2**20
DENSE = {"vocab_size": 256, "layers": 4, "hidden": 64, "heads": 4, "ffn": 128}
MIXTURE = {**DENSE, "moe": {"experts": 8, "prototypes": 2, "top_k": 1, "ffn": 64}}


def run(model: dict[str, Any] = DENSE, **sections: Any) -> RunConfig:
    raw: dict[str, Any] = {
        "model": model,
        "data": {"sequence_length": 64},
        "training": {"steps": 10, "batch_size": 8, "precision": "bf16"},
    }
    for section, given_there in sections.items():
        there = raw.get(section, {})
        raw[section] = {**there, **given_there} if isinstance(given_there, dict) else given_there
    return build(RunConfig, raw, "run.toml")


def cluster(shape: str, device: int, host: int = 0, disk: int = 0, **more: Any) -> Cluster:
    """H100s with so many bytes of device, host and disk for a rank, and nothing reserved."""
    found = load_cluster(f"{shape}:h100")
    ranks = found.per_node
    memory = {"memory_bytes": device, "reserve_bytes": 0, "reserve_share": 0.0, **more}
    tiers = {
        "host_memory_bytes": max(1, host * ranks),
        "host_reserve_share": 0.0,
        "disk_bytes": disk * ranks,
        "disk_read_bytes_per_second": 4e9,
        "disk_write_bytes_per_second": 2e9,
    }
    if not host:
        tiers |= {"host_read_bytes_per_second": 0.0, "host_write_bytes_per_second": 0.0}
    return found.model_copy(update={"accelerator": found.accelerator.model_copy(update=memory), **tiers})


PLENTY = 2**36


def everything(config: RunConfig, ranks: int) -> list[Candidate]:
    """All ways through a run's one stage, the slow way."""
    (stage,) = plan_stages(config)
    found = []
    numbers = [each for each in range(1, ranks + 1) if ranks % each == 0]
    schedules = ["gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv", "terapipe"]
    for replicate, shard, tensor, context, pipeline, expert in itertools.product(numbers, repeat=6):
        degrees = Degrees(replicate, shard, tensor, context, pipeline, expert)
        if degrees.ranks != ranks:
            continue
        for micro, schedule, mode, reshard in itertools.product((1, 2, 4, 8), schedules, MODES, RESHARDS):
            candidate = Candidate(degrees, micro, mode, None, schedule, reshard=reshard)  # type: ignore[arg-type]
            if pipeline == 1 and schedule != "1f1b":
                continue
            with suppress(TenfoldError):
                check(degrees, config.model, stage.batch_size, micro, stage.lengths, parallel_of(config, candidate))
                found.append(candidate)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("model", "device"), [(DENSE, PLENTY), (DENSE, 3 * MIB), (MIXTURE, PLENTY)])
def test_nothing_that_fits_is_faster_than_what_is_found(model: dict[str, Any], device: int) -> None:
    config, there = run(model), cluster("2x2", device)
    (stage,) = plan_stages(config)
    fastest = float("inf")
    for candidate in everything(config, 4):
        if max(each.needed for each in memory_of(config, stage, candidate)) <= there.budgets(candidate.degrees).device:
            fastest = min(fastest, play_step(config, stage, candidate, there).seconds)
    (found,) = plan(config, there).stages
    assert found.step.seconds <= fastest * (1 + 1e-9)
    assert max(each.needed for each in found.memory) <= device
    assert [*plan(config, there).stages] == [found]


def test_layouts_and_ways_fit_and_go_by_the_rules() -> None:
    config = run(MIXTURE, training={"batch_size": 64})
    (stage,) = plan_stages(config)
    choices = Choices.of(config, stage)
    found = layouts(config, stage, choices, 16, 4)
    assert len(found) > 5
    for degrees in [*found, *(other for each in found for other in beside(config, choices, each, 4))]:
        assert degrees.ranks == 16
        assert degrees.tensor <= 4
    assert {(each.data_replicate, each.data_shard) for each in found if each.tensor == each.pipeline == 1} == {
        (1, 16),
        (16, 1),
    }
    assert [(each.data_replicate, each.data_shard) for each in beside(config, choices, found[0], 4)] == [
        (4, 4),
        (16, 1),
    ]
    for degrees in found:
        for way in ways(config, stage, choices, degrees):
            parallel = parallel_of(config, way)
            check(degrees, config.model, stage.batch_size, way.micro_batch_size, stage.lengths, parallel)


def test_what_the_run_file_names_is_kept_and_what_it_leaves_out_is_open() -> None:
    parallel = {"tensor": 2, "data_shard": "auto", "pipeline_schedule": "gpipe", "reshard": "backward"}
    own = {"name": "real", "micro_batch_size": 2, "recompute": "full", "parallel": {"pipeline": 2}}
    config = run(parallel=parallel, stages=[{"name": "pseudo", "sharing": "all", "until": {"steps": 5}}, own])
    there = cluster("1x8", PLENTY)
    pseudo, real = plan(config, there).stages
    for stage in (pseudo, real):
        for row in stage.table:
            assert row.candidate.degrees.tensor == 2
            assert row.candidate.degrees.ranks == 8
            assert row.candidate.schedule == "gpipe"
            assert row.candidate.reshard == "backward" or row.candidate.degrees.shard == 1
    assert {row.candidate.degrees.pipeline for row in real.table} == {2}
    assert {row.candidate.micro_batch_size for row in real.table} == {2}
    assert {row.candidate.recompute for row in real.table} == {"full"}
    assert pseudo.candidate.recompute == "none"


def test_what_lacks_memory_is_told_in_words() -> None:
    found = plan(run(), cluster("1x2", MIB))
    assert not found.stages
    (unfit,) = found.unfit
    assert unfit.rejected
    assert [each.over for each in unfit.rejected] == sorted(each.over for each in unfit.rejected)
    for each in unfit.rejected:
        assert "memory" in each.why
        assert "of 0.0010 GiB" in each.why
        assert each.over > 1


def test_recompute_is_what_memory_asks_for_and_no_more() -> None:
    config = run(training={"batch_size": 2, "micro_batch_size": 2})
    (stage,) = plan_stages(config)
    one = Candidate(Degrees(), 2)
    keeps, full = (
        max(each.needed for each in memory_of(config, stage, Candidate(Degrees(), 2, mode)))
        for mode in ("none", "full")
    )
    assert full < keeps
    (found,) = plan(config, cluster("1x1", keeps)).stages
    assert found.candidate == one
    (found,) = plan(config, cluster("1x1", keeps - 1)).stages
    assert found.candidate.recompute != "none"
    assert max(each.needed for each in found.memory) <= keeps - 1


def test_what_does_not_fit_leaves_the_device_and_keeps_every_budget() -> None:
    deep = {**DENSE, "layers": 12}
    config = run(deep, training={"batch_size": 2, "micro_batch_size": 1})
    (stage,) = plan_stages(config)
    needed = max(each.needed for each in memory_of(config, stage, Candidate(Degrees(), 1, "full")))
    state = sum(part.bytes["moments"] for part in memory_of(config, stage, Candidate(Degrees(), 1))[0].parts)
    there = cluster("1x1", needed - state // 2, host=state // 4, disk=PLENTY)
    (found,) = plan(config, there).stages
    (memory,), (placement,) = found.memory, found.placements
    tiers = {placement.tier(part.name, kind) for part in memory.parts for kind in placement.below(part)}
    assert "disk" in tiers
    assert memory.needed <= needed - state // 2
    assert memory.tiers["host"] <= state // 4
    assert found.table[0].disk_bytes == memory.tiers["disk"] > 0
    nothing = plan(config, cluster("1x1", needed - state // 2))
    assert nothing.unfit
    off = run(deep, training={"batch_size": 2, "micro_batch_size": 1}, stages=[{"offload": "off"}])
    assert plan(off, there).unfit


def test_a_delinking_counts_the_state_that_is_laid_out_anew() -> None:
    stages = [{"name": "pseudo", "sharing": "all", "until": {"steps": 4}}, {"name": "real"}]
    found = plan(run(stages=stages, parallel={"data_shard": 2}), cluster("2x1", PLENTY, host=PLENTY))
    pseudo, real = found.stages
    assert pseudo.delinking is None
    assert real.delinking is not None
    assert {*real.delinking.shares} == {"copying"}  # of ranks that keep their shards each has what it needs
    assert real.delinking.bytes["copying"] >= real.memory[0].items["weights"] + real.memory[0].items["moments"]
    assert real.delinking.seconds == pytest.approx(sum(real.delinking.shares.values()))
    assert found.seconds == pytest.approx(4 * pseudo.step.seconds + 6 * real.step.seconds + real.delinking.seconds)
    alone = plan(run(stages=stages), cluster("1x1", PLENTY)).stages[1]
    assert alone.delinking is not None
    assert {*alone.delinking.shares} == {"copying"}


def test_energy_and_cost_are_what_the_cluster_says() -> None:
    config, there = run(), cluster("1x2", PLENTY, watts=700.0, idle_watts=100.0, price_per_hour=3.6)
    for objective in ("energy", "cost"):
        found: Plan = plan(config, there, objective)  # type: ignore[arg-type]
        (stage,) = found.stages
        assert stage.cost == pytest.approx(2 * stage.seconds / 3600 * 3.6)
        assert stage.joules is not None
        assert 2 * 100 * stage.seconds < stage.joules <= 2 * 700 * stage.seconds
    with pytest.raises(TenfoldError, match="add watts=N"):
        plan(config, cluster("1x2", PLENTY, watts=0.0), "energy")
    with pytest.raises(TenfoldError, match="add price=N"):
        plan(config, cluster("1x2", PLENTY, price_per_hour=None), "cost")


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (run(parallel={"data_shard": 3}), "no degrees make the 4 ranks of the cluster.*data_shard 3"),
        (run(parallel={"tensor": 4}, model={**DENSE, "heads": 2, "hidden": 64}), "tensor = 4 is more than model.heads"),
        (run(model={key: each for key, each in DENSE.items() if key != "vocab_size"}), "needs model.vocab_size"),
    ],
)
def test_what_cannot_be_on_a_cluster_is_told(config: RunConfig, told: str) -> None:
    with pytest.raises(TenfoldError, match=told):
        plan(config, cluster("1x4", PLENTY))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=14))
def test_the_table_begins_with_what_nothing_beats(numbers: list[tuple[int, int, int]]) -> None:
    rows = [Alternative(Candidate(), float(t), float(e), None, 1.0, m) for t, e, m in numbers]
    found = table(rows, "time")
    assert len(found) == min(10, len(rows))
    assert found[0].seconds == min(t for t, _, _ in numbers)

    def beaten(row: Alternative) -> bool:
        mine = (row.seconds, row.joules, row.device_bytes)
        return any(all(a >= b for a, b in zip(mine, each, strict=True)) and mine != each for each in numbers)

    front = [row for row in found if not beaten(row)]
    assert {(row.seconds, row.joules, row.device_bytes) for row in front} == {
        (row.seconds, row.joules, row.device_bytes) for row in rows if not beaten(row)
    } or len(front) == 10
    assert not beaten(found[0])
