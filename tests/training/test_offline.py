"""Delinking a checkpoint on disk, beside delinking in memory and saving."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runs import refused
from tenfold.checkpoint import store, tensors
from tenfold.checkpoint.store import load_checkpoint, save_checkpoint
from tenfold.cli.main import main
from tenfold.config.load import load_run
from tenfold.config.run import OptimConfig
from tenfold.nn.decoder import Decoder
from tenfold.sharing.delinking import Moments, delink
from tenfold.sharing.patterns import Pattern
from tenfold.sharing.tying import PARTS, Sharing, tie
from tenfold.training.offline import OfflineDelinking
from tenfold.training.optimizers import build_optimizers, materialize, state_tensors
from tenfold.training.setup import load_model

MOE = {"experts": 4, "prototypes": 2, "bias_rate": 0.01, "shared_experts": 1}


def trained(model: Decoder, optimizer: str, steps: int = 3) -> list[torch.optim.Optimizer]:
    """Optimizers whose state is of some steps with gradients of chance."""
    optimizers = build_optimizers(model, OptimConfig(name=optimizer, lr=1e-2))
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
        for one in optimizers:
            one.step()
            one.zero_grad()
    return optimizers


def save(folder: Path, model: Decoder, optimizers: list[torch.optim.Optimizer], sharing: Sharing, **more: Any) -> Path:
    place = {
        **sharing.dump(),
        "model": model.config.model_dump(mode="json", exclude_none=True),
        "sequence_length": 32,
        "precision": "fp32",
        "betas": [0.9, 0.95],
        "place": {"step": 3},
        **more,
    }
    weights = {name: parameter.data for name, parameter in model.named_parameters()}
    return save_checkpoint(folder, 3, weights, state_tensors(model, optimizers), place)


@pytest.fixture
def shared(tiny_decoder: Callable[..., Decoder], tmp_path: Path) -> Path:
    """A checkpoint of four layers that share everything, in a run directory."""
    model = tiny_decoder("all", dtype=torch.float32)
    return save(tmp_path / "run" / "checkpoints", model, trained(model, "adamw"), Sharing(Pattern([0] * 4)))


CASES = [
    ("all", PARTS, "none", PARTS),
    ("all", PARTS, {"groups": 2}, PARTS),
    ({"groups": 2}, PARTS, "none", PARTS),
    ([0, 0, 0, 1], PARTS, [0, 1, 0, 2], PARTS),
    ("all", PARTS, "all", ("attention",)),
    ("all", ("attention", "ffn"), {"cycle": 2}, ("attention",)),
]
EXPERTS = [
    ("all", "layer", "none", "layer", 1),
    ("all", "layer", "none", "free", 1),
    ("none", "prototype", "none", "free", 2),
    ({"groups": 2}, "layer", "none", "prototype", 1),
    ("all", "prototype", {"groups": 2}, "free", 1),
]


@pytest.mark.parametrize(("before", "experts", "after", "experts_after", "top_k"), EXPERTS, ids=str)
@pytest.mark.parametrize("moments", ["copy", "rescale", "reset"])
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "muon"])
def test_experts_are_freed_to_the_last_bit_as_in_memory(
    tiny_decoder: Callable[..., Decoder],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    optimizer: str,
    moments: Moments,
    before: Any,
    experts: str,
    after: Any,
    experts_after: str,
    top_k: int,
) -> None:
    monkeypatch.setattr(tensors, "PIECE", 100)
    model = tiny_decoder(dtype=torch.float32, moe={**MOE, "experts": 8, "top_k": top_k})
    coarse = Sharing(Pattern.parse(before, 4), experts=experts)
    fine = Sharing(Pattern.parse(after, 4), experts=experts_after)
    tie(model.layers, coarse)
    optimizers = trained(model, optimizer)
    source = save(tmp_path / "coarse" / "checkpoints", model, optimizers, coarse)
    delink(model.layers, optimizers, fine, moments)
    materialize(optimizers)
    expected = save(tmp_path / "memory", model, optimizers, fine)

    made = OfflineDelinking(source, tmp_path / "fine", after, PARTS, moments, experts_after).write()
    for name in ("weights.safetensors", "optimizer.safetensors"):
        assert (made / name).read_bytes() == (expected / name).read_bytes()
    assert Sharing.load(load_checkpoint(made)[0]) == fine


@pytest.mark.parametrize(("before", "parts", "after", "parts_after"), CASES, ids=str)
@pytest.mark.parametrize("moments", ["copy", "rescale", "reset"])
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "muon"])
def test_the_result_is_to_the_last_bit_what_delinking_in_memory_saves(
    tiny_decoder: Callable[..., Decoder],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    optimizer: str,
    moments: Moments,
    before: Any,
    parts: tuple[str, ...],
    after: Any,
    parts_after: tuple[str, ...],
) -> None:
    monkeypatch.setattr(tensors, "PIECE", 100)
    model = tiny_decoder(before, dtype=torch.float32, parts=parts, moe=MOE if "experts" in parts else {})
    coarse, fine = Sharing(Pattern.parse(before, 4), parts), Sharing(Pattern.parse(after, 4), parts_after)
    optimizers = trained(model, optimizer)
    source = save(tmp_path / "coarse" / "checkpoints", model, optimizers, coarse)
    delink(model.layers, optimizers, fine, moments)
    expected = save(tmp_path / "memory", model, optimizers, fine)

    made = OfflineDelinking(source, tmp_path / "fine", after, parts_after, moments).write()
    assert made == tmp_path / "fine" / "checkpoints" / "step-00000003"
    for name in ("weights.safetensors", "optimizer.safetensors"):
        assert (made / name).read_bytes() == (expected / name).read_bytes()
    manifest, _, _ = load_checkpoint(made)
    assert Sharing.load(manifest) == fine
    assert manifest["delinked_from"]["pattern"] == list(coarse.pattern.blocks)


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "muon"])
@pytest.mark.parametrize(("before", "parts"), [("all", PARTS), ("sandwich", PARTS), ("all", ("experts", "attention"))])
def test_low_rank_differences_are_folded_in_as_in_memory(
    tiny_decoder: Callable[..., Decoder],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    optimizer: str,
    before: Any,
    parts: tuple[str, ...],
) -> None:
    monkeypatch.setattr(tensors, "PIECE", 100)  # pieces begin and end within rows, and cross from expert to expert
    model = tiny_decoder("none", dtype=torch.float32, moe=MOE)
    relaxed, free = Sharing(Pattern.parse(before, 4), parts, rank=3), Sharing(Pattern(range(4)))
    tie(model.layers, relaxed)
    optimizers = trained(model, optimizer)
    source = save(tmp_path / "coarse" / "checkpoints", model, optimizers, relaxed)
    delink(model.layers, optimizers, free)
    expected = load_checkpoint(save(tmp_path / "memory", model, optimizers, free))
    found = load_checkpoint(OfflineDelinking(source, tmp_path / "fine", "none", PARTS, "rescale").write())
    for mine, theirs in zip(found[1:], expected[1:], strict=True):
        assert mine.keys() == theirs.keys()
        for name, tensor in theirs.items():
            torch.testing.assert_close(mine[name], tensor, rtol=1e-6, atol=1e-6, msg=name)
    assert all(torch.equal(found[2][name], tensor) for name, tensor in expected[2].items())


def test_layers_that_differ_are_not_left_sharing(
    tiny_decoder: Callable[..., Decoder], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_decoder("none", dtype=torch.float32)
    relaxed = Sharing(Pattern([0] * 4), rank=3)
    tie(model.layers, relaxed)
    source = save(tmp_path / "run" / "checkpoints", model, trained(model, "adamw"), relaxed)
    told = refused(["delink", str(source), str(tmp_path / "out"), "--sharing", "groups=2"], capsys)
    assert "differences of rank 3" in told
    assert not (tmp_path / "out").exists()


def test_a_state_that_made_no_step_yet_is_carried_too(tiny_decoder: Callable[..., Decoder], tmp_path: Path) -> None:
    model = tiny_decoder("all", dtype=torch.float32)
    optimizers = trained(model, "adamw", steps=0)
    source = save(tmp_path, model, optimizers, Sharing(Pattern([0] * 4)))
    _, _, state = load_checkpoint(OfflineDelinking(source, tmp_path / "fine", "none", PARTS, "rescale").write())
    assert not any(tensor.any() for tensor in state.values())


def test_the_delinked_run_writes_and_evaluates_as_the_one_it_came_from(
    run_file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, free = tmp_path / "pseudo", tmp_path / "free"
    stages = '[[stages]]\nname = "pseudo"\nsharing = "all"\n'
    assert main(["train", str(run_file(stages=stages)), "--out", str(run), "--training.steps", "4"]) == 0
    assert main(["delink", str(run), str(free), "--sharing", "groups=2"]) == 0
    assert "(0,0,0,0) -> (0,0,1,1)" in capsys.readouterr().out
    assert [stage.sharing for stage in load_run(free / "config.toml").stages] == [[0, 0, 1, 1]]
    tokens = torch.arange(32)[None]
    outputs = [load_model(place, None, torch.device("cpu")).eval()(tokens)[0] for place in (run, free)]
    assert torch.equal(*outputs)
    told = []
    for place in (run, free):
        assert main(["eval", str(place), "--json"]) == 0
        told.append(json.loads(capsys.readouterr().out)["values"])
    assert told[0] == told[1]
    # It is no run to go on with: where it is in its schedule nobody knows.
    argv = ["train", str(free / "config.toml"), "--out", str(free), "--resume"]
    assert "start.checkpoint" in refused(argv, capsys)


def test_what_is_no_refinement_is_refused_with_both_patterns(
    tiny_decoder: Callable[..., Decoder], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_decoder({"groups": 2}, dtype=torch.float32)
    source = save(tmp_path / "checkpoints", model, trained(model, "adamw"), Sharing(Pattern([0, 0, 1, 1])))
    told = refused(["delink", str(source), str(tmp_path / "fine"), "--sharing", "cycle=2"], capsys)
    assert "(0,1,0,1) does not refine (0,0,1,1)" in told
    assert str(source) in told
    told = refused(["delink", str(source), str(tmp_path / "fine"), "--sharing", "groups=2"], capsys)
    assert "nothing to delink" in told
    told = refused(["delink", str(source), str(tmp_path / "fine"), "--sharing", "0,1"], capsys)
    assert "names 2 layers, but the model has 4" in told
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_damage_is_named_and_nothing_is_written(
    shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = shared / "optimizer.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 1
    file.write_bytes(raw)
    assert f"{file} is damaged" in refused(["delink", str(shared), str(tmp_path / "fine")], capsys)
    assert "every checkpoint in" in refused(["delink", str(tmp_path / "run"), str(tmp_path / "fine")], capsys)
    assert "there is no" in refused(["delink", str(tmp_path / "x"), str(tmp_path / "fine")], capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_place_that_is_taken_is_refused(shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "exists already" in refused(["delink", str(shared), str(tmp_path / "run")], capsys)
    (tmp_path / "file").touch()
    assert "cannot write" in refused(["delink", str(shared), str(tmp_path / "file" / "x")], capsys)


def test_a_disk_without_room_is_told_before_anything_is_written(
    shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    told = refused(["delink", str(shared), str(tmp_path / "fine")], capsys)
    assert f"cannot write {tmp_path / 'fine'}" in told
    assert "1000 free" in told
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_rescaling_without_the_betas_is_refused_with_the_remedy(
    tiny_decoder: Callable[..., Decoder], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    model = tiny_decoder("all", dtype=torch.float32)
    place = {"model": model.config.model_dump(mode="json", exclude_none=True), "pattern": [0] * 4}
    weights = {name: parameter.data for name, parameter in model.named_parameters()}
    state = state_tensors(model, trained(model, "adamw"))
    source = save_checkpoint(tmp_path, 3, weights, state, {**place, "sequence_length": 32})
    assert "moments copy" in refused(["delink", str(source), str(tmp_path / "fine")], capsys)
    assert main(["delink", str(source), str(tmp_path / "fine"), "--moments", "copy"]) == 0


def test_state_of_a_kind_that_cannot_be_rescaled_is_refused(
    tiny_decoder: Callable[..., Decoder], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_decoder("all", dtype=torch.float32)
    optimizers = trained(model, "adamw")
    optimizers[0].state[model.layers[0].attention.wq.weight]["shadow"] = torch.ones(1)
    source = save(tmp_path, model, optimizers, Sharing(Pattern([0] * 4)))
    assert "'shadow'" in refused(["delink", str(source), str(tmp_path / "fine")], capsys)


_KILLED = """
import os, signal, sys
from tenfold.checkpoint import tensors
from tenfold.cli.main import main
tensors.PIECE = 500
real, left = tensors._reader, [int(sys.argv[3])]
def counted(*arguments):
    pieces = real(*arguments)
    def slow():
        for piece in pieces():
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            yield piece
    return slow
tensors._reader = counted
main(["delink", sys.argv[1], sys.argv[2]])
"""


@pytest.mark.parametrize("piece", [1, 40])
def test_a_kill_in_between_leaves_nothing_of_that_name_and_the_next_call_cleans_up(
    shared: Path, tmp_path: Path, piece: int
) -> None:
    out = tmp_path / "fine"
    done = subprocess.run([sys.executable, "-c", _KILLED, str(shared), str(out), str(piece)], check=False)
    assert done.returncode == -9
    assert not out.exists()
    assert (tmp_path / ".writing-fine").is_dir()
    assert main(["delink", str(shared), str(out)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fine", "run"]
    load_checkpoint(out / "checkpoints" / "step-00000003")


_MEASURED = """
import sys
from pathlib import Path
from tenfold.hardware.memory import peak_memory_bytes
from tenfold.sharing.tying import PARTS
from tenfold.training.offline import OfflineDelinking
import torch
small, large, out = map(Path, sys.argv[1:])
cpu = torch.device("cpu")
OfflineDelinking(small, out / "fine-small", "none", PARTS, "rescale").write()  # all that is loaded once is loaded now
before = peak_memory_bytes(cpu)
OfflineDelinking(large, out / "fine-large", "none", PARTS, "rescale").write()
print(peak_memory_bytes(cpu) - before)
"""


def test_memory_does_not_hang_on_the_size_of_the_checkpoint(
    shared: Path, tiny_decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    model = tiny_decoder("all", dtype=torch.float32, hidden=64, ffn=2**17, layers=2)
    large = save(tmp_path / "large", model, trained(model, "adamw", steps=1), Sharing(Pattern([0, 0])))
    assert sum(file.stat().st_size for file in large.iterdir()) > 280e6
    command = [sys.executable, "-c", _MEASURED, str(shared), str(large), str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert int(done.stdout) < 128e6
