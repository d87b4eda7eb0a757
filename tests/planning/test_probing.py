"""Measured at tiny sizes: what is measured is real, how fast it is here does not matter."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tenfold.errors import TenfoldError
from tenfold.parallel.mesh import Degrees
from tenfold.planning.accelerator import MEMORY_WORK
from tenfold.planning.cluster import Cluster, load_cluster
from tenfold.planning.here import check_savable, measure_here, save_cluster
from tenfold.planning.probing import Probe, Sizes
from tenfold.planning.probing_ranks import RankSizes, fit_line
from tenfold.planning.stopwatch import Passes, Stopwatch
from tenfold.planning.terms import Collective, Operation

TINY = Sizes(
    rows=(4, 8),
    sides=(8, 16),
    positions=(8, 16),
    widths=(8,),
    heads=2,
    group_rows=(2, 4),
    group_sides=(16,),
    elements=(4096, 8192),
    weights=(2048, 4096),
    muon_sides=(8, 16),
    seconds=0.001,
)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """This machine, and what was told meanwhile."""
    folder = tmp_path_factory.mktemp("disk")
    told: list[str] = []
    small = RankSizes(bytes=(64, 4096), side=16, seconds=0.001)
    cluster = measure_here(folder, told.append, TINY, small, disk_bytes=2**20, seconds=0.01)
    assert list(folder.iterdir()) == []
    assert any("products" in each for each in told)
    assert any("2 processes" in each for each in told)
    return cluster


def test_what_is_measured_is_a_cluster_that_its_file_gives_back(here: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    save_cluster(here, path)
    assert load_cluster(str(path)) == here
    save_cluster(here, path)  # again: a cluster may be replaced
    assert sorted(each.name for each in tmp_path.iterdir()) == ["here.toml"]


def test_every_kind_of_work_of_every_dtype_has_a_measured_rate(here: Cluster) -> None:
    device = here.accelerator
    for dtype in ("fp32", "bf16"):
        assert set(device.matrix[dtype].measured) == {"forward", "input", "weight"}
        assert set(device.attention[dtype].measured) == {"forward", "input"}
        assert set(device.grouped[dtype].measured) == {"forward", "input"}
        assert set(device.memory[dtype]) == set(MEMORY_WORK)
    assert set(device.update) == {"adamw", "adafactor", "muon"}
    assert set(here.node_link.kinds) == {
        "all_gather",
        "reduce_scatter",
        "all_reduce",
        "all_to_all",
        "send",
        "broadcast",
    }
    if device.kind == "cpu":
        assert here.threads == torch.get_num_threads()
        assert all(factor >= 1 for factor in here.crowding.values())
    assert here.disk_read_bytes_per_second > 0 < here.disk_write_bytes_per_second


def test_a_measured_cluster_answers_what_plans_ask(here: Cluster) -> None:
    two = here.model_copy(update={"per_node": 2})
    for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "broadcast"):
        axis = "pipeline" if kind == "send" else "data_shard"
        degrees = Degrees(pipeline=2) if kind == "send" else Degrees(data_shard=2)
        small, large = (Collective("x", kind, axis, size) for size in (1e3, 1e9))  # type: ignore[arg-type]
        assert 0 < two.exchange_seconds(small, degrees) < two.exchange_seconds(large, degrees)
        assert two.lane_of(small, degrees) == "node"
    product = Operation("x", "matrix", rows=8, inner=8, columns=8)
    alone, crowded = here.seconds(product, "bf16"), two.seconds(product, "bf16")
    assert crowded == pytest.approx(alone * here.crowding.get("matrix", 1.0))


def test_seconds_of_a_measured_size_are_those_that_were_measured() -> None:
    probe = Probe(torch.device("cpu"), TINY)
    probe.launch = 0.25
    taken = iter(range(1, 100))
    probe.watch.over = lambda make, work, size: (work(make()), float(next(taken)))[1]  # type: ignore[assignment, method-assign, func-returns-value]
    speed = probe.products("fp32")
    order = [(rows, inner, columns) for rows in (4, 8) for inner in (8, 16) for columns in (8, 16)]
    for seconds, place in enumerate(order, start=1):
        flops = 2 * math.prod(place)
        assert flops / speed.at("forward", *place) + 0.25 == pytest.approx(seconds, rel=1e-3)
    weights = [(rows, inner, columns) for rows in (8, 16) for inner in (4, 8) for columns in (8, 16)]
    for seconds, place in enumerate(weights, start=17):  # behind eight forward and eight of inputs
        flops = 2 * math.prod(place)
        assert flops / speed.at("weight", *place) + 0.25 == pytest.approx(seconds, rel=1e-3)


def test_work_is_done_on_other_operands_every_time() -> None:
    seen: list[int] = []
    made = iter(range(100))
    Stopwatch(torch.device("cpu"), seconds=0.0).over(lambda: next(made), seen.append, size=24 * 2**20)
    assert set(seen) == {0, 1}  # twice 24 MiB are more than a cache holds
    assert seen[:4] == [0, 1, 0, 1]


def test_passes_count_what_operations_read_and_write() -> None:
    x, row = torch.ones(8, 16), torch.ones(16)
    with Passes(least=1) as counter:
        y = x + row  # 128 and 16 read, 128 written
        y.t().mul_(2)  # a view, and a pass over 128 there and back
        row.expand(8, 16).sum()  # 16 read, 1 written
    assert counter.count == 3
    assert counter.bytes == 4 * (128 + 16 + 128 + 256 + 17)


def test_a_line_through_exchanges_has_their_start_and_slope() -> None:
    start, slope = fit_line([(size, 2e-5 + size / 1e9) for size in (4e3, 6e4, 1e6, 8e6)])
    assert start == pytest.approx(2e-5)
    assert 1 / slope == pytest.approx(1e9)
    start, slope = fit_line([(1e3, 1e-3), (1e6, 0.9e-3)])  # noise alone: still no exchange in no time
    assert start > 0
    assert slope > 0


def test_a_file_that_is_no_cluster_is_not_overwritten(here: Cluster, tmp_path: Path) -> None:
    other = tmp_path / "run.toml"
    other.write_text("[model]\n", encoding="utf-8")
    with pytest.raises(TenfoldError, match="no cluster"):
        save_cluster(here, other)
    assert other.read_text(encoding="utf-8") == "[model]\n"
    with pytest.raises(TenfoldError, match=r"here\.toml"):
        check_savable(tmp_path / "here.json")
    with pytest.raises(TenfoldError, match="no folder"):
        check_savable(tmp_path / "gone" / "here.toml")
