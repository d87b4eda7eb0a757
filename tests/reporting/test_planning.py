"""What `tenfold plan` says, of plans made by hand: numbers, bars, near-misses and advice, in a hundred columns."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tenfold.config.load import build
from tenfold.config.run import RunConfig
from tenfold.offload.placement import Part, Placement
from tenfold.parallel.mesh import Degrees
from tenfold.planning.cluster import load_cluster
from tenfold.planning.memory import RankMemory
from tenfold.planning.plans import Alternative, Delinking, Plan, Rejected, StagePlan, Unfit
from tenfold.planning.stages import plan_stages
from tenfold.planning.terms import Candidate
from tenfold.reporting.plan_advice import plan_advice
from tenfold.reporting.plan_numbers import layout_told, plan_told
from tenfold.reporting.planning import at_its_fullest, layout_words, plan_view

GIB = 2**30
CONFIG = build(
    RunConfig,
    {
        "model": {"preset": "gpt2-124m"},
        "training": {"steps": 100, "batch_size": 64, "precision": "bf16"},
        "stages": [{"name": "pseudo", "sharing": "all", "until": "20%"}, {"name": "real"}],
    },
    "test",
)
DESCRIBED = [
    {
        "name": name,
        "sharing": sharing,
        "stored_parameters": stored,
        "total_parameters": 124_000_000,
        "active_parameters": 124_000_000,
        "flops_per_token": 8e8,
        "steps": steps,
        "tokens": steps * 64 * 1024,
    }
    for name, sharing, stored, steps in (("pseudo", "all", 46_000_000, 20), ("real", "none", 124_000_000, 80))
]
CANDIDATE = Candidate(
    Degrees(data_shard=8, pipeline=2, tensor=4), 2, recompute="full", recompute_layers=6, schedule="interleaved-1f1b"
)


def memory(pipeline_rank: int, more: int = 0) -> RankMemory:
    items = {
        "weights": 4 * GIB,
        "gradients": 2 * GIB,
        "moments": 3 * GIB,
        "activations": 5 * GIB + more,
        "gathered": GIB,
    }
    items |= {"temporaries": GIB, "logits": 7 * GIB, "buffers": 0, "working": 0, "reserve": 0}
    peaks = {"forward": 12 * GIB, "backward": 17 * GIB + more, "step": 9 * GIB}
    part = Part("layers.0", (0,), {"weights": GIB})
    return RankMemory(pipeline_rank, [part], items, peaks, {"device": 17 * GIB + more, "host": 3 * GIB, "disk": 0}, GIB)


def planned(number: int, seconds: float, **shares: float) -> StagePlan:
    stage = plan_stages(CONFIG)[number]
    whole = stage.steps * seconds
    placement = Placement.of({"layers.0": {"moments": "host"}})
    return StagePlan(
        stage=stage,
        candidate=CANDIDATE,
        memory=[memory(0), memory(1, GIB)],
        placements=[placement, Placement.of({"layers.0": {}})],
        step=SimpleNamespace(seconds=seconds, shares=shares, lanes={"0 compute": shares["compute"]}),
        seconds=whole,
        joules=1e6 * whole,
        cost=0.1 * whole,
        tokens_per_second=stage.tokens_per_step / seconds,
        table=[
            Alternative(
                CANDIDATE, seconds, 1e6 * seconds, 0.1 * seconds, stage.tokens_per_step / seconds, 18 * GIB, 3 * GIB
            ),
            Alternative(Candidate(Degrees(data_shard=64)), 2 * seconds, 1e6, 0.2, 100.0, 9 * GIB),
        ],
        rejected=[Rejected(Candidate(Degrees(tensor=64)), "device memory: needs 35.1 of 31.0 GiB", 1.13)],
        delinking=Delinking(3.0, {"copying": 2.0, "disk": 1.0}, {"disk": GIB}, 3e6, 0.3) if number else None,
        looked_at={"ways": 1200, "with memory counted": 300, "played": 40},
    )


def told(**more: Any) -> dict[str, Any]:
    plan = Plan("time", [planned(0, 2.0, compute=1.5, communication=0.5), planned(1, 8.0, compute=2.0, offload=6.0)])
    found = {"run": "run.toml", **plan_told(plan, load_cluster("8x8:v100-32gb,price=2"), DESCRIBED), **more}
    found["stages"][1]["doubled"] = [
        {"resource": "host link", "seconds": 5.0, "times": 1.6},
        {"resource": "network", "seconds": 7.5, "times": 1.067},
        {"resource": "disks", "seconds": 8.0, "times": 1.0},
    ]
    return found


def shown(found: dict[str, Any], width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(plan_view(found))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    return text


def test_the_numbers_are_those_of_the_plan_and_json_has_them() -> None:
    found = json.loads(json.dumps(told()))
    pseudo, real = found["stages"]
    assert found["seconds"] == 20 * 2 + 80 * 8 + 3
    assert found["joules"] == pytest.approx(1e6 * 680 + 3e6)
    assert real["tokens_per_day"] == pytest.approx(64 * 1024 / 8 * 86400)
    assert real["layout"]["degrees"] == {"data_shard": 8, "pipeline": 2, "tensor": 4}
    assert real["delinking"]["bytes"] == {"disk": GIB}
    assert pseudo["delinking"] is None
    assert real["placement"][0] == {"layers.0": {"moments": "host"}}
    assert real["rejected"][0]["why"] == "device memory: needs 35.1 of 31.0 GiB"
    assert found["cluster"]["price_per_hour"] == 2 * 64
    # 800 MFLOP a token at 8192 tokens a second, of 64 V100s of 125 TFLOP/s.
    assert real["flops_share"] == pytest.approx(8e8 * 8192 / (64 * 125e12), rel=1e-6)


def test_all_of_it_is_shown_in_a_hundred_columns_and_in_eighty() -> None:
    text = shown(told())
    shown(told(), 80)
    assert "run.toml on 8x8:v100-32gb (64 x V100" in text
    words = " ".join(text.split())
    for word in (
        "pseudo (all): 46M of 124M parameters stored, 20 steps of 65.54k tokens",
        "data_shard 8 x tensor 4 x pipeline 2, micro-batch 2, recompute full in 6 layers, interleaved-1f1b of 2 chunks",
        "pipeline rank 0: layer 0: moments host",
        "pipeline rank 1: all on the device",
        "8 s: 8.19k tokens a second, 707.8M a day",
        "10m 40s, 640 MJ (177.8 kWh), cost 64.00",
        "3 s, 3 MJ (0.8333 kWh), cost 0.3: copying 2 s, disk 1 s",
        "most in backward, pipeline rank 1",
        "the best 2 of 1,200 ways, 300 with memory counted, 40 played:",
        "needs 35.1 of 31.0 GiB",
        "the whole run: 11m 23s, 683 MJ (189.7 kWh), cost 68.30",
    ):
        assert word in words, word


def test_the_bar_of_memory_adds_up_to_the_peak() -> None:
    found = told()["stages"][0]["memory"][1]
    moment, there = at_its_fullest(found)
    assert moment == "backward"
    assert sum(there.values()) == 18 * GIB
    assert there["other"] == GIB
    assert "logits" not in there


def test_layouts_are_told_by_what_is_not_off() -> None:
    def words(candidate: Candidate) -> str:
        return layout_words(layout_told(candidate))

    assert words(Candidate()) == "one rank, micro-batch 1"
    both = Candidate(Degrees(data_shard=64, expert=16), 4, reshard="step", gather="bf16")
    assert words(both) == "data_shard 64, experts over 16, micro-batch 4, reshard step, gather bf16"
    grid = Candidate(Degrees(tensor=4, grid=True))
    assert words(grid) == "tensor 4, tensor ranks as a grid, micro-batch 1"
    slices = Candidate(Degrees(pipeline=4), schedule="terapipe", slices=8)
    assert words(slices) == "pipeline 4, micro-batch 1, terapipe of 8 slices"


def test_advice_says_what_bounds_a_stage_and_what_would_help_most() -> None:
    words = plan_advice(told())
    assert "The real stage is bound by traffic with the memory below the device, 75% of a step" in words
    assert "(besides compute 25%)" in words
    assert (
        "A host link twice as fast would help most: a step of 5 s, 1.60 times as fast; "
        "a network twice as fast, 1.07 times." in words
    )
    assert "disks" not in words
    assert (
        "A token of pseudo costs 25% of the time of one of real, so that sharing for 20% of the tokens saves 15%"
        in words
    )


def test_work_on_the_device_is_told_by_what_of_it_helps_most() -> None:
    found = told()
    found["stages"][0]["doubled"] = [
        {"resource": "matrix rate", "seconds": 1.9, "times": 1.05},
        {"resource": "starting of operations", "seconds": 1.3, "times": 1.54},
    ]
    words = plan_advice(found)
    assert "The pseudo stage is bound by the starting of operations, 75% of a step" in words
    assert "Operations started in half the time would help most: a step of 1.3 s" in words


def test_advice_says_when_sharing_saves_nothing_and_when_nothing_helps() -> None:
    found = told()
    found["stages"][0]["tokens_per_second"] = found["stages"][1]["tokens_per_second"]
    found["stages"][1]["doubled"] = [{"resource": "network", "seconds": 7.9, "times": 1.01}]
    found["stages"][1]["step"]["shares"] = {"compute": 6.0, "bubble": 2.0}
    words = plan_advice(found)
    assert "costs 100% of the time of one of real: sharing saves next to nothing here." in words
    assert "No single thing doubled helps: a network twice as fast would bring 1%." in words
    assert "A larger batch, in more micro-batches, fills the pipeline's waiting." in words


def test_a_stage_that_does_not_fit_is_told_with_what_it_lacked() -> None:
    real = plan_stages(CONFIG)[1]
    rejected = [
        Rejected(Candidate(Degrees(data_shard=64)), "host memory: needs 900 of 450 GiB", 2.0),
        Rejected(CANDIDATE, "device memory: needs 35.1 of 31.0 GiB", 1.13),
    ]
    plan = Plan("time", [planned(0, 2.0, compute=2.0)], [Unfit(real, rejected, {"ways": 10})])
    found = {"run": "run.toml", **plan_told(plan, load_cluster("8x8:v100-32gb"), DESCRIBED)}
    found["advice"] = plan_advice(found)
    text = " ".join(shown(found).split())
    assert "real (none): 124M of 124M parameters stored" in text
    assert "does not fit" in text
    assert "what misses least lacks device memory: needs 35.1 of 31.0 GiB" in text
    assert "the stages that fit: 40 s" in text


@pytest.mark.parametrize("verdict", ["share", "do not share", "open"])
def test_how_long_to_share_is_a_table_and_plain_words(verdict: str) -> None:
    course = {"shared_tokens": 2e9, "free_tokens": 8e9, "loss": 2.8, "price": 86400.0, "tokens": 1e10, "share": 0.2}
    horizon = {
        "verdict": verdict,
        "best": course,
        "never": {**course, "share": 0.0, "shared_tokens": 0.0},
        "gain": 0.12,
        "unit": "seconds",
        "share_range": (0.1, 0.3),
        "gain_range": (0.05, 0.2),
        "sure": 0.97,
        "beyond": 1.0,
        "reasons": ("Fitted to a, b.",),
    }
    text = " ".join(shown(told(horizon=horizon)).split())
    assert f"how long to share: {verdict}" in text
    if verdict == "do not share":
        assert "Sharing does not pay: at its best it saves 12.0% of the seconds." in text
    else:
        assert "Delink after 2B tokens: to the same loss that takes 12.0% fewer seconds than never sharing." in text
    assert ("It may pay." in text) == (verdict == "open")
    assert "the best share between 10.0% and 30.0%" in text
    assert "97% have a gain at all. Fitted to a, b." in text


def test_a_run_that_is_best_never_delinked_is_told_so() -> None:
    course = {"shared_tokens": 2e9, "free_tokens": 0.0, "loss": 2.8, "price": 86400.0, "tokens": 2e9, "share": 1.0}
    horizon = {
        "verdict": "share",
        "best": course,
        "never": course,
        "gain": 0.5,
        "unit": "joules",
        "share_range": None,
        "gain_range": None,
        "sure": None,
        "reasons": (),
    }
    text = " ".join(shown(told(horizon=horizon)).split())
    assert (
        "Do not delink at all: the shared model gets there by itself: to the same loss that takes 50.0% fewer" in text
    )
    assert "of likely curves" not in text.lower()
