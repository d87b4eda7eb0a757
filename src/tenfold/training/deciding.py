"""What a run file leaves open in its layout, decided by the planner for the ranks that there are.

Open are degrees of "auto" between which arithmetic leaves a choice, and where any are, the keys of [parallel] that hang
on them and are not set: `reshard`, and of a pipeline its schedule. One rank decides for all; `plan.json` in the run
directory keeps it, and a resumption that asks the same on as many ranks takes it from there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tenfold.config.parallel import ParallelConfig
from tenfold.config.run import RunConfig
from tenfold.config.stage import StageConfig
from tenfold.config.units import AXES
from tenfold.errors import TenfoldError
from tenfold.parallel.mesh import degrees_of
from tenfold.planning.foreseen import Foreseen, tensors_of

if TYPE_CHECKING:
    from tenfold.planning.cluster import Cluster
    from tenfold.planning.machine import Ranks
    from tenfold.planning.plans import StagePlan, Unfit

# What searches plans is imported where something is open: most runs need none of it.

FILE = "plan.json"
_RUN_WIDE = {"timeout", "cluster"}
_WITH_DATA = {"reshard"}
_WITH_PIPELINE = {"pipeline_schedule", "pipeline_chunks", "pipeline_slices"}


@dataclass(frozen=True)
class Decided:
    """A run as it was `given`, the same with nothing open, and what is foreseen of its stages, by name."""

    given: RunConfig
    config: RunConfig
    foreseen: dict[str, Foreseen] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    """What was decided and why, for people: a line for each stage that was open."""
    plan: dict[str, Any] | None = None
    """What `plan.json` is to keep; None: nothing was open."""

    def save(self, folder: Path) -> None:
        """Keep what was decided in a run directory."""
        from tenfold.reporting.metrics import write_atomically

        if self.plan is not None:
            write_atomically(folder / FILE, json.dumps(self.plan, indent=2) + "\n")


def decide(config: RunConfig, count: int, ranks: Callable[[], Ranks], folder: Path | None = None) -> Decided:
    """A resolved configuration with its layout decided for `count` ranks, of which `ranks` tells what they are.

    Where nothing is open, but the run file names a cluster, its stages are foreseen as they are. `folder` is the run
    directory of a run that is gone on with. Raises TenfoldError where something is open and nothing fits, and where the
    run file names a cluster that these ranks are not.
    """
    open_keys = [set(_open(config, stage, count)) for stage in config.stages]
    foreseen = {
        stage.name: Foreseen(by="run file", **stage.foreseen) for stage in config.stages if stage.foreseen is not None
    }
    if not any(open_keys) and config.parallel.cluster is None:
        return Decided(config, config, foreseen)
    asked = [_asked(config, *each) for each in zip(config.stages, open_keys, strict=True)]
    plan = _kept(folder, count, asked) if folder is not None else None
    begun = "planned" if plan is None else "as planned before"
    if plan is None:
        plan = {"ranks": count, "asked": asked, **_search(config, ranks(), open_keys)}
    planned = {each["name"]: each for each in plan["stages"]}
    stages, lines = [], []
    for stage, keys in zip(config.stages, open_keys, strict=True):
        if (found := planned.get(stage.name)) is not None:
            foreseen[stage.name] = Foreseen(found["seconds"], found["device_bytes"], "plan", plan["cluster"])
            lines.append(f"{begun if keys else 'foreseen'}: {stage.name}: {found['why']}")
        if keys:
            own = config.of_stage(stage).parallel
            given = {key: getattr(own, key) for key in own.model_fields_set - keys - _RUN_WIDE}
            stage = stage.model_copy(update={"parallel": {**given, **planned[stage.name]["parallel"]}})
        stages.append(stage)
    closed = config.model_copy(update={"stages": stages})
    return Decided(config, closed, foreseen, [*lines, *plan["notes"]], plan)


def _open(config: RunConfig, stage: StageConfig, count: int) -> Iterator[str]:
    """The keys of [parallel] that are to be chosen in a stage."""
    own = config.of_stage(stage).parallel
    try:
        if degrees_of(own, count, config.model) is not None:
            return
    except TenfoldError as error:
        raise TenfoldError(f"stages.{config.stages.index(stage)} ({stage.name}): {error}") from None
    axes = {axis for axis in AXES if getattr(own, axis) == "auto"}
    yield from axes
    if axes & {"data_replicate", "data_shard", "context"}:
        yield from _WITH_DATA - own.model_fields_set
    if "pipeline" in axes:
        yield from _WITH_PIPELINE - own.model_fields_set


def _asked(config: RunConfig, stage: StageConfig, keys: set[str]) -> dict[str, Any]:
    """What a decision hangs on, that may differ between a run and its resumption."""
    parallel = config.of_stage(stage).parallel.model_dump(mode="json", exclude=_RUN_WIDE - {"cluster"})
    offload = config.offload.of_stage(stage.offload).model_dump(mode="json")
    return {"open": sorted(keys), "parallel": parallel, "offload": offload}


def _kept(folder: Path, count: int, asked: list[dict[str, Any]]) -> dict[str, Any] | None:
    """What was decided before of the same, for as many ranks."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        found: dict[str, Any] = json.loads((folder / FILE).read_text(encoding="utf-8"))
        if found["ranks"] == count and found["asked"] == asked:
            return found
    return None


def _search(config: RunConfig, ranks: Ranks, open_keys: list[set[str]]) -> dict[str, Any]:
    """The planner's way through the run."""
    from tenfold.planning.applied import chosen_keys
    from tenfold.planning.machine import cluster_of
    from tenfold.planning.search import plan

    cluster = cluster_of(config.parallel.cluster, ranks)
    if not any(config.offload.of_stage(stage.offload).disk for stage in config.stages):
        cluster = cluster.model_copy(update={"disk_bytes": 0})
    found = plan(_fixed(config, open_keys, ranks.count), cluster)
    names = {stage.name for stage, keys in zip(config.stages, open_keys, strict=True) if keys}
    notes = [note for unfit in found.unfit if (note := _unfit(unfit, cluster, unfit.stage.name in names))]
    stages = [
        {
            "name": planned.stage.name,
            "parallel": chosen_keys(planned.candidate),
            "seconds": planned.step.seconds,
            "device_bytes": tensors_of(planned.memory),
            "why": _why(planned),
        }
        for planned in found.stages
    ]
    return {"cluster": cluster.name, "stages": stages, "notes": [*notes, *cluster.notes]}


def _fixed(config: RunConfig, open_keys: list[set[str]], count: int) -> RunConfig:
    """The run as the planner takes it, for which all is open that is not set: with all set but what is open here."""
    stages = []
    for stage, keys in zip(config.stages, open_keys, strict=True):
        own = config.of_stage(stage)
        named = ParallelConfig.model_fields.keys() - keys - _RUN_WIDE
        parallel = {key: getattr(own.parallel, key) for key in named}
        degrees = degrees_of(own.parallel, count, config.model)
        if degrees is not None:
            parallel |= {axis: getattr(degrees, axis) for axis in AXES}
        update = {
            "parallel": parallel,
            "micro_batch_size": own.training.micro_batch_size,
            "recompute": own.training.recompute,
            "recompute_layers": own.training.recompute_layers,
        }
        if not config.offload.of_stage(stage.offload).on:
            update["offload"] = "off"
        stages.append(stage.model_copy(update=update))
    return config.model_copy(update={"stages": stages, "parallel": ParallelConfig()})


def _unfit(unfit: Unfit, cluster: Cluster, is_open: bool) -> str:
    """That a stage fits in no way, and what came nearest; TenfoldError where its layout was to be chosen."""
    from tenfold.reporting.plan_numbers import layout_told
    from tenfold.reporting.planning import layout_words

    nearest = unfit.rejected[0]
    told = f"{layout_words(layout_told(nearest.candidate))}, which lacks {nearest.why} (cluster {cluster.name})"
    if not is_open:
        return f"{unfit.stage.name} may not fit: it is {told}"
    raise TenfoldError(
        f"{unfit.stage.name} fits these ranks in no layout that [parallel] leaves open: nearest is {told}. Set a "
        'smaller training.micro_batch_size, training.recompute = "full", or [offload]; or name the degrees, to try it '
        "all the same"
    )


def _why(planned: StagePlan) -> str:
    """A way to run a stage, what is foreseen of it, and what came next."""
    from tenfold.reporting.format import format_bytes, format_seconds
    from tenfold.reporting.plan_numbers import layout_told
    from tenfold.reporting.planning import layout_words

    memory = format_bytes(tensors_of(planned.memory))
    told = layout_words(layout_told(planned.candidate))
    told += f": {format_seconds(planned.step.seconds)} a step and {memory} a rank foreseen"
    if len(planned.table) > 1:
        other = planned.table[1]
        told += f"; next {layout_words(layout_told(other.candidate))}, {format_seconds(other.seconds)}"
    return f"{told}. `tenfold plan` shows all"
