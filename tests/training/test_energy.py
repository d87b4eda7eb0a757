"""The account of energy: over processes, over stages, and what is not claimed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tenfold.cli.main import main
from tenfold.hardware.carbon import Grid
from tenfold.reporting.metrics import MetricsWriter, read_metrics
from tenfold.training import energy
from tenfold.training.energy import Ledger
from tenfold.training.place import Place

CPU = torch.device("cpu")


class Counter:
    """A meter that stands where the test puts it."""

    def __init__(self, source: str) -> None:
        self.source, self.value, self.closed = source, 0.0, False

    def joules(self) -> float:
        return self.value

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    counter = Counter("rapl")
    monkeypatch.setattr(energy, "open_meter", lambda *_: counter)
    return counter


def test_joules_add_up_over_processes(meter: Counter) -> None:
    place = Place()
    for already in (0.0, 30.0):
        meter.value = already  # a meter need not begin at 0 in the account's eyes
        ledger = Ledger(None)
        ledger._read = already
        with ledger.open(CPU, None, place, print):
            meter.value += 20
            ledger.read(place)
            meter.value += 10
    assert place.joules == pytest.approx(60.0)
    assert place.energy_source == "rapl"
    assert meter.closed


def test_joules_of_a_token_are_those_since_the_line_before(meter: Counter) -> None:
    place, ledger = Place(), Ledger(Grid(360.0, 1.0, "me"))
    with ledger.open(CPU, None, place, print):
        meter.value = 100.0
        ledger.read(place)
        assert "joules_per_token" not in ledger.window(place, 10)
        meter.value = 400.0
        ledger.read(place)
        event = ledger.window(place, 20)
    assert event == {"joules_per_token": 30.0, "co2_kg": pytest.approx(400 / 1e7), "energy_source": "rapl"}


def test_a_run_of_which_a_part_was_not_metered_claims_nothing(meter: Counter) -> None:
    place, ledger, told = Place(joules=None), Ledger(Grid(400.0, 1.0, "me")), []
    with ledger.open(CPU, None, place, told.append):
        meter.value = 5.0
        ledger.read(place)
    assert (
        ledger.so_far(place) == ledger.window(place, 9) == ledger.of_stage(place, 9) == ledger.closing(place, 9) == {}
    )
    assert "not counted" in told[0]


def test_a_run_part_of_which_is_estimated_is_an_estimate(meter: Counter) -> None:
    place, told = Place(joules=10.0, energy_source="estimate"), []
    with Ledger(None).open(CPU, None, place, told.append):
        pass
    assert place.energy_source == "estimate"
    assert "by estimate so far, and now by rapl" in told[0]


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_metrics(run) if event["event"] == kind]


def estimated(run_file: Callable[..., Path], out: Path, *more: str) -> list[str]:
    flags = ["--energy.watts", "200", "--energy.carbon-intensity", "380", "--energy.pue", "1.1"]
    return ["train", str(run_file()), "--out", str(out), *flags, *more]


@pytest.fixture
def _no_meters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without meters, whatever this one has."""
    from tenfold.hardware.energy import open_meter

    monkeypatch.setattr(
        energy, "open_meter", lambda device, watts, note, _root: open_meter(device, watts, note, tmp_path / "empty")
    )


@pytest.mark.usefixtures("_no_meters")
def test_a_run_tells_its_energy_everywhere_and_calls_an_estimate_one(
    run_file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    out = tmp_path / "run"
    assert main(estimated(run_file, out)) == 0
    steps, (end,) = events(out, "step"), events(out, "end")
    for event in [*steps, *events(out, "validation"), end]:
        assert event["joules"] == pytest.approx(200 * event["seconds"], abs=200 * 0.5)
    joules = [event["joules"] for event in steps]
    assert joules == sorted(joules)
    assert {event["energy_source"] for event in [*steps, end]} == {"estimate"}
    assert end["co2_kg"] == pytest.approx(end["joules"] / 3.6e6 * 1.1 * 0.38)
    assert end["joules_per_token"] == pytest.approx(end["joules"] / end["tokens"])
    first, second = (stage["joules"] for stage in end["stages"])
    at_its_end = next(event["joules"] for event in events(out, "validation"))
    assert first >= at_its_end
    assert first + second <= end["joules"]
    assert [stage["joules_per_token"] for stage in end["stages"]] == [
        pytest.approx(stage["joules"] / stage["tokens"]) for stage in end["stages"]
    ]
    assert "estimate from stated watts" in capsys.readouterr().out
    board = EventAccumulator(str(out / "tensorboard"))
    board.Reload()
    assert [scalar.value for scalar in board.Scalars("training/joules")] == pytest.approx(joules)
    assert board.Tags()["scalars"].count("training/co2_kg") == 1


@pytest.mark.usefixtures("_no_meters")
def test_joules_go_on_after_a_resume_even_with_other_watts(
    run_file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, write = tmp_path / "run", MetricsWriter.write

    def stop(self: MetricsWriter, event: dict[str, Any]) -> None:
        write(self, event)
        if event["event"] == "step" and event["step"] == 8:
            raise MemoryError("made for the test")

    monkeypatch.setattr(MetricsWriter, "write", stop)
    assert main(estimated(run_file, out)) == 2
    saved = {event["step"]: event["joules"] for event in events(out, "step")}
    monkeypatch.setattr(MetricsWriter, "write", write)
    assert main(estimated(run_file, out, "--resume", "--energy.watts", "100")) == 0
    assert events(out, "step")[6]["joules"] > saved[6]
    assert [event["joules"] for event in events(out, "step")] == sorted(e["joules"] for e in events(out, "step"))
    (resume,) = events(out, "resume")
    assert (resume["step"], resume["reached"]) == (6, 8)
    assert resume["idle_seconds"] >= 0
    (error,) = events(out, "error")
    assert error["text"] == "made for the test"


@pytest.mark.usefixtures("_no_meters")
def test_a_run_without_meter_and_watts_says_nothing_of_energy(run_file: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert main(["train", str(run_file()), "--out", str(out), "--energy.carbon-intensity", "380"]) == 0
    text = (out / "metrics.jsonl").read_text()
    assert "joules" not in text
    assert "co2" not in text
    assert "energy_source" not in text
