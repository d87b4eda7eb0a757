"""Offload as a run file asks for it: foreseen, refused, and gone on with after the process was killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from runs import final_state, losses, of_kind, refused
from tenfold.cli.main import main
from tenfold.offload.loads import Loads
from training.cases_offloading import ALL, SOME, offload
from training.conftest import PSEUDO_REAL
from training.test_run import same_tensors

pytestmark = pytest.mark.usefixtures("small_pieces")


@pytest.mark.parametrize("budget", ["2200KiB", "1900KiB"])
def test_a_dry_run_says_what_the_run_will_do(
    run_file: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    budget: str,
) -> None:
    monkeypatch.setenv("COLUMNS", "160")  # no row goes on in a second line
    monkeypatch.setattr(Loads, "saw", lambda *_: None)  # of which a dry run knows nothing
    config = f"[offload]\ndevice_budget = '{budget}'\ndisk = ['{tmp_path}/fast']\n{PSEUDO_REAL}"
    file = str(run_file(stages=config))
    assert main(["train", file, "--dry-run"]) == 0
    foreseen = capsys.readouterr().out
    assert not (tmp_path / "fast").exists()
    assert main(["train", file, "--out", str(tmp_path / "run")]) == 0
    told = capsys.readouterr().out
    for stage in ("pseudo", "real"):
        lines = foreseen.partition(f"state of {stage} would lie")[2].split("\n\n")[0].splitlines()[1:]
        shown = [" ".join(line.split()) for line in told.partition(f"state of {stage} lies")[2].splitlines()]
        for line in lines:
            words = " ".join(line.split())
            assert not words or any(each.startswith(words) for each in shown), words
    assert "moments  disk" in foreseen


@pytest.mark.slow
def test_a_run_that_was_killed_in_a_step_goes_on_as_if_it_had_not_been(
    run_file: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And what it left in the folder is removed. It goes on with another placement, which is none of its past."""
    fast, whole, killed = tmp_path / "fast", tmp_path / "whole", tmp_path / "killed"
    file = run_file(stages=offload(tmp_path, ALL) + PSEUDO_REAL)
    assert main(["train", str(run_file(stages=PSEUDO_REAL)), "--out", str(whole)]) == 0
    file = run_file(stages=offload(tmp_path, ALL) + PSEUDO_REAL)
    script = (
        "import os, signal, sys\n"
        "from tenfold.cli.main import main\n"
        "from tenfold.offload.stepping import StreamedStep as S\n"
        "store, count = S._store, [0]\n"
        "def hook(self, loaded):\n"
        "    store(self, loaded)\n"
        "    count[0] += 1\n"
        "    if count[0] == 26: os.kill(os.getpid(), signal.SIGKILL)\n"
        "S._store = hook\n"
        "main(sys.argv[1:])\n"
    )
    done = subprocess.run([sys.executable, "-c", script, "train", str(file), "--out", str(killed)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert max(losses(killed)) == 7  # so it was in step 8, and the last checkpoint is of step 6
    (left,) = fast.iterdir()
    assert sum(each.stat().st_blocks for each in left.iterdir()) > 0
    file = run_file(stages=offload(tmp_path, SOME) + PSEUDO_REAL)
    capfd.readouterr()
    assert main(["train", str(file), "--out", str(killed), "--resume"]) == 0
    assert "left there by processes that are no more: 1" in capfd.readouterr().out
    assert any("left there by processes" in event["text"] for event in of_kind(killed, "note"))
    assert losses(killed) == losses(whole)
    assert same_tensors(final_state(killed), final_state(whole))
    assert not list(fast.iterdir())


BUDGET = "device_budget = '1MiB'\n"


@pytest.mark.parametrize(
    ("said", "else_", "message"),
    [
        (
            BUDGET,
            "",
            "offload.device_budget is set, and this run computes on the CPU, below whose RAM there is only disk",
        ),
        (BUDGET + "disk = ['FAST/deep/er']\n", "", "FAST/deep/er: No such file or directory. Name a folder"),
        (BUDGET + "disk = ['FILE']\n", "", "FILE: File exists. Name a folder"),
        (BUDGET + "disk = ['/proc/fast']\n", "", "nothing can be written in /proc/fast: No such file"),
        (BUDGET + "disk = ['']\n", "", "offload.disk.0"),
        (
            "device_budget = '1KiB'\ndisk = ['FAST']\n",
            "",
            "offload.device_budget allows 1,024 bytes, and this model needs",
        ),
        ("device_budget = 'much'\ndisk = ['FAST']\n", "", "offload.device_budget"),
        ("device_budget = '120%'\ndisk = ['FAST']\n", "", "offload.device_budget"),
        ("device_budget = 0\ndisk = ['FAST']\n", "", "offload.device_budget allows 0 bytes"),
        ("disk = ['FAST']\n", "", "offload.disk is set, and nothing is offloaded"),
        ("host_budget = '1MiB'\ndisk = ['FAST']\n" + BUDGET, "", "offload.host_budget is for pinned RAM"),
        (BUDGET + "disk = ['FAST']\nplacement = [{layers = 'all', moments = 'disk'}]\n", "", "exclude each other"),
        ("placement = [{layers = '0', moments = 'disk'}]\n", "", "needs a folder: set offload.disk"),
        ("placement = [{layers = '0', moments = 'host'}]\n", "", "there is no host below it"),
        ("disk = ['FAST']\nplacement = [{layers = '9', moments = 'disk'}]\n", "", "the layers are 0 to 3"),
        ("disk = ['FAST']\nplacement = [{layers = 'some', moments = 'disk'}]\n", "", "cannot read 'some' as layers"),
        ("disk = ['FAST']\nplacement = [{layers = '3-1', moments = 'disk'}]\n", "", "run backwards: write 1-3"),
        ("disk = ['FAST']\nplacement = [{layers = 'all'}]\n", "", "says nothing"),
        ("disk = ['FAST']\nplacement = [{layers = 'all', moments = 'tape'}]\n", "", "offload.placement.0.moments"),
        ("disk = ['FAST']\nplacement = [{layers = 'head', weights = 'disk'}]\n", "", "embedding and head stay"),
        ("disk = ['FAST']\nplacement = [{layers = 'head', activations = 'disk'}]\n", "", "names none of them"),
        ("disk = ['FAST']\nstep_in_backward = true\n" + BUDGET, "", "set optim.clip = 0"),
        (
            "disk = ['FAST']\nstep_in_backward = true\nplacement = [{layers = 'all', gradients = 'disk'}]\n",
            "clip = 0",
            "has gradients wait for the step",
        ),
        (BUDGET + "disk = ['FAST']\nactivations = true\n", "recompute = 'full'", "training.recompute"),
        (
            "disk = ['FAST']\nplacement = [{layers = '2', activations = 'disk'}]\n",
            "recompute = 'full'",
            "moves what layer 2 keeps",
        ),
        (BUDGET + "disc = ['FAST']\n", "", "disc"),
        (BUDGET + "disk = 'FAST'\n", "", "offload.disk"),
    ],
)
def test_what_cannot_be_is_one_message(
    run_file: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    said: str,
    else_: str,
    message: str,
) -> None:
    (tmp_path / "file").touch()
    names = {"FAST": f"{tmp_path}/fast", "FILE": f"{tmp_path}/file"}
    for name, path in names.items():
        said, message = said.replace(name, path), message.replace(name, path)
    out = tmp_path / "run"
    section = "optim" if "clip" in else_ else "training"
    file = run_file(stages=f"[offload]\n{said}{PSEUDO_REAL}", **{section: else_})
    told = refused(["train", str(file), "--out", str(out)], capsys)
    assert message in told
    assert told.startswith("tenfold: ")
    assert told.count("tenfold: ") == 1
    assert len(told) < 600
    assert not out.exists()
    assert not list((tmp_path / "fast").glob("*"))


@pytest.mark.parametrize("override", ["'on'", "{disk = ['/a']}", "{device_budged = 5}", "{}"])
def test_what_a_stage_cannot_have_is_one_message(
    run_file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str
) -> None:
    file = run_file(stages=PSEUDO_REAL + f"offload = {override}\n")
    assert "stages.1.offload" in refused(["train", str(file), "--out", str(tmp_path / "run")], capsys)


def test_a_full_disk_is_one_message(
    run_file: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = ["--out", str(tmp_path / "run")]
    budget = f"[offload]\ndisk = ['{tmp_path}/fast']\ndevice_budget = '1800KiB'\n"
    free = SimpleNamespace(free=8192)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: free)
        told = refused(["train", str(run_file(stages=budget + PSEUDO_REAL)), *arguments], capsys)
    assert f"offload.device_budget = {1800 * 1024:,} sends" in told
    assert "in the folders of offload.disk are 8,192" in told

    def no_room(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    told = refused(["train", str(run_file(stages=offload(tmp_path, ALL) + PSEUDO_REAL)), *arguments], capsys)
    assert str(tmp_path / "fast") in told
    assert "bytes" in told
    assert not list((tmp_path / "fast").iterdir())


def test_a_budget_that_a_later_stage_cannot_keep_is_refused_before_the_first_step(
    run_file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run_file(stages=f"{PSEUDO_REAL}offload = {{device_budget = '1MiB', disk = ['{tmp_path}/fast']}}\n")
    told = refused(["train", str(file), "--out", str(tmp_path / "run")], capsys)
    assert told.startswith("tenfold: stages.1.offload.device_budget allows 1,048,576 bytes")
    assert not (tmp_path / "run").exists()
    assert not list((tmp_path / "fast").iterdir())


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (PSEUDO_REAL.replace('"50%"', '"auto"'), 'stages.0.until = "auto" looks at the gradients'),
        (PSEUDO_REAL + "moments = 'measure'\n", 'stages.1.moments = "measure" looks at the gradients'),
        (PSEUDO_REAL + "moments = 'measure'\noffload = 'off'\n", "and stage 0 is offloaded"),
    ],
)
def test_gradients_that_may_be_away_are_not_looked_at(
    run_file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], stages: str, message: str
) -> None:
    file = run_file(stages=offload(tmp_path, "{layers = '0', moments = 'disk'}") + stages)
    assert message in refused(["train", str(file), "--out", str(tmp_path / "run")], capsys)
