"""A step calls each collective as often as theory says, and a shared segment's as often as one layer's."""

from __future__ import annotations

import pytest

from distributed.layouts import LAYOUTS, run_file
from ranks import on_ranks

OWN = 3  # all-reduces of a step beside FSDP2's: predicted tokens; loss and statistics; the norm


def wanted(segments: int, passes: int, degrees: dict[str, int], reshard: str) -> dict[str, int]:
    """Groups of FSDP2 are the segments and the root. With `reshard` "forward" segments are gathered for forward and
    for backward, the root, whose output matrix is used at once again, for both."""
    groups = segments + 1
    exchanges = 1 if reshard == "step" else passes
    gathers = (2 * segments + 1 if reshard == "forward" else groups) * exchanges
    if degrees.get("data_shard", 1) == 1:  # nothing is split, so nothing gathered: replicas add up once a step
        return {"allreduce_": groups + OWN}
    told = {"_allgather_base_": gathers, "_reduce_scatter_base_": groups * exchanges, "allreduce_": OWN}
    if degrees.get("data_replicate", 1) > 1:
        told["allreduce_"] += groups
    return told


@pytest.mark.parametrize("layout", ["shard", "replicate", "replicate x shard"])
def test_segments_are_gathered_and_reduced_as_one_layer_is(layout: str) -> None:
    ranks, degrees = LAYOUTS[layout]
    cases = []
    for sharing, segments in (("none", 4), ("all", 1), ({"cycle": 2}, 1), ("sandwich", 3)):
        for passes in (1, 2):
            for reshard in ("forward", "backward", "step"):
                raw = run_file(layout, "dense", "real", passes)
                raw["stages"] = [{"sharing": sharing}]
                raw["parallel"]["reshard"] = reshard
                cases.append((raw, wanted(segments, passes, degrees, reshard)))
    for found in on_ranks(ranks, "distributed.cases:count_many", [raw for raw, _ in cases]):
        for (raw, want), counts in zip(cases, found, strict=True):
            assert counts == want, raw
