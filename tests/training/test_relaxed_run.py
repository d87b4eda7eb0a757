"""Whole runs with a relaxed stage between Pseudo and Real: all that stages do, differences do too."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from runs import final_state, losses, of_kind, refused, stopping_at
from tenfold.checkpoint.store import list_checkpoints, load_checkpoint
from tenfold.cli.main import main
from tenfold.data.shards import TokenData
from tenfold.evaluation.generation import generate
from tenfold.training.setup import load_model

HEADERS = Path(sysconfig.get_path("include"), "Python.h")

RELAXED = """
[[stages]]
name = "pseudo"
sharing = "all"
until = {{steps = 4}}
[[stages]]
name = "relaxed"
sharing = "all"
rank = {rank}
until = {{steps = 8}}
[[stages]]
name = "real"
sharing = "none"
"""


@pytest.mark.parametrize("optimizer", ["adafactor", "muon"])
def test_a_relaxed_stage_begins_and_ends_without_changing_a_bit_and_is_told_of(
    run_file: Callable[..., Path], tmp_path: Path, optimizer: str
) -> None:
    out = tmp_path / "run"
    flags = ["--optim.name", optimizer, "--optim.lr", {"muon": "1e-2", "adafactor": "0.3"}[optimizer]]
    assert main(["train", str(run_file(stages=RELAXED.format(rank=4))), "--out", str(out), *flags]) == 0
    first, second = of_kind(out, "delink")
    assert (first["pattern_from"], first["pattern_to"]) == ("(0,0,0,0)", "(0,0,0,0) + rank 4")
    assert second["pattern_to"] == "(0,1,2,3)"
    assert first["logits_equal"] is second["logits_equal"] is True
    pseudo, relaxed, real = of_kind(out, "start")[0]["stages"]
    assert pseudo["stored_parameters"] < relaxed["stored_parameters"] < real["stored_parameters"]
    assert (pseudo.get("rank"), relaxed["rank"]) == (None, 4)
    alike = {event["step"]: event["ffn"][0][1] for event in of_kind(out, "similarity")}
    assert alike[4] == 1
    assert max(alike[8], alike[12]) < 1
    found = list(losses(out).values())
    assert found[-1] < found[0]


def test_a_run_that_was_stopped_in_every_stage_goes_on_bit_for_bit(
    run_file: Callable[..., Path], tmp_path: Path
) -> None:
    file, whole, parts = str(run_file(stages=RELAXED.format(rank=4))), tmp_path / "whole", tmp_path / "parts"
    assert main(["train", file, "--out", str(whole)]) == 0
    for step in (2, 4, 5, 8, 10):  # within every stage, at every end, just after it
        with stopping_at(step):
            assert main(["train", file, "--out", str(parts), "--resume"]) == 0
        assert list_checkpoints(parts / "checkpoints")[-1].name == f"step-{step:08d}"
    assert main(["train", file, "--out", str(parts), "--resume"]) == 0
    assert losses(parts) == losses(whole)
    mine, theirs = final_state(parts), final_state(whole)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_a_checkpoint_of_a_relaxed_stage_is_loaded_evaluated_and_written_with(
    run_file: Callable[..., Path], tmp_path: Path, shards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, left = tmp_path / "run", "layers.3.attention.wq.weight_left"
    assert main(["train", str(run_file(stages=RELAXED.format(rank=4))), "--out", str(out)]) == 0
    capsys.readouterr()
    for event in of_kind(out, "validation"):
        assert main(["eval", str(out), "--checkpoint", str(event["step"]), "--json"]) == 0
        loss = json.loads(capsys.readouterr().out)["values"]["loss"]
        assert loss == pytest.approx(event["validation_loss"], rel=1e-6)
    device = torch.device("cpu")
    model, real = load_model(out, 8, device), load_model(out, 12, device)
    assert left in dict(model.named_parameters())
    assert not any("_left" in name for name, _ in real.named_parameters())
    prompt = TokenData.open(shards).split("validation").read(0, 8).tolist()
    written = list(generate(model, prompt, 5, temperature=0.0))
    tokens = torch.tensor([prompt])
    for token in written:  # without a cache
        logits = model.logits(model(tokens)[0])[0, -1]
        assert logits.argmax().item() == token
        tokens = torch.cat((tokens, torch.tensor([[token]])), dim=1)


def test_a_run_may_begin_relaxed(run_file: Callable[..., Path], tmp_path: Path) -> None:
    stages = '[[stages]]\nname = "relaxed"\nsharing = "sandwich"\nrank = 2\nuntil = "50%"\n[[stages]]\n'
    assert main(["train", str(run_file(stages=stages)), "--out", str(tmp_path / "run")]) == 0
    assert of_kind(tmp_path / "run", "delink")[0]["logits_equal"] is True
    (weights,) = (load_checkpoint(path)[1] for path in [tmp_path / "run" / "checkpoints" / "step-00000006"])
    assert {name.split(".")[1] for name in weights if name.endswith("_left")} == {"1", "2"}


@pytest.mark.parametrize(
    ("stages", "told"),
    [
        (RELAXED.format(rank=33), ["stages.1 (relaxed): rank = 33 is more than any shared matrix can use: at 32"]),
        (RELAXED.format(rank=-1), ["stages.1.rank", "greater than or equal to 0"]),
        (RELAXED.format(rank=4) + "rank = 4", ["stages.2 (real): rank = 4 is of layers' own differences", "leave it"]),
        (
            RELAXED.format(rank=4).replace('sharing = "none"', "sharing = {groups = 2}"),
            ["stages.2 (real): layers that still share, (0,0,1,1), have differences of rank 4", "keep rank = 4"],
        ),
    ],
)
def test_ranks_that_cannot_be_are_refused_with_the_stage(
    run_file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], stages: str, told: list[str]
) -> None:
    for more in ([], ["--dry-run"]):
        message = refused(["train", str(run_file(stages=stages)), "--out", str(tmp_path / "run"), *more], capsys)
        for words in told:
            assert words in message
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_dry_run_tells_the_rank(
    run_file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    file = run_file(stages=RELAXED.format(rank=4))
    assert main(["train", str(file), "--out", str(tmp_path / "run"), "--dry-run"]) == 0
    assert "all + rank 4" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(not HEADERS.is_file(), reason="torch.compile needs Python.h, and it is not installed")
def test_a_compiled_run_trains_as_the_plain_one(run_file: Callable[..., Path], tmp_path: Path) -> None:
    file = str(run_file(stages=RELAXED.format(rank=4)))
    main(["train", file, "--out", str(tmp_path / "plain")])
    main(["train", file, "--out", str(tmp_path / "compiled"), "--training.compile"])
    assert all(event["max_difference"] < 1e-5 for event in of_kind(tmp_path / "compiled", "delink"))
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "plain"), rel=1e-4)
