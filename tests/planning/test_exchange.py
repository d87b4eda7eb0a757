from __future__ import annotations

import pytest

from tenfold.parallel.mesh import Degrees
from tenfold.planning.cluster import Cluster, load_cluster
from tenfold.planning.exchange import group_on
from tenfold.planning.terms import Collective, CollectiveKind

NODE, NETWORK = 100e9, 10e9


@pytest.fixture
def cluster() -> Cluster:
    """Four nodes of four, without latency, at round rates."""
    raw = load_cluster("4x4:a100-80gb").model_dump()
    raw["node_link"] = {"latency_seconds": 0.0, "bytes_per_second": NODE, "all_to_all_share": 0.5}
    raw["network"] = {"latency_seconds": 0.0, "bytes_per_second": NETWORK, "all_to_all_share": 0.5}
    return Cluster.model_validate(raw)


def seconds(cluster: Cluster, kind: CollectiveKind, axis: str, size: float, **degrees: int) -> float:
    return cluster.exchange_seconds(Collective("x", kind, axis, size), Degrees(**degrees))  # type: ignore[arg-type]


def test_a_ring_moves_all_but_a_ranks_own_part_and_an_all_reduce_twice_that(cluster: Cluster) -> None:
    whole = 1e9
    for kind, turns in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)):
        found = seconds(cluster, kind, "tensor", whole, tensor=4, data_shard=4)  # type: ignore[arg-type]
        assert found == pytest.approx(turns * whole * 3 / 4 / NODE)


def test_a_group_over_nodes_is_bound_by_its_links_between_them(cluster: Cluster) -> None:
    # All 16 ranks: into each node come the 12 sixteenths of the others, over four links.
    assert seconds(cluster, "all_gather", "data_shard", 16e9, data_shard=16) == pytest.approx(12e9 / (4 * NETWORK))
    # One rank a node: three quarters come over its own link.
    apart = seconds(cluster, "all_gather", "data_shard", 16e9, tensor=4, data_shard=4)
    assert apart == pytest.approx(12e9 / NETWORK)
    # Two nodes' worth of two: the half of the other node, over two links.
    assert group_on(8, 1, 4)[:3] == (8, 2, 4)


def test_an_all_to_all_crosses_links(cluster: Cluster) -> None:
    within = seconds(cluster, "all_to_all", "expert", 4e9, data_shard=16, expert=4)
    assert within == pytest.approx(4e9 * 3 / 4 / (NODE / 2), rel=1e-3)
    between = seconds(cluster, "all_to_all", "expert", 16e9, data_shard=16, expert=16)
    assert between == pytest.approx(16e9 * 12 / 16 / (NETWORK / 2), rel=1e-3)


def test_a_broadcast_goes_over_every_link_once(cluster: Cluster) -> None:
    assert seconds(cluster, "broadcast", "tensor", 1e9, tensor=4) == pytest.approx(1e9 / NODE)
    assert seconds(cluster, "broadcast", "world", 1e9, tensor=4, data_shard=4) == pytest.approx(1e9 / NETWORK)


def test_a_message_goes_to_the_next_stage(cluster: Cluster) -> None:
    assert seconds(cluster, "send", "pipeline", 1e9, data_shard=4, pipeline=4) == pytest.approx(1e9 / NETWORK)
    assert seconds(cluster, "send", "pipeline", 1e9, data_shard=1, pipeline=4) == pytest.approx(1e9 / NODE)


def test_nothing_is_sent_where_a_rank_is_alone(cluster: Cluster) -> None:
    assert seconds(cluster, "all_reduce", "tensor", 1e9, data_shard=16) == 0


def test_latency_counts_hops_and_count_counts_all(cluster: Cluster) -> None:
    raw = cluster.model_dump()
    raw["node_link"]["latency_seconds"], raw["network"]["latency_seconds"] = 1e-3, 1.0
    slow = Cluster.model_validate(raw)
    assert seconds(slow, "all_gather", "data_shard", 1, data_shard=16) == pytest.approx(3 * 1e-3 + 3)
    assert seconds(slow, "all_reduce", "data_shard", 1, data_shard=16) == pytest.approx(2 * (3 * 1e-3 + 2))
    many = Collective("x", "all_gather", "data_shard", 1, count=7)
    assert slow.exchange_seconds(many, Degrees(data_shard=16)) == pytest.approx(7 * (3 * 1e-3 + 3))


@pytest.mark.parametrize(
    ("size", "stride", "nodes"), [(4, 1, 1), (2, 4, 2), (4, 4, 4), (8, 1, 2), (2, 2, 1), (3, 1, 2), (16, 1, 4)]
)
def test_a_group_is_where_its_ranks_are(size: int, stride: int, nodes: int) -> None:
    assert group_on(size, stride, 4).nodes == nodes
    # Of 48 ranks every one is in one such group: none spans more nodes.
    groups = [[start + at * stride for at in range(size)] for start in range(48) if start // stride % size == 0]
    assert max(len({rank // 4 for rank in group}) for group in groups) == nodes


def test_lanes_are_of_the_node_or_of_the_network(cluster: Cluster) -> None:
    degrees = Degrees(tensor=4, data_shard=4)
    assert cluster.lane_of(Collective("x", "all_reduce", "tensor", 1), degrees) == "node"
    assert cluster.lane_of(Collective("x", "all_gather", "shard", 1), degrees) == "network"
