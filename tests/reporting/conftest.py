"""A made-up run for tests: Pseudo then Real, a mixture of experts, a resume; smooth numbers plus fixed noise."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

MIB = 2**20
LAYERS, EXPERTS, TOKENS_A_STEP, WATTS = 6, 8, 16_384, 65.0
STAGES = [
    {
        "name": "pseudo",
        "sharing": "all",
        "stored_parameters": 4_390_144,
        "total_parameters": 15_204_608,
        "active_parameters": 7_340_032,
        "flops_per_token": 48_234_496,
        "steps": 240,
        "tokens": 240 * TOKENS_A_STEP,
    },
    {
        "name": "real",
        "sharing": "none",
        "stored_parameters": 15_204_608,
        "total_parameters": 15_204_608,
        "active_parameters": 7_340_032,
        "flops_per_token": 48_234_496,
        "steps": 360,
        "tokens": 360 * TOKENS_A_STEP,
    },
]
CONFIG = """[model]
preset = "moe-tiny"

[training]
steps = 600
batch_size = 16

[[stages]]
name = "pseudo"
sharing = "all"

[stages.until]
share = 0.4

[[stages]]
name = "real"
sharing = "none"
"""
START = {
    "event": "start",
    "run": "demo",
    "model": {"preset": "moe-tiny", "layers": LAYERS, "hidden": 256, "moe": {"experts": EXPERTS, "top_k": 1}},
    "stages": STAGES,
    "machine": {
        "device": "cpu",
        "processor": "Example Processor 9",
        "vector_features": "AVX2, AVX-512, AMX bf16",
        "cores": 2,
        "memory_limit_bytes": 8 * 2**30,
        "matrix_rate": 412e9,
        "torch": "2.13.0",
    },
}
DELINK = {
    "event": "delink",
    "step": 240,
    "stage_from": "pseudo",
    "stage_to": "real",
    "pattern_from": [0] * LAYERS,
    "pattern_to": list(range(LAYERS)),
    "moments": "rescale",
    "logits_equal": True,
    "max_difference": 0.0,
    "stored_before": 4_390_144,
    "stored_after": 15_204_608,
    "seconds": 0.31,
}


def example_events(log_every: int = 5) -> list[dict[str, Any]]:
    """All events of the run, `start` to `end`."""
    noise = random.Random(0)
    events: list[dict[str, Any]] = [START]
    seconds = 4.0
    for step in range(1, 601):
        pseudo = step <= 240
        rate = (9_400 if pseudo else 7_900) * (1 + 0.04 * noise.gauss(0, 1))
        seconds += TOKENS_A_STEP / rate
        loss = (
            2.55 + 6.4 * math.exp(-step / 38) + 1.5 * math.exp(-step / 190) - (0 if pseudo else 0.0006 * (step - 240))
        )
        where = {
            "step": step,
            "stage": "pseudo" if pseudo else "real",
            "tokens": step * TOKENS_A_STEP,
            "seconds": seconds,
            "joules": WATTS * seconds,
        }
        if step % log_every == 0 or step == 1:
            events.append({"event": "step", **where, **_measured(step, loss, rate, noise)})
        if step % 60 == 0:
            events.append(
                {"event": "validation", **where, "validation_loss": loss + 0.06, "bits_per_byte": (loss + 0.06) / 2.4}
            )
            events.append({"event": "sample", **where, "text": f"def step_{step}(self):\n    return '<{step}>'\n"})
            events.append({"event": "similarity", **where, **_similar(step)})
            for name, task, values in (
                ("held-out", "loss", {"perplexity": math.exp(loss), "bits_per_byte": loss / 2.4}),
                ("stories", "cloze", {"accuracy": step / 2000, "words": 120}),
            ):
                events.append({"event": "evaluation", **where, "name": name, "task": task, "values": values})
        if step == 240:
            events.append(DELINK)
            events.append({"event": "similarity", **where, "stage": "real", **_similar(step)})
        if step == 400:
            events.append({"event": "stop", "step": 400, "reason": "interrupted (Ctrl-C)"})
            events.append({"event": "note", "step": 395, "text": "step-00000400: weights.safetensors is damaged"})
            resume = {"event": "resume", "step": 395, "seconds": seconds, "reached": 400, "idle_seconds": 7200.0}
            events.append(resume)
    events.append(_end(seconds, events))
    return events


def placed(stage: str, step: int, below: bool) -> dict[str, Any]:
    """The `placement` event of a stage: moments on disk or not."""
    kinds: dict[str, int] = {"weights": 60 * MIB, "gradients": 60 * MIB, "moments": 120 * MIB}
    moved = {"bytes": 20 * MIB, "bytes_read": 20 * MIB, "bytes_written": 20 * MIB}
    cost = {"seconds_hidden": 0.2, "seconds_stalled": 0.05}
    rows = [{"part": f"layers.{at}", "kind": "moments", "tier": "disk", **moved, **cost} for at in range(LAYERS)]
    disk = {"moments": kinds.pop("moments")} if below else {}
    return {
        "event": "placement",
        "step": step,
        "stage": stage,
        "placement": {},
        "tier_bytes": {"device": sum(kinds.values()), "host": 0, "disk": sum(disk.values())},
        "kind_bytes": {"device": kinds, "host": {}, "disk": disk},
        "working_bytes": 12 * MIB if below else 0,
        "other_bytes": 100 * MIB,
        "forecast": {
            "seconds": 1.9,
            "compute_seconds": 1.6,
            "lane_seconds": {"disk read": 0.4} if below else {},
            "rows": rows if below else [],
        },
    }


def offloaded_events() -> list[dict[str, Any]]:
    """The events of the run, as if its Real stage had its moments on disk."""
    events: list[dict[str, Any]] = []
    for event in example_events():
        real = event.get("stage") == "real"
        if event["event"] == "step":
            told: dict[str, Any] = {"tier_bytes": {"disk": 120 * MIB * real}, "stalled": {}}
            told |= {key: {"disk": 120.0 * MIB * real} for key in ("bytes_read", "bytes_written")}
            if real:
                told["stalled"] = {"moments": 0.25, "gradients": 0.0}
            event["offload"] = told
        if event["event"] == "end":
            measured = {"steps": 359, "seconds": 2.0, "stalled_seconds": 0.25, "device_bytes": 400 * MIB, **told}
            foreseen = {"seconds": 1.9, "device_bytes": 232 * MIB, "by": "offload", "cluster": ""}
            held = {"foreseen": foreseen, "measured": measured}
            events.append({"event": "measured", "step": 600, "stage": "real", "last": True, **held})
        events.append(event)
        if event["event"] in ("start", "delink"):
            events.append(placed("real", 240, True) if event["event"] == "delink" else placed("pseudo", 0, False))
    return events


def _similar(step: int) -> dict[str, Any]:
    """Layers that share until step 240, and then drift apart, the further the further they are from each other."""
    moved = max(step - 240, 0) / 1800
    grid = [[round(1 - moved * abs(one - other), 4) for other in range(LAYERS)] for one in range(LAYERS)]
    return {"layers": list(range(LAYERS)), "attention": grid, "ffn": [[value**2 for value in row] for row in grid]}


def _measured(step: int, loss: float, rate: float, noise: random.Random) -> dict[str, Any]:
    skew = 1.6 * math.exp(-step / 120) + (0.5 * math.exp(-(step - 240) / 60) if step > 240 else 0) + 0.12
    loads = []
    for layer in range(LAYERS):
        weights = [
            math.exp(skew * math.sin(1.7 * expert + layer) + 0.05 * noise.gauss(0, 1)) for expert in range(EXPERTS)
        ]
        loads.append([weight / sum(weights) for weight in weights])
    return {
        "loss": loss + 0.05 * noise.gauss(0, 1),
        "lr": 3e-4 * min(step / 20, 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / 600))),
        "grad_norm": 0.6 + 3 * math.exp(-step / 25) + abs(0.15 * noise.gauss(0, 1)) + (1.2 if step == 245 else 0),
        "tokens_per_second": rate,
        "flops_share": rate * 48_234_496 / 412e9 / 2,
        "memory_bytes": int((1.05 if step <= 240 else 1.42) * 2**30 + 2**22 * noise.random()),
        "joules_per_token": WATTS / rate,
        "energy_source": "estimate",
        "co2_kg": step * 1e-5,
        "sequence_length": 512 if step <= 240 else 1024,
        "mixture": {"web": 0.7, "code": 0.3} if step <= 240 else {"web": 0.5, "code": 0.5},
        "balance_loss": 1 + 0.3 * skew,
        "z_loss": 0.2 + 0.4 * math.exp(-step / 90),
        "dropped_share": 0.02 * skew,
        "expert_load": loads,
    }


def _end(seconds: float, events: list[dict[str, Any]]) -> dict[str, Any]:
    validations = [event for event in events if event["event"] == "validation"]
    boundary = next(event["seconds"] for event in validations if event["step"] == 240)
    rows = []
    for stage, spent in zip(STAGES, (boundary, seconds - boundary), strict=True):
        last = [event for event in validations if event["stage"] == stage["name"]][-1]
        rows.append(
            {
                "name": stage["name"],
                "stored_parameters": stage["stored_parameters"],
                "tokens": stage["tokens"],
                "tokens_per_second": stage["tokens"] / spent,
                "validation_loss": last["validation_loss"],
                "seconds": spent,
                "joules": WATTS * spent,
                "joules_per_token": WATTS * spent / stage["tokens"],
            }
        )
    return {
        "event": "end",
        "step": 600,
        "tokens": 600 * TOKENS_A_STEP,
        "seconds": seconds,
        "joules": WATTS * seconds,
        "joules_per_token": WATTS * seconds / (600 * TOKENS_A_STEP),
        "energy_source": "estimate",
        "co2_kg": 600e-5,
        "carbon_intensity": 380.0,
        "pue": 1.2,
        "carbon_stated_by": "energy.carbon_intensity",
        "stages": rows,
        "unigram_loss": 6.412,
        "bigram_loss": 4.318,
        "sample": 'def read(self, size=-1):\n    """Read & return <size> bytes."""\n    return self.read(size)\n',
    }


def write_run(run: Path, events: list[dict[str, Any]] | None = None, config: str = CONFIG) -> Path:
    """A run directory with `events` (all of them by default) and `config`."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.toml").write_text(config, encoding="utf-8")
    lines = [json.dumps(event) + "\n" for event in (example_events() if events is None else events)]
    (run / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    return run


@pytest.fixture(scope="session")
def example() -> SimpleNamespace:
    """The made-up run: `events()` afresh, `offloaded()`, `write(run, events, config)`, its size and its parts."""
    return SimpleNamespace(
        events=example_events,
        offloaded=offloaded_events,
        write=write_run,
        stages=STAGES,
        delink=DELINK,
        total_tokens=600 * TOKENS_A_STEP,
    )


@pytest.fixture(autouse=True)
def _without_plots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots take seconds; tests of what the page says besides do without, unless they are marked `report`."""
    if request.node.get_closest_marker("report") is None:
        monkeypatch.setattr("tenfold.reporting.plots.all_plots", lambda history: [])
        monkeypatch.setattr("tenfold.reporting.overlays.comparison_plots", lambda runs: [])
