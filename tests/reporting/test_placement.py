"""Tables of placements: rows that are alike are one, and what was measured is beside what was foreseen."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from tenfold.offload.budget import Budgets, choose
from tenfold.offload.forecast import Compute, Rates, describe, forecast
from tenfold.offload.placement import Part
from tenfold.reporting.foreseen import outcome_table
from tenfold.reporting.placement import placement_table

MIB = 2**20


def shown(table: Any, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


def row(part: str, kind: str, tier: str, size: int, hidden: float, stalled: float) -> dict[str, Any]:
    moved = {"bytes_read": size, "bytes_written": size}
    return {"part": part, "kind": kind, "tier": tier, "bytes": size, **moved, "seconds_hidden": hidden,
            "seconds_stalled": stalled}  # fmt: skip


@pytest.fixture
def event() -> dict[str, Any]:
    rows = [row(f"layers.{layer}", "moments", "disk", 100 * MIB, 0.4, 0.1) for layer in range(12)]
    rows += [
        row("embedding", "moments", "disk", 50 * MIB, 0.25, 0.0),
        row("layers.0-11", "weights", "host", MIB, 0.0, 0.5),
    ]
    return {
        "event": "placement",
        "placement": {},
        "tier_bytes": {"device": 1024 * MIB, "host": MIB, "disk": 1250 * MIB},
        "working_bytes": 64 * MIB,
        "other_bytes": 448 * MIB,
        "forecast": {
            "seconds": 11.7,
            "compute_seconds": 10.0,
            "lane_seconds": {"disk read": 3.0, "disk write": 4.0},
            "rows": rows,
        },
    }


def test_rows_that_are_alike_are_one(event: dict[str, Any]) -> None:
    lines = [" ".join(line.split()) for line in shown(placement_table(event)).splitlines()]
    assert lines == [
        "state of kind tier bytes moved a step hidden not hidden",
        "layers 0-11 moments disk 1.17 GiB 2.34 GiB 4.8 s 1.2 s",
        "embedding moments disk 50 MiB 100 MiB 0.25 s 0 s",
        "layers 0-11 (shared) weights host 1 MiB 2 MiB 0 s 0.5 s",
        "device: 1.5 GiB, of which state 1 GiB, working memory 64 MiB, activations and temporaries 448 MiB;",
        "host: 1 MiB; disk: 1.22 GiB",
        "a step: 12 s, of which compute 10 s and waiting for transfers 1.7 s; with perfect overlap 10 s",
    ]


def test_nothing_below_is_said_in_words(event: dict[str, Any]) -> None:
    event["forecast"]["rows"], event["tier_bytes"] = [], {"device": MIB, "host": 0, "disk": 0}
    text = shown(placement_table(event))
    assert text.startswith("all state stays on the device")
    assert "disk:" not in text


def test_what_was_measured_is_beside_what_was_foreseen(event: dict[str, Any]) -> None:
    measured = {
        "seconds": 13.0,
        "stalled_seconds": 3.4,
        "device_bytes": 1536 * MIB,
        "tier_bytes": {"disk": 1250 * MIB},
        "bytes_read": {"disk": 1875 * MIB, "host": MIB},
    }
    told = {"foreseen": {"seconds": 11.7, "device_bytes": 1536 * MIB}, "measured": measured}
    lines = [" ".join(line.split()) for line in shown(outcome_table(told, event)).splitlines()]
    assert lines == [
        "of a step foreseen measured difference",
        "time 12 s 13 s +11.1%",
        "memory of a rank, at most 1.5 GiB 1.5 GiB +0.0%",
        "waiting for transfers 1.7 s 3.4 s +100.0%",
        "kept on disk 1.22 GiB 1.22 GiB +0.0%",
        "read from disk 1.22 GiB 1.83 GiB +50.0%",
        "written to disk 1.22 GiB – –",
        "kept on host 1 MiB – –",
        "read from host 1 MiB 1 MiB +0.0%",
        "written to host 1 MiB – –",
    ]


@pytest.mark.parametrize(("layers", "experts"), [(4, 0), (126, 0), (5, 8), (24, 8)])
def test_tables_of_real_placements_fit_a_hundred_columns(layers: int, experts: int) -> None:
    each = {"weights": 4, "gradients": 4, "moments": 8}
    whole, piece = ({kind: size * count for kind, size in each.items()} for count in (10**9, 2**22))
    state = {kind: size // (1 + experts) for kind, size in whole.items()}
    parts = [
        Part(name, (number,), state, piece, (), some, f"layers.{number}")
        for number in range(layers)
        for name, some in [(f"layers.{number}", ()), *((f"layers.{number}.experts.{n}", (n,)) for n in range(experts))]
    ]
    for share in (10, 50, 80):
        budget = Budgets(layers * 16 * 10**9 * share // 100 + 4 * 10**9, host=layers * 10**9, disk=10**15)
        placement = choose(parts, budget)
        rates = Rates({"host": 5e10, "disk": 1e10}, {"host": 5e10, "disk": 5e9})
        cost = forecast(parts, placement, rates, Compute((0.1,) * layers, (0.2,) * layers, 1.0))
        event = json.loads(json.dumps(describe(parts, placement, cost)))
        text = shown(placement_table(event))
        assert max(map(len, text.splitlines())) <= 100
        assert len(text.splitlines()) <= (16 if experts else 12)
        assert "…" not in text
