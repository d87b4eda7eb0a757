"""`tenfold plan` on small models: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runs import refused
from tenfold.cli.main import main
from tenfold.config.load import load_run
from tenfold.planning.stages import plan_stages

RUN = """
[model]
preset = "tiny"
vocab_size = 4096

[data]
sequence_length = 256

[training]
steps = 100
batch_size = 32
precision = "bf16"

[[stages]]
name = "pseudo"
sharing = "all"
until = "20%"

[[stages]]
name = "real"
"""


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """`tenfold plan run.toml` with arguments: its JSON, or what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "run.toml").write_text(RUN, encoding="utf-8")

    def ask(*arguments: str) -> Any:
        capsys.readouterr()
        assert main(["plan", "run.toml", *arguments]) == 0
        shown = capsys.readouterr().out
        return json.loads(shown) if "--json" in arguments else shown

    return ask


def test_both_stages_are_planned_and_the_sums_are_those_of_their_parts(plan: Any, tmp_path: Path) -> None:
    told = plan("--cluster", "4:h100,price=2", "--json")
    pseudo, real = told["stages"]
    assert [stage["name"] for stage in told["stages"]] == ["pseudo", "real"]
    assert pseudo["steps"] == 20
    for stage in told["stages"]:
        assert stage["seconds"] == pytest.approx(stage["steps"] * stage["step_seconds"])
        assert sum(stage["step"]["shares"].values()) == pytest.approx(stage["step_seconds"])
        assert max(each["tiers"]["device"] for each in stage["memory"]) <= stage["budgets"]["device"]
        assert stage["tokens_per_second"] == pytest.approx(32 * 256 / stage["step_seconds"])
        assert stage["cost"] == pytest.approx(stage["seconds"] / 3600 * 2 * 4)
    assert told["seconds"] == pytest.approx(pseudo["seconds"] + real["seconds"] + real["delinking"]["seconds"])
    assert {row["resource"] for row in real["doubled"]} >= {"network", "matrix rate"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.toml"]  # nothing else is made


def test_it_is_told_in_a_hundred_columns_and_drawn(plan: Any, tmp_path: Path) -> None:
    shown = plan("--cluster", "2x2:v100-32gb", "--timeline", "step.html")
    assert max(map(len, shown.splitlines())) <= 100
    for word in ("pseudo", "real", "layout", "placement", "tokens a second", "device", "assumed:", "is bound by"):
        assert word in shown
    assert "<svg" in (tmp_path / "step-real.html").read_text(encoding="utf-8")


def test_an_open_vocabulary_and_precision_are_decided_and_told(plan: Any, tmp_path: Path) -> None:
    text = RUN.replace("vocab_size = 4096\n", "").replace('precision = "bf16"\n', "")
    (tmp_path / "run.toml").write_text(text, encoding="utf-8")
    told = plan("--cluster", "1:h100", "--json")
    notes = " ".join(told["cluster"]["notes"])
    assert "a vocabulary of 8192" in notes
    assert "set model.vocab_size if it will be another" in notes
    assert "training.precision = bf16" in notes


def test_a_stage_that_does_not_fit_is_told_with_what_it_lacks(plan: Any) -> None:
    shown = plan(
        "--cluster", "1:v100-32gb,host_memory=8GiB,memory=2GiB", "--model.hidden", "2048", "--model.ffn", "8192"
    )
    assert "does not fit in any way" in shown
    assert "needs" in shown


def test_what_is_wrong_is_one_message(plan: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def wrong(*arguments: str) -> str:
        return refused(["plan", "run.toml", *arguments], capsys)

    assert "there are no accelerators named 'h200x'" in wrong("--cluster", "8:h200x")
    assert "--deadline is for --share-until" in wrong("--cluster", "8:h100", "--deadline", "10d")
    both = ("--deadline", "10d", "--target-loss", "3")
    assert "exclude each other" in wrong("--cluster", "8:h100", "--share-until", "a", *both)
    bad = ("--share-until", "a", "--deadline", "10w")
    assert "--deadline: cannot read '10w' as a time" in wrong("--cluster", "8:h100", *bad)
    assert "--timeline step.png" in wrong("--cluster", "8:h100", "--timeline", "step.png")
    assert "energy" in wrong("--cluster", "8:h100,watts=0", "--objective", "energy")
    assert "price" in wrong("--cluster", "8:h100", "--objective", "cost")
    assert "--cluster" in wrong()
    assert "a.toml" in refused(["plan", "a.toml", "--cluster", "8:h100"], capsys)


def test_how_long_to_share_is_told_from_runs(plan: Any, tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, shared) for name, shared in (("free", False), ("shared", True))]
    asked = ("--cluster", "2:h100", "--share-until", *runs)
    found = plan(*asked, "--target-loss", "3", "--json")
    told = found["horizon"]
    assert told["verdict"] in ("share", "do not share", "open")
    assert told["best"]["loss"] == 3
    assert told["best"]["price"] <= told["never"]["price"]
    assert told["curves"]["free"]["floor"] == pytest.approx(2.0, abs=0.1)
    prices = [1 / stage["tokens_per_second"] for stage in found["stages"]]
    assert [told["price"]["shared"], told["price"]["free"]] == pytest.approx(prices)


def make_run(folder: Path, shared: bool) -> str:
    """A run directory whose loss is 2 + 3000 / sqrt(tokens), sharing, 2.2 + the same."""
    planned = {"name": "a", "stored_parameters": 50 if shared else 100, "total_parameters": 100, "steps": 200}
    events: list[dict[str, Any]] = [{"event": "start", "stages": [{**planned, "tokens": 200 * 8192}]}]
    for step in range(1, 201):
        tokens = step * 8192
        loss = (2.2 if shared else 2.0) + 3000 / (tokens + 1e5) ** 0.5 + 0.001 * (-1) ** step
        events.append({"event": "step", "step": step, "stage": "a", "tokens": tokens, "seconds": step, "loss": loss})
    folder.mkdir()
    (folder / "config.toml").write_text("[optim]\nwarmup = 0.02\n", encoding="utf-8")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    return folder.name


def test_the_written_run_file_has_the_plan_and_is_planned_alike(plan: Any, tmp_path: Path) -> None:
    told = plan("--cluster", "2:h100", "--write", "planned.toml", "--json")
    written = load_run(tmp_path / "planned.toml")
    for stage, planned in zip(plan_stages(written), told["stages"], strict=True):
        own = written.of_stage(stage.config)
        for axis, degree in planned["layout"]["degrees"].items():
            assert getattr(own.parallel, axis) == degree
        assert own.training.micro_batch_size == planned["layout"]["micro_batch_size"]
        assert own.training.recompute == planned["layout"]["recompute"]
    assert "[optim]" not in (tmp_path / "planned.toml").read_text(encoding="utf-8")  # which the run file leaves out
    # What the file now names is kept: nothing is left to choose.
    (tmp_path / "run.toml").write_text((tmp_path / "planned.toml").read_text(encoding="utf-8"), encoding="utf-8")
    again = plan("--cluster", "2:h100", "--json", "--timeline", "step.json")
    assert [stage["layout"] for stage in again["stages"]] == [stage["layout"] for stage in told["stages"]]
    assert again["seconds"] == pytest.approx(told["seconds"])
    for name in ("pseudo", "real"):
        trace = json.loads((tmp_path / f"step-{name}.json").read_text(encoding="utf-8"))
        assert any(event.get("ph") == "X" for event in trace["traceEvents"])


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["2:h100", "1:h100"])
def test_a_dry_run_counts_every_stage_of_the_plan(plan: Any, cluster: str) -> None:
    told = plan("--cluster", cluster, "--dry-run", "--json", "--training.batch-size", "8")["dry_run"]
    assert {row["stage"] for row in told["rows"]} == {"pseudo", "real"}
    assert [each["stage"] for each in told["delinkings"]] == ["real"]
    state = [row for row in told["rows"] if row["what"] in ("weights", "gradients", "moments", "activations")]
    assert len(state) == 8
    assert all(row["agrees"] for row in state), state
    sent = [row for row in told["rows"] if " over " in row["what"]]
    assert bool(sent) == (cluster == "2:h100")
    assert all(row["agrees"] for row in sent), sent
