"""A cluster of which one thing is doubled: what hangs on that thing takes half as long, and the rest what it took."""

from __future__ import annotations

from typing import get_args

import pytest

from tenfold.parallel.mesh import Degrees
from tenfold.planning.cluster import Cluster, load_cluster
from tenfold.planning.doubling import Resource, doubled, gains
from tenfold.planning.terms import Collective, Operation

HERE = Degrees(tensor=8)
APART = Degrees(data_replicate=8, data_shard=8)


def measures(cluster: Cluster) -> dict[str, float]:
    """Seconds of something that is bound by one resource alone."""
    product = Operation("product", "matrix", rows=8192, inner=8192, columns=8192)
    norm = Operation("norm", "memory", bytes=1e10)
    update = Operation("adamw", "update", bytes=1e10)
    starts = Operation("add", "memory", bytes=8.0)
    near, far = Collective("x", "all_gather", "tensor", 1e11), Collective("x", "all_gather", "data_replicate", 1e11)
    rates = cluster.rates()
    return {
        "matrix rate": cluster.seconds(product, "bf16"),
        "memory bandwidth": cluster.seconds(norm, "bf16") + cluster.seconds(update, "bf16"),
        "starting of operations": cluster.seconds(starts, "bf16"),
        "links within nodes": cluster.exchange_seconds(near, HERE),
        "network": cluster.exchange_seconds(far, APART),
        "host link": 1 / rates.read["host"] + 1 / rates.write["host"],
        "disks": 1 / rates.read["disk"] + 1 / rates.write["disk"],
    }


@pytest.mark.parametrize("resource", get_args(Resource))
def test_what_hangs_on_it_takes_half_and_the_rest_the_same(resource: Resource) -> None:
    cluster = load_cluster("8x8:h100,disk=1TiB,disk_read=6GiB,disk_write=3GiB")
    before, after = measures(cluster), measures(doubled(cluster, resource))
    for name, seconds in after.items():
        assert seconds == pytest.approx(before[name] / (2 if name == resource else 1), rel=2e-3), name


def test_gains_are_the_steps_played_again_best_first() -> None:
    cluster = load_cluster("8x8:h100")

    def play(other: Cluster) -> float:
        found = measures_of_step(other)
        return sum(found)

    def measures_of_step(other: Cluster) -> list[float]:
        product = Operation("product", "matrix", rows=8192, inner=8192, columns=8192, count=3)
        return [
            other.seconds(product, "bf16"),
            other.exchange_seconds(Collective("x", "send", "data_replicate", 1e8), APART),
        ]

    found = gains(cluster, play(cluster), play)
    assert {each.resource for each in found} == set(get_args(Resource))
    assert [each.times for each in found] == sorted((each.times for each in found), reverse=True)
    compute, exchange = measures_of_step(cluster)
    of = {each.resource: each.seconds for each in found}
    assert of["matrix rate"] == pytest.approx(compute / 2 + exchange)
    assert of["disks"] == pytest.approx(compute + exchange)
