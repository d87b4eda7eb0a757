"""Offload to disk on this machine: memory against the budget, time against the floor, granular against all or nothing.

    python benchmarks/offload.py                                       # all three, in build/
    python benchmarks/offload.py memory  --folder /fast/dir            # peak memory at budgets, and under a hard limit
    python benchmarks/offload.py speed   --folder /fast/dir            # step times at 25, 50 and 75% of all
    python benchmarks/offload.py largest --folder /fast/dir --steps 2  # a mixture that does not fit by far

`largest` has 4.3 billion parameters: it wants 20 GiB of memory and 5 GB of the disk. Each figure is of a process of its
own. Memory is the resident set's peak while training less what it was before the model was made, which is told too. The
disk is read and written past the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

DENSE: dict[str, Any] = {"vocab_size": 8192, "layers": 12, "hidden": 768, "heads": 12, "ffn": 2048}
LARGEST: dict[str, Any] = {
    "vocab_size": 8192,
    "layers": 24,
    "hidden": 1024,
    "heads": 16,
    "ffn": 4096,
    "moe": {"experts": 56, "ffn": 1024, "top_k": 1, "prototypes": 1},
}
GIB = 2**30


def run_file(options: dict[str, Any]) -> dict[str, Any]:
    """The run file of a case."""
    return {
        "model": options["model"],
        "data": {"sequence_length": options["length"]},
        "training": {
            "steps": 100,
            "batch_size": options["batch"],
            "micro_batch_size": options.get("micro", 0),
            "precision": "fp32",
            "recompute": options.get("recompute", "full"),
        },
        "optim": {"name": options.get("optimizer", "adamw"), **options.get("optim", {})},
        "offload": options.get("offload", {}),
        "stages": [{"sharing": "none"}],
    }


def worker(options: dict[str, Any]) -> None:
    """Train, and print what was measured, as JSON."""
    import torch

    from tenfold.config.load import build
    from tenfold.config.offload import key_of
    from tenfold.config.run import RunConfig
    from tenfold.hardware.memory import keep_freed_memory, memory_used_bytes, peak_memory_bytes, return_freed_memory
    from tenfold.offload import stepping, weights
    from tenfold.parallel.mesh import Degrees, Mesh
    from tenfold.planning.stages import plan_stages
    from tenfold.training.offloading import Meter, Tiers, begin_stage
    from tenfold.training.setup import layout_of
    from tenfold.training.step import train_step

    return_freed_memory() if options.get("limit") else keep_freed_memory()  # as `tenfold train`
    device = torch.device("cpu")
    torch.set_num_threads(options["threads"])
    config = build(RunConfig, run_file(options), "benchmark")
    (stage,) = plan_stages(config)
    if not options.get("ahead", True):  # fetched when it is needed, and written before anything else is
        weights.WorkingCopies._fetch_ahead = lambda self: None  # type: ignore[method-assign]
        stepping.StreamedStep.run = _one_by_one  # type: ignore[method-assign]
        stepping.StreamedStep.later = _one_by_one  # type: ignore[method-assign]
    torch.ones(512, 512) @ torch.ones(512, 512)  # libraries have their memory before it is looked at
    if limit := options.get("limit"):
        data = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (data + limit, data + limit))
    before = memory_used_bytes(device)
    Path("/proc/self/clear_refs").write_text("5")
    tiers = Tiers([config.offload], device, 0, 1, lambda text: print(text, file=sys.stderr))
    layout = layout_of(config, stage.sharing, Mesh(Degrees(), "cpu"), device)
    began = time.perf_counter()
    begun = begin_stage(config, stage, config.offload, key_of(0, None), layout, tiers)
    made = time.perf_counter() - began
    meter = None if begun.offload is None else Meter(begun.offload, tiers)
    generator = torch.Generator().manual_seed(1)
    vocabulary, shape = config.model.vocab_size or 0, (options["batch"], options["length"] + 1)
    seconds, losses = [], []
    for number in range(1 + options["steps"]):
        batch = torch.randint(vocabulary, shape, generator=generator)
        if meter is not None:
            meter.begin_step()
        began = time.perf_counter()
        result = train_step(begun.model, begun.optimizers, batch, number + 1, 1e-3, config, 0, 1, layout, begun.offload)
        took = time.perf_counter() - began
        if meter is not None:
            meter.end_step(took)
        print(f"step {number}: loss {result.loss:.4f}, {took:.1f} s", file=sys.stderr, flush=True)
        if number:
            seconds.append(took)
        losses.append(result.loss)
    found: dict[str, Any] = {
        "seconds": statistics.median(seconds),
        "made": made,
        "losses": losses,
        "before": before,
        "memory": peak_memory_bytes(device) - before,
        "parameters": sum(parameter.numel() for parameter in begun.model.parameters()),
    }
    if meter is not None:
        found |= meter.outcome() or {}
        found["seconds"] = statistics.median(seconds)
        found["placed"] = begun.placed
    tiers.close()
    print(json.dumps(found), flush=True)


def _one_by_one(self: Any, jobs: Any) -> None:
    """`StreamedStep.run`, and `later`, without anything on its way meanwhile."""
    import torch

    with torch.no_grad():
        for job in jobs:
            self._finish(self._load(job))
            self._space.drain()


def measure(options: dict[str, Any]) -> dict[str, Any] | str:
    """A case in a process of its own; what went wrong, if it failed."""
    command = [sys.executable, __file__, "worker", json.dumps(options)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return f"failed with {done.returncode}"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def state_of(model: dict[str, Any]) -> int:
    """Bytes of weights, gradients and AdamW's moments."""
    import torch

    from tenfold.config.model import ModelConfig
    from tenfold.nn.counting import count
    from tenfold.nn.decoder import Decoder

    with torch.device("meta"):
        return 16 * count(Decoder(ModelConfig(**model), 256), 256).total


def memory(console: Console, base: dict[str, Any], folder: str) -> None:
    """Peaks at eleven budgets, and one run whose heap is limited to one of them."""
    whole = measure({**base, "offload": {}})
    assert not isinstance(whole, str), whole
    state = state_of(base["model"])
    console.print(f"state {state / GIB:.2f} GiB; all on the device: peak {whole['memory'] / GIB:.2f} GiB")
    table = Table("budget", "foreseen", "peak", "peak / budget", "on disk", "s / step", "loss equal")
    for share in (0.22, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2):
        budget = int(share * whole["memory"])
        found = measure({**base, "offload": {"device_budget": budget, "disk": [folder]}})
        if isinstance(found, str):
            table.add_row(f"{budget / GIB:.3f} GiB", found)
            continue
        placed = found["placed"]
        foreseen = placed["tier_bytes"]["device"] + placed["working_bytes"] + placed["other_bytes"]
        table.add_row(
            f"{budget / GIB:.3f} GiB",
            f"{foreseen / GIB:.3f} GiB",
            f"{found['memory'] / GIB:.3f} GiB",
            f"{found['memory'] / budget:.3f}",
            f"{placed['tier_bytes']['disk'] / GIB:.3f} GiB",
            f"{found['seconds']:.2f}",
            str(found["losses"] == whole["losses"]),
        )
    console.print(table)
    deep = {**base["model"], "layers": 16}
    budget = state_of(deep) // 4
    placed = {"device_budget": budget, "disk": [folder]}
    found = measure({**base, "model": deep, "offload": placed, "limit": int(budget * 1.05)})
    told = found if isinstance(found, str) else f"peak {found['memory'] / budget:.3f} of it"
    console.print(f"16 layers, a quarter of the state, {budget / GIB:.3f} GiB, as a hard limit (RLIMIT_DATA): {told}")


def speed(console: Console, base: dict[str, Any], folder: str) -> None:
    """Granular against all or nothing and against no prefetch, beside the floor."""
    from tenfold.hardware.disk import measure_disk

    rates = measure_disk(Path(folder), GIB)
    read, write = rates["read_bytes_per_second"], rates["write_bytes_per_second"]
    console.print(f"disk: read {read / 1e9:.2f} GB/s, written {write / 1e9:.2f} GB/s")
    plain = measure({**base, "offload": {}})
    assert not isinstance(plain, str), plain
    table = Table("what", "s / step", "over the floor", "read GB", "written GB", "waited s", "peak GiB", "equal")
    table.add_row("all on the device", f"{plain['seconds']:.2f}", "", "", "", "", f"{plain['memory'] / GIB:.2f}", "")
    everything = {"layers": "all", "weights": "disk", "gradients": "disk", "moments": "disk"}
    cases: list[tuple[str, dict[str, Any]]] = [
        ("all or nothing: all", {"offload": {"placement": [everything], "disk": [folder]}}),
        ("all, without prefetch", {"offload": {"placement": [everything], "disk": [folder]}, "ahead": False}),
    ]
    for share in (25, 50, 75):
        budget = {"device_budget": int(share / 100 * plain["memory"]), "disk": [folder]}
        cases.append((f"granular, {share}%", {"offload": budget}))
        cases.append((f"granular, {share}%, without prefetch", {"offload": budget, "ahead": False}))
    budget = {"device_budget": plain["memory"] // 2, "disk": [folder], "step_in_backward": True}
    name = "granular, 50%, step in backward, no clipping, one pass"
    cases.append((name, {"offload": budget, "optim": {"clip": 0}, "micro": 0}))
    for name, case in cases:
        found = measure({**base, **case})
        if isinstance(found, str):
            table.add_row(name, found)
            continue
        moved = (found["bytes_read"]["disk"], found["bytes_written"]["disk"])
        floor = max(plain["seconds"], moved[0] / read, moved[1] / write)
        table.add_row(
            name,
            f"{found['seconds']:.2f}",
            f"{found['seconds'] / floor:.2f}",
            f"{moved[0] / 1e9:.2f}",
            f"{moved[1] / 1e9:.2f}",
            f"{found['stalled_seconds']:.2f}",
            f"{found['memory'] / GIB:.2f}",
            str(found["losses"] == plain["losses"]),
        )
    console.print(table)


def largest(console: Console, base: dict[str, Any], folder: str, budget: str, optimizer: str) -> None:
    """A mixture of experts whose state does not fit by far."""
    found = measure(
        {
            **base,
            "model": LARGEST,
            "micro": 0,
            "optimizer": optimizer,
            "offload": {"device_budget": budget, "disk": [folder], "step_in_backward": True},
            "optim": {"clip": 0},
        }
    )
    console.print(found if isinstance(found, str) else json.dumps({**found, "placed": None}, indent=1))


def main() -> None:
    if sys.argv[1:2] == ["worker"]:
        worker(json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["all", "memory", "speed", "largest"], default="all")
    parser.add_argument("--folder", type=Path, default=Path("build/offload"), help="on a fast disk; made if missing")
    parser.add_argument("--steps", type=int, default=3, help="measured, after one that is not")
    parser.add_argument("--batch", type=int, default=4, help="sequences of --length tokens in a step")
    parser.add_argument("--micro", type=int, default=1, help="sequences in a pass")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--budget", default="16GiB", help="of `largest`")
    parser.add_argument("--optimizer", default="adafactor", help="of `largest`")
    options = parser.parse_args()
    given = ("steps", "batch", "micro", "length", "threads")
    base = {"model": DENSE} | {name: getattr(options, name) for name in given}
    console = Console(width=120)
    options.folder.mkdir(parents=True, exist_ok=True)
    folder = str(options.folder)
    if options.what in ("all", "memory"):
        memory(console, base, folder)
    if options.what in ("all", "speed"):
        speed(console, base, folder)
    if options.what in ("all", "largest"):
        largest(console, base, folder, options.budget, options.optimizer)


if __name__ == "__main__":
    main()
