"""Seconds of exchanges between ranks by the alpha-beta model: a latency for each hop, and bytes at a link's rate.

Ranks of a node are consecutive numbers. Of a group that spans nodes, what has to get into a node comes over the network
links of its members there, and is spread within the node at the same time: so a ring, or NCCL's rings, one for each
link, do it. An all-reduce is twice a reduce-scatter's traffic, 2 (n - 1) / n of the tensor (Patarasu and Yuan, 2009).
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

from tenfold.parallel.mesh import Degrees
from tenfold.planning.terms import Axis, Collective, group_of

if TYPE_CHECKING:
    from tenfold.planning.cluster import Cluster

Lane = Literal["node", "network"]

_MESSAGE_SECONDS = 1e-6
"""Of each message but the first in an all-to-all: assumed, for they are under way side by side."""


class Group(NamedTuple):
    """The ranks of a group, and how they lie: `local` of them on each of `nodes` nodes (the most, and the least)."""

    size: int
    nodes: int
    local: int
    least: int
    neighbours_apart: bool
    """Whether some that follow each other are on different nodes."""


@functools.lru_cache(maxsize=4096)
def group_on(size: int, stride: int, per_node: int) -> Group:
    """Of all groups of `size` ranks that are `stride` apart, the one that spans most nodes."""
    period = math.lcm(per_node, size * stride)
    worst: Group | None = None
    for start in range(0, period, size * stride):
        for offset in {0, stride - 1}:
            nodes = [(start + offset + at * stride) // per_node for at in range(size)]
            counts = Counter(nodes).values()
            apart = any(one != other for one, other in pairwise(nodes))
            found = Group(size, len(counts), max(counts), min(counts), apart)
            if worst is None or (found.nodes, -found.least) > (worst.nodes, -worst.least):
                worst = found
    assert worst is not None
    return worst


def lane_of(cluster: Cluster, axis: Axis, degrees: Degrees) -> Lane:
    """Whether ranks along an axis talk within a node alone, or over the network too."""
    return "network" if group_on(*group_of(axis, degrees), cluster.per_node).nodes > 1 else "node"


def exchange_seconds(cluster: Cluster, collective: Collective, degrees: Degrees) -> float:
    """Of doing it `count` times, with nothing else on its links but what other groups of the same axis do."""
    group = group_on(*group_of(collective.axis, degrees), cluster.per_node)
    return 0.0 if group.size == 1 else collective.count * _seconds(cluster, collective, group)


def _seconds(cluster: Cluster, collective: Collective, group: Group) -> float:
    kind, size, whole = collective.kind, group.size, collective.bytes
    inside, across = cluster.node_link.of(kind), cluster.network.of(kind)
    if kind == "send":
        link = across if group.neighbours_apart else inside
        return link.latency_seconds + whole / link.rate
    if kind == "broadcast":  # in pieces, each handed on at once
        links = [across] * (group.nodes > 1) + [inside] * (group.local > 1)
        latency = (group.local - 1) * inside.latency_seconds + (group.nodes - 1) * across.latency_seconds
        return latency + whole / min(link.rate for link in links)
    if kind == "all_to_all":
        near = whole * (group.least - 1) / size / inside.rate
        far = whole * (size - group.least) / size / across.rate if group.nodes > 1 else 0.0
        latency = across.latency_seconds if group.nodes > 1 else inside.latency_seconds
        near = near if group.nodes > 1 else whole * (size - 1) / size / inside.rate
        return latency + (size - 2) * _MESSAGE_SECONDS + max(near, far)
    turns = 2 if kind == "all_reduce" else 1
    near = whole * (size - 1) / size / inside.rate if group.local > 1 else 0.0
    far = whole * (size - group.least) / size / (group.least * across.rate) if group.nodes > 1 else 0.0
    # NCCL takes a tree between nodes for all-reduces, and a ring for the others.
    hops = math.ceil(math.log2(group.nodes)) if kind == "all_reduce" else group.nodes - 1
    latency = (group.local - 1) * inside.latency_seconds + hops * across.latency_seconds
    return turns * (latency + max(near, far))
