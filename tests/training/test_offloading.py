"""Whole runs whose state leaves the device are those that keep it there, to the last bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ranks import on_ranks
from runs import final_state, losses, of_kind
from tenfold.checkpoint.store import list_checkpoints
from tenfold.cli.main import main
from tenfold.config.load import load_run
from tenfold.nn import routing
from tenfold.offload.budget import Budgets
from tenfold.planning.stages import plan_stages
from tenfold.training.offload_plan import foresee
from training.cases_offloading import ALL, SOME, offload
from training.conftest import PSEUDO_REAL
from training.test_many_ranks import assert_equal_training
from training.test_run import CHAIN, same_tensors
from training.test_upcycling_run import EXPERTS_FIRST, LAYERS_FIRST

pytestmark = pytest.mark.usefixtures("small_pieces")


@pytest.mark.parametrize("rules", [ALL, SOME], ids=["all", "some"])
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "muon"])
def test_a_run_through_delinkings_is_the_same(
    run_file: Callable[..., Path], tmp_path: Path, optimizer: str, rules: str
) -> None:
    (tmp_path / "fast").mkdir()
    flags = ["--optim.name", optimizer, "--training.micro-batch-size", "2"]
    plain, mine = tmp_path / "plain", tmp_path / "mine"
    assert main(["train", str(run_file(stages=CHAIN)), "--out", str(plain), *flags]) == 0
    assert main(["train", str(run_file(stages=offload(tmp_path, rules) + CHAIN)), "--out", str(mine), *flags]) == 0
    assert losses(mine) == losses(plain)
    assert same_tensors(final_state(mine), final_state(plain))
    assert all(event["logits_equal"] for event in of_kind(mine, "delink"))
    assert not list((tmp_path / "fast").iterdir())


@pytest.mark.parametrize("micro", ["0", "1"], ids=["one pass", "four passes"])
def test_a_run_that_steps_in_the_backward_pass_is_the_same(
    run_file: Callable[..., Path], tmp_path: Path, micro: str
) -> None:
    """By the rate of its own step, when a gradient is whole of all passes; and its norm is told."""
    (tmp_path / "fast").mkdir()
    rules = "{layers = 'all', moments = 'disk'}, {layers = '0-3', weights = 'disk'}"
    asked = offload(tmp_path, rules).replace("placement", "step_in_backward = true\nplacement") + PSEUDO_REAL
    flags = ["--training.micro-batch-size", micro, "--training.steps", "6"]
    plain, mine = tmp_path / "plain", tmp_path / "mine"
    assert main(["train", str(run_file(optim="clip = 0")), "--out", str(plain), *flags]) == 0
    assert main(["train", str(run_file(optim="clip = 0", stages=asked)), "--out", str(mine), *flags]) == 0
    assert losses(mine) == losses(plain)
    assert same_tensors(final_state(mine), final_state(plain))
    norms = [[event["grad_norm"] for event in of_kind(run, "step")] for run in (mine, plain)]
    assert norms[0] == norms[1]


@pytest.mark.parametrize("first", ["away", "here"])
def test_a_run_goes_on_from_a_checkpoint_wherever_its_state_lay(
    run_file: Callable[..., Path], tmp_path: Path, first: str
) -> None:
    (tmp_path / "fast").mkdir()
    files = {"here": CHAIN, "away": offload(tmp_path, ALL) + CHAIN}
    second = "here" if first == "away" else "away"
    whole, mine = tmp_path / "whole", tmp_path / "mine"
    assert main(["train", str(run_file(stages=files["here"])), "--out", str(whole)]) == 0
    assert main(["train", str(run_file(stages=files[first])), "--out", str(mine)]) == 0
    for checkpoint in list_checkpoints(mine / "checkpoints")[-2:]:
        shutil.rmtree(checkpoint)
    assert main(["train", str(run_file(stages=files[second])), "--out", str(mine), "--resume"]) == 0
    assert of_kind(mine, "resume")[0]["step"] < 12
    assert losses(mine) == losses(whole)
    assert same_tensors(final_state(mine), final_state(whole))


def test_checkpoints_go_from_offloaded_ranks_to_one_that_is_not_and_back(
    run_file: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "fast").mkdir()
    alone, both = tmp_path / "alone", tmp_path / "both"

    def two_ranks(resume: bool) -> None:
        file = str(run_file(optim="eps = 1e-3", stages=offload(tmp_path, ALL) + PSEUDO_REAL))
        assert on_ranks(2, "training.cases_offloading:train", file, [], str(both), resume) == [0, 0]

    def one_rank(folder: Path, *flags: str) -> None:
        assert main(["train", str(run_file(optim="eps = 1e-3")), "--out", str(folder), *flags]) == 0

    one_rank(alone)
    two_ranks(resume=False)
    assert_equal_training(both, alone)
    for path in list_checkpoints(both / "checkpoints"):
        if path.name > "step-00000006":  # in the stage whose layers share
            shutil.rmtree(path)
    one_rank(both, "--resume")
    assert_equal_training(both, alone)
    shutil.rmtree(list_checkpoints(both / "checkpoints")[-1])
    two_ranks(resume=True)
    assert_equal_training(both, alone)
    assert [event["step"] for event in of_kind(both, "resume")] == [6, 9]
    assert not list((tmp_path / "fast").iterdir())


def test_differences_of_layers_are_folded_in_to_rounding(run_file: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "fast").mkdir()
    stages = PSEUDO_REAL.replace('sharing = "all"', 'sharing = "all"\nrank = 2\nparts = ["attention"]')
    out = tmp_path / "run"
    assert main(["train", str(run_file(stages=offload(tmp_path, ALL) + stages)), "--out", str(out)]) == 0
    (delink,) = of_kind(out, "delink")
    assert delink["max_difference"] <= delink["tolerance"] < 1e-3


MOE = """
[model.moe]
experts = 4
prototypes = 2
ffn = 32
balance_loss = 0.01
bias_rate = 0.001
"""
BY_EXPERT = (
    "{layers = 'every 2', weights = 'disk'}, {layers = 'all', experts = '1-2', moments = 'disk', gradients = 'disk'},"
    "{layers = '3', experts = '0', gradients = 'disk'}, {layers = '0', experts = '2', gradients = 'device'},"
    "{layers = '1', experts = '0,2', weights = 'disk'}, {layers = '0', experts = '0,3', weights = 'device'}"
)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_experts_that_lie_apart_are_trained_the_same(
    run_file: Callable[..., Path], tmp_path: Path, optimizer: str
) -> None:
    (tmp_path / "fast").mkdir()
    flags = ["--optim.name", optimizer, "--training.micro-batch-size", "2"]
    plain, mine = tmp_path / "plain", tmp_path / "mine"
    asked = offload(tmp_path, BY_EXPERT) + PSEUDO_REAL
    assert main(["train", str(run_file(model=MOE, stages=PSEUDO_REAL)), "--out", str(plain), *flags]) == 0
    assert main(["train", str(run_file(model=MOE, stages=asked)), "--out", str(mine), *flags]) == 0
    assert losses(mine) == losses(plain)
    assert same_tensors(final_state(mine), final_state(plain))
    pseudo, real = of_kind(mine, "placement")
    assert pseudo["placement"]["layers.0-3.experts.1"] == dict(BELOW, weights="device", gradients="disk")
    assert pseudo["placement"]["layers.0-3.experts.2"] == dict(BELOW, weights="device", gradients="device")
    assert real["placement"]["layers.2.experts.1-2"] == BELOW
    assert real["placement"]["layers.3.experts.0"] == dict.fromkeys(BELOW, "device") | {"gradients": "disk"}
    for foreseen, told in zip(
        (pseudo, real), [each for each in of_kind(mine, "measured") if "tier_bytes" in each["measured"]], strict=True
    ):
        assert told["measured"]["tier_bytes"]["disk"] == foreseen["tier_bytes"]["disk"] > 0


BELOW = dict.fromkeys(("weights", "gradients", "moments"), "disk")


def test_experts_that_share_and_are_freed_are_trained_the_same(run_file: Callable[..., Path], tmp_path: Path) -> None:
    """While those of a prototype share, what is sent off of one of them alone stays."""
    (tmp_path / "fast").mkdir()
    rules = "{layers = 'all', experts = '1-3', moments = 'disk', gradients = 'disk'}, {layers = '1', weights = 'disk'}"
    plain, mine = tmp_path / "plain", tmp_path / "mine"
    asked = offload(tmp_path, rules) + EXPERTS_FIRST
    assert main(["train", str(run_file(model=MOE, stages=EXPERTS_FIRST)), "--out", str(plain)]) == 0
    assert main(["train", str(run_file(model=MOE, stages=asked)), "--out", str(mine)]) == 0
    assert losses(mine) == losses(plain)
    assert same_tensors(final_state(mine), final_state(plain))
    dense, shared, real = [event["placement"] for event in of_kind(mine, "placement")]
    assert {name: kinds["moments"] for name, kinds in dense.items() if ".experts." in name} == {
        "layers.0-3.experts.0-1": "device",
        "layers.0-3.experts.2-3": "disk",
    }
    assert shared["layers.0-3.experts.1-3"]["moments"] == real["layers.2.experts.1-3"]["moments"] == "disk"


@pytest.mark.parametrize(
    ("degrees", "stages", "apart"),
    [
        ("expert = 2\ndata_shard = 2", PSEUDO_REAL, ["0", "2"]),  # of two prototypes an expert each
        ("data_shard = 2", LAYERS_FIRST, ["0", "1"]),  # while all experts share the second rank has none of a stack
    ],
    ids=["expert ranks", "data ranks"],
)
def test_experts_of_ranks_lie_apart_on_each(
    run_file: Callable[..., Path], tmp_path: Path, degrees: str, stages: str, apart: list[str]
) -> None:
    (tmp_path / "fast").mkdir()
    plain, mine = tmp_path / "plain", tmp_path / "mine"
    for folder, rules in ((plain, ""), (mine, offload(tmp_path, BY_EXPERT))):
        file = str(run_file(model=MOE, stages=f"[parallel]\n{degrees}\n{rules}{stages}"))
        assert on_ranks(2, "training.cases_offloading:train", file, [], str(folder), False) == [0, 0]
    assert losses(mine) == losses(plain)
    assert same_tensors(final_state(mine), final_state(plain))
    real = of_kind(mine, "placement")[-1]["placement"]
    assert {name for name in real if name.startswith("layers.3.")} == {f"layers.3.experts.{each}" for each in apart}


def test_a_budget_places_experts_of_a_layer_apart(run_file: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "fast").mkdir()
    plain, mine, flags = tmp_path / "plain", tmp_path / "mine", ["--training.micro-batch-size", "2"]
    on_disk = f"[offload]\ndisk = ['{tmp_path}/fast']\ndevice_budget = "
    file = run_file(model=MOE, stages=f"{on_disk}1\n{PSEUDO_REAL}")
    config = load_run(file, [*flags, "--model.vocab-size", "400"])  # that of the data
    everything = foresee(config, plan_stages(config), torch.device("cpu"), lambda _: Budgets(10**15))[-1]
    # Moments of a lot, a page in each of two stacks, are 16 KiB; of three pieces on their way there are 24.
    budget = everything["tier_bytes"]["device"] + everything["other_bytes"] - 40 * 2**10
    asked = f"{on_disk}{budget}\n{PSEUDO_REAL}"
    assert main(["train", str(run_file(model=MOE, stages=PSEUDO_REAL)), "--out", str(plain), *flags]) == 0
    assert main(["train", str(run_file(model=MOE, stages=asked)), "--out", str(mine), *flags]) == 0
    assert losses(mine) == losses(plain)
    assert same_tensors(final_state(mine), final_state(plain))
    (_, real) = of_kind(mine, "placement")
    used = real["tier_bytes"]["device"] + real["working_bytes"] + real["other_bytes"]
    moments = {name: kinds["moments"] for name, kinds in real["placement"].items() if ".experts." in name}
    assert len(moments) == 16
    assert any(len({moments[f"layers.{layer}.experts.{each}"] for each in range(4)}) == 2 for layer in range(4))
    assert budget - 16 * 2**10 < used <= budget


def test_experts_are_placed_by_what_they_see_once_that_is_known(
    run_file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the midst of a stage, behind a delinking and when a run is resumed: to the same losses and weights."""

    def choose(scores_NZP: torch.Tensor, top_k: int) -> torch.Tensor:  # never an even one
        return routing.choose(scores_NZP.masked_fill(torch.arange(8) % 2 == 0, -1.0), top_k)

    monkeypatch.setattr("tenfold.nn.moe.choose", choose)
    monkeypatch.setattr("tenfold.training.run.HORIZON", 2)
    (tmp_path / "fast").mkdir()
    moe = "[model.moe]\nexperts = 8\nffn = 32\n"
    flags, on_disk = ["--training.micro-batch-size", "2"], f"[offload]\ndisk = ['{tmp_path}/fast']\ndevice_budget = "
    config = load_run(run_file(model=moe, stages=f"{on_disk}1\n{PSEUDO_REAL}"), [*flags, "--model.vocab-size", "400"])
    pseudo, real = foresee(config, plan_stages(config), torch.device("cpu"), lambda _: Budgets(10**15))
    spare = real["tier_bytes"]["device"] + real["other_bytes"] - 60 * 2**10
    tight = pseudo["tier_bytes"]["device"] + pseudo["other_bytes"] - 12 * 2**10
    stages = PSEUDO_REAL.replace("until", f"offload = {{device_budget = {tight}}}\nuntil")
    asked = f"{on_disk}{spare}\n{stages}"
    plain, mine = tmp_path / "plain", tmp_path / "mine"
    assert main(["train", str(run_file(model=moe, stages=PSEUDO_REAL)), "--out", str(plain), *flags]) == 0
    assert main(["train", str(run_file(model=moe, stages=asked)), "--out", str(mine), *flags]) == 0
    assert losses(mine) == losses(plain)
    assert same_tensors(final_state(mine), final_state(plain))
    begun, anew, free = of_kind(mine, "placement")
    assert (begun["step"], anew["step"], free["step"]) == (0, 2, 6)

    def away(placed: dict[str, Any]) -> set[tuple[str, str]]:
        return {(name, kind) for name, kinds in placed["placement"].items() for kind in kinds if kinds[kind] == "disk"}

    assert "layers.0-3.experts.0" in begun["placement"]
    assert {kind for _, kind in away(anew)} == {"gradients"} != {kind for _, kind in away(begun)}
    assert any("placed anew" in event["text"] for event in of_kind(mine, "note"))
    assert {kind for _, kind in away(free)} == {"gradients"}
    for event in (anew, free):  # zeros are not moved, nor foreseen to be
        assert sum(row["bytes_written"] for row in event["forecast"]["rows"]) == 0
    for path in list_checkpoints(mine / "checkpoints"):
        if path.name > "step-00000009":
            shutil.rmtree(path)
    assert main(["train", str(run_file(model=moe, stages=asked)), "--out", str(mine), "--resume", *flags]) == 0
    assert losses(mine) == losses(plain)
    assert same_tensors(final_state(mine), final_state(plain))
    again = of_kind(mine, "placement")[-1]
    assert (again["step"], away(again)) == (9, away(free))
