"""What training refuses, the search of plans does not offer, in the same words."""

from __future__ import annotations

from typing import Any

import pytest

from tenfold.config.load import build
from tenfold.config.run import RunConfig
from tenfold.errors import TenfoldError
from tenfold.planning.cluster import load_cluster
from tenfold.planning.search import plan
from tenfold.planning.stages import plan_stages
from tenfold.training.setup import degrees_of_stages

MODEL = {"vocab_size": 256, "layers": 4, "hidden": 64, "heads": 4, "ffn": 128}


def run(**sections: Any) -> RunConfig:
    training = {"steps": 40, "batch_size": 8, "precision": "bf16", **sections.pop("training", {})}
    raw = {"model": MODEL, "data": {"sequence_length": 64}, "training": training, **sections}
    return build(RunConfig, raw, "run.toml")


def refused(config: RunConfig, ranks: int) -> tuple[str, str]:
    """How training, and how a plan, refuse a run on so many ranks."""
    with pytest.raises(TenfoldError) as by_training:
        degrees_of_stages(config, plan_stages(config), ranks)
    with pytest.raises(TenfoldError) as by_plan:
        plan(config, load_cluster(f"{ranks}:h100"))
    return str(by_training.value), str(by_plan.value)


CLOSED = {"data_replicate": 1, "data_shard": 2, "tensor": 1, "context": 1, "pipeline": 1, "expert": 1}
AUTO = {"auto": "correlation", "every": 2, "checks": 3, "at_most": "50%"}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "muon": (
        {"optim": {"name": "muon"}, "parallel": {**CLOSED, "data_shard": 1, "tensor": 2}},
        r"parallel.tensor = 2 splits them",
    ),
    "measure": (
        {"stages": [{"name": "a", "sharing": "all", "until": "20%"}, {"name": "b", "moments": "measure"}]},
        'moments = "measure" looks at every layer.*there are 2',
    ),
    "rule": (
        {"stages": [{"name": "a", "sharing": "all", "until": AUTO}, {"name": "b"}]},
        'stages.0 .a.: until = "auto" looks at every layer',
    ),
    "tokens of a pipeline, compiled": (
        {
            "training": {"compile": True},
            "parallel": {**CLOSED, "data_shard": 1, "pipeline": 2, "pipeline_schedule": "terapipe"},
        },
        "terapipe keeps keys and values",
    ),
    "gradients below the device": (
        {
            "training": {"micro_batch_size": 1},
            "parallel": {**CLOSED, "data_shard": 1, "pipeline": 2, "pipeline_schedule": "zbv"},
            "offload": {"placement": [{"layers": "all", "gradients": "host"}]},
        },
        r"offload.placement.0.* have to stay",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_both_refuse_in_the_same_words(case: str) -> None:
    sections, message = CASES[case]
    config = run(**{"parallel": CLOSED, **sections})
    by_training, by_plan = refused(config, 2)
    assert by_plan == by_training
    with pytest.raises(TenfoldError, match=message):
        raise TenfoldError(by_plan)


def test_a_plan_with_everything_open_leaves_out_what_training_refuses() -> None:
    config = run(optim={"name": "muon"}, training={"compile": True})
    (stage,) = plan(config, load_cluster("4:h100")).stages
    for row in stage.table:
        assert row.candidate.degrees.tensor == 1
        assert row.candidate.schedule != "terapipe"
    assert plan(run(optim={"name": "adafactor"}), load_cluster("4:h100")).stages
