"""Energy that a run uses: read from the machine's meters, or estimated from watts that the user states."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from tenfold.hardware.cgroup import ROOT, read_text

RAPL_SECONDS = 10.0  # between readings, so that no counter turns over twice unseen
POWER_SECONDS = 0.1  # between samples of a GPU that tells its power alone


class Meter(Protocol):
    """Counts joules from the moment it is made. `source` is how: "nvml", "rapl", "nvml+rapl" or "estimate"."""

    source: str

    def joules(self) -> float:
        """Joules since the meter was made."""

    def close(self) -> None:
        """Let go of threads and libraries; `joules` stays as it was."""


class Rapl:
    """Processor packages and their memory, by the counters that Linux shows under /sys/class/powercap.

    They count the whole machine, whoever else uses it, in microjoules up to `max_energy_range_uj`, then from 0 again.
    AMD processors have the same files.
    """

    source = "rapl"

    def __init__(self, zones: Sequence[Path]) -> None:
        self._zones = {zone: (_number(zone / "energy_uj"), _number(zone / "max_energy_range_uj")) for zone in zones}
        self._total = 0.0
        self._lock = threading.Lock()
        self._thread = _Repeated(self.joules, RAPL_SECONDS)

    def joules(self) -> float:
        with self._lock:
            for zone, (before, most) in self._zones.items():
                now = _number(zone / "energy_uj")
                if before is None or now is None:  # unread this once: what it missed comes with the next reading
                    continue
                # A counter that fell has turned over; one without a stated range has been set back.
                self._total += (now - before if now >= before else now + ((most - before) if most else 0)) / 1e6
                self._zones[zone] = (now, most)
            return self._total

    def close(self) -> None:
        self._thread.close()
        self.joules()
        self._zones = {}


def rapl_zones(root: Path = ROOT) -> list[Path]:
    """The zones that together hold each joule once: packages, and memory, which no package counts.

    Left out: cores and graphics, which are parts of a package; psys, which holds packages; the second way (mmio) to
    the same counters, where there is the first.
    """
    for kind in ("intel-rapl", "intel-rapl-mmio"):
        zones = sorted((root / "sys/class/powercap").glob(f"{kind}:*"))
        chosen = [zone for zone in zones if read_text(zone / "name").strip().startswith(("package", "dram"))]
        if chosen:
            return chosen
    return []


class Nvml:
    """One GPU, by NVML: its energy counter (Volta and later), else its power, sampled on a thread and added up."""

    source = "nvml"

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._lock = threading.Lock()
        self._total = 0.0
        self._thread: _Repeated | None = None
        try:
            self._first: int | None = nvml.nvmlDeviceGetTotalEnergyConsumption(handle)  # millijoules
        except nvml.NVMLError:
            self._first = None
            self._last = (time.monotonic(), self._watts())
            self._thread = _Repeated(self.joules, POWER_SECONDS)

    def joules(self) -> float:
        with self._lock:
            if self._nvml is None:
                return self._total
            if self._first is not None:
                with contextlib.suppress(self._nvml.NVMLError):  # unread this once: the counter keeps it
                    now = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
                    self._total = (now - self._first) / 1e3
                return self._total
            now, (then, watts) = time.monotonic(), self._last
            with contextlib.suppress(self._nvml.NVMLError):
                self._last = (now, self._watts())
                self._total += (watts + self._last[1]) / 2 * (now - then)
            return self._total

    def _watts(self) -> float:
        return float(self._nvml.nvmlDeviceGetPowerUsage(self._handle)) / 1e3

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()
        self.joules()
        with self._lock:
            if self._nvml is not None:
                self._nvml.nvmlShutdown()
                self._nvml = None


class Stated:
    """What a machine of `watts` uses in the time that passes: an estimate, and called so wherever it is shown."""

    source = "estimate"

    def __init__(self, watts: float) -> None:
        self._watts, self._began = watts, time.monotonic()
        self._ended: float | None = None

    def joules(self) -> float:
        return self._watts * ((self._ended or time.monotonic()) - self._began)

    def close(self) -> None:
        self._ended = self._ended or time.monotonic()


class Together:
    """Several meters of different parts of a machine as one."""

    def __init__(self, meters: Sequence[Meter]) -> None:
        self._meters = meters
        self.source = "+".join(meter.source for meter in meters)

    def joules(self) -> float:
        return sum(meter.joules() for meter in self._meters)

    def close(self) -> None:
        for meter in self._meters:
            meter.close()


def open_meter(
    device: torch.device, watts: float | None, note: Callable[[str], None], root: Path = ROOT
) -> Meter | None:
    """The best meter for a run on `device`: NVML for a GPU, RAPL for the processor, both where both can be read.

    Without either, an estimate from `watts`; without those None. `note` is told, once, of a meter that is there and
    cannot be read.
    """
    gpu = _gpu_meter(device, note)
    zones = rapl_zones(root)
    readable = [zone for zone in zones if _number(zone / "energy_uj") is not None]
    if device.type == "cuda" and gpu is None:
        readable = []  # the processor's share alone would pass for the whole
    elif len(readable) < len(zones):
        hidden = next(zone for zone in zones if zone not in readable)
        note(
            f"energy: the processor's meter, {hidden / 'energy_uj'}, cannot be read (it is for root alone, as a rule): "
            "let everybody read it, or state energy.watts for an estimate"
        )
        readable = []
    meters: list[Meter] = [] if gpu is None else [gpu]
    if readable:
        meters.append(Rapl(readable))
    if meters:
        return Together(meters) if len(meters) > 1 else meters[0]
    return Stated(watts) if watts is not None else None


def _gpu_meter(device: torch.device, note: Callable[[str], None]) -> Nvml | None:
    if device.type != "cuda":
        return None
    try:
        import pynvml
    except ImportError:
        note("energy: the GPU's meter needs nvidia-ml-py: pip install 'tenfold[energy]'")
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        note(f"energy: the GPU's meter cannot be read ({error})")
        return None
    try:
        # By UUID: NVML counts all GPUs of the machine, PyTorch those that CUDA_VISIBLE_DEVICES leaves, in its order.
        index = torch.cuda.current_device() if device.index is None else device.index
        uuid = str(torch.cuda.get_device_properties(index).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
        return Nvml(pynvml, handle)
    except pynvml.NVMLError as error:
        pynvml.nvmlShutdown()
        note(f"energy: the GPU's meter cannot be read ({error})")
        return None


class _Repeated:
    """Calls `action` every `seconds` on a thread of its own, until closed."""

    def __init__(self, action: Callable[[], object], seconds: float) -> None:
        self._action, self._seconds = action, seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="energy", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._seconds):
            self._action()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


def _number(path: Path) -> int | None:
    text = read_text(path).strip()
    return int(text) if text.isdigit() else None
