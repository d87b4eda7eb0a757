"""`tenfold.plan` is what `tenfold plan` finds, from Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tenfold
from tenfold.config.load import build, dump_toml
from tenfold.config.model import ModelConfig
from tenfold.config.run import RunConfig
from tenfold.errors import TenfoldError
from tenfold.planning.cluster import load_cluster
from tenfold.planning.search import plan as search

MODEL: dict[str, Any] = {"vocab_size": 256, "layers": 4, "hidden": 64, "heads": 4, "ffn": 128}
SECTIONS: dict[str, Any] = {
    "data": {"sequence_length": 64},
    "training": {"steps": 10, "batch_size": 8, "precision": "bf16"},
    "stages": [{"name": "pseudo", "sharing": "all", "until": "20%"}, {"name": "real"}],
}


def test_a_models_configuration_is_enough() -> None:
    model_config = ModelConfig(**MODEL)
    plan = tenfold.plan(model_config, cluster="64x8:v100-32gb", training={"steps": 10, "batch_size": 512})
    (stage,) = plan.stages
    assert stage.candidate.degrees.ranks == 512
    assert tenfold.plan(model_config, cluster="2:h100").stages  # with all else as a run file has it that leaves it out


def test_it_is_the_plan_of_the_run_file(tmp_path: Path) -> None:
    config = build(RunConfig, {"model": MODEL, **SECTIONS}, "run.toml")
    (tmp_path / "run.toml").write_text(dump_toml(config), encoding="utf-8")
    there = load_cluster("4:h100,price=2")
    expected = search(config, there, "cost")
    assert tenfold.plan(MODEL, there, "cost", **SECTIONS) == expected
    assert tenfold.plan(config, "4:h100,price=2", "cost") == expected
    # The file names every key: what is left to choose is what is "auto".
    written = tenfold.plan(tmp_path / "run.toml", there)
    assert {each.candidate.degrees.tensor for each in written.stages} == {1}


def test_what_is_wrong_is_told() -> None:
    with pytest.raises(TenfoldError, match=r"tenfold.plan: unknown key `model.hiden`; did you mean `model.hidden`"):
        tenfold.plan({"hiden": 64}, "2:h100")
    with pytest.raises(TenfoldError, match="no accelerators named 'h1000'"):
        tenfold.plan(MODEL, "2:h1000")
    with pytest.raises(TenfoldError, match=r"a plan needs model.vocab_size"):
        tenfold.plan({"layers": 2}, "2:h100")
    with pytest.raises(TenfoldError, match="training beside a whole run: put it into that"):
        tenfold.plan(build(RunConfig, {"model": MODEL}, "run.toml"), "2:h100", training={"steps": 3})
    with pytest.raises(TenfoldError, match=r"there is no run file nowhere.toml"):
        tenfold.plan("nowhere.toml", "2:h100")
