"""Speed of the training step: threads, compilation, recomputation, dense against mixture of experts.

Each case trains the demo's model (random tokens) in a process of its own, in turn, `--rounds` times; the best round
counts. Prints tokens a second, the ratio to the first case, seconds of the first step, and peak memory in bytes.

    python benchmarks/step.py [--rounds 3] [--steps 20]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

DEMO = Path(__file__).parents[1] / "examples" / "demo.toml"

CASES: dict[str, dict[str, Any]] = {
    "two threads": {"threads": 2},
    "one thread": {"threads": 1},
    "two threads, compiled": {"threads": 2, "flags": ["--training.compile"]},
    "two threads, recompute": {"threads": 2, "flags": ["--training.recompute", "full"]},
    "two threads, dense of the same shape": {"threads": 2, "flags": ["--model.moe.experts", "0"]},
}


def worker(steps: int, flags: list[str]) -> None:
    """Train and print what was measured, as JSON."""
    import torch

    from tenfold.config.load import load_run
    from tenfold.hardware.memory import peak_memory_bytes
    from tenfold.planning.stages import plan_stages
    from tenfold.training.optimizers import build_optimizers
    from tenfold.training.setup import build_model, compile_layers, resolve
    from tenfold.training.step import train_step

    device = torch.device("cpu")
    config = resolve(load_run(DEMO, ["--training.precision", "fp32", *flags]), 1024, device)
    stage = plan_stages(config)[-1]
    model = build_model(config, stage.sharing, device)
    optimizers = build_optimizers(model, config.optim)
    if config.training.compile:
        compile_layers(model.layers)
    shape = (stage.batch_size, stage.sequence_length + 1)
    batch = torch.randint(0, 1024, shape, generator=torch.Generator().manual_seed(0))
    began = time.monotonic()
    train_step(model, optimizers, batch, 1, 1e-3, config)
    first = time.monotonic() - began
    for step in range(3):
        train_step(model, optimizers, batch, step, 1e-3, config)
    began = time.monotonic()
    for step in range(steps):
        train_step(model, optimizers, batch, step, 1e-3, config)
    rate = steps * stage.tokens_per_step / (time.monotonic() - began)
    print(json.dumps({"rate": rate, "first": first, "memory": peak_memory_bytes(device)}))


def measure(case: dict[str, Any], steps: int) -> dict[str, float]:
    """One case in a process of its own."""
    command = [sys.executable, __file__, "--worker", json.dumps(case.get("flags", [])), "--steps", str(steps)]
    with tempfile.TemporaryDirectory() as cache:  # what is compiled is compiled anew
        environment = {**os.environ, "OMP_NUM_THREADS": str(case["threads"]), "TORCHINDUCTOR_CACHE_DIR": cache}
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Run every case in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        worker(arguments.steps, json.loads(arguments.worker))
        return
    best: dict[str, dict[str, float]] = {}
    for _ in range(arguments.rounds):
        for name, case in CASES.items():
            found = measure(case, arguments.steps)
            best[name] = max(best.get(name, found), found, key=lambda each: each["rate"])
    table = Table("case", "tokens/s", "ratio", "first step, s", "peak memory, bytes", box=None)
    base = next(iter(best.values()))["rate"]
    for name, found in best.items():
        ratio, memory = f"{found['rate'] / base:.2f}", f"{found['memory']:,.0f}"
        table.add_row(name, f"{found['rate']:,.0f}", ratio, f"{found['first']:.1f}", memory)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
