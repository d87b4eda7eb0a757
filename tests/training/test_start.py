"""Runs that begin from another run's checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from runs import refused
from tenfold.checkpoint.store import list_checkpoints, load_checkpoint
from tenfold.cli.main import main
from tenfold.config.load import load_run
from tenfold.config.run import RunConfig
from tenfold.data.mixture import open_data
from tenfold.reporting.metrics import read_metrics
from tenfold.sharing.delinking import delink
from tenfold.training.optimizers import build_optimizers, fill_tensors, load_state_tensors, state_tensors
from tenfold.training.run import Run
from tenfold.training.setup import build_model, resolve

PSEUDO = '[[stages]]\nname = "pseudo"\nsharing = "all"\n'
GROUPS = '[[stages]]\nname = "groups"\nsharing = {groups = 2}\nuntil = "50%"\n[[stages]]\nname = "real"\n'


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first test that needs it leaves the coarse run for the others."""
    return tmp_path_factory.mktemp("kept") / "pseudo"


@pytest.fixture
def pseudo(run_file: Callable[..., Path], tmp_path: Path, kept: Path) -> Path:
    """A run of four steps whose layers share everything."""
    if not kept.exists():
        assert main(["train", str(run_file(stages=PSEUDO)), "--out", str(kept), "--training.steps", "4"]) == 0
    shutil.copytree(kept, tmp_path / "pseudo")
    return tmp_path / "pseudo"


def begun(path: Path, flags: list[str], out: Path) -> Run:
    """A run that has begun and made no step yet."""
    config: RunConfig = load_run(path, flags)
    data, cpu = open_data(config.data), torch.device("cpu")
    config = resolve(config, data.vocab_size, cpu, data.mask_token(), data.end_of_text)
    run = Run(config, data, out, cpu, lambda _: None, lambda _: None)
    run.open_start()
    run._begin()
    return run


def loaded_then_delinked(run: Run, checkpoint: Path, moments: Any) -> dict[str, torch.Tensor]:
    """Weights and optimizer state by the longer way: the whole coarse model in memory, then delinked."""
    _, weights, state = load_checkpoint(checkpoint)
    model = build_model(run.config, run.stages[0].sharing.load({"pattern": [0] * 4}), torch.device("cpu"))
    optimizers = build_optimizers(model, run.config.optim)
    fill_tensors({name: parameter.data for name, parameter in model.named_parameters()}, weights, "weights")
    load_state_tensors(model, optimizers, state)
    delink(model.layers, optimizers, run.stages[0].sharing, moments)
    return dict(model.named_parameters()) | state_tensors(model, optimizers)


@pytest.mark.parametrize("moments", ["copy", "rescale", "reset"])
@pytest.mark.parametrize("sharing", ["none", "groups=2", "all"])
def test_layers_begin_with_the_block_that_they_used_and_its_state(
    pseudo: Path, run_file: Callable[..., Path], tmp_path: Path, sharing: str, moments: str
) -> None:
    flags = ["--start.checkpoint", str(pseudo), "--stages.0.sharing", sharing, "--stages.0.moments", moments]
    run = begun(run_file(stages='[[stages]]\nname = "real"\n'), flags, tmp_path / "real")
    expected = loaded_then_delinked(run, list_checkpoints(pseudo / "checkpoints")[-1], moments)
    found = dict(run.model.named_parameters()) | state_tensors(run.model, run.optimizers)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    steps = {float(tensor) for name, tensor in found.items() if name == "embedding.weight/step"}
    assert steps == {4.0}


def test_weights_alone_begin_with_a_new_optimizer(pseudo: Path, run_file: Callable[..., Path], tmp_path: Path) -> None:
    flags = ["--start.checkpoint", str(pseudo), "--start.no-optimizer", "--optim.name", "adafactor"]
    run = begun(run_file(stages='[[stages]]\nname = "real"\n'), flags, tmp_path / "real")
    assert not any(tensor.any() for tensor in state_tensors(run.model, run.optimizers).values())
    _, weights, _ = load_checkpoint(list_checkpoints(pseudo / "checkpoints")[-1])
    wq = weights["layers.0.attention.wq.weight"]
    assert all(torch.equal(layer.attention.wq.weight, wq) for layer in run.model.layers)


def test_a_relaxed_stage_begins_from_the_shared_blocks_with_differences_of_nothing(
    pseudo: Path, run_file: Callable[..., Path], tmp_path: Path
) -> None:
    relaxed = '[[stages]]\nname = "relaxed"\nsharing = "all"\nrank = 2\n'
    flags = ["--start.checkpoint", str(pseudo), "--training.steps", "2"]
    run = begun(run_file(stages=relaxed), flags, tmp_path / "relaxed")
    _, weights, state = load_checkpoint(list_checkpoints(pseudo / "checkpoints")[-1])
    found = dict(run.model.named_parameters())
    wq = "layers.0.attention.wq.weight"
    assert torch.equal(found[wq], weights[wq])
    assert not found["layers.3.attention.wq.weight_left"].any()
    assert torch.equal(state_tensors(run.model, run.optimizers)[f"{wq}/exp_avg"], state[f"{wq}/exp_avg"])
    # A relaxed checkpoint is gone on with by a stage of the same sharing, and its differences are folded by a free one.
    out = tmp_path / "trained"
    assert main(["train", str(run_file(stages=relaxed)), "--out", str(out), *flags]) == 0
    again = begun(run_file(stages=relaxed), ["--start.checkpoint", str(out)], tmp_path / "again")
    _, weights, _ = load_checkpoint(list_checkpoints(out / "checkpoints")[-1])
    found = dict(again.model.named_parameters())
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
    real = begun(run_file(stages='[[stages]]\nname = "real"\n'), ["--start.checkpoint", str(out)], tmp_path / "real")
    left, right = (weights[f"layers.3.attention.wq.weight_{side}"] for side in ("left", "right"))
    torch.testing.assert_close(real.model.layers[3].attention.wq.weight, weights[wq] + left @ right)


def test_moments_can_be_measured_on_what_the_run_trains_on(
    pseudo: Path, run_file: Callable[..., Path], tmp_path: Path
) -> None:
    flags = ["--start.checkpoint", str(pseudo), "--stages.0.moments", "measure", "--stages.0.moments-steps", "2"]
    run = begun(run_file(stages='[[stages]]\nname = "real"\n'), flags, tmp_path / "real")
    state = state_tensors(run.model, run.optimizers)
    assert state["layers.3.attention.wq.weight/step"] == 2
    assert state["embedding.weight/step"] == 4
    first, last = (state[f"layers.{layer}.attention.wq.weight/exp_avg"] for layer in (0, 3))
    assert first.any()
    assert not torch.equal(first, last)


def test_a_run_tells_where_it_began_and_goes_on_without_that_checkpoint(
    pseudo: Path, run_file: Callable[..., Path], tmp_path: Path
) -> None:
    out, whole = tmp_path / "run", tmp_path / "whole"
    argv = ["train", str(run_file(stages=GROUPS)), "--start.checkpoint", str(pseudo)]
    assert main([*argv, "--out", str(whole)]) == 0
    (start,) = [event for event in read_metrics(whole) if event["event"] == "start"]
    step = str(list_checkpoints(pseudo / "checkpoints")[-1])
    assert start["started_from"] == {"checkpoint": step, "step": 4, "pattern": "(0,0,0,0)", "moments": "rescale"}
    notes = [event["text"] for event in read_metrics(whole) if event["event"] == "note"]
    assert any("(0,0,0,0) -> (0,0,1,1)" in text for text in notes)
    (delinked,) = [event for event in read_metrics(whole) if event["event"] == "delink"]
    assert (delinked["step"], delinked["pattern_from"]) == (6, "(0,0,1,1)")

    # A run that lost its later checkpoints goes on from its own alone, to the same end.
    shutil.copytree(whole, out)
    for path in list_checkpoints(out / "checkpoints"):
        if path.name > "step-00000006":
            shutil.rmtree(path)
    shutil.rmtree(pseudo)
    assert main([*argv, "--out", str(out), "--resume"]) == 0
    ends = [load_checkpoint(list_checkpoints(run / "checkpoints")[-1]) for run in (out, whole)]
    for mine, theirs in zip(ends[0][1:], ends[1][1:], strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_the_loss_goes_on_where_the_first_run_left_it(
    pseudo: Path, run_file: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "real"
    argv = ["train", str(run_file(stages='[[stages]]\nname = "real"\n')), "--out", str(out)]
    assert main([*argv, "--start.checkpoint", str(pseudo / "checkpoints" / "step-00000004")]) == 0
    before = [event["validation_loss"] for event in read_metrics(pseudo) if event["event"] == "validation"][-1]
    first = next(event["loss"] for event in read_metrics(out) if event["event"] == "step")
    fresh = next(event["loss"] for event in read_metrics(pseudo) if event["event"] == "step")
    assert abs(first - before) < abs(first - fresh)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--model.ffn", "64"], "model.ffn is 48 in"),
        (["--model.vocab-size", "512"], "model.vocab_size is 400 in"),
        (["--model.moe.bias-rate", "0"], "model.moe.bias_rate"),
        (["--optim.name", "muon"], "start.optimizer = false"),
        (["--start.checkpoint", "nowhere"], "there is no"),
    ],
)
def test_what_does_not_fit_is_told_with_key_and_file(
    pseudo: Path,
    run_file: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    told: str,
) -> None:
    out = tmp_path / "real"
    argv = ["train", str(run_file(stages='[[stages]]\nname = "real"\n')), "--out", str(out)]
    for more in ([], ["--dry-run"]):
        message = refused([*argv, "--start.checkpoint", str(pseudo), *flags, *more], capsys)
        assert told in message
        assert "tenfold: start.checkpoint = " in message
    assert not out.exists()


def test_a_finer_checkpoint_is_refused_with_both_patterns(
    run_file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    real, out = tmp_path / "real", tmp_path / "groups"
    argv = ["train", str(run_file(stages=GROUPS)), "--training.steps", "4"]
    assert main([*argv, "--out", str(real)]) == 0
    assert main([*argv, "--out", str(out), "--start.checkpoint", str(real)]) == 2
    message = capsys.readouterr().err
    assert "stages.0 (groups)" in message
    assert "(0,0,1,1) does not refine (0,1,2,3)" in message
    assert str(real) in message
    assert not out.exists()


def test_another_tokenizer_of_the_same_size_is_refused(
    pseudo: Path, run_file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = pseudo / "tokenizer.json"
    told = json.loads(file.read_text(encoding="utf-8"))
    first, second = list(told["model"]["vocab"])[-2:]
    vocabulary = told["model"]["vocab"]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(told), encoding="utf-8")
    argv = ["train", str(run_file()), "--out", str(tmp_path / "real"), "--start.checkpoint", str(pseudo)]
    assert main(argv) == 2
    assert "another tokenizer" in (message := capsys.readouterr().err)
    assert f"data.tokenizer = '{file}'" in message


def test_a_damaged_checkpoint_is_named(
    pseudo: Path, run_file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = list_checkpoints(pseudo / "checkpoints")[-1]
    (path / "weights.safetensors").write_bytes(b"x")
    argv = ["train", str(run_file()), "--out", str(tmp_path / "real"), "--start.checkpoint", str(path)]
    assert main(argv) == 2
    assert "weights.safetensors is damaged" in capsys.readouterr().err
