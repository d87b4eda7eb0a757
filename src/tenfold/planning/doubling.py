"""What bounds a step: the step played again on a cluster of which one thing is twice as fast or as large."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from tenfold.planning.accelerator import Grid, Speed
from tenfold.planning.cluster import Cluster, Link

Resource = Literal[
    "matrix rate",
    "memory bandwidth",
    "starting of operations",
    "links within nodes",
    "network",
    "host link",
    "disks",
]
"""What a step is only played again for; more memory needs another search."""


@dataclass(frozen=True)
class Doubled:
    """With twice of a resource a step takes `seconds`, `times` less than it does."""

    resource: Resource
    seconds: float
    times: float


def doubled(cluster: Cluster, resource: Resource) -> Cluster:
    """The cluster with twice of it; latencies of links stay."""
    return _DOUBLED[resource](cluster)


def gains(cluster: Cluster, seconds: float, play: Callable[[Cluster], float]) -> list[Doubled]:
    """What twice of each rate makes of a step of `seconds`, which `play` plays on a cluster; most helpful first."""
    found = []
    for resource in get_args(Resource):
        again = play(doubled(cluster, resource))
        found.append(Doubled(resource, again, seconds / again))
    return sorted(found, key=lambda each: -each.times)


def _accelerator(cluster: Cluster, update: dict[str, Any]) -> Cluster:
    return cluster.model_copy(update={"accelerator": cluster.accelerator.model_copy(update=update)})


def _faster(speed: Speed) -> Speed:
    measured = {
        way: Grid(sizes=grid.sizes, rates=[2 * rate for rate in grid.rates]) for way, grid in speed.measured.items()
    }
    return speed.model_copy(update={"peak": 2 * speed.peak, "measured": measured})


def _all_faster(speeds: dict[Any, Speed]) -> dict[Any, Speed]:
    return {key: _faster(speed) for key, speed in speeds.items()}


def _matrix(cluster: Cluster) -> Cluster:
    device = cluster.accelerator
    return _accelerator(cluster, {key: _all_faster(getattr(device, key)) for key in ("matrix", "attention", "grouped")})


def _bandwidth(cluster: Cluster) -> Cluster:
    device = cluster.accelerator
    memory = {dtype: _all_faster(speeds) for dtype, speeds in device.memory.items()}
    return _accelerator(
        cluster,
        {"memory_rate": _faster(device.memory_rate), "memory": memory, "update": _all_faster(device.update)},
    )


def _link(link: Link) -> Link:
    kinds = {
        kind: pace.model_copy(update={"bytes_per_second": 2 * pace.bytes_per_second})
        for kind, pace in link.kinds.items()
    }
    return link.model_copy(update={"bytes_per_second": 2 * link.bytes_per_second, "kinds": kinds})


def _times_two(*keys: str) -> Callable[[Cluster], Cluster]:
    return lambda cluster: cluster.model_copy(update={key: 2 * getattr(cluster, key) for key in keys})


_DOUBLED: dict[Resource, Callable[[Cluster], Cluster]] = {
    "matrix rate": _matrix,
    "memory bandwidth": _bandwidth,
    "starting of operations": lambda cluster: _accelerator(
        cluster, {"launch_seconds": cluster.accelerator.launch_seconds / 2}
    ),
    "links within nodes": lambda cluster: cluster.model_copy(update={"node_link": _link(cluster.node_link)}),
    "network": lambda cluster: cluster.model_copy(update={"network": _link(cluster.network)}),
    "host link": _times_two("host_read_bytes_per_second", "host_write_bytes_per_second"),
    "disks": _times_two("disk_read_bytes_per_second", "disk_write_bytes_per_second"),
}
