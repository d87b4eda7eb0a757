"""The machines that a plan is for: nodes, their accelerators, links, memory and disks."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, PositiveFloat, PositiveInt

from tenfold.config.base import Section
from tenfold.config.load import build, dump_toml, read_toml
from tenfold.config.units import parse_bytes
from tenfold.errors import TenfoldError
from tenfold.offload.budget import Budgets
from tenfold.offload.forecast import Rates
from tenfold.offload.tiers import TierName
from tenfold.parallel.mesh import Degrees
from tenfold.planning import exchange
from tenfold.planning.accelerator import Accelerator, Dtype
from tenfold.planning.presets import PRESETS
from tenfold.planning.terms import Collective, CollectiveKind, Operation, OperationKind


class Pace(Section):
    """Latency of a message, and bytes a second of a rank, each way, beside all others of its node."""

    latency_seconds: float = Field(ge=0)
    bytes_per_second: PositiveFloat
    share: float = Field(1.0, gt=0, le=1)
    """Of the bytes a second what is assumed to be reached; 1 where they were measured."""

    @property
    def rate(self) -> float:
        """Bytes a second that are reached."""
        return self.bytes_per_second * self.share


class Link(Pace):
    """A way between ranks."""

    all_to_all_share: float = Field(1.0, gt=0, le=1)
    """Of the rate what is left when every rank sends to every other: links cross, switches are shared."""
    kinds: dict[CollectiveKind, Pace] = Field({})
    """Those of a kind of exchange, where it was measured by itself."""

    def of(self, kind: CollectiveKind) -> Pace:
        """What holds for a kind of exchange."""
        if kind in self.kinds:
            return self.kinds[kind]
        share = self.share * (self.all_to_all_share if kind == "all_to_all" else 1.0)
        return Pace(latency_seconds=self.latency_seconds, bytes_per_second=self.bytes_per_second, share=share)


class Cluster(Section):
    """`nodes` nodes of `per_node` accelerators; one rank for each. Ranks of a node are consecutive."""

    name: str
    nodes: PositiveInt = 1
    per_node: PositiveInt = 1
    accelerator: Accelerator
    node_link: Link
    """Between ranks of a node."""
    network: Link
    """Between nodes, for each rank, when all of a node send."""
    host_read_bytes_per_second: float = Field(0.0, ge=0)
    """From the memory of the node to a rank's device, when all of them copy; 0: the device is that memory."""
    host_write_bytes_per_second: float = Field(0.0, ge=0)
    host_memory_bytes: PositiveInt
    """Of a node."""
    host_reserve_share: float = Field(0.0, ge=0, lt=1)
    """Of it: what the system, the ranks' processes and the data loader take."""
    disk_bytes: int = Field(0, ge=0)
    """Of a node's own disks; 0: none."""
    disk_read_bytes_per_second: float = Field(0.0, ge=0)
    disk_write_bytes_per_second: float = Field(0.0, ge=0)
    crowding: dict[OperationKind, float] = Field({})
    """How many times as long work takes when all ranks of a node do it at once on memory that they share."""
    threads: int = Field(0, ge=0)
    """OpenMP threads of a rank for which it was measured; 0: it was not."""
    notes: list[str] = Field([])
    """What is assumed, and where figures are from: for people."""

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.nodes * self.per_node

    @property
    def watts(self) -> float:
        """Drawn by all under load."""
        return self.ranks * self.accelerator.watts

    def seconds(self, operation: Operation, dtype: Dtype) -> float:
        """What `operation` takes a rank, all its `count` times."""
        slower = self.crowding.get(operation.kind, 1.0) if self.per_node > 1 else 1.0
        return self.accelerator.seconds(operation, dtype) * slower

    def exchange_seconds(self, collective: Collective, degrees: Degrees) -> float:
        """What `collective` takes, all its `count` times."""
        return exchange.exchange_seconds(self, collective, degrees)

    def lane_of(self, collective: Collective, degrees: Degrees) -> exchange.Lane:
        """Which links it goes over."""
        return exchange.lane_of(self, collective.axis, degrees)

    def budgets(self, degrees: Degrees | None = None) -> Budgets:
        """Bytes that a rank may use of each tier, less what is reserved, when ranks of `degrees` share each node; None:
        as many as there are accelerators."""
        ranks, accelerator = self._sharing(degrees), self.accelerator
        device = int((accelerator.memory_bytes - accelerator.reserve_bytes) * (1 - accelerator.reserve_share))
        host = int(self.host_memory_bytes * (1 - self.host_reserve_share)) // ranks
        if accelerator.kind == "cpu":
            return Budgets(min(device, host), 0, self.disk_bytes // ranks)
        return Budgets(device, host, self.disk_bytes // ranks)

    def rates(self, degrees: Degrees | None = None) -> Rates:
        """Bytes a second that a rank moves to and from the tiers below its device, beside the others of its node."""
        ranks = self._sharing(degrees)
        read: dict[TierName, float] = {}
        write: dict[TierName, float] = {}
        if self.accelerator.kind != "cpu" and self.host_read_bytes_per_second:
            read["host"] = self.host_read_bytes_per_second
            write["host"] = self.host_write_bytes_per_second or self.host_read_bytes_per_second
        if self.disk_bytes:
            read["disk"] = self.disk_read_bytes_per_second / ranks
            write["disk"] = self.disk_write_bytes_per_second / ranks
        return Rates(read, write)

    def _sharing(self, degrees: Degrees | None) -> int:
        return self.per_node if degrees is None else min(self.per_node, degrees.ranks)

    def dump(self) -> str:
        """As TOML, which `load_cluster` reads."""
        return dump_toml(self)


def load_cluster(
    text: str, say: Callable[[str], None] = lambda _: None, shape: tuple[int, int] | None = None
) -> Cluster:
    """What `text` names: "64x8:v100-32gb" (nodes x accelerators: a preset), "8:h100", "2:cpu", "h100"; a file that
    `tenfold doctor --save` wrote, "here.toml" or "2x8:here.toml"; "here", this machine, which takes a minute to measure
    and of that `say` is told. Behind it changes, ",host_memory=512GiB". `shape`: nodes, and ranks on each, where `text`
    gives no numbers; unset: one, or as the file says.

    Raises TenfoldError for names, files and changes that there are not.
    """
    head, *changes = (part.strip() for part in text.split(","))
    match = re.fullmatch(r"(?:(\d+)\s*[x×]\s*)?(\d+)\s*:\s*(.+)", head)
    name = match[3] if match else head
    is_file = name.endswith(".toml") or "/" in name
    if name == "here":
        from tenfold.planning.here import measure_here  # which makes what is defined here

        raw = measure_here(Path("."), say).model_dump()
    else:
        raw = _read(Path(name)) if is_file else _preset(name, text)
    if match:
        shape = int(match[1] or 1), int(match[2])
    if shape:
        raw |= {"nodes": shape[0], "per_node": shape[1]}
    if (not is_file and name != "here") or match:
        raw["name"] = head
    _change(raw, changes, text)
    cluster = build(Cluster, raw, f'cluster "{text}"')
    if cluster.threads and cluster.accelerator.kind == "cpu" and torch.get_num_threads() != cluster.threads:
        note = (
            f"measured with {cluster.threads} OpenMP threads a rank, and here are {torch.get_num_threads()}: "
            f"set OMP_NUM_THREADS={cluster.threads}, or measure again"
        )
        cluster = cluster.model_copy(update={"notes": [*cluster.notes, note]})
    return cluster


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise TenfoldError(f"there is no cluster file {path}; tenfold doctor --save {path} measures this machine")
    raw = read_toml(path)
    if not _is_cluster(raw):
        raise TenfoldError(f"{path} is no cluster file: tenfold doctor --save writes one")
    return raw


def is_cluster_file(path: Path) -> bool:
    """Whether a file is one of a cluster, of this version or another."""
    try:
        return _is_cluster(read_toml(path))
    except TenfoldError:
        return False


def _is_cluster(raw: dict[str, Any]) -> bool:
    return isinstance(raw.get("accelerator"), dict) and "node_link" in raw


def _preset(name: str, text: str) -> dict[str, Any]:
    raw = PRESETS.get(name.lower())
    if raw is None:
        close = [each for each in PRESETS if each.startswith(name.lower())]
        close = close or difflib.get_close_matches(name.lower(), PRESETS, n=1, cutoff=0.4)
        meant = f" (did you mean {' or '.join(close)}?)" if close else ""
        raise TenfoldError(
            f'cluster "{text}": there are no accelerators named {name!r}{meant}. There are {", ".join(PRESETS)}, '
            "here, and files that tenfold doctor --save wrote; write for example "
            '"64x8:v100-32gb" (nodes x accelerators)'
        )
    return {**raw, "accelerator": {**raw["accelerator"]}}


def _positive(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise ValueError("it has to be a number of at least 0")
    return number


def _rate(text: str) -> float:
    return float(parse_bytes(text))


_CHANGES: dict[str, tuple[tuple[str, ...], Callable[[str], Any]]] = {
    "memory": (("accelerator", "memory_bytes"), parse_bytes),
    "host_memory": (("host_memory_bytes",), parse_bytes),
    "disk": (("disk_bytes",), parse_bytes),
    "disk_read": (("disk_read_bytes_per_second",), _rate),
    "disk_write": (("disk_write_bytes_per_second",), _rate),
    "host_read": (("host_read_bytes_per_second",), _rate),
    "host_write": (("host_write_bytes_per_second",), _rate),
    "node_rate": (("node_link", "bytes_per_second"), _rate),
    "network_rate": (("network", "bytes_per_second"), _rate),
    "watts": (("accelerator", "watts"), _positive),
    "price": (("accelerator", "price_per_hour"), _positive),
}
"""What may be changed behind a cluster's name: memory of an accelerator; memory and disks of a node; rates a second, of
a disk for a node and of links for a rank; watts under load and price per hour of an accelerator."""


def _change(raw: dict[str, Any], changes: list[str], text: str) -> None:
    found: dict[str, Any] = {}
    for change in changes:
        key, _, value = (part.strip() for part in change.partition("="))
        if key not in _CHANGES:
            close = difflib.get_close_matches(key, _CHANGES, n=1)
            meant = f" (did you mean {close[0]}?)" if close else ""
            raise TenfoldError(f'cluster "{text}": {key!r} cannot be changed{meant}. There are {", ".join(_CHANGES)}')
        try:
            found[key] = _CHANGES[key][1](value)
        except ValueError as error:
            raise TenfoldError(f'cluster "{text}": {key} = {value!r}: {error}') from None
    for key, value in found.items():
        *parents, leaf = _CHANGES[key][0]
        table = raw
        for parent in parents:
            table[parent] = {**table[parent]}
            table = table[parent]
        table[leaf] = value
    device = raw["accelerator"]
    if device.get("kind") == "cpu" and "memory" not in found and isinstance(raw.get("host_memory_bytes"), int):
        device["memory_bytes"] = raw["host_memory_bytes"] // raw.get("per_node", 1)  # ranks share it
