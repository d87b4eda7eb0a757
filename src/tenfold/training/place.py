"""Where a run is, and whether a checkpoint is of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tenfold.config.run import RunConfig
from tenfold.errors import TenfoldError


@dataclass
class Place:
    """Where a run is; with weights and optimizer state, all that going on needs."""

    stage: int = 0
    step: int = 0
    seconds: float = 0.0  # of the whole run, over all its processes
    stage_seconds: float = 0.0  # of the steps of this stage alone
    finished: list[dict[str, Any]] = field(default_factory=list)  # closing numbers of stages that are over
    joules: float | None = 0.0  # as `seconds`; None: a part of the run was not metered
    joules_before: float | None = 0.0  # when this stage began
    energy_source: str | None = None
    ends: dict[str, int] = field(default_factory=dict)  # steps at which rules ended stages, in the order of decision
    watch: dict[str, Any] = field(default_factory=dict)  # what the rule of this stage remembers
    loads: dict[str, Any] = field(default_factory=dict)  # what experts saw, where a budget tells them apart


def check_same_run(path: Path, manifest: dict[str, Any], config: RunConfig, fingerprint: str) -> None:
    """Raise TenfoldError unless the checkpoint at `path` is of this data, model and optimizer."""
    if manifest["data_fingerprint"] != fingerprint:
        raise TenfoldError(
            f"the training data is not what {path} was trained on: the text behind data.path = {config.data.path} has "
            "changed, or it is prepared otherwise. Put it back, or give another --out"
        )
    mine = {"model": config.model.model_dump(mode="json", exclude_none=True), "optimizer": config.optim.name}
    for key, value in mine.items():
        if manifest[key] != value:
            raise TenfoldError(f"{path} is a checkpoint of another {key}: it has {manifest[key]}, this run {value}")
