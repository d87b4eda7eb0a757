"""The facts of `hardware.examination` on a terminal, and beneath them what will hurt."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tenfold.reporting.advice import Advice
from tenfold.reporting.format import format_bytes, format_flops

UNKNOWN = "unknown"
_TITLES = {
    "processor": "processor",
    "load": "load",
    "memory": "memory",
    "limits": "limits of a process",
    "accelerators": "accelerators",
    "torch": "PyTorch",
    "products": "measured matrix products",
    "disks": "disks",
}
_NAMES = {
    "cpu": "CPU",
    "cuda": "CUDA",
    "mkl": "MKL",
    "numa": "NUMA",
    "nvlinks": "NVLinks",
    "onednn": "oneDNN",
    "python": "Python",
    "torch": "PyTorch",
}
_NONE = {"core_quota", "cuda", "compiler", "nvlinks_between_two"}  # what is None there is not there
_YES = {True: "yes", False: "no"}


def machine_report(facts: dict[str, Any], advice: list[Advice]) -> RenderableType:
    """Every section under its title, then the advice."""
    parts: list[RenderableType] = []
    for key, title in _TITLES.items():
        section = facts.get(key)
        if section is None:
            continue
        if isinstance(section, list):
            for disk in section:
                parts += [Text(f"disk of {disk['folder']}", style="bold"), _rows(disk)]
        else:
            parts += [Text(title, style="bold"), _rows(section)]
    if advice:
        parts.append(Text(f"\nwhat will hurt ({len(advice)})", style="bold yellow"))
        table = Table.grid(padding=(0, 1))
        for entry in advice:
            table.add_row(Text("!", style="bold yellow"), Text(entry.what))
            table.add_row(Text(""), Text(f"remedy: {entry.remedy}", style="cyan"))
        parts.append(table)
    else:
        parts.append(Text("\nnothing was found that will hurt", style="bold green"))
    return Group(*parts)


def cluster_report(cluster: dict[str, Any]) -> RenderableType:
    """What was measured of a machine for planning (a dumped `planning.cluster.Cluster`), in short."""
    accelerator, link = cluster["accelerator"], cluster["node_link"]
    table = Table.grid(padding=(0, 2))
    table.add_row("device", accelerator["name"])
    if cluster["threads"]:
        table.add_row("OpenMP threads", str(cluster["threads"]))
    for dtype, speed in accelerator["matrix"].items():
        table.add_row(f"products, {dtype}", f"up to {format_flops(speed['peak'])}")
    for dtype, speed in accelerator["attention"].items():
        table.add_row(f"attention, {dtype}", f"up to {format_flops(speed['peak'])}")
    for dtype, speed in accelerator["grouped"].items():
        table.add_row(f"experts, {dtype}", f"up to {format_flops(speed['peak'])}")
    table.add_row("large passes over memory", _per_second(accelerator["memory_rate"]["peak"]))
    for optimizer, speed in accelerator["update"].items():
        table.add_row(f"updates, {optimizer}", f"{_per_second(speed['peak'])} of weights at most")
    for way in ("read", "write"):
        if rate := cluster[f"host_{way}_bytes_per_second"]:
            table.add_row(f"host memory, {way}", _per_second(rate))
        table.add_row(f"disk, {way}", _per_second(cluster[f"disk_{way}_bytes_per_second"]))
    for kind, pace in link["kinds"].items():
        microseconds = pace["latency_seconds"] * 1e6
        table.add_row(kind.replace("_", "-"), f"{microseconds:.0f} us, then {_per_second(pace['bytes_per_second'])}")
    if cluster["crowding"]:
        slower = ", ".join(f"{kind} {factor:.2f}" for kind, factor in cluster["crowding"].items())
        table.add_row("two at once take times", slower)
    return table


def _per_second(rate: float) -> str:
    return f"{format_bytes(rate)}/s"


def _rows(section: dict[str, Any]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=24)
    table.add_column(overflow="fold")
    for key, value in section.items():
        if key == "folder":
            continue
        if key == "devices":
            for number, device in enumerate(value):
                table.add_row(Text(f"  {number}"), Text(_device(device)))
            if not value:
                table.add_row(Text("  devices"), Text("none"))
            continue
        table.add_row(Text(f"  {_label(key)}"), Text(_show(key, value)))
    return table


def _label(key: str) -> str:
    if key.endswith("_bytes_per_second"):
        return key.removesuffix("_bytes_per_second")
    if key.isupper():
        return key
    words = key.removesuffix("_bytes").split("_")
    return " ".join(_NAMES.get(word, word) for word in words)


def _show(key: str, value: Any) -> str:
    if value is None:
        return "not set" if key.isupper() else "none" if key in _NONE else UNKNOWN
    if isinstance(value, bool):
        return _YES[value]
    if key.endswith("_bytes_per_second"):
        return f"{format_bytes(value)}/s"
    if key == "cache_bytes":
        return ", ".join(f"{name} {format_bytes(size)}" for name, size in value.items())
    if key.endswith("_bytes") and not isinstance(value, str):
        return format_bytes(value)
    if key == "busiest":
        return ", ".join(f"{entry['name']} ({entry['process']}) {entry['cores']:g}" for entry in value) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} {format_flops(rate)}" for name, rate in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "nothing"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _device(device: dict[str, Any]) -> str:
    parts = [str(device.get("name"))]
    if device.get("memory_bytes"):
        parts.append(format_bytes(device["memory_bytes"]))
    if device.get("driver"):
        parts.append(f"driver {device['driver']}")
    if device.get("pcie"):
        parts.append(f"PCIe {device['pcie']}")
    return ", ".join(parts)
