"""Whole runs whose optimizer state is kept in fewer bits (`optim.state`)."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from offload import codecs
from runs import final_state, losses, of_kind, refused
from tenfold.checkpoint.store import list_checkpoints
from tenfold.cli.main import main
from tenfold.offload import codec, units
from training.test_run import CHAIN, same_tensors


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "PIECE", 1024)
    monkeypatch.setattr(codec, "SMALL", 512)


def below(tmp_path: Path) -> str:
    (tmp_path / "fast").mkdir()
    rule = "{layers = 'every 2', weights = 'disk', gradients = 'disk', moments = 'disk'}"
    return f"[offload]\ndisk = ['{tmp_path}/fast']\nplacement = [{rule}]\n"


def is_coded(state: dict[str, torch.Tensor], form: str) -> bool:
    """Whether all moments of large parameters are what can be kept of them, and those of small ones are not."""
    found = set()
    for name, value in state.items():
        if "/exp_avg" in name or "/momentum_buffer" in name:
            coded = value.bfloat16().float() if form == "bf16" else codecs.int8(value, "exp_avg_sq" not in name)
            large = value.numel() >= codec.SMALL
            found.add((large, torch.equal(coded, value)))
    return {(True, True), (False, False)} <= found and (True, False) not in found


@pytest.mark.parametrize(("optimizer", "form"), [("adamw", "int8"), ("muon", "bf16")])
def test_a_run_on_the_device_and_one_below_it_are_the_same_and_keep_what_they_say(
    run_file: Callable[..., Path], tmp_path: Path, optimizer: str, form: str
) -> None:
    flags = ["--optim.name", optimizer, "--optim.state", form, "--training.micro-batch-size", "2"]
    here, disk = tmp_path / "here", tmp_path / "disk"
    assert main(["train", str(run_file(stages=CHAIN)), "--out", str(here), *flags]) == 0
    assert main(["train", str(run_file(stages=below(tmp_path) + CHAIN)), "--out", str(disk), *flags]) == 0
    assert losses(here) == losses(disk)
    assert same_tensors(final_state(here), final_state(disk))
    assert is_coded(final_state(here), form)
    assert all(event["logits_equal"] for event in of_kind(here, "delink"))
    assert not of_kind(here, "placement")
    assert all("offload" not in event for event in of_kind(here, "step"))


@pytest.mark.parametrize("form", ["bf16", "int8"])
def test_a_run_that_goes_on_is_one_that_did_not_stop(run_file: Callable[..., Path], tmp_path: Path, form: str) -> None:
    file, whole, parts = str(run_file(model="")), tmp_path / "whole", tmp_path / "parts"
    assert main(["train", file, "--out", str(whole), "--optim.state", form]) == 0
    for stop in (6, 9):  # where the next stage delinks, and within it
        mine = parts / str(stop)
        shutil.copytree(whole, mine)
        for checkpoint in list_checkpoints(mine / "checkpoints"):
            if int(checkpoint.name.removeprefix("step-")) > stop:
                shutil.rmtree(checkpoint)
        assert main(["train", file, "--out", str(mine), "--resume", "--optim.state", form]) == 0
        assert of_kind(mine, "resume")[0]["step"] == stop
        assert losses(mine) == losses(whole)
        assert same_tensors(final_state(mine), final_state(whole))


def test_a_run_may_begin_from_a_checkpoint_of_another_state(run_file: Callable[..., Path], tmp_path: Path) -> None:
    """A checkpoint has fp32, whatever made it; the first step from it is the same, and later ones are not."""
    file, first = str(run_file(model="")), tmp_path / "first"
    assert main(["train", file, "--out", str(first), "--optim.state", "int8"]) == 0
    assert all(value.dtype == torch.float32 for value in final_state(first).values())
    begin = ["train", file, "--start.checkpoint", str(first / "checkpoints" / "step-00000006")]
    for form in ("int8", "fp32"):
        assert main([*begin, "--out", str(tmp_path / form), "--optim.state", form]) == 0
    coded, plain = losses(tmp_path / "int8"), losses(tmp_path / "fp32")
    assert [coded[1], coded[2]] == [plain[1], plain[2]]
    assert coded[4] != plain[4]


def test_a_rule_may_end_a_stage_and_moments_are_not_measured(
    run_file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, file = tmp_path / "run", run_file(model="")
    text = file.read_text()
    file.write_text(text.replace('until = "50%"', 'until = {auto = "correlation", every = 1, at_most = "50%"}'))
    assert main(["train", str(file), "--out", str(out), "--optim.state", "int8"]) == 0
    assert of_kind(out, "check")
    file.write_text(text.replace("rewarm = 2", 'moments = "measure"'))
    told = refused(["train", str(file), "--out", str(tmp_path / "other"), "--optim.state", "bf16"], capsys)
    assert 'stages.1.moments = "measure"' in told
    assert 'optim.state = "bf16"' in told
