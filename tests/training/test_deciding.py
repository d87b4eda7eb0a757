"""What a run file leaves open is decided by the planner, once for all ranks, and told beside what is measured."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ranks import on_ranks
from runs import losses, of_kind, refused
from tenfold.cli.main import main
from tenfold.config.load import build, dump_toml, load_run
from tenfold.config.run import RunConfig
from tenfold.errors import TenfoldError
from tenfold.planning.applied import chosen_keys
from tenfold.planning.cluster import load_cluster
from tenfold.planning.machine import Ranks
from tenfold.planning.search import plan
from tenfold.planning.stages import plan_stages
from tenfold.training.deciding import FILE, decide
from tenfold.training.setup import degrees_of_stages

GIB = 2**30
MODEL = {"vocab_size": 256, "layers": 4, "hidden": 64, "heads": 4, "ffn": 128}
MIXTURE = {**MODEL, "moe": {"experts": 8, "prototypes": 2, "ffn": 64}}
GPUS = Ranks(1, 4, "cuda", "NVIDIA H100 80GB HBM3", 80 * GIB, 1000 * GIB)
STAGES = [{"name": "pseudo", "sharing": "all", "until": "50%"}, {"name": "real"}]


def run(model: dict[str, Any] = MODEL, **sections: Any) -> RunConfig:
    training = {"steps": 10, "batch_size": 8, "precision": "bf16", **sections.pop("training", {})}
    raw = {"model": model, "data": {"sequence_length": 64}, "training": training, **sections}
    return build(RunConfig, raw, "run.toml")


def never() -> Ranks:
    raise AssertionError("the planner was asked")


def closed(config: RunConfig, ranks: int) -> list[Any]:
    """The degrees of each stage, once nothing is open."""
    return degrees_of_stages(config, plan_stages(config), ranks)


def test_where_nothing_is_open_nobody_is_asked() -> None:
    for config, ranks in (
        (run(), 1),
        (run(parallel="auto"), 1),
        (run(parallel={"data_replicate": 1}), 4),
        (run(parallel={"tensor": 2, "pipeline": 2}), 4),
    ):
        found = decide(config, ranks, never)
        assert found.config == config
        assert [found.plan, found.lines, found.foreseen] == [None, [], {}]


def test_what_is_open_is_as_the_planner_has_it_and_the_rest_as_the_run_file_has_it() -> None:
    """A plan has open what is not set: so the same is set, but data degrees and how long weights stay gathered."""
    training = {"micro_batch_size": 2, "recompute": "full"}
    config = run(training=training, stages=STAGES)
    rest = {"tensor": 1, "context": 1, "pipeline": 1, "expert": 1}
    expected = plan(
        run(training=training, stages=[{**each, "offload": "off"} for each in STAGES], parallel=rest),
        load_cluster("4:h100"),
    )
    found = decide(config, 4, lambda: GPUS)
    for stage, planned in zip(found.config.stages, expected.stages, strict=True):
        own = found.config.of_stage(stage)
        for key, value in chosen_keys(planned.candidate).items():
            assert getattr(own.parallel, key) == value
        assert (own.training.micro_batch_size, own.training.recompute) == (2, "full")
        assert found.foreseen[stage.name].seconds == planned.step.seconds
        assert 0 < found.foreseen[stage.name].device_bytes < planned.memory[0].needed  # without the allocator's rest
        assert found.foreseen[stage.name].by == "plan"
    assert closed(found.config, 4) == [planned.candidate.degrees for planned in expected.stages]
    assert found.given == config
    told = " ".join(found.lines)
    for word in ("planned: pseudo: ", "planned: real: ", "a step and", "foreseen", "`tenfold plan` shows all"):
        assert word in told


def test_small_models_take_samples_of_their_own_on_every_rank() -> None:
    for model in (MODEL, MIXTURE):
        (degrees,) = closed(decide(run(model), 4, lambda: GPUS).config, 4)
        assert degrees.data == degrees.ranks == 4


def test_what_is_named_is_kept_and_what_hangs_on_an_open_degree_is_open_too() -> None:
    named = {"data_shard": "auto", "tensor": 2, "reshard": "backward"}
    own = decide(run(parallel=named), 4, lambda: GPUS).config
    own = own.of_stage(own.stages[0])
    assert (own.parallel.tensor, own.parallel.pipeline, own.parallel.context) == (2, 1, 1)
    assert own.parallel.reshard == "backward"
    # One sequence on four ranks: nothing but splitting layers or sequences is left, and one pass has no 1f1b.
    found = decide(run(parallel="auto", training={"batch_size": 1}, model={**MODEL, "heads": 1}), 4, lambda: GPUS)
    (degrees,) = closed(found.config, 4)
    assert degrees.ranks == 4
    assert degrees.data == 1
    # A stage of its own keys: the other is open.
    stages = [STAGES[0], {**STAGES[1], "parallel": {"tensor": 2, "data_shard": 2, "data_replicate": 1}}]
    found = decide(run(stages=stages), 4, lambda: GPUS)
    pseudo, real = closed(found.config, 4)
    assert pseudo.data == 4
    assert (real.tensor, real.data_shard) == (2, 2)
    assert set(found.foreseen) == {"pseudo", "real"}
    assert [line.partition(": ")[0] for line in found.lines[:2]] == ["planned", "foreseen"]


def test_a_resumption_on_as_many_ranks_goes_on_as_planned(tmp_path: Path) -> None:
    config = run()
    found = decide(config, 4, lambda: GPUS)
    found.save(tmp_path)
    kept = json.loads((tmp_path / FILE).read_text())
    kept["stages"][0]["parallel"] |= {"data_replicate": 2, "data_shard": 2}
    (tmp_path / FILE).write_text(json.dumps(kept))
    again = decide(config, 4, never, tmp_path)
    assert [str(each) for each in closed(again.config, 4)] == ["data_replicate 2 x data_shard 2"]
    assert again.lines[0].startswith("as planned before: real")
    assert decide(config, 1, never, tmp_path).config == config
    for other in (run(parallel={"tensor": "auto"}), run(parallel={"cluster": "4:h100"})):
        assert decide(other, 4, lambda: GPUS, tmp_path).lines[0].startswith("planned")
    two = Ranks(1, 2, "cuda", "NVIDIA H100 80GB HBM3", 80 * GIB, 1000 * GIB)
    assert closed(decide(config, 2, lambda: two, tmp_path).config, 2)[0].ranks == 2
    (tmp_path / FILE).write_text("{")
    assert decide(config, 4, lambda: GPUS, tmp_path).config == found.config


def test_a_cluster_that_is_named_lets_what_is_closed_be_foreseen() -> None:
    config = run(parallel={"cluster": "2x2:h100", "data_replicate": 1})
    found = decide(config, 4, lambda: GPUS)
    assert found.config == config
    assert found.foreseen["real"].cluster == "2x2:h100"
    assert found.lines[0].startswith("foreseen: real: data_shard 4")


def test_what_was_written_into_the_run_file_is_foreseen_and_a_plan_of_now_goes_first() -> None:
    written = {"seconds": 0.5, "device_bytes": "1GiB", "cluster": "8:h100"}
    found = decide(run(stages=[{"foreseen": written}]), 1, never)
    assert vars(found.foreseen["real"]) == {"seconds": 0.5, "device_bytes": GIB, "by": "run file", "cluster": "8:h100"}
    assert decide(run(stages=[{"foreseen": written}]), 4, lambda: GPUS).foreseen["real"].by == "plan"


def test_what_fits_no_rank_is_told_with_what_it_lacks() -> None:
    small = Ranks(1, 4, "cuda", "NVIDIA H100 80GB HBM3", 2 * GIB, 1000 * GIB)
    wide = {**MODEL, "hidden": 4096, "heads": 32, "ffn": 16384}
    with pytest.raises(TenfoldError, match=r"real fits these ranks in no layout .*lacks device memory.* of .*GiB"):
        decide(run(wide), 4, lambda: small)
    # What names its degrees is foreseen, and goes on.
    closed_one = {"cluster": "4:h100,memory=2GiB", "data_replicate": 1}
    assert "real may not fit" in " ".join(decide(run(wide, parallel=closed_one), 4, lambda: small).lines)
    with pytest.raises(TenfoldError, match=r"stages.0 \(real\): parallel: .* does not make the 4 ranks"):
        decide(run(parallel={"tensor": 3}), 4, never)
    with pytest.raises(TenfoldError, match=r"stages.0 \(real\): parallel: data_replicate = . and data_shard = . give"):
        decide(run(training={"batch_size": 3}), 4, lambda: GPUS)


def test_ranks_decide_alike_train_as_one_and_tell_what_was_foreseen(
    run_file: Callable[..., Path], tmp_path: Path
) -> None:
    file, alone, both = str(run_file(model="", training="log_every = 2")), tmp_path / "alone", tmp_path / "both"
    Path(file).write_text(Path(file).read_text().replace("log_every = 1\n", "", 1))
    assert main(["train", file, "--out", str(alone)]) == 0
    assert not (alone / FILE).exists()
    assert of_kind(alone, "measured") == []
    assert on_ranks(2, "training.cases_offloading:train", file, [], str(both), False) == [0, 0]
    assert losses(both) == pytest.approx(losses(alone), abs=2e-5)
    kept = json.loads((both / FILE).read_text())
    assert kept["ranks"] == 2
    assert "auto" in (both / "config.toml").read_text()  # which is for any number of ranks
    (told,) = of_kind(both, "plan")
    assert [line.split(": ")[:2] for line in told["lines"][:2]] == [["planned", "pseudo"], ["planned", "real"]]
    measured = of_kind(both, "measured")
    assert [(event["stage"], event["step"], event["last"]) for event in measured] == [
        ("pseudo", 2, False),
        ("pseudo", 4, False),
        ("pseudo", 6, True),
        ("real", 8, False),
        ("real", 10, False),
        ("real", 12, True),
    ]
    for event in measured:
        (planned,) = (each for each in kept["stages"] if each["name"] == event["stage"])
        assert event["foreseen"]["seconds"] == planned["seconds"]
        assert event["foreseen"]["by"] == "plan"
        assert event["measured"]["seconds"] > 0
    assert measured[2]["measured"]["steps"] == 5  # without the first
    # Gone on with, the layout is the same, and nothing is planned anew.
    (both / "checkpoints" / "step-00000012").rename(tmp_path / "moved")
    assert on_ranks(2, "training.cases_offloading:train", file, [], str(both), True) == [0, 0]
    assert losses(both) == pytest.approx(losses(alone), abs=2e-5)
    assert json.loads((both / FILE).read_text()) == kept
    assert of_kind(both, "plan")[-1]["lines"][1].startswith("as planned before: real")


def test_a_plan_that_was_written_is_told_beside_what_is_measured(
    run_file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    file, written = str(run_file(model="")), tmp_path / "planned.toml"
    assert main(["plan", file, "--cluster", "1:cpu", "--write", str(written)]) == 0
    foreseen = {stage.name: stage.foreseen for stage in load_run(written).stages}
    capsys.readouterr()
    assert main(["train", str(written), "--out", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert "foreseen" in shown
    assert "run file, 1:cpu" in shown
    for event in of_kind(tmp_path / "run", "measured"):
        assert event["foreseen"] == {"by": "run file", **foreseen[event["stage"]]}
    # What was foreseen is no part of what a run is: one goes on with another.
    other = ["--stages.0.foreseen", "seconds=3,device_bytes=1GiB,cluster=8:h100"]
    assert main(["train", str(written), "--out", str(tmp_path / "run"), "--resume", *other]) == 0


def test_one_rank_with_nothing_open_never_hears_of_the_planner(run_file: Callable[..., Path], tmp_path: Path) -> None:
    script = (
        "import sys; from tenfold.cli.main import main\n"
        f"assert main(['train', {str(run_file(model=''))!r}, '--out', {str(tmp_path / 'run')!r}]) == 0\n"
        "print([name for name in ('tenfold.planning.search', 'tenfold.planning.machine', 'tenfold.planning.tracing') "
        "if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_cluster_of_other_ranks_is_refused(
    run_file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = str(run_file(model="")), str(tmp_path / "run")
    told = refused(["train", file, "--out", out, "--parallel.cluster", "2:cpu"], capsys)
    assert 'parallel.cluster = "2:cpu" has 2 ranks, and 1 were started' in told
    assert "there is no cluster file nowhere.toml" in refused(
        ["train", file, "--out", out, "--parallel.cluster", "nowhere.toml"], capsys
    )
    assert not Path(out).exists()


def test_a_run_file_may_name_the_cluster_of_its_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text(dump_toml(run(parallel={"cluster": "2:h100"})), encoding="utf-8")
    assert main(["plan", str(tmp_path / "run.toml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cluster"]["name"] == "2:h100"
