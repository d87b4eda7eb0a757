"""A step calls each collective as often as theory says, and a shared segment's as often as one layer's."""

from __future__ import annotations

import pytest

from distributed.layouts import LAYOUTS, PASSES, below, run_file
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


@pytest.mark.parametrize("layout", ["shard", "replicate", pytest.param("replicate x shard", marks=pytest.mark.slow)])
def test_segments_are_gathered_and_reduced_as_one_layer_is(layout: str) -> None:
    ranks, degrees = LAYOUTS[layout]
    groups, wants = [], []
    for sharing, segments in (("none", 4), ("all", 1), ({"cycle": 2}, 1), ("sandwich", 3)):
        for reshard in ("forward", "backward", "step"):
            raws = [run_file(layout, "dense", "real", passes) for passes in PASSES]
            for raw in raws:
                raw["stages"] = [{"sharing": sharing}]
                raw["parallel"]["reshard"] = reshard
            groups.append(raws)
            wants.append([wanted(segments, passes, degrees, reshard) for passes in PASSES])
            if reshard == "forward" and sharing in ("none", "all"):  # what lies below the device calls no other
                offload = below("all", "weights", "gradients", "moments")
                groups.append([raw | {"offload": offload} for raw in raws])
                wants.append(wants[-1])
    for found in on_ranks(ranks, "distributed.cases:count_many", groups):
        for raws, counts, want in zip(groups, found, wants, strict=True):
            assert counts == want, raws[0]
