"""`tenfold.plan`: what fits, how fast and how to lay it out, from Python."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tenfold.config.load import build, load_run
from tenfold.config.model import ModelConfig
from tenfold.config.run import RunConfig
from tenfold.errors import TenfoldError
from tenfold.planning.cluster import Cluster, load_cluster
from tenfold.planning.plans import Objective, Plan
from tenfold.planning.search import plan as search


def plan(
    model: ModelConfig | RunConfig | Mapping[str, Any] | str | Path,
    cluster: Cluster | str,
    objective: Objective = "time",
    **sections: Any,
) -> Plan:
    """The best way to train a model on a cluster, stage by stage: layout, passes, recompute and placement.

    model: a model's configuration, as it is or as a mapping of its keys; a whole run's; or the path of a run file.
    cluster: as `tenfold plan --cluster` takes it ("64x8:v100-32gb", "here.toml"), or a `Cluster`.
    objective: what is to be least: "time", "energy" or "cost".
    sections: sections of the run file beside the model, as mappings of their keys: `data={"sequence_length": 2048}`,
        `training={"steps": 1000, "batch_size": 512}`, `stages=[{...}, {...}]`. They are not for whole runs.

    What is given is kept, and what is left out is searched. Nothing is started and nothing has memory. Raises
    TenfoldError for a configuration that is none, a cluster that there is not, and where what is given cannot be.
    """
    there = load_cluster(cluster) if isinstance(cluster, str) else cluster
    return search(_run_of(model, sections), there, objective)


def _run_of(model: ModelConfig | RunConfig | Mapping[str, Any] | str | Path, sections: Mapping[str, Any]) -> RunConfig:
    if isinstance(model, (RunConfig, str, Path)):
        run = model if isinstance(model, RunConfig) else load_run(Path(model))
        if not sections:
            return run
        raise TenfoldError(f"tenfold.plan: {', '.join(sections)} beside a whole run: put it into that")
    keys = model.model_dump(exclude_unset=True) if isinstance(model, ModelConfig) else dict(model)
    return build(RunConfig, {"model": keys, **sections}, "tenfold.plan")
