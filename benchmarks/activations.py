"""What it costs to keep a model's activations in memory, to make them again, and to have them on disk.

The same training steps, each way in a process of its own, all ways in turn and as often as `--rounds` says: the peak of
resident memory over that before the first step, the least seconds of a step, and the processor seconds of that step.
Losses and the last gradients have to be equal to the last bit. Beside them what `saved_bytes` counts, and what the disk
did: bytes written and read, seconds that a step stood still for them, reads that were not asked for in time.

With `--heap returned` the C library gives every freed block above 1 MiB back to the system: what is resident is then
what is in use, and steps take longer for the page faults. With `--heap kept` memory is as in `tenfold train`.

    python benchmarks/activations.py [--folder build/offload] [--layers 12] [--hidden 256] [--sequences 4]
        [--length 1024] [--steps 3] [--rounds 2] [--precision fp32] [--threads 1] [--heap returned]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tenfold.config.model import ModelConfig
from tenfold.hardware.memory import keep_freed_memory, memory_used_bytes, peak_memory_bytes
from tenfold.nn.decoder import Decoder
from tenfold.nn.init import initialize
from tenfold.nn.objective import loss_sum, next_token_example
from tenfold.nn.recompute import Mode, Recompute
from tenfold.offload.activations import ActivationStore, working_bytes
from tenfold.offload.counted import saved_bytes
from tenfold.offload.disk import Disk
from tenfold.offload.slab import Slab

WAYS = ("keep", "selective", "full", "disk", "disk, a third")
VOCABULARY = 2048
CPU = torch.device("cpu")


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The steps, one way."""
    torch.set_num_threads(arguments.threads)
    if arguments.heap == "kept":
        keep_freed_memory()
    recompute: Mode = arguments.way if arguments.way in ("selective", "full") else "none"
    config = ModelConfig(
        layers=arguments.layers,
        hidden=arguments.hidden,
        heads=arguments.hidden // 64,
        ffn=4 * arguments.hidden,
        vocab_size=VOCABULARY,
    )
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[arguments.precision]
    model = Decoder(config, arguments.length, dtype, Recompute(recompute))
    initialize(model, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    generator = torch.Generator().manual_seed(1)
    shape = (arguments.sequences, arguments.length + 1)
    example = next_token_example(torch.randint(VOCABULARY, shape, generator=generator))
    saved = saved_bytes(model, arguments.sequences, arguments.length)
    store, finish = _offload(model, arguments, saved.layers)
    optimizer.zero_grad()
    for parameter in model.parameters():  # optimizer state exists from the first moment
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    _reset_peak()
    before, seconds, losses = memory_used_bytes(CPU), [], []
    for _ in range(arguments.steps):
        optimizer.zero_grad()
        begin, processor = time.perf_counter(), time.process_time()
        loss = loss_sum(model, model(example.inputs)[0], example, 512) / example.targets.numel()
        loss.backward()
        seconds.append((time.perf_counter() - begin, time.process_time() - processor))
        losses.append(loss.item())
        optimizer.step()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        assert parameter.grad is not None
        digest.update(parameter.grad.numpy().tobytes())
    found = {
        "peak": peak_memory_bytes(CPU) - before,
        "counted": sum(saved.layers) + saved.outside + saved.loss,
        "seconds": min(wall for wall, _ in seconds),
        "processor": min(processor for _, processor in seconds),
        "losses": losses,
        "gradients": digest.hexdigest(),
    }
    if store is not None:
        steps = arguments.steps
        found |= {
            "slab": store.slab.size,
            "written": store.tier.bytes_written / steps,
            "read": store.tier.bytes_read / steps,
            "waited": store.waited / steps,
            "late": store.late,
            "outside": store.outside,
        }
    finish()
    return found


def _offload(
    model: Decoder, arguments: argparse.Namespace, saved: list[int]
) -> tuple[ActivationStore | None, Callable[[], None]]:
    if not arguments.way.startswith("disk"):
        return None, lambda: None
    layers = range(0, len(model.layers), 3 if "third" in arguments.way else 1)
    tier = Disk([arguments.folder])
    store = ActivationStore(tier, Slab(working_bytes([saved[layer] for layer in layers]), CPU))
    for layer in layers:
        store.attach(model.layers[layer])

    def finish() -> None:
        store.finish()
        tier.close()

    return store, finish


def _reset_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        raise SystemExit(f"the peak of resident memory cannot be reset here: {error}") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/offload"), help="on the disk; made if missing")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--heap", choices=("returned", "kept"), default="returned")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        print(json.dumps(measure(arguments)))
        return
    arguments.folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(arguments.rounds):
        for way in WAYS:
            command = [sys.executable, *sys.argv, "--way", way]
            environment = {
                **os.environ,
                **({"MALLOC_MMAP_THRESHOLD_": str(2**20)} if arguments.heap == "returned" else {}),
            }
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            if done.returncode:
                raise SystemExit(f"{way}: {done.stderr}")
            found[way].append(json.loads(done.stdout))
    table = Table("way", "peak MB", "counted", "s a step", "cpu s", "slab MB", "written", "read", "waited s", "late")
    results = {(str(run["losses"]), run["gradients"]) for runs in found.values() for run in runs}
    for way, runs in found.items():
        row = [f"{max(run['peak'] for run in runs) / 1e6:.0f}", f"{runs[0]['counted'] / 1e6:.0f}"]
        row += [f"{min(run[key] for run in runs):.2f}" for key in ("seconds", "processor")]
        if "slab" in runs[0]:
            row += [f"{runs[0][key] / 1e6:.0f}" for key in ("slab", "written", "read")]
            row += [f"{min(run['waited'] for run in runs):.2f}", f"{max(run['late'] for run in runs)}"]
        table.add_row(way, *row)
    console = Console(width=120)
    console.print(table)
    console.print("losses and gradients are the same to the last bit" if len(results) == 1 else "RESULTS DIFFER")
    if len(results) != 1:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
