"""A plan's advice in plain words: what bounds each stage, and what would help most, from the step played again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tenfold.reporting.format import format_number, format_seconds

_WORTH = 1.03
"""Times as fast that are worth a word."""
_TWICE = {
    "matrix rate": "twice the matrix rate",
    "memory bandwidth": "twice the memory bandwidth",
    "starting of operations": "operations started in half the time",
    "links within nodes": "links within nodes twice as fast",
    "network": "a network twice as fast",
    "host link": "a host link twice as fast",
    "disks": "disks twice as fast",
}
_WORK = {
    "matrix rate": "products of matrices",
    "memory bandwidth": "passes over the device's memory",
    "starting of operations": "the starting of operations",
}
_BOUNDS = {
    "communication": "exchanges between ranks",
    "offload": "traffic with the memory below the device",
    "optimizer": "the optimizer's step",
    "bubble": "waiting in the pipeline",
}


def plan_advice(told: Mapping[str, Any]) -> str:
    """One paragraph on a plan, as `reporting.plan_numbers.plan_told` has it, with `doubled` in its stages."""
    sentences = []
    for stage in told["stages"]:
        sentences += _stage(stage)
    for stage in told.get("unfit", ()):
        sentences.append(unfit_words(stage))
    sentences += _two_stages(told["stages"])
    return " ".join(sentences)


def _stage(stage: Mapping[str, Any]) -> list[str]:
    shares = {name: seconds for name, seconds in stage["step"]["shares"].items() if seconds > 0}
    total = sum(shares.values())
    if not total:
        return []
    rows = sorted(stage.get("doubled") or (), key=lambda row: -row["times"])
    words = _BOUNDS | {"compute": next((_WORK[row["resource"]] for row in rows if row["resource"] in _WORK), "compute")}
    first, *others = sorted(shares, key=lambda name: -shares[name])
    also = [f"{words[name]} {_percent(shares[name] / total)}" for name in others if shares[name] > 0.05 * total]
    found = [
        f"The {stage['name']} stage is bound by {words[first]}, {_percent(shares[first] / total)} of a step"
        f"{f' (besides {_listed(also)})' if also else ''}."
    ]
    found += _doubled(rows)
    if shares.get("bubble", 0) > 0.1 * total:
        found.append("A larger batch, in more micro-batches, fills the pipeline's waiting.")
    return found


def _doubled(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What helps, of rows with the most helpful first."""
    worth = [row for row in rows if row["times"] >= _WORTH]
    if not rows:
        return []
    if not worth:
        best = rows[0]
        return [f"No single thing doubled helps: {_TWICE[best['resource']]} would bring {_percent(best['times'] - 1)}."]
    best, *others = worth
    told = (
        f"{_capital(_TWICE[best['resource']])} would help most: a step of {format_seconds(best['seconds'])}, "
        f"{best['times']:.2f} times as fast"
    )
    if others:
        told += "; " + ", ".join(f"{_TWICE[row['resource']]}, {row['times']:.2f} times" for row in others)
    return [told + "."]


def unfit_words(stage: Mapping[str, Any]) -> str:
    """What a stage that fits in no way misses least."""
    if not stage["rejected"]:
        return f"The {stage['name']} stage fits in no way."
    least = min(stage["rejected"], key=lambda row: row["over"])
    return f"The {stage['name']} stage fits in no way; what misses least lacks {least['why']}."


def _two_stages(stages: Sequence[Mapping[str, Any]]) -> list[str]:
    """What sharing saves of a token's time, between the first stage and the last."""
    if len(stages) < 2:
        return []
    first, last = stages[0], stages[-1]
    if not first["stored_parameters"] < last["stored_parameters"]:
        return []
    cost = last["tokens_per_second"] / first["tokens_per_second"]
    told = f"A token of {first['name']} costs {_percent(cost)} of the time of one of {last['name']}"
    if cost > 0.95:
        return [f"{told}: sharing saves next to nothing here."]
    share = first["tokens"] / sum(stage["tokens"] for stage in stages)
    saved = share * (1 - cost)
    return [f"{told}, so that sharing for {_percent(share)} of the tokens saves {_percent(saved)} of the run's time."]


def _capital(words: str) -> str:
    return words[0].upper() + words[1:]


def _percent(value: float) -> str:
    return format_number(value, ".0%")


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
