"""Whole runs: both stages, stopping and going on, refusals."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from runs import final_state, losses, of_kind, refused, stopping_at
from tenfold.checkpoint.store import list_checkpoints
from tenfold.cli.main import main
from tenfold.data.sampling import PackedSequences
from tenfold.data.shards import TokenData
from tenfold.nn.recompute import Recompute
from tenfold.parallel.rank import Rank
from tenfold.training.setup import load_model

HEADERS = Path(sysconfig.get_path("include"), "Python.h")

CHAIN = """
[[stages]]
name = "one"
sharing = "all"
until = {steps = 4}
batch_size = 8
[[stages]]
name = "two"
sharing = {groups = 2}
until = "60%"
[[stages]]
name = "four"
sharing = "none"
moments = "copy"
"""


def same_tensors(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


@pytest.mark.parametrize("model", ["", "[model.moe]\nexperts = 4\nprototypes = 2\n"], ids=["dense", "moe"])
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "muon"])
def test_pseudo_then_real_trains_and_keeps_its_function_across_delinking(
    run_file: Callable[..., Path], tmp_path: Path, model: str, optimizer: str
) -> None:
    out = tmp_path / "run"
    rate = {"adamw": "1e-2", "muon": "1e-2", "adafactor": "0.3"}[optimizer]  # Adafactor's is relative to the weights
    flags = ["--optim.name", optimizer, "--optim.lr", rate]
    assert main(["train", str(run_file(model=model)), "--out", str(out), *flags]) == 0
    (delink,) = of_kind(out, "delink")
    assert delink["logits_equal"] is True
    assert delink["max_difference"] == 0
    assert delink["step"] == 6
    pseudo, real = of_kind(out, "start")[0]["stages"]
    assert pseudo["stored_parameters"] < real["stored_parameters"] == real["total_parameters"]
    assert losses(out)[12] < losses(out)[1]
    (end,) = of_kind(out, "end")
    assert [stage["name"] for stage in end["stages"]] == ["pseudo", "real"]
    assert {"config.toml", "metrics.jsonl", "tokenizer.json", "checkpoints", "tensorboard"} <= {
        path.name for path in out.iterdir()
    }


@pytest.mark.report
def test_a_run_ends_with_its_report(run_file: Callable[..., Path], tmp_path: Path) -> None:
    assert main(["train", str(run_file()), "--out", str(tmp_path / "run")]) == 0
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "pseudo" in page
    assert "<svg" in page


def test_a_chain_of_three_stages_with_its_own_batch_size(run_file: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert main(["train", str(run_file(stages=CHAIN)), "--out", str(out)]) == 0
    assert [event["pattern_to"] for event in of_kind(out, "delink")] == ["(0,0,1,1)", "(0,1,2,3)"]
    assert all(event["logits_equal"] for event in of_kind(out, "delink"))
    tokens = {event["step"]: event["tokens"] for event in of_kind(out, "step")}
    assert tokens[4] == 4 * 8 * 32
    assert tokens[12] == tokens[4] + 8 * 4 * 32


def test_the_effective_configuration_alone_reproduces_the_run(run_file: Callable[..., Path], tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    main(["train", str(run_file()), "--out", str(first), "--optim.lr", "3e-3", "--training.seed", "5"])
    main(["train", str(first / "config.toml"), "--out", str(second)])
    assert losses(first) == losses(second)
    assert same_tensors(final_state(first), final_state(second))


@pytest.mark.parametrize("recompute", ["false", "true"])
def test_the_seed_fixes_the_run(run_file: Callable[..., Path], tmp_path: Path, recompute: str) -> None:
    file = run_file(training=f"recompute = {recompute}")
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        torch.manual_seed(len(name) * 7 + int(seed))  # the global generator has no say
        main(["train", str(file), "--out", str(tmp_path / name), "--training.seed", seed])
    assert losses(tmp_path / "a") == losses(tmp_path / "b") != losses(tmp_path / "c")


@pytest.mark.parametrize("flags", [["selective"], ["full", "--training.recompute_layers", "1"]], ids=" ".join)
def test_recomputing_changes_nothing(run_file: Callable[..., Path], tmp_path: Path, flags: list[str]) -> None:
    main(["train", str(run_file()), "--out", str(tmp_path / "keep")])
    main(["train", str(run_file()), "--out", str(tmp_path / "again"), "--training.recompute", *flags])
    assert losses(tmp_path / "keep") == losses(tmp_path / "again")


OWN = """
[[stages]]
name = "pseudo"
sharing = "all"
until = "50%"
micro_batch_size = 2
recompute = "full"
recompute_layers = 2
[[stages]]
name = "real"
micro_batch_size = 1
recompute = "selective"
rewarm = 2
"""


def test_stages_with_passes_and_recompute_of_their_own_train_as_a_plain_run_does(
    run_file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["train", str(run_file()), "--out", str(tmp_path / "plain")])
    done: list[tuple[int, list[str]]] = []
    original = Rank.run_passes

    def run_passes(self: Rank, model: Any, micro_batches: Any, *arguments: Any) -> Any:
        done.append((len(micro_batches), [layer.recompute for layer in model.layers]))
        return original(self, model, micro_batches, *arguments)

    monkeypatch.setattr(Rank, "run_passes", run_passes)
    assert main(["train", str(run_file(stages=OWN)), "--out", str(tmp_path / "own")]) == 0
    half = [Recompute("full", 2).of(layer, 4) for layer in range(4)]
    assert sorted(half) == ["full", "full", "none", "none"]
    assert done == 6 * [(2, half)] + 6 * [(4, 4 * ["selective"])]
    plain, own = losses(tmp_path / "plain"), losses(tmp_path / "own")
    assert list(own.values()) == pytest.approx(list(plain.values()), abs=1e-5)
    for name, tensor in final_state(tmp_path / "plain").items():
        torch.testing.assert_close(final_state(tmp_path / "own")[name], tensor, atol=1e-4, rtol=1e-4, msg=name)


# In the Pseudo stage, at its very end, just after delinking, within the Real stage, between checkpoints.
@pytest.mark.parametrize("stop_at", [1, 3, 6, 7, 11])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(
    run_file: Callable[..., Path], tmp_path: Path, stop_at: int
) -> None:
    file, whole, parts = str(run_file()), tmp_path / "whole", tmp_path / "parts"
    assert main(["train", file, "--out", str(whole)]) == 0
    with stopping_at(stop_at):
        assert main(["train", file, "--out", str(parts)]) == 0
    assert list_checkpoints(parts / "checkpoints")[-1].name == f"step-{stop_at:08d}"
    assert of_kind(parts, "stop")[0]["reason"] == "SIGTERM"
    assert main(["train", file, "--out", str(parts), "--resume"]) == 0
    assert losses(parts) == losses(whole)
    assert same_tensors(final_state(parts), final_state(whole))
    assert [event["stage"] for event in of_kind(parts, "validation")] == ["pseudo", "real"]


def test_another_end_of_documents_than_the_datas_is_told(
    run_file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--data.document_mask", "--model.document_end", "3"]
    assert main(["train", str(run_file()), "--out", str(tmp_path / "run"), *flags]) == 2
    assert "model.document_end = 3, but documents end in token" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_with_document_masks_is_evaluated_with_them(
    run_file: Callable[..., Path], shards: Path, tmp_path: Path
) -> None:
    out, flags = tmp_path / "run", ["--data.document-mask", "--model.positions", "learned"]
    assert main(["train", str(run_file()), "--out", str(out), *flags]) == 0
    assert of_kind(out, "delink")[0]["logits_equal"] is True
    data = TokenData.open(shards)
    model = load_model(out, None, torch.device("cpu"))
    rows = torch.from_numpy(PackedSequences(data.split("validation"), 32, None).batch(0, 8))
    inputs = rows[:, :-1]
    assert (inputs[:, :-1] == data.end_of_text).any(), "the text has a border between documents to look at"
    told = of_kind(out, "validation")[-1]["validation_loss"]

    def loss(tokens: torch.Tensor, targets: torch.Tensor) -> float:
        logits = model.logits(model(tokens)[0])
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()

    apart = 0.0  # each document in a forward pass of its own
    for row in rows.tolist():
        begin = 0
        for place in range(32):
            if row[place] == data.end_of_text or place == 31:
                apart += loss(torch.tensor([row[begin : place + 1]]), torch.tensor([row[begin + 1 : place + 2]]))
                begin = place + 1
    assert told == pytest.approx(apart / inputs.numel(), rel=1e-5)
    assert main(["train", str(run_file()), "--out", str(out), *flags, "--resume"]) == 0


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_from_its_last_checkpoint(run_file: Callable[..., Path], tmp_path: Path) -> None:
    file, whole, killed = run_file(), tmp_path / "whole", tmp_path / "killed"
    assert main(["train", str(file), "--out", str(whole)]) == 0
    script = (
        "import os, signal, sys\n"
        "from tenfold.cli.main import main\n"
        "from tenfold.reporting.metrics import MetricsWriter as W\n"
        "write = W.write\n"
        "def hook(self, event):\n"
        "    write(self, event)\n"
        "    if event.get('event') == 'step' and event['step'] == 8: os.kill(os.getpid(), signal.SIGKILL)\n"
        "W.write = hook\n"
        "main(sys.argv[1:])\n"
    )
    done = subprocess.run([sys.executable, "-c", script, "train", str(file), "--out", str(killed)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert list_checkpoints(killed / "checkpoints")[-1].name == "step-00000006"
    assert main(["train", str(file), "--out", str(killed), "--resume"]) == 0
    assert losses(killed) == losses(whole)
    assert same_tensors(final_state(killed), final_state(whole))


def test_a_damaged_checkpoint_is_passed_over(
    run_file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = str(run_file()), tmp_path / "run"
    main(["train", file, "--out", str(out)])
    before = final_state(out)
    newest = list_checkpoints(out / "checkpoints")[-1] / "weights.safetensors"
    content = bytearray(newest.read_bytes())
    content[-3] ^= 1
    newest.write_bytes(content)
    assert main(["train", file, "--out", str(out), "--resume"]) == 0
    assert "weights.safetensors is damaged" in capsys.readouterr().out
    assert same_tensors(final_state(out), before)


def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_anew(
    run_file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = str(run_file()), tmp_path / "run"
    main(["train", file, "--out", str(out)])
    metrics = (out / "metrics.jsonl").read_bytes()
    for path in list_checkpoints(out / "checkpoints"):
        (path / "weights.safetensors").write_bytes(b"")
    assert "is whole" in refused(["train", file, "--out", str(out), "--resume"], capsys)
    assert (out / "metrics.jsonl").read_bytes() == metrics


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 246 GiB"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_too_little_memory_is_told_with_the_keys_that_save_some(
    error: Exception,
    run_file: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr("tenfold.training.run.train_step", fails)
    message = refused(["train", str(run_file()), "--out", str(tmp_path / "run")], capsys)
    assert str(error) in message
    assert "training.micro_batch_size" in message


def test_a_finished_run_that_is_resumed_says_so_and_changes_nothing(
    run_file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = str(run_file()), tmp_path / "run"
    main(["train", file, "--out", str(out)])
    before = (out / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    assert main(["train", file, "--out", str(out), "--resume"]) == 0
    shown = capsys.readouterr().out
    assert "finished already" in shown
    assert "bigram" in shown
    assert (out / "metrics.jsonl").read_bytes() == before


def test_validation_loss_does_not_depend_on_micro_batches(run_file: Callable[..., Path], tmp_path: Path) -> None:
    found = []
    for micro in ("1", "4"):
        out = tmp_path / micro
        main(["train", str(run_file()), "--out", str(out), "--training.micro-batch-size", micro])
        found.append([event["validation_loss"] for event in of_kind(out, "validation")])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_bad_input_gets_one_clear_message(
    run_file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = str(run_file()), tmp_path / "run"
    train = ["train", file, "--out", str(out)]
    cases = {
        "there is no run file": ["train", str(tmp_path / "none.toml")],
        "did you mean `training`?": ["train", str(_with(tmp_path / "key.toml", "[trainig]\nsteps = 3\n"))],
        "not valid TOML": ["train", str(_with(tmp_path / "toml.toml", "[training\n"))],
        "does not divide into heads": [*train, "--model.hidden", "33"],
        "names 3 layers, but the model has 4": [*train, "--stages.0.sharing", "0,0,1"],
        "does not refine": [*train, "--stages.0.sharing", "groups=2", "--stages.1.sharing", "cycle=2"],
        "greater than 0": [*train, "--optim.lr", "-1"],
        "Unrecognized": [*train, "--optim.learning-rate", "1"],
        "model.vocab_size = 10 is smaller than": [*train, "--model.vocab-size", "10"],
        "alone need": [*train, "--model.preset", "m6-10t", "--data.sequence-length", "32"],
        "is no device": [*train, "--training.device", "abacus"],
        "would have no steps": [*train, "--stages.0.until", "100%"],
        "data.path": [*train, "--data.path", str(tmp_path / "nothing-here")],
    }
    for expected, arguments in cases.items():
        message = refused(arguments, capsys)
        assert expected in message.replace("\n", " "), f"{arguments}: {message}"
        assert not out.exists(), arguments


def _with(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_run_directory_is_never_written_over(
    run_file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = str(run_file()), tmp_path / "run"
    main(["train", file, "--out", str(out)])
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert "exists already; give --resume" in refused(["train", file, "--out", str(out)], capsys)
    changed = ["train", file, "--out", str(out), "--resume", "--optim.lr", "0.5"]
    assert "was begun with optim.lr = 0.01" in refused(changed, capsys)
    other = tmp_path / "other"
    other.mkdir()
    (other / "letter.txt").write_text("mine")
    assert "not a run directory" in refused(["train", file, "--out", str(other), "--resume"], capsys)
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_half_of_a_launch_is_refused(
    run_file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not set" in refused(
        ["train", str(run_file()), "--out", str(tmp_path / "run")], capsys
    )


def test_a_full_disk_leaves_the_last_checkpoint_whole(
    run_file: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tenfold.checkpoint import store

    file, out = str(run_file()), tmp_path / "run"
    write, calls = store.write_tensors, []

    def fills_up(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) > 3:
            raise OSError(28, "No space left on device")
        return write(*arguments)

    monkeypatch.setattr(store, "write_tensors", fills_up)
    message = refused(["train", file, "--out", str(out)], capsys)
    assert "No space left" in message
    assert "step-00000003" in message
    monkeypatch.undo()
    assert main(["train", file, "--out", str(out), "--resume"]) == 0
    assert [path for path in (out / "checkpoints").iterdir() if path.name.startswith(".")] == []


def test_a_dry_run_prints_the_stages_and_writes_nothing(
    tmp_path: Path, run_file: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    out = tmp_path / "run"
    arguments = ["train", str(run_file()), "--out", str(out), "--dry-run", "--model.preset", "m6-10t"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "10.05T" in shown
    assert "209.4B" in shown
    assert not out.exists()


def test_compiling_without_a_compiler_is_refused_before_the_run(
    run_file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    message = refused(["train", str(run_file()), "--out", str(tmp_path / "run"), "--training.compile"], capsys)
    assert "needs a C++ compiler (g++)" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.skipif(not HEADERS.is_file(), reason="torch.compile needs Python.h, and it is not installed")
def test_a_compiled_run_delinks_exactly_and_trains_as_the_plain_one(
    run_file: Callable[..., Path], tmp_path: Path
) -> None:
    file = str(run_file(training="recompute = true"))
    main(["train", file, "--out", str(tmp_path / "plain")])
    main(["train", file, "--out", str(tmp_path / "compiled"), "--training.compile"])
    assert of_kind(tmp_path / "compiled", "delink")[0]["logits_equal"] is True
    plain, compiled = losses(tmp_path / "plain"), losses(tmp_path / "compiled")
    assert list(compiled.values()) == pytest.approx(list(plain.values()), rel=1e-4)
