"""`tenfold advise` on tiny models; that its timings are good no test can tell."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from tenfold.cli.main import main
from tenfold.config.run import OptimConfig
from tenfold.training import timing
from tenfold.training.setup import state_bytes

RUN = """
[model]
layers = 2
hidden = 16
heads = 2
ffn = 24
[data]
sequence_length = 16
vocab_size = 300
[training]
steps = 100
batch_size = 2
precision = "fp32"
device = "cpu"
"""
STAGES = '[[stages]]\nname = "pseudo"\nsharing = "all"\nuntil = "20%"\n[[stages]]\nname = "free"\n'


@pytest.fixture
def advise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Asks for advice on a run file of these stages; what was printed, or the object of --json."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(timing, "WARM_UP", 1)

    def ask(*flags: str, stages: str = STAGES, code: int = 0) -> Any:
        Path("run.toml").write_text(RUN + stages)
        assert main(["advise", "run.toml", "--seconds", "0.01", *flags]) == code
        out, err = capsys.readouterr()
        return err if code else json.loads(out) if "--json" in flags else out

    return ask


def test_both_stages_are_counted_and_timed_and_nothing_is_written(advise: Any, tmp_path: Path) -> None:
    told = advise("--json", "--energy.watts", "100")
    pseudo, real = told["stages"]
    assert (pseudo["name"], real["name"]) == ("pseudo", "free")
    assert pseudo["stored_parameters"] < real["stored_parameters"]
    assert pseudo["state_bytes"] == state_bytes(pseudo["stored_parameters"], OptimConfig())
    for stage in (pseudo, real):
        assert stage["timed_steps"] >= 4
        assert stage["tokens_per_step"] == 32
        assert 0 < stage["optimizer_share"] < 1
        assert stage["joules_per_token"] > 0
        low, high = stage["step_seconds_quartiles"]
        assert 0 < low <= stage["step_seconds"] <= high
    assert [plan["step"] for plan in told["plans"]] == [10, 20]
    assert told["verdict"] in ("share", "do not share", "open")  # as it was timed
    assert {path.name for path in tmp_path.iterdir()} == {"run.toml"}


def test_the_advice_is_a_table_and_plain_words_in_a_hundred_columns(advise: Any) -> None:
    shown = advise()
    assert all(len(line) <= 100 for line in shown.splitlines())
    assert "A Pseudo step costs" in shown
    assert "Energy is not claimed" in " ".join(shown.split())


def test_a_run_of_one_stage_is_held_against_sharing_all(advise: Any) -> None:
    told = advise("--json", stages="")
    shared, real = told["stages"]
    assert (shared["name"], shared["sharing"], real["sharing"]) == ("shared", "all", "none")
    assert [plan["step"] for plan in told["plans"]] == [10]


def test_a_stage_that_ends_when_a_rule_says_so_has_no_length_to_tell_of(advise: Any) -> None:
    assert [plan["step"] for plan in advise("--json", "--stages.0.until", "auto=correlation,every=5")["plans"]] == [10]


@pytest.mark.parametrize(
    "flags",
    [
        ["--model.moe.experts", "4", "--data.document-mask"],
        ["--model.objective", "masked"],
        ["--optim.name", "muon", "--stages.0.sequence-length", "from=8,over=50%"],
    ],
    ids=str,
)
def test_every_kind_of_model_can_be_asked_about(advise: Any, flags: list[str]) -> None:
    assert len(advise("--json", *flags)["reasons"]) == 5


def test_the_two_models_are_never_there_at_once(advise: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[torch.nn.Module]] = []
    build = timing.build_model

    def watched(*arguments: Any) -> torch.nn.Module:
        assert all(former() is None for former in made)
        model = build(*arguments)
        made.append(weakref.ref(model))
        return model

    monkeypatch.setattr(timing, "build_model", watched)
    advise("--json")
    assert len(made) == 2


def test_what_does_not_fit_is_told_without_building_it(advise: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(timing, "build_model", build)
    told = advise("--json", "--model.preset", "m6-10t")
    assert told["verdict"] == "does not fit"
    assert told["stages"][1]["stored_parameters"] > 10**13
    assert "does not fit" in advise("--model.preset", "m6-10t")


def test_running_out_of_memory_is_one_message(advise: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: Any) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")

    monkeypatch.setattr(timing, "build_model", build)
    assert "out of memory while pseudo was timed" in advise(code=2)


@pytest.mark.parametrize(
    ("flags", "stages", "told"),
    [
        (["--stages.0.sharing", "none"], STAGES, "nothing to compare"),
        (["--model.layers", "1"], "", "nothing to compare"),
        (["--seconds", "-1"], STAGES, "--seconds = -1"),
        (["--optim.lr", "-1"], STAGES, "optim.lr"),
        (["--training.device", "tpu"], STAGES, "training.device"),
        ([], STAGES.replace("until", "til"), "did you mean"),
    ],
    ids=str,
)
def test_what_cannot_be_asked_is_one_message(advise: Any, flags: list[str], stages: str, told: str) -> None:
    assert told in advise(*flags, stages=stages, code=2)
