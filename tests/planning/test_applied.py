"""A plan in its run file: what is written there is the plan, read again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tenfold.config.load import build, dump_toml, load_run
from tenfold.config.offload import PlacementRule
from tenfold.config.run import RunConfig
from tenfold.errors import TenfoldError
from tenfold.offload.placement import Part, Placement, explicit
from tenfold.offload.units import name_of
from tenfold.parallel.mesh import Degrees
from tenfold.planning.applied import applied, placement_rules
from tenfold.planning.plans import Plan, StagePlan
from tenfold.planning.stages import plan_stages
from tenfold.planning.terms import Candidate

RAW: dict[str, Any] = {
    "model": {"preset": "tiny", "vocab_size": 4096},
    "training": {"steps": 10, "batch_size": 32, "micro_batch_size": 16},
    "parallel": "auto",
    "stages": [{"name": "pseudo", "sharing": "all", "until": "20%", "lr_scale": 0.5}, {"name": "real"}],
}


def part(name: str, layers: tuple[int, ...] = (), ends: tuple[Any, ...] = (), **more: int) -> Part:
    return Part(name, layers, {"weights": 4, "gradients": 4, "moments": 8, **more}, {}, ends)


LAYERS = [part(f"layers.{layer}", (layer,), activations=3) for layer in range(6)]
ENDS = [part("embedding", (), ("embedding",)), part("norm", (), ("head",)), part("head", (), ("head",))]


def planned(config: RunConfig, number: int, candidate: Candidate, parts: list[Part], placement: Placement) -> StagePlan:
    memory = [SimpleNamespace(parts=parts, needed=100, items={"reserve": 6})]
    return StagePlan(
        plan_stages(config)[number],
        candidate,
        memory,
        [placement],
        SimpleNamespace(seconds=0.5),
        1.0,
        None,
        None,
        1.0,
        [],
        [],
    )


def on_device(parts: list[Part]) -> Placement:
    return Placement.of({each.name: {} for each in parts})


def test_every_stage_has_its_own_way_and_keeps_what_it_had(tmp_path: Path) -> None:
    config = build(RunConfig, RAW, "test")
    ways = [
        Candidate(Degrees(data_shard=8), 4, reshard="step"),
        Candidate(
            Degrees(data_shard=2, tensor=2, pipeline=2),
            8,
            "full",
            3,
            schedule="interleaved-1f1b",
            chunks=3,
            reshard="backward",
        ),
    ]
    away = {"moments": "host"}
    lower = Placement.of({each.name: (away if each.name != "layers.5" else {}) for each in LAYERS + ENDS})
    shared = [part("layers.0", tuple(range(6))), *ENDS]
    plan = Plan(
        "time",
        [
            planned(config, 0, ways[0], shared, on_device(shared)),
            planned(config, 1, ways[1], LAYERS + ENDS, lower),
        ],
    )
    (tmp_path / "planned.toml").write_text(dump_toml(applied(config, plan, "8:h100,price=2")), encoding="utf-8")
    written = load_run(tmp_path / "planned.toml")
    pseudo, real = (written.of_stage(stage) for stage in written.stages)
    assert (pseudo.parallel.data_shard, pseudo.parallel.tensor, pseudo.parallel.reshard) == (8, 1, "step")
    assert (pseudo.training.micro_batch_size, pseudo.training.recompute) == (4, "none")
    assert written.stages[0].lr_scale == 0.5
    assert (real.parallel.data_shard, real.parallel.tensor, real.parallel.pipeline) == (2, 2, 2)
    assert (real.parallel.pipeline_schedule, real.parallel.pipeline_chunks) == ("interleaved-1f1b", 3)
    assert (real.training.micro_batch_size, real.training.recompute, real.training.recompute_layers) == (8, "full", 3)
    offload = written.offload.of_stage(written.stages[1].offload)
    assert explicit(offload.placement, LAYERS + ENDS, 6) == explicit(
        [
            PlacementRule(layers="0-4, embedding, head", moments="host"),
        ],
        LAYERS + ENDS,
        6,
    )
    assert not written.offload.of_stage(written.stages[0].offload).on
    assert written.stages[1].foreseen == {"seconds": 0.5, "device_bytes": 94, "cluster": "8:h100,price=2"}


@pytest.mark.parametrize(
    "tiers",
    [
        {"layers.0": {"moments": "host", "gradients": "host"}, "layers.3": {"moments": "disk"}},
        {"layers.1": {"weights": "host", "gradients": "host", "moments": "host", "activations": "host"}},
        {"embedding": {"moments": "host"}, "layers.2": {"moments": "host"}},
        {"norm": {"moments": "disk", "gradients": "host"}, "head": {"moments": "disk", "gradients": "host"}},
        {},
    ],
)
def test_rules_make_the_placement_they_are_made_of(tiers: dict[str, Any]) -> None:
    parts = LAYERS + ENDS
    kinds = ("weights", "gradients", "moments", "activations")
    whole = {
        each.name: {kind: tiers.get(each.name, {}).get(kind, "device") for kind in kinds if kind in each.bytes}
        for each in parts
    }
    # Of two pipeline ranks, each with its own half of the parts.
    halves = [parts[:4], parts[4:]]
    placements = [Placement.of({each.name: whole[each.name] for each in half}) for half in halves]
    rules = [PlacementRule.model_validate(rule) for rule in placement_rules(halves, placements)]
    again = explicit(rules, parts, 6)
    for each in parts:
        for kind in each.bytes:
            assert again.tier(each.name, kind) == whole[each.name][kind], (each.name, kind)


def lots_of(layer: int, *experts: tuple[int, ...]) -> list[Part]:
    sizes = {"weights": 4, "gradients": 4, "moments": 8}
    unit = f"layers.{layer}"
    rest = Part(unit, (layer,), {**sizes, "activations": 3}, {}, (), (), unit)
    return [rest, *(Part(name_of(unit, each), (layer,), sizes, {}, (), each, unit) for each in experts)]


@pytest.mark.parametrize(
    "tiers",
    [
        {"layers.0.experts.0-1": {"moments": "host", "gradients": "disk"}, "layers.3.experts.4-5": {"moments": "disk"}},
        {"layers.1": {"weights": "host", "moments": "host", "activations": "host"}, "layers.2": {"gradients": "disk"}},
        {"layers.1": {"moments": "disk"}, "layers.1.experts.0-1": {"moments": "disk"}},
        {f"layers.{layer}.experts.2-3": {"moments": "host"} for layer in range(4)},
    ],
)
def test_rules_make_the_placement_of_lots_of_experts(tiers: dict[str, Any]) -> None:
    parts = [each for layer in range(4) for each in lots_of(layer, (0, 1), (2, 3), (4, 5))]
    whole = {
        each.name: {kind: tiers.get(each.name, {}).get(kind, "device") for kind in each.bytes}
        | ({"weights": tiers[each.unit]["weights"]} if "weights" in tiers.get(each.unit, {}) else {})
        for each in parts
    }
    rules = [PlacementRule.model_validate(one) for one in placement_rules([parts], [Placement.of(whole)])]
    again = explicit(rules, parts, 4, 6)
    assert {each.name: {kind: again.tier(each.name, kind) for kind in each.bytes} for each in parts} == whole
    assert len(rules) <= 4
    # As experts are placed, so are those that other ranks have in their place.
    beside = {each: {each, each + 6} for each in range(6)}
    rules = [PlacementRule.model_validate(one) for one in placement_rules([parts], [Placement.of(whole)], beside)]
    others = [replace(each, experts=tuple(one + 6 for one in each.experts)) for each in parts]
    again = explicit(rules, others, 4, 12)
    assert {each.name: {kind: again.tier(each.name, kind) for kind in each.bytes} for each in parts} == whole


def test_what_all_layers_share_leaves_by_a_rule_for_all_of_them() -> None:
    shared = [part("layers.0", tuple(range(6))), *ENDS]
    placement = Placement.of({"layers.0": {"moments": "host"}, "embedding": {}, "norm": {}, "head": {}})
    rules = placement_rules([shared], [placement])
    assert rules == [{"layers": "0-5", "moments": "host"}]
    again = explicit([PlacementRule.model_validate(rule) for rule in rules], shared, 6)
    assert again.tier("layers.0", "moments") == "host"


def test_state_on_disk_needs_folders() -> None:
    config = build(RunConfig, RAW, "test")
    away = Placement.of({each.name: {"moments": "disk"} for each in LAYERS + ENDS})
    plan = Plan("time", [planned(config, 1, Candidate(), LAYERS + ENDS, away)])
    with pytest.raises(TenfoldError, match=r"needs a folder: set .*disk"):
        applied(config, plan, "8:h100,price=2")


def test_a_run_with_a_budget_that_needs_nothing_below_the_device_is_told_so() -> None:
    config = build(RunConfig, {**RAW, "offload": {"device_budget": "20GiB"}}, "test")
    plan = Plan("time", [planned(config, 1, Candidate(), LAYERS + ENDS, on_device(LAYERS + ENDS))])
    assert applied(config, plan, "8:h100,price=2").stages[1].offload == "off"
