"""A plan put into its run: every stage's layout, passes, recompute and placement, as a run file states them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tenfold.config.depth import ranges
from tenfold.config.load import build
from tenfold.config.run import RunConfig
from tenfold.config.units import AXES
from tenfold.offload.placement import Part, Placement, together
from tenfold.offload.tiers import Kind
from tenfold.planning.foreseen import tensors_of
from tenfold.planning.holdings import Holdings
from tenfold.planning.plans import Plan, StagePlan
from tenfold.planning.terms import Candidate

_APART: tuple[Kind, ...] = ("gradients", "moments")
"""What of experts rules place apart."""


def applied(config: RunConfig, plan: Plan, cluster: str) -> RunConfig:
    """The run with the ways of `plan` for `cluster` in its stages, and what it foresees of them; a stage that fits in
    no way is left as it is.

    Raises TenfoldError where the run cannot have them: state on disk needs `offload.disk`.
    """
    raw = config.model_dump(exclude_unset=True)
    found = {planned.stage.name: planned for planned in plan.stages}
    raw["stages"] = [
        stage.model_dump(exclude_unset=True)
        | (_stage(config, found[stage.name], cluster) if stage.name in found else {})
        for stage in config.stages
    ]
    return build(RunConfig, raw, "the plan")


def _stage(config: RunConfig, planned: StagePlan, cluster: str) -> dict[str, Any]:
    candidate = planned.candidate
    own: dict[str, Any] = {
        "micro_batch_size": candidate.micro_batch_size,
        "recompute": candidate.recompute,
        "parallel": chosen_keys(candidate),
        "foreseen": {
            "seconds": planned.step.seconds,
            "device_bytes": tensors_of(planned.memory),
            "cluster": cluster,
        },
    }
    if candidate.recompute_layers is not None:
        own["recompute_layers"] = candidate.recompute_layers
    parts = [list(memory.parts) for memory in planned.memory]
    beside = _experts_beside(config, planned) if any(part.experts for mine in parts for part in mine) else {}
    if rules := placement_rules(parts, planned.placements, beside):
        own["offload"] = {"placement": rules}
    elif config.offload.on:
        own["offload"] = "off"
    return own


def chosen_keys(candidate: Candidate) -> dict[str, Any]:
    """Of [parallel] what the way to run a stage decides."""
    degrees = candidate.degrees
    found: dict[str, Any] = {axis: getattr(degrees, axis) for axis in AXES}
    if degrees.shard > 1:
        found["reshard"] = candidate.reshard
    if degrees.pipeline > 1:
        found["pipeline_schedule"] = candidate.schedule
        if candidate.schedule.startswith("interleaved"):
            found["pipeline_chunks"] = candidate.chunks
        if candidate.schedule == "terapipe":
            found["pipeline_slices"] = candidate.slices
    return found


def _experts_beside(config: RunConfig, planned: StagePlan) -> dict[int, set[int]]:
    """For each expert of a rank those at its place on all ranks that split the experts: they are placed alike."""
    whole, degrees = Holdings(config, planned.stage.sharing, planned.candidate).whole, planned.candidate.degrees
    name = next(name for name in whole.shapes if whole.experts(name, degrees, 0))
    rows: list[set[int]] = []
    for shard in range(degrees.shard):
        for row, experts in enumerate(whole.experts(name, degrees, shard)):
            if row == len(rows):
                rows.append(set())
            rows[row].update(experts)
    return {expert: row for row in rows for expert in row}


def placement_rules(
    parts: Sequence[Sequence[Part]],
    placements: Sequence[Placement],
    beside: Mapping[int, Collection[int]] = MappingProxyType({}),
) -> list[dict[str, str]]:
    """Rules that make the placements of all pipeline ranks, from what each of them holds.

    Rules go by places, so that what is outside of layers at one end of the model goes together. Lots of experts have
    rules of their own behind these, where they lie elsewhere than the rest of their layer; `beside`: with each expert
    of a rank those that are placed as it is.
    """
    alike: dict[tuple[tuple[str, str], ...], tuple[list[int], list[str]]] = {}
    apart: dict[tuple[tuple[tuple[str, str], ...], frozenset[int]], list[int]] = {}
    for mine, placement in zip(parts, placements, strict=True):
        for unit in together(mine):
            rest, *lots = unit
            kinds = tuple((str(kind), str(placement.tier(rest.name, kind))) for kind in placement.below(rest))
            if kinds:
                layers, ends = alike.setdefault(kinds, ([], []))
                layers += rest.layers
                ends += [end for end in rest.ends if end not in ends and not rest.layers]
            elsewhere: dict[tuple[tuple[str, str], ...], set[int]] = {}
            for lot in lots:
                differs = [kind for kind in _APART if placement.tier(lot.name, kind) != placement.tier(rest.name, kind)]
                if differs:
                    tiers = tuple((str(kind), str(placement.tier(lot.name, kind))) for kind in differs)
                    experts = {each for one in lot.experts for each in beside.get(one, [one])}
                    elsewhere.setdefault(tiers, set()).update(experts)
            for tiers, experts in elsewhere.items():
                apart.setdefault((tiers, frozenset(experts)), []).extend(rest.layers)
    rules: list[dict[str, str]] = []
    for kinds, (layers, ends) in alike.items():
        places = ([ranges(layers)] if layers else []) + ends
        rules.append({"layers": ", ".join(places), **dict(kinds)})
    for (tiers, numbers), layers in apart.items():
        rules.append({"layers": ranges(layers), "experts": ranges(numbers), **dict(tiers)})
    return rules
