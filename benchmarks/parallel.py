"""What each layout costs: step time, bytes that a rank puts into collectives, and peak memory of a rank.

Every layout trains the same model on random tokens in processes of its own, joined by gloo on a CPU and by NCCL where
there are as many GPUs; in turn, `--rounds` times, of which the best counts. On a machine with fewer cores than ranks
the times tell what a layout costs in work and talk, not how it scales.

    python benchmarks/parallel.py [--model dense|mixture] [--sharing none|all] [--ranks 2 4] [--rounds 3]
                                  [--only "shard 2" "tensor 2"]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from rich.console import Console
from rich.table import Table

LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "shard 2": {"data_shard": 2},
    "shard 2, reshard step": {"data_shard": 2, "reshard": "step"},
    "replicate 2": {"data_replicate": 2},
    "tensor 2": {"tensor": 2},
    "context 2": {"context": 2},
    "pipeline 2": {"pipeline": 2},
    "shard 2, expert 2": {"data_shard": 2, "expert": 2},
    "replicate 2 x shard 2": {"data_replicate": 2, "data_shard": 2},
    "shard 2 x tensor 2": {"data_shard": 2, "tensor": 2},
    "shard 2 x context 2": {"data_shard": 2, "context": 2},
    "shard 2 x pipeline 2": {"data_shard": 2, "pipeline": 2},
    "tensor 2 x pipeline 2": {"tensor": 2, "pipeline": 2},
    "shard 4, expert 4": {"data_shard": 4, "expert": 4},
    "shard 2 x pipeline 2, expert 2": {"data_shard": 2, "pipeline": 2, "expert": 2},
    "pipeline 2 by tokens": {"pipeline": 2, "pipeline_schedule": "terapipe"},
    "replicate 2 x pipeline 2": {"data_replicate": 2, "pipeline": 2},
    "tensor 4": {"tensor": 4},
    "tensor 4, a grid": {"tensor": 4, "tensor_grid": True},
    "tensor 2 x context 2": {"tensor": 2, "context": 2},
    "context 2 x pipeline 2": {"context": 2, "pipeline": 2},
    "shard 2 x tensor 2, expert 2": {"data_shard": 2, "tensor": 2, "expert": 2},
    "shard 2 x context 2, expert 4": {"data_shard": 2, "context": 2, "expert": 4},
    "shard 2 x tensor 2 x pipeline 2": {"data_shard": 2, "tensor": 2, "pipeline": 2},
    "shard 2 x context 2 x tensor 2": {"data_shard": 2, "context": 2, "tensor": 2},
    "replicate 2 x shard 2 x tensor 2": {"data_replicate": 2, "data_shard": 2, "tensor": 2},
    "shard 2 x tensor 2 x pipeline 2, expert 2": {"data_shard": 2, "tensor": 2, "pipeline": 2, "expert": 2},
    "replicate 2 x shard 2 x context 2, expert 4": {"data_replicate": 2, "data_shard": 2, "context": 2, "expert": 4},
}
DEGREES = ("data_replicate", "data_shard", "tensor", "context", "pipeline")

MODEL: dict[str, Any] = {
    "vocab_size": 8192,
    "layers": 8,
    "hidden": 256,
    "heads": 8,
    "kv_heads": 4,
    "ffn": 1024,
    "init_std": 0.05,
}
MIXTURE: dict[str, Any] = {"experts": 16, "prototypes": 2, "ffn": 512, "balance_loss": 0.01}


def ranks_of(degrees: dict[str, Any]) -> int:
    """How many ranks a layout has."""
    return math.prod(degrees.get(axis, 1) for axis in DEGREES)


def run_file(name: str, model: str, sharing: str) -> dict[str, Any]:
    """The run file of a layout."""
    return {
        "model": {**MODEL, **({"moe": MIXTURE} if model == "mixture" else {})},
        "data": {"sequence_length": 256},
        "training": {"steps": 100, "batch_size": 8, "micro_batch_size": 2, "precision": "fp32"},
        "parallel": {"data_replicate": 1, "data_shard": 1, **LAYOUTS[name]},
        "stages": [{"sharing": sharing}],
    }


def worker(name: str, model: str, sharing: str, steps: int) -> None:
    """On each rank: train, and on rank 0 print what was measured, as JSON."""
    import torch
    import torch.distributed as dist

    from tenfold.config.load import build
    from tenfold.config.run import RunConfig
    from tenfold.hardware.memory import memory_used_bytes, peak_memory_bytes
    from tenfold.parallel.mesh import Mesh
    from tenfold.parallel.traffic import Collectives
    from tenfold.planning.stages import plan_stages
    from tenfold.training.optimizers import build_optimizers
    from tenfold.training.setup import degrees_of_stages, layout_of
    from tenfold.training.step import train_step

    kind = "cuda" if torch.cuda.device_count() >= ranks_of(LAYOUTS[name]) else "cpu"
    config, ranks = build(RunConfig, run_file(name, model, sharing), name), ranks_of(LAYOUTS[name])
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if ranks > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    device = torch.device(kind)
    (stage,) = stages = plan_stages(config)
    (degrees,) = degrees_of_stages(config, stages, ranks)
    before = memory_used_bytes(device)
    layout = layout_of(config, stage.sharing, Mesh(degrees, kind), device)
    decoder = layout.build(1)
    optimizers = build_optimizers(decoder, config.optim, layout)
    mine = stage.batch_size // layout.data
    generator = torch.Generator().manual_seed(layout.mesh.data_index)
    batch = torch.randint(0, MODEL["vocab_size"], (mine, 257), generator=generator).to(device)

    def step() -> float:
        began = time.perf_counter()
        train_step(decoder, optimizers, batch, 1, 1e-3, config, 0, 1, layout)
        return time.perf_counter() - began

    step()
    with Collectives() as seen:
        step()
    seconds = statistics.median(step() for _ in range(steps))
    told = layout.of_all((seen.bytes, len(seen.calls), peak_memory_bytes(device) - before))
    if layout.number == 0:
        most = [max(values) for values in zip(*told, strict=True)]
        print(json.dumps({"seconds": seconds, "bytes": most[0], "calls": most[1], "memory": most[2]}), flush=True)
    if ranks > 1:
        dist.destroy_process_group()


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """A layout in processes of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = ranks_of(LAYOUTS[name])
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    arguments = [__file__, "--worker", name, "--model", options.model, "--sharing", options.sharing]
    done = subprocess.run(
        [*start, *arguments, "--steps", str(options.steps)], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{name}:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("dense", "mixture"), default="dense")
    parser.add_argument("--sharing", default="none")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--only", nargs="+", default=list(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.model, options.sharing, options.steps)
        return
    names = [
        name
        for name in options.only
        if ranks_of(LAYOUTS[name]) in (1, *options.ranks)
        and ("expert" not in name or options.model == "mixture")
        and (("grid" not in name and "tokens" not in name) or options.model == "dense")
    ]
    names = ["one rank", *[name for name in names if name != "one rank"]]
    best: dict[str, dict[str, Any]] = {}
    for number in range(options.rounds):
        for name in names:
            found = measure(name, options)
            if name not in best or found["seconds"] < best[name]["seconds"]:
                best[name] = found
            print(f"round {number + 1}: {name}: {found['seconds']:.3f} s", file=sys.stderr)
    table = Table(title=f"{options.model}, sharing {options.sharing}: a step of 8 x 256 tokens")
    for column in ("layout", "ranks", "seconds", "x one rank", "MB sent by a rank", "calls", "peak memory of a rank"):
        table.add_column(column, justify="left" if column == "layout" else "right")
    for name in names:
        found = best[name]
        table.add_row(
            name,
            str(ranks_of(LAYOUTS[name])),
            f"{found['seconds']:.3f}",
            f"{found['seconds'] / best['one rank']['seconds']:.2f}",
            f"{found['bytes'] / 1e6:.1f}",
            str(found["calls"]),
            f"{found['memory']:,}",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
