"""`tenfold train` started by torchrun is the run of one process, and either goes on with the other's checkpoints."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from runs import final_state, losses, of_kind
from tenfold.checkpoint.store import list_checkpoints
from tenfold.cli.main import main

DENSE = 'positions = "learned"\nkv_heads = 1'


def torchrun(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [*start, "-m", "tenfold", "train", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def assert_equal_training(one: Path, other: Path) -> None:
    assert losses(one) == pytest.approx(losses(other), abs=2e-5)
    mine, theirs = final_state(one), final_state(other)
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], atol=1e-4, rtol=1e-4, msg=name)
    for event, same in zip(of_kind(one, "validation"), of_kind(other, "validation"), strict=True):
        assert event["validation_loss"] == pytest.approx(same["validation_loss"], abs=2e-5)


def assert_equal_runs(one: Path, other: Path) -> None:
    assert_equal_training(one, other)
    for event, same in zip(of_kind(one, "similarity"), of_kind(other, "similarity"), strict=True):
        for part in ("attention", "ffn"):
            torch.testing.assert_close(torch.tensor(event[part]), torch.tensor(same[part]), atol=1e-4, rtol=0)


@pytest.mark.slow
def test_two_ranks_train_as_one_and_checkpoints_go_both_ways(run_file: Any, tmp_path: Path) -> None:
    file = str(run_file(model=DENSE, optim="eps = 1e-3"))
    alone, both = tmp_path / "alone", tmp_path / "both"
    assert main(["train", file, "--out", str(alone)]) == 0
    # Pseudo on shards, Real on tensor ranks.
    layout = ["--stages.1.parallel", "tensor=2,data_shard=1,data_replicate=1"]
    done = torchrun(2, file, "--out", str(both), *layout)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_equal_runs(both, alone)
    (delinked,) = of_kind(both, "delink")
    assert delinked["max_difference"] <= delinked["tolerance"]

    # As if it had been killed in the Pseudo stage: one process goes on with what two wrote.
    for path in list_checkpoints(both / "checkpoints"):
        if path.name > "step-00000006":
            shutil.rmtree(path)
    assert main(["train", file, "--out", str(both), "--resume"]) == 0
    assert_equal_runs(both, alone)

    # And two, otherwise laid out, with what one wrote, within the Real stage.
    shutil.rmtree(list_checkpoints(both / "checkpoints")[-1])
    done = torchrun(2, file, "--out", str(both), "--resume", "--parallel.data-replicate", "2")
    assert done.returncode == 0, done.stderr[-3000:]
    assert_equal_runs(both, alone)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("degrees", ["data_shard=2", "tensor=2", "context=2", "data_shard=2,expert=2", "pipeline=2"])
def test_two_gpus_train_as_one_does(run_file: Any, tmp_path: Path, degrees: str) -> None:
    training = 'device = "cuda"\nmicro_batch_size = 2'
    file = tmp_path / "gpu.toml"
    file.write_text(
        Path(run_file(optim="eps = 1e-3")).read_text().replace('device = "cpu"', training), encoding="utf-8"
    )
    alone, both = tmp_path / "alone", tmp_path / "both"
    assert main(["train", str(file), "--out", str(alone)]) == 0
    given = {"data_replicate": "1", "data_shard": "1", **dict(each.split("=") for each in degrees.split(","))}
    flags = [word for axis, degree in given.items() for word in (f"--parallel.{axis.replace('_', '-')}", degree)]
    done = torchrun(2, str(file), "--out", str(both), *flags)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_equal_runs(both, alone)
