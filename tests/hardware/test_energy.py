"""Meters of energy, read from a file tree and an NVML made for the test."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tenfold.hardware import energy
from tenfold.hardware.energy import Nvml, Rapl, Stated, open_meter, rapl_zones

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class Clock:
    """Stands in for the module `time` where it is imported."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(energy, "time", clock)
    return clock


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """No thread reads behind a test's back; what would be repeated is kept here, to be called by hand."""
    repeated: list[Any] = []

    class Repeated:
        def __init__(self, action: Any, seconds: float) -> None:
            repeated.append(action)

        def close(self) -> None:
            repeated.clear()

    monkeypatch.setattr(energy, "_Repeated", Repeated)
    return repeated


def zone(root: Path, folder: str, name: str, microjoules: int, most: int = 262_143_328_850) -> Path:
    path = root / "sys/class/powercap" / folder
    path.mkdir(parents=True, exist_ok=True)
    (path / "name").write_text(f"{name}\n")
    (path / "energy_uj").write_text(f"{microjoules}\n")
    (path / "max_energy_range_uj").write_text(f"{most}\n")
    return path


def notes() -> list[str]:
    return []


def test_each_joule_is_counted_once_however_many_zones_show_it(tmp_path: Path) -> None:
    for number, (folder, name) in enumerate(
        {
            "intel-rapl:0": "package-0",
            "intel-rapl:0:0": "core",
            "intel-rapl:0:1": "dram",
            "intel-rapl:1": "package-1",
            "intel-rapl:2": "psys",
            "intel-rapl-mmio:0": "package-0",
        }.items()
    ):
        zone(tmp_path, folder, name, number)
    assert [path.name for path in rapl_zones(tmp_path)] == ["intel-rapl:0", "intel-rapl:0:1", "intel-rapl:1"]


def test_the_second_way_to_the_counters_serves_where_it_is_the_only_one(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl-mmio:0", "package-0", 5)
    assert [path.name for path in rapl_zones(tmp_path)] == ["intel-rapl-mmio:0"]


def test_packages_and_memory_add_up(tmp_path: Path) -> None:
    package, memory = zone(tmp_path, "intel-rapl:0", "package-0", 10**9), zone(tmp_path, "intel-rapl:0:1", "dram", 0)
    meter = Rapl([package, memory])
    (package / "energy_uj").write_text(str(10**9 + 7_000_000))
    (memory / "energy_uj").write_text("500000\n")
    assert meter.joules() == pytest.approx(7.5)
    assert meter.joules() == pytest.approx(7.5)


def test_a_counter_that_turns_over_goes_on_from_its_range(tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", 990_000_000, most=1_000_000_000)
    meter = Rapl([package])
    for value, expected in ((4_000_000, 14.0), (900_000_000, 910.0), (1_000_000, 1011.0)):
        (package / "energy_uj").write_text(str(value))
        assert meter.joules() == pytest.approx(expected)


def test_a_thread_reads_so_that_no_turn_is_missed(tmp_path: Path, threads: list[Any]) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", 0, most=1_000_000_000)
    meter = Rapl([package])
    for value in (800_000_000, 100_000_000, 900_000_000, 200_000_000):  # two turns
        (package / "energy_uj").write_text(str(value))
        threads[0]()
    assert meter.joules() == pytest.approx(2200.0)


def test_a_reading_that_fails_once_is_made_up_by_the_next(tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", 0)
    meter = Rapl([package])
    (package / "energy_uj").write_text("")
    assert meter.joules() == 0
    (package / "energy_uj").write_text("3000000")
    assert meter.joules() == pytest.approx(3.0)


def test_a_closed_meter_keeps_what_it_read(tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", 0)
    meter = Rapl([package])
    (package / "energy_uj").write_text("2000000")
    meter.close()
    (package / "energy_uj").write_text("9000000")
    assert meter.joules() == pytest.approx(2.0)


class Error(Exception):
    """What the made NVML raises."""


class FakeNvml:
    """An NVML with one GPU, of a UUID that it must be asked by."""

    NVMLError = Error

    def __init__(self, counter: bool = True) -> None:
        self.counter, self.millijoules, self.milliwatts, self.open, self.asked = counter, 5_000_000, 300_000, 0, ""

    def nvmlInit(self) -> None:  # noqa: N802
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        self.asked = uuid
        if uuid != "GPU-11-22":
            raise Error("Not Found")
        return "handle"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:  # noqa: N802
        if not self.counter:
            raise Error("Not Supported")
        return self.millijoules

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:  # noqa: N802
        return self.milliwatts


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """NVML, and PyTorch's word for which GPU it uses."""
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    properties = SimpleNamespace(uuid="11-22")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    return fake


def test_a_gpu_with_a_counter_is_read_by_it(nvml: FakeNvml, tmp_path: Path) -> None:
    meter = open_meter(CUDA, None, notes().append, tmp_path)
    assert meter is not None
    assert meter.source == "nvml"
    assert nvml.asked == "GPU-11-22"
    nvml.millijoules += 42_500
    assert meter.joules() == pytest.approx(42.5)
    meter.close()
    assert nvml.open == 0
    assert meter.joules() == pytest.approx(42.5)


def test_a_gpu_that_tells_its_power_alone_is_sampled_and_added_up(clock: Clock, threads: list[Any]) -> None:
    fake = FakeNvml(counter=False)
    meter = Nvml(fake, "handle")
    for seconds, milliwatts in ((2.0, 300_000), (1.0, 100_000), (0.5, 100_000)):
        clock.now += seconds
        fake.milliwatts = milliwatts
        threads[0]()
    assert meter.joules() == pytest.approx(2 * 300 + (300 + 100) / 2 + 0.5 * 100)


def test_gpu_and_processor_are_counted_together_where_both_can_be_read(nvml: FakeNvml, tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", 0)
    meter = open_meter(CUDA, 99.0, notes().append, tmp_path)
    assert meter is not None
    assert meter.source == "nvml+rapl"
    nvml.millijoules += 10_000
    (package / "energy_uj").write_text("5000000")
    assert meter.joules() == pytest.approx(15.0)


def test_a_gpu_without_nvml_is_not_passed_over_for_the_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    zone(tmp_path, "intel-rapl:0", "package-0", 0)
    told = notes()
    assert open_meter(CUDA, None, told.append, tmp_path) is None
    assert len(told) == 1
    assert "pip install 'tenfold[energy]'" in told[0]


def test_a_gpu_that_nvml_does_not_find_leaves_the_estimate(
    nvml: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="99"))
    told = notes()
    meter = open_meter(CUDA, 700.0, told.append, tmp_path)
    assert meter is not None
    assert meter.source == "estimate"
    assert told == ["energy: the GPU's meter cannot be read (Not Found)"]
    assert nvml.open == 0


def test_a_processor_is_read_by_rapl_and_stated_watts_have_no_say(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", 0)
    told = notes()
    meter = open_meter(CPU, 500.0, told.append, tmp_path)
    assert meter is not None
    assert (meter.source, meter.joules(), told) == ("rapl", 0.0, [])


def test_a_meter_that_is_not_ours_to_read_is_told_once_and_the_estimate_serves(tmp_path: Path, clock: Clock) -> None:
    for number in range(2):
        path = zone(tmp_path, f"intel-rapl:{number}", f"package-{number}", 0) / "energy_uj"
        path.unlink()
        path.mkdir()  # as unreadable to root as a file of mode 0400 is to others
    told = notes()
    meter = open_meter(CPU, 65.0, told.append, tmp_path)
    assert meter is not None
    clock.now += 10
    assert (meter.source, meter.joules()) == ("estimate", pytest.approx(650.0))
    assert len(told) == 1
    assert "intel-rapl:0/energy_uj" in told[0]
    assert "energy.watts" in told[0]


def test_without_meters_and_without_watts_nothing_is_claimed(tmp_path: Path) -> None:
    told = notes()
    assert open_meter(CPU, None, told.append, tmp_path) is None
    assert told == []


def test_an_estimate_ends_when_it_is_closed(clock: Clock) -> None:
    meter = Stated(100.0)
    clock.now += 3
    meter.close()
    clock.now += 3
    assert meter.joules() == pytest.approx(300.0)


def test_what_is_repeated_stops_when_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    from threading import Event

    called = Event()
    repeated = energy._Repeated(called.set, 0.001)
    assert called.wait(10)
    repeated.close()
    assert not repeated._thread.is_alive()
