"""Where each stage of a run would have its state, without a run: nothing is allocated, written or measured."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tenfold.config.offload import OffloadConfig, key_of
from tenfold.config.run import RunConfig
from tenfold.errors import TenfoldError
from tenfold.nn.decoder import Decoder
from tenfold.offload.budget import Budgets
from tenfold.offload.forecast import Compute, Rates, describe, forecast
from tenfold.offload.pinned import pinnable_bytes
from tenfold.parallel.mesh import Degrees, Mesh
from tenfold.planning.stages import Stage
from tenfold.training.offloading import Plan, budgets_of, place_state
from tenfold.training.optimizers import build_optimizers
from tenfold.training.setup import layout_of

_CPU = torch.device("cpu")


def foresee(
    config: RunConfig, stages: Sequence[Stage], device: torch.device, budgets: Callable[[OffloadConfig], Budgets]
) -> list[dict[str, Any]]:
    """For each stage with offload what its `placement` event would be on one rank, without seconds.

    `budgets` has the bytes of each tier for what a stage wants. Raises TenfoldError where a budget is too small, and
    for a tier that `device` has not.
    """
    found = []
    for number, stage in enumerate(stages):
        wanted = config.offload.of_stage(stage.config.offload)
        if not wanted.on:
            continue
        wanted.check_device(key_of(number, stage.config.offload), device.type)
        plan = _plan(config, number, stage, wanted, budgets(wanted))
        nothing = (0.0,) * config.model.layers
        rates = Rates({"host": 1.0, "disk": 1.0}, {"host": 1.0, "disk": 1.0})
        moved = forecast(
            plan.parts,
            plan.placement,
            rates,
            Compute(nothing, nothing),
            plan.micro_batches,
            wanted.step_in_backward,
        )
        told = describe(plan.parts, plan.placement, moved, plan.other, plan.in_backward)
        found.append({**told, "stage": stage.name, "forecast": {"rows": told["forecast"]["rows"]}})
    return found


def _plan(config: RunConfig, number: int, stage: Stage, wanted: OffloadConfig, budgets: Budgets) -> Plan:
    key = key_of(number, stage.config.offload)
    layout = layout_of(config.of_stage(stage.config), stage.sharing, Mesh(Degrees(), "cpu"), _CPU)
    plans: list[Plan] = []

    def housed(model: Decoder) -> Any:
        optimizers = build_optimizers(model, config.optim, layout, state=False)
        plans.append(place_state(model, optimizers, config, stage, wanted, key, layout, budgets))

    layout.build(None, housed)
    return plans[0]


def budgets_here(wanted: OffloadConfig, device: torch.device) -> Budgets:
    """What one rank could use of each tier on this machine now, with nothing opened."""
    host = 0
    if device.type == "cuda":
        host = pinnable_bytes()[0] if wanted.host_budget is None else wanted.host_budget
    return budgets_of(wanted, device, host, sum(_free(Path(folder)) for folder in dict.fromkeys(wanted.disk)))


def _free(folder: Path) -> int:
    """Bytes free in a folder, which need not be there if the one that it is in is."""
    try:
        return shutil.disk_usage(folder if folder.exists() else folder.parent).free
    except OSError as error:
        raise TenfoldError(
            f"offload to disk: {folder}: {error.strerror}. Name a folder for offload that is there and that this "
            "process may write to"
        ) from None
