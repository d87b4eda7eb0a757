"""A mixture of which many experts see few tokens, within budgets: lots of experts by their load against lots by number.

    python benchmarks/offload_experts.py [--folder /fast/dir]

Each figure is of a process of its own, in which the same steps are done first without offload: of these the loads are.
Routing is made uneven by balancing biases that stay as they are: of each layer a sixth of the experts, scattered, is
chosen freely, a third ever less, and half never. The disk is read and written past the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

MODEL: dict[str, Any] = {
    "vocab_size": 8192,
    "layers": 4,
    "hidden": 512,
    "heads": 8,
    "ffn": 512,
    "activation": "gelu",
    "moe": {"experts": 64, "ffn": 512, "top_k": 1, "prototypes": 1, "bias_rate": 1e-9},
}
WARM = 4
"""Steps without offload before, of which loads are known."""
GIB = 2**30


def run_file(options: dict[str, Any]) -> dict[str, Any]:
    """The run file of a case."""
    return {
        "model": MODEL,
        "data": {"sequence_length": options["length"]},
        "training": {
            "steps": 100,
            "batch_size": options["batch"],
            "micro_batch_size": options["micro"],
            "precision": "fp32",
            "recompute": "full",
        },
        "offload": options["offload"],
        "stages": [{"sharing": "none"}],
    }


def skew(model: Any) -> None:
    """Make routing uneven."""
    import torch

    from tenfold.nn.moe import MixtureOfExperts

    generator = torch.Generator().manual_seed(3)
    for module in model.modules():
        if isinstance(module, MixtureOfExperts) and module.balance_bias is not None:
            experts = len(module.balance_bias)
            order = torch.randperm(experts, generator=generator)
            with torch.no_grad():
                for place, expert in enumerate(order.tolist()):
                    some = -0.002 * max(0, place - experts // 6)
                    module.balance_bias[expert] = some if place < experts // 2 else -1.0


def worker(options: dict[str, Any]) -> None:
    """Train, and print what was measured, as JSON."""
    import torch

    from tenfold.config.load import build
    from tenfold.config.offload import OffloadConfig, key_of
    from tenfold.config.run import RunConfig
    from tenfold.hardware.memory import keep_freed_memory
    from tenfold.nn.moe import LOADS
    from tenfold.offload.loads import Loads
    from tenfold.parallel.mesh import Degrees, Mesh
    from tenfold.planning.stages import plan_stages
    from tenfold.training.offloading import Meter, Tiers, begin_stage
    from tenfold.training.setup import layout_of
    from tenfold.training.step import train_step

    keep_freed_memory()
    device = torch.device("cpu")
    torch.set_num_threads(options["threads"])
    config = build(RunConfig, run_file(options), "benchmark")
    (stage,) = plan_stages(config)
    tiers = Tiers([config.offload], device, 0, 1, lambda text: print(text, file=sys.stderr))
    shape = (options["batch"], options["length"] + 1)

    def train(offloaded: OffloadConfig, steps: int, loads: Loads | None, saw: Loads | None) -> dict[str, Any]:
        layout = layout_of(config, stage.sharing, Mesh(Degrees(), "cpu"), device)
        begun = begin_stage(config, stage, offloaded, key_of(0, None), layout, tiers, loads=loads)
        skew(begun.model)
        meter = Meter(begun.offload, tiers) if begun.offload is not None else None
        generator = torch.Generator().manual_seed(1)
        seconds, losses = [], []
        for number in range(steps):
            batch = torch.randint(config.model.vocab_size or 0, shape, generator=generator)
            if meter is not None:
                meter.begin_step()
            began = time.perf_counter()
            result = train_step(
                begun.model, begun.optimizers, batch, number + 1, 1e-3, config, 0, 1, layout, begun.offload
            )
            took = time.perf_counter() - began
            if meter is not None:
                meter.end_step(took)
            if saw is not None:
                saw.saw(result.statistics[:, LOADS:])
            seconds.append(took)
            losses.append(result.loss)
        found: dict[str, Any] = {"losses": losses, "seconds": statistics.median(seconds[1:])}
        if meter is not None:
            found |= meter.outcome() or {}
            found |= {"seconds": statistics.median(seconds[1:]), "placed": begun.placed}
        if begun.offload is not None:
            begun.offload.close()
        return found

    loads = Loads(config.model.layers, config.model.moe.experts)
    plain = train(OffloadConfig(), WARM, None, loads)
    micro_batches = options["batch"] // options["micro"]
    seen = loads.seen(micro_batches)
    found = {"seen": seen, **plain}
    if config.offload.on:
        found |= train(config.offload, 1 + options["steps"], loads if options["by_load"] else None, None)
    tiers.close()
    print(json.dumps(found), flush=True)


def measure(options: dict[str, Any]) -> dict[str, Any]:
    """A case in a process of its own."""
    command = [sys.executable, __file__, "worker", json.dumps(options)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    if sys.argv[1:2] == ["worker"]:
        worker(json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/offload"), help="on a fast disk; made if missing")
    parser.add_argument("--steps", type=int, default=4, help="measured, after one that is not")
    parser.add_argument("--batch", type=int, default=4, help="sequences of --length tokens in a step")
    parser.add_argument("--micro", type=int, default=2, help="sequences in a pass")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--budgets", default="85,70,55,40", help="in per cent of the state")
    options = parser.parse_args()
    base = {name: getattr(options, name) for name in ("steps", "batch", "micro", "length", "threads")}
    console = Console(width=120)
    options.folder.mkdir(parents=True, exist_ok=True)
    plain = measure({**base, "offload": {}, "by_load": False})
    state = state_bytes()
    console.print(
        f"{state / 16 / 1e6:.0f}M parameters, state {state / GIB:.2f} GiB; all on the device: {plain['seconds']:.2f} s "
        f"a step; gradients of an expert are seen behind {plain['seen']:.0%} of passes"
    )
    table = Table("budget", "lots", "s / step", "waited s", "read GB", "written GB", "foreseen GB", "equal")
    for share in map(int, options.budgets.split(",")):
        budget = {"device_budget": state * share // 100 + OTHER, "disk": [str(options.folder)]}
        for by_load in (False, True):
            found = measure({**base, "offload": budget, "by_load": by_load})
            rows = found["placed"]["forecast"]["rows"]
            foreseen = sum(row["bytes_read"] + row["bytes_written"] for row in rows)
            table.add_row(
                f"{share}%",
                "by load" if by_load else "by number",
                f"{found['seconds']:.2f}",
                f"{found['stalled_seconds']:.2f}",
                f"{found['bytes_read']['disk'] / 1e9:.2f}",
                f"{found['bytes_written']['disk'] / 1e9:.2f}",
                f"{foreseen / 1e9:.2f}",
                str(found["losses"][:WARM] == plain["losses"]),
            )
    console.print(table)


OTHER = 256 * 2**20
"""Bytes of a budget for all but state."""


def state_bytes() -> int:
    """Of weights, gradients and AdamW's moments."""
    import torch

    from tenfold.config.model import ModelConfig
    from tenfold.nn.counting import count
    from tenfold.nn.decoder import Decoder

    with torch.device("meta"):
        return 16 * count(Decoder(ModelConfig(**MODEL), 256), 256).total


if __name__ == "__main__":
    main()
