from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tenfold.errors import TenfoldError
from tenfold.parallel.mesh import Degrees
from tenfold.planning.accelerator import Grid
from tenfold.planning.cluster import Cluster, load_cluster
from tenfold.planning.presets import PRESETS
from tenfold.planning.terms import Operation

GIB = 2**30


def product(rows: int, inner: int, columns: int, count: int = 1) -> Operation:
    return Operation("product", "matrix", rows=rows, inner=inner, columns=columns, count=count)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_cluster_and_its_toml_is_the_same_cluster(name: str, tmp_path: Path) -> None:
    cluster = load_cluster(f"64x8:{name}")
    assert (cluster.nodes, cluster.per_node, cluster.ranks) == (64, 8, 512)
    file = tmp_path / "saved.toml"
    file.write_text(cluster.dump(), encoding="utf-8")
    assert load_cluster(str(file)) == cluster
    assert cluster.notes, "figures without a word of what is assumed"
    for dtype in ("fp32", "bf16"):
        for kind, sizes in {"matrix": (512, 512, 512), "grouped": (512, 256, 256), "attention": (512, 64, 0)}.items():
            rows, inner, columns = sizes
            work = Operation(kind, kind, flops=1e9, rows=rows, inner=inner, columns=columns, groups=4)  # type: ignore[arg-type]
            assert 0 < cluster.seconds(work, dtype) < 1  # type: ignore[arg-type]
    for optimizer in ("adamw", "adafactor", "muon"):
        assert 0 < cluster.seconds(Operation(optimizer, "update", bytes=2**20), "fp32") < 1


@pytest.mark.parametrize(
    ("text", "nodes", "per_node"), [("8:h100", 1, 8), ("2:cpu", 1, 2), ("h200", 1, 1), ("64 x 8 : V100-32GB", 64, 8)]
)
def test_a_cluster_is_nodes_by_accelerators(text: str, nodes: int, per_node: int) -> None:
    cluster = load_cluster(text)
    assert (cluster.nodes, cluster.per_node) == (nodes, per_node)


def test_what_stands_behind_a_name_changes_it_and_no_preset() -> None:
    cluster = load_cluster("64x8:v100-32gb,host_memory=768GiB,network_rate=25GB,price=2.5,memory=30GiB")
    assert cluster.host_memory_bytes == 768 * GIB
    assert cluster.network.bytes_per_second == 25e9
    assert cluster.accelerator.price_per_hour == 2.5
    assert cluster.accelerator.memory_bytes == 30 * GIB
    plain = load_cluster("64x8:v100-32gb")
    assert plain.host_memory_bytes == 512 * GIB
    assert plain.accelerator.memory_bytes == 32 * GIB
    assert plain.network.bytes_per_second == 6.25e9  # 4 x 100 Gb/s over eight ranks (DGX-1 datasheet)


def test_ranks_on_a_cpu_share_its_memory() -> None:
    cluster = load_cluster("4:cpu,host_memory=32GiB")
    assert cluster.accelerator.memory_bytes == 8 * GIB
    assert cluster.budgets().host == 0
    assert cluster.budgets().device < 8 * GIB


def test_a_rank_gets_its_share_of_the_node(tmp_path: Path) -> None:
    cluster = load_cluster("2x8:v100-32gb,host_memory=800GB,disk=8TB,disk_read=4GB")
    assert cluster.budgets().host == int(800e9 * 0.9) // 8
    assert cluster.budgets().disk == 10**12
    assert cluster.rates().read["disk"] == 4e9 / 8
    alone = cluster.budgets(Degrees(data_shard=2))
    assert alone.host == int(800e9 * 0.9) // 2
    assert cluster.rates(Degrees(data_shard=2)).read["disk"] == 2e9
    assert cluster.rates().read["host"] == cluster.host_read_bytes_per_second


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("64x8:v100", "did you mean v100-32gb?"),
        ("8:a100", "a100-40gb or a100-80gb"),
        ("8:h1000", "did you mean h100"),
        ("8:h100,host_mem=3GiB", "did you mean host_memory?"),
        ("8:h100,host_memory=lots", "cannot read 'lots' as bytes"),
        ("8:h100,watts=nan", "watts"),
        ("0x8:h100", "nodes"),
        ("2x8:gone.toml", "tenfold doctor --save gone.toml"),
    ],
)
def test_mistakes_are_told_with_what_was_meant(text: str, told: str) -> None:
    with pytest.raises(TenfoldError, match="cluster") as raised:
        load_cluster(text)
    assert told in str(raised.value)


def test_a_run_file_is_no_cluster(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[model]\npreset = 'tiny'\n", encoding="utf-8")
    with pytest.raises(TenfoldError, match="no cluster file"):
        load_cluster(str(tmp_path / "run.toml"))


def test_a_file_may_be_of_another_size_and_says_for_how_many_threads_it_is(tmp_path: Path) -> None:
    here = load_cluster("2:cpu").model_copy(update={"threads": torch.get_num_threads() + 1})
    (tmp_path / "here.toml").write_text(here.dump(), encoding="utf-8")
    cluster = load_cluster(f"3x4:{tmp_path / 'here.toml'}")
    assert (cluster.nodes, cluster.per_node) == (3, 4)
    assert "OMP_NUM_THREADS" in cluster.notes[-1]


def test_a_grid_is_exact_where_it_was_measured_and_a_power_law_between() -> None:
    grid = Grid(sizes=[[1, 100], [8, 32]], rates=[10.0, 20.0, 1000.0, 80.0])
    assert grid.at(1, 8) == pytest.approx(10)
    assert grid.at(100, 32) == pytest.approx(80)
    assert grid.at(10, 8) == pytest.approx(100)  # the geometric middle of 10 and 1000
    assert grid.at(10, 16) == pytest.approx((10 * 20 * 1000 * 80) ** 0.25)
    assert grid.at(0.1, 4) == pytest.approx(10)
    assert grid.at(1e6, 1e6) == pytest.approx(80)
    with pytest.raises(ValueError, match="rates"):
        Grid(sizes=[[1, 2]], rates=[1.0])


def test_a_product_takes_its_operations_or_its_bytes_whichever_is_slower() -> None:
    cluster = load_cluster("a100-80gb")
    large = cluster.seconds(product(8192, 8192, 8192), "bf16")
    assert large == pytest.approx(2 * 8192**3 / (312e12 * 0.7))
    thin = cluster.seconds(product(8192, 1, 8192, count=10), "bf16")
    assert thin == pytest.approx(10 * 2 * (8192 + 8192 + 8192**2) / (2039e9 * 0.8))
    tiny = cluster.seconds(product(8, 8, 8), "bf16")
    assert tiny == cluster.accelerator.launch_seconds


def test_a_measured_product_goes_by_its_three_sizes_and_its_way() -> None:
    raw = load_cluster("2:cpu").model_dump()
    rates = {"forward": [100e9] * 8, "weight": [50e9] * 8}
    grids = {way: {"sizes": [[64, 512]] * 3, "rates": each} for way, each in rates.items()}
    raw["accelerator"]["matrix"]["fp32"]["measured"] = grids
    raw["crowding"] = {"matrix": 1.5}
    cluster = Cluster.model_validate(raw)
    launch = cluster.accelerator.launch_seconds
    flops = 2 * 128**3
    assert cluster.seconds(product(128, 128, 128), "fp32") == pytest.approx(1.5 * (flops / 100e9 + launch))
    weight = Operation("product", "matrix", rows=128, inner=128, columns=128, way="weight")
    assert cluster.seconds(weight, "fp32") == pytest.approx(1.5 * (flops / 50e9 + launch))
    alone = cluster.model_copy(update={"per_node": 1})
    assert alone.seconds(weight, "fp32") == pytest.approx(flops / 50e9 + launch)
