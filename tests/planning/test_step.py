"""A step played through: against sums, the published bubbles of schedules, and the forecast of offload."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planning.doubles import Told, roofline
from planning.test_work import MODELS, candidate_of, run_of
from tenfold.config.load import build
from tenfold.config.offload import PlacementRule
from tenfold.config.run import RunConfig
from tenfold.errors import TenfoldError
from tenfold.offload.forecast import Compute, forecast
from tenfold.offload.placement import explicit
from tenfold.parallel.mesh import Degrees, check
from tenfold.planning.cluster import load_cluster
from tenfold.planning.events import Tasks, play
from tenfold.planning.memory import memory_of
from tenfold.planning.pricing import Belt, Exchange
from tenfold.planning.pricing import Compute as Work
from tenfold.planning.stages import Stage, plan_stages
from tenfold.planning.step import StepForecast, bound, play_step
from tenfold.planning.stream import Stream
from tenfold.planning.terms import Candidate, Operation
from tenfold.planning.work import work_of


def planned(raw: dict[str, Any]) -> tuple[RunConfig, Stage]:
    config = build(RunConfig, raw, "run.toml")
    return config, plan_stages(config)[0]


def played(raw: dict[str, Any], ranks: int, cluster: Any) -> StepForecast:
    config, stage = planned(raw)
    return play_step(config, stage, candidate_of(config, ranks), cluster)


@pytest.mark.parametrize("model", ["dense", "mixture", "encoder"])
def test_one_rank_takes_the_sum_of_its_operations(model: str) -> None:
    config, stage = planned(run_of(MODELS[model], {"sharing": {"groups": 2}}, recompute="selective"))
    cluster: Any = roofline()
    candidate = candidate_of(config, 1)
    (work,) = work_of(config, stage, candidate)
    seconds = sum(cluster.seconds(each, "fp32") * count / each.count for each, count in work.items())
    found = play_step(config, stage, candidate, cluster)
    assert found.seconds == pytest.approx(seconds)
    assert found.shares["communication"] == found.shares["bubble"] == 0


@pytest.mark.parametrize("parallel", [{"data_shard": 2}, {"data_shard": 2, "reshard": "step"}, {"tensor": 2}])
def test_ranks_of_a_cpu_do_one_thing_after_another(parallel: dict[str, Any]) -> None:
    raw = run_of(MODELS["dense"], {}, parallel, micro=2)
    config, stage = planned(raw)
    cluster: Any = roofline("cpu")
    candidate = candidate_of(config, 2)
    (work,) = work_of(config, stage, candidate, fused=False)
    seconds = 0.0
    for each, count in work.items():
        one = (
            cluster.seconds(each, "fp32")
            if isinstance(each, Operation)
            else cluster.exchange_seconds(each, candidate.degrees)
        )
        seconds += one * count / each.count
    assert play_step(config, stage, candidate, cluster).seconds == pytest.approx(seconds)


def of_layers(forward: float, hidden: float, weights: float, rest: float = 0.0) -> Any:
    """A layer's prices, put on its first projection."""
    prices = {"forward": forward, "input": hidden, "weight": weights}
    return Told(lambda work: prices[work.way] if work.name == "wq" else rest if work.name == "logits" else 0.0)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("passes", [4, 8])
@pytest.mark.parametrize(
    ("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2), ("interleaved-1f1b", 4)]
)
def test_bubbles_of_schedules_are_those_published(ranks: int, passes: int, schedule: str, chunks: int) -> None:
    """(p - 1) / v of a rank's forward and backward pass of a micro-batch (Narayanan et al. 2021, arXiv 2104.04473,
    section 2.2)."""
    parallel = {"pipeline": ranks, "pipeline_schedule": schedule, "pipeline_chunks": max(chunks, 2)}
    raw = run_of(MODELS["dense"] | {"layers": 16}, {}, parallel, passes, 1)
    found = played(raw, ranks, of_layers(1.0, 1.0, 1.0))
    mine = 3.0 * 16 / ranks
    assert found.seconds == pytest.approx(passes * mine + (ranks - 1) * mine / chunks)
    assert found.shares["bubble"] == pytest.approx((ranks - 1) * mine / chunks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_v_of_three_equal_passes_leaves_next_to_no_bubble(ranks: int) -> None:
    """Qi et al. 2023 (arXiv 2401.10241), section 6: none, but for the first and last pass of a stage."""
    raw = run_of(MODELS["dense"] | {"layers": 16}, {}, {"pipeline": ranks, "pipeline_schedule": "zbv"}, 4 * ranks, 1)
    found = played(raw, ranks, of_layers(1.0, 1.0, 1.0))
    stage = 16 / ranks / 2
    busy = 3 * 4 * ranks * 2 * stage
    # What a rank waits for at first is made up for at last by gradients of weights; the first stage has its own whole.
    assert busy <= found.seconds <= busy + (ranks - 1) * 2 * stage
    slower = played(
        run_of(MODELS["dense"] | {"layers": 16}, {}, {"pipeline": ranks}, 4 * ranks, 1), ranks, of_layers(1.0, 1.0, 1.0)
    )
    assert found.seconds < slower.seconds


def test_gradients_of_weights_are_not_put_off_in_stages_that_recompute() -> None:
    parallel = {"pipeline": 2, "pipeline_schedule": "zbv"}
    free = played(run_of(MODELS["dense"], {}, parallel, 8, 1), 2, of_layers(1.0, 1.0, 1.0))
    shared = played(run_of(MODELS["dense"], {"sharing": "all"}, parallel, 8, 1), 2, of_layers(1.0, 1.0, 1.0))
    assert not any("weights" in event.name for event in shared.trace if event.kind == "compute")
    assert shared.seconds > free.seconds


def test_weights_come_while_the_layer_before_is_computed() -> None:
    """Four layers of 1 s forward and 2 s backward; a gather takes 0.6 s, a reduction 0.5 s."""
    shard = {"all_gather": 0.6, "reduce_scatter": 0.5}
    cluster: Any = Told(
        lambda work: {"forward": 1.0, "input": 1.0, "weight": 1.0}[work.way] if work.name == "wq" else 0.0,
        lambda each: shard.get(each.kind, 0.0) if each.axis == "shard" else 0.0,
    )
    found = played(run_of(MODELS["dense"], {}, {"data_shard": 2}, 8, 4), 2, cluster)
    # Before the first layer the root's weights and its own come; in the backward pass the first layer's come while
    # nothing is computed. Behind it the last reductions are waited for: of the first layer and of the root.
    assert found.seconds == pytest.approx(0.6 + 0.6 + 4 + 0.6 + 8 + 0.5 + 0.5)
    assert found.shares["communication"] == pytest.approx(2.8)
    assert found.lanes["0 network"] == pytest.approx(9 * 0.6 + 5 * 0.5)


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_shares_add_up_and_no_step_is_under_its_bound(data: st.DataObject) -> None:
    draw = data.draw
    model = draw(st.sampled_from(["dense", "mixture", "encoder"]))
    schedule = draw(
        st.sampled_from(["gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv", "terapipe"])
    )
    degrees = Degrees(
        data_replicate=draw(st.sampled_from([1, 2])),
        data_shard=draw(st.sampled_from([1, 2, 4])),
        tensor=draw(st.sampled_from([1, 2])),
        context=draw(st.sampled_from([1, 2])),
        pipeline=draw(st.sampled_from([1, 2, 4])),
        expert=draw(st.sampled_from([1, 2])),
    )
    recompute = draw(st.sampled_from(["none", "full", "selective"]))
    sharing = draw(st.sampled_from(["none", "all", {"cycle": 2}]))
    micro = draw(st.sampled_from([1, 2]))
    reshard, gather = draw(st.sampled_from(["forward", "backward", "step"])), draw(st.sampled_from(["fp32", "bf16"]))
    parallel = {"pipeline": degrees.pipeline, "pipeline_schedule": schedule}
    raw = run_of(MODELS[model] | {"layers": 8}, {"sharing": sharing}, parallel, 64, micro)
    config, stage = planned(raw)
    try:
        check(degrees, config.model, 64, micro, [16], config.parallel)
    except TenfoldError:
        return
    candidate = Candidate(degrees, micro, recompute, None, schedule, 2, 4, reshard, gather)
    cluster: Any = roofline(draw(st.sampled_from(["cuda", "cpu"])))
    found = play_step(config, stage, candidate, cluster)
    assert sum(found.shares.values()) == pytest.approx(found.seconds)
    assert min(found.shares.values()) >= 0
    assert max(found.lanes.values()) <= found.seconds * (1 + 1e-9)
    assert bound(config, stage, candidate, cluster) <= found.seconds * (1 + 1e-9)
    assert play_step(config, stage, candidate, cluster) == found


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 9), st.floats(0, 5), st.floats(0, 5), st.floats(0, 5), st.floats(0, 9), st.floats(0, 9))
def test_few_tasks_take_as_long_as_every_portion_by_itself(
    count: int, into: float, work: float, out: float, before: float, behind: float
) -> None:
    one, other = Tasks(), Tasks()
    stream = Stream(one, 0, together=True)
    belt = Belt(
        count,
        (Exchange("into", "network", into),),
        (Work(work),),
        (Exchange("out", "network", out),),
        (Work(before),),
        (Work(behind),),
    )
    stream.go("experts", [belt])
    ends = stream.place()
    # Portion by portion, as `parallel.exchange` asks for them.
    first = other.new("compute", "", 0.0, (), "compute")
    comes = [other.new("communication", "", into, (first,), "network") for _ in range(count)]
    other.new("compute", "", before, (), "compute")
    gone = []
    for portion in comes:
        done = other.new("compute", "", work, (portion,), "compute")
        gone.append(other.new("communication", "", out, (done,), "network"))
    last = other.new("compute", "", behind, (), "compute")
    end = other.new("compute", "", 0.0, (*gone, last), "compute")
    assert max((play(one).end[each] for each in ends), default=0.0) == pytest.approx(play(other).end[end], abs=1e-9)


RULES = {
    "moments": [PlacementRule(layers="all", moments="disk")],
    "weights and moments": [PlacementRule(layers="all", weights="disk", moments="disk")],
    "gradients": [PlacementRule(layers="every 2", gradients="disk", moments="host")],
    "activations": [PlacementRule(layers="all", activations="disk"), PlacementRule(layers="0", weights="host")],
}


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("sharing", ["none", {"groups": 2}])
@pytest.mark.parametrize("rules", RULES)
def test_with_state_below_the_device_it_is_offloads_own_forecast(rules: str, sharing: Any, passes: int) -> None:
    config, stage = planned(run_of(MODELS["dense"], {"sharing": sharing}, micro=8 // passes))
    candidate = candidate_of(config, 1)
    # In fewest words: a layer's products cost, and the optimizer's step.
    cluster: Any = Told(
        lambda work: 3e-6 if work.name == "wq" else 4e-6 if work.kind == "update" else 0.0,
        rates={"host": 5e9, "disk": 2e9},
    )
    (held,) = memory_of(config, stage, candidate)
    placement = explicit(RULES[rules], held.parts, 4)
    found = play_step(config, stage, candidate, cluster, [held], [placement])
    compute = Compute((3e-6,) * 4, (6e-6,) * 4, 4e-6)
    wanted = forecast(held.parts, placement, cluster.rates(candidate.degrees), compute, passes)
    assert found.seconds == pytest.approx(wanted.seconds, rel=1e-6)
    for lane, seconds in wanted.lanes.items():
        assert found.lanes[f"0 {lane}"] == pytest.approx(seconds, rel=1e-6)
    assert found.shares["offload"] == pytest.approx(found.seconds - passes * 4 * 9e-6 - 4e-6)
    assert (found.shares["offload"] > 0) == bool(wanted.lanes)
    nothing = play_step(config, stage, candidate, cluster)
    assert nothing.seconds == pytest.approx(passes * 4 * 9e-6 + 4e-6)


def test_five_hundred_ranks_are_played_by_as_many_tasks_as_sixteen() -> None:
    model = {"vocab_size": 50257, "layers": 48, "hidden": 4096, "heads": 32, "ffn": 16384}
    cluster, tasks = load_cluster("64x8:v100-32gb"), []
    for shards in (2, 64):
        config, stage = planned(run_of(model, {}, {}, 8 * shards, 8))
        candidate = Candidate(Degrees(data_shard=shards, tensor=8), 8)
        found = play_step(config, stage, candidate, cluster)
        assert bound(config, stage, candidate, cluster) <= found.seconds
        tasks.append(len(found.trace))
    assert tasks[0] == tasks[1]
