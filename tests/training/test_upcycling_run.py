"""Whole runs in which experts share: chains, resuming, what is told, what the checkpoint alone can do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from runs import final_state, of_kind, stopping_at
from tenfold.checkpoint.store import list_checkpoints, load_checkpoint
from tenfold.cli.main import main
from tenfold.training.setup import load_model

MOE = """
[model.moe]
experts = 4
prototypes = 2
shared_experts = 1
ffn = 24
balance_loss = 0.01
bias_rate = 0.001
"""
LAYERS_FIRST = """
[[stages]]
name = "dense shared"
sharing = "all"
experts = "layer"
until = "33%"
[[stages]]
name = "dense"
experts = "layer"
until = "67%"
[[stages]]
name = "mixture"
"""
EXPERTS_FIRST = """
[[stages]]
name = "dense shared"
sharing = "all"
experts = "prototype"
until = "33%"
[[stages]]
name = "mixture shared"
sharing = "all"
until = "67%"
[[stages]]
name = "mixture"
"""
CHAINS = {"layers first": LAYERS_FIRST, "experts first": EXPERTS_FIRST}


@pytest.mark.parametrize(
    ("chain", "optimizer"),
    [("layers first", "adamw"), ("experts first", "adamw"), ("layers first", "muon"), ("experts first", "adafactor")],
)
def test_a_chain_frees_layers_and_experts_in_either_order(
    run_file: Callable[..., Path], tmp_path: Path, chain: str, optimizer: str
) -> None:
    out = tmp_path / "run"
    flags = ["--optim.name", optimizer, "--optim.lr", "0.3" if optimizer == "adafactor" else "1e-2"]
    assert main(["train", str(run_file(model=MOE, stages=CHAINS[chain])), "--out", str(out), *flags]) == 0
    for event in of_kind(out, "delink"):
        frees_experts = "experts by" in event["pattern_from"] and "experts by" not in event["pattern_to"]
        assert ("tolerance" in event) == frees_experts
        assert event["logits_equal"] or event["max_difference"] <= event["tolerance"] < 1e-2
        assert event["logits_equal"] or frees_experts
    dense, between, real = of_kind(out, "start")[0]["stages"]
    assert dense["experts"] == ("layer" if chain == "layers first" else "prototype")
    assert "experts" not in real
    assert dense["stored_parameters"] < between["stored_parameters"] < real["stored_parameters"]
    assert real["stored_parameters"] == real["total_parameters"] == dense["total_parameters"]
    steps = of_kind(out, "step")
    routed = {event["stage"]: "expert_load" in event for event in steps}
    assert routed == {"dense shared": False, between["name"]: chain == "experts first", "mixture": True}
    assert steps[-1]["loss"] < steps[0]["loss"]
    for path in list_checkpoints(out / "checkpoints"):
        manifest, weights, _ = load_checkpoint(path)
        assert any("router" in name for name in weights) == (manifest["experts"] == "free")


@pytest.mark.parametrize(
    ("chain", "stop_at"),
    [("layers first", 2), ("layers first", 8), ("layers first", 9), ("experts first", 4), ("experts first", 6)],
)
def test_a_run_that_was_stopped_in_any_stage_goes_on_bit_for_bit(
    run_file: Callable[..., Path], tmp_path: Path, chain: str, stop_at: int
) -> None:
    file = str(run_file(model=MOE, stages=CHAINS[chain]))
    assert main(["train", file, "--out", str(tmp_path / "whole")]) == 0
    with stopping_at(stop_at):
        assert main(["train", file, "--out", str(tmp_path / "parts")]) == 0
    assert list_checkpoints(tmp_path / "parts" / "checkpoints")[-1].name == f"step-{stop_at:08d}"
    assert main(["train", file, "--out", str(tmp_path / "parts"), "--resume"]) == 0
    whole, parts = final_state(tmp_path / "whole"), final_state(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.parametrize("chain", CHAINS)
def test_recompute_and_micro_batches_change_nothing_where_experts_share(
    run_file: Callable[..., Path], tmp_path: Path, chain: str
) -> None:
    file = run_file(model=MOE, stages=CHAINS[chain])
    for name, flags in (
        ("a", []),
        ("b", ["--training.recompute", "full"]),
        ("c", ["--training.micro_batch_size", "2"]),
    ):
        main(["train", str(file), "--out", str(tmp_path / name), *flags])
    losses = {name: [event["loss"] for event in of_kind(tmp_path / name, "step")] for name in "abc"}
    assert losses["a"] == losses["b"]
    # To the delinking of experts; a token that is near to two of them may then go elsewhere.
    assert losses["c"][:4] == pytest.approx(losses["a"][:4], rel=1e-5)


def test_a_checkpoint_of_shared_experts_is_a_model_that_writes_and_is_evaluated(
    run_file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    main(["train", str(run_file(model=MOE, stages=EXPERTS_FIRST)), "--out", str(out)])
    model = load_model(out, 4, torch.device("cpu"))
    assert model.layers[0].ffn.router is None
    assert len(model.layers[0].ffn.experts.up) == 2
    _, weights, _ = load_checkpoint(out / "checkpoints" / "step-00000004")
    assert weights.keys() == dict(model.named_parameters()).keys()
    capsys.readouterr()
    assert main(["generate", str(out), "--checkpoint", "4", "--tokens", "8", "--prompt", "a"]) == 0
    assert capsys.readouterr().out.strip()
    assert main(["eval", str(out), "--checkpoint", "4"]) == 0


def test_delinking_with_a_limited_capacity_is_compared_without_dropping(
    run_file: Callable[..., Path], tmp_path: Path
) -> None:
    model = MOE + 'capacity = "one"\ncapacity_factor = 1.0\n'
    assert main(["train", str(run_file(model=model, stages=LAYERS_FIRST)), "--out", str(tmp_path / "run")]) == 0
    (*_, freed) = of_kind(tmp_path / "run", "delink")
    assert freed["max_difference"] <= freed["tolerance"]
    assert of_kind(tmp_path / "run", "step")[-1]["dropped_share"] > 0


@pytest.mark.report
def test_the_report_and_the_closing_table_tell_of_rounding(
    run_file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["train", str(run_file(model=MOE, stages=LAYERS_FIRST)), "--out", str(out)]) == 0
    page, told = (out / "report.html").read_text(encoding="utf-8"), capsys.readouterr().out
    assert "equal to rounding" in page
    assert "DIFFERENT" not in page + told
    assert "all, experts by layer" in page
    assert "equal to rounding" in told


def test_sharing_experts_again_is_refused_before_anything_is_read(
    run_file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = '[[stages]]\nname = "a"\nuntil = "50%"\n[[stages]]\nname = "b"\nexperts = "layer"\n'
    assert main(["train", str(run_file(model=MOE, stages=stages)), "--out", str(tmp_path / "run")]) == 2
    assert 'stages.1 (b): experts = "layer" does not refine experts = "free"' in " ".join(
        capsys.readouterr().err.replace("\n", " ").split()
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("moments", ["rescale", "measure"])
def test_a_run_of_a_mixture_begins_from_a_dense_checkpoint(
    run_file: Callable[..., Path], tmp_path: Path, moments: str
) -> None:
    """By the file as by a stage: the first step is that of the run which frees the experts itself."""
    one_stage = '[[stages]]\nname = "dense"\nexperts = "layer"\n'
    first, second = tmp_path / "dense", tmp_path / "mixture"
    steady = ["--optim.schedule", "constant", "--optim.warmup", "0"]
    file = run_file(model=MOE, stages=one_stage)
    assert main(["train", str(file), "--out", str(first), "--training.steps", "4", *steady]) == 0
    file = run_file(model=MOE, stages=f'[[stages]]\nname = "mixture"\nmoments = "{moments}"\n')
    flags = ["--start.checkpoint", str(first), "--training.steps", "4", *steady]
    assert main(["train", str(file), "--out", str(second), *flags]) == 0
    before = [event["validation_loss"] for event in of_kind(first, "validation")][-1]
    steps = of_kind(second, "step")
    assert steps[0]["loss"] == pytest.approx(before, abs=0.3)  # another batch; 6 before training
    assert steps[0]["expert_load"]
    assert steps[-1]["loss"] < steps[0]["loss"] + 0.1


def test_experts_are_freed_on_disk_from_the_command_line(
    run_file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense, free = tmp_path / "dense", tmp_path / "free"
    file = run_file(model=MOE, stages='[[stages]]\nname = "dense"\nsharing = "all"\nexperts = "layer"\n')
    assert main(["train", str(file), "--out", str(dense), "--training.steps", "2"]) == 0
    assert main(["delink", str(dense), str(tmp_path / "layers"), "--experts", "layer"]) == 0
    assert main(["delink", str(dense), str(free)]) == 0
    assert "(0,0,0,0), experts by layer -> (0,1,2,3), moments rescale" in capsys.readouterr().out
    assert load_model(tmp_path / "layers", None, torch.device("cpu")).layers[0].ffn.router is None
    assert load_model(free, None, torch.device("cpu")).layers[0].ffn.router is not None
    assert main(["delink", str(free), str(tmp_path / "back"), "--experts", "layer"]) == 2
    assert 'experts = "layer" does not refine experts = "free"' in capsys.readouterr().err
