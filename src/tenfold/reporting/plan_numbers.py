"""A plan as plain numbers, for `--json` and for whoever shows it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tenfold.planning.cluster import Cluster
    from tenfold.planning.doubling import Doubled
    from tenfold.planning.memory import RankMemory
    from tenfold.planning.plans import Alternative, Delinking, Plan, Rejected, StagePlan, Unfit
    from tenfold.planning.terms import Candidate

_DAY = 86400.0


def plan_told(plan: Plan, cluster: Cluster, described: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All of a plan as plain numbers. `described` are the stages as the `start` event tells them."""
    by_name = {told["name"]: dict(told) for told in described}
    return {
        "cluster": cluster_told(cluster),
        "objective": plan.objective,
        "seconds": plan.seconds,
        "joules": plan.joules,
        "cost": plan.cost,
        "stages": [_stage(each, cluster, by_name[each.stage.name]) for each in plan.stages],
        "unfit": [_unfit(each, by_name[each.stage.name]) for each in plan.unfit],
    }


def cluster_told(cluster: Cluster) -> dict[str, Any]:
    """A cluster in few numbers."""
    device = cluster.accelerator
    return {
        "name": cluster.name,
        "nodes": cluster.nodes,
        "per_node": cluster.per_node,
        "accelerator": device.name,
        "memory_bytes": device.memory_bytes,
        "host_memory_bytes": cluster.host_memory_bytes,
        "disk_bytes": cluster.disk_bytes,
        "watts": cluster.watts or None,
        "price_per_hour": None if device.price_per_hour is None else device.price_per_hour * cluster.ranks,
        "notes": list(cluster.notes),
    }


def _stage(planned: StagePlan, cluster: Cluster, told: dict[str, Any]) -> dict[str, Any]:
    budgets = cluster.budgets(planned.candidate.degrees)
    return told | {
        "batch_size": planned.stage.batch_size,
        "layout": layout_told(planned.candidate),
        "budgets": {"device": budgets.device, "host": budgets.host, "disk": budgets.disk},
        "step_seconds": planned.step.seconds,
        "tokens_per_step": planned.stage.tokens_per_step,
        "tokens_per_second": planned.tokens_per_second,
        "tokens_per_day": planned.tokens_per_second * _DAY,
        "seconds": planned.seconds,
        "joules": planned.joules,
        "cost": planned.cost,
        "flops_share": _flops_share(planned, cluster, told),
        "delinking": None if planned.delinking is None else _delinking(planned.delinking),
        "memory": [_memory(each) for each in planned.memory],
        "placement": [placement.dump() for placement in planned.placements],
        "placement_words": [str(placement) for placement in planned.placements],
        "step": {"shares": dict(planned.step.shares), "lanes": dict(planned.step.lanes)},
        "table": [_alternative(each) for each in planned.table],
        "rejected": _rejected(planned.rejected),
        "looked_at": dict(planned.looked_at),
    }


def _unfit(unfit: Unfit, told: dict[str, Any]) -> dict[str, Any]:
    return told | {
        "batch_size": unfit.stage.batch_size,
        "tokens_per_step": unfit.stage.tokens_per_step,
        "rejected": _rejected(unfit.rejected),
        "looked_at": dict(unfit.looked_at),
    }


def _rejected(rows: Sequence[Rejected]) -> list[dict[str, Any]]:
    return [{"layout": layout_told(each.candidate), "why": each.why, "over": each.over} for each in rows]


def _flops_share(planned: StagePlan, cluster: Cluster, told: Mapping[str, Any]) -> float | None:
    """Of the peak of all accelerators in the better of both precisions."""
    if not told.get("flops_per_token"):
        return None
    peak = max(speed.peak for speed in cluster.accelerator.matrix.values()) * planned.candidate.degrees.ranks
    return float(told["flops_per_token"]) * planned.tokens_per_second / peak


def layout_told(candidate: Candidate) -> dict[str, Any]:
    """A way to run a stage: what of it is not off."""
    found = {key: value for key, value in dataclasses.asdict(candidate).items() if key != "degrees"}
    degrees = {axis: value for axis, value in vars(candidate.degrees).items() if value is True or value > 1}
    return {"degrees": degrees, **found}


def _delinking(delinking: Delinking) -> dict[str, Any]:
    return {
        "seconds": delinking.seconds,
        "shares": dict(delinking.shares),
        "bytes": dict(delinking.bytes),
        "joules": delinking.joules,
        "cost": delinking.cost,
    }


def _memory(memory: RankMemory) -> dict[str, Any]:
    return {
        "pipeline_rank": memory.pipeline_rank,
        "items": dict(memory.items),
        "peaks": dict(memory.peaks),
        "tiers": dict(memory.tiers),
    }


def _alternative(found: Alternative) -> dict[str, Any]:
    numbers = {key: value for key, value in vars(found).items() if key != "candidate"}
    return {"layout": layout_told(found.candidate), **numbers}


def gains_told(found: Sequence[Doubled]) -> list[dict[str, Any]]:
    """What doubling each resource would bring, for `stages[...]["doubled"]`."""
    return [dataclasses.asdict(each) for each in found]
