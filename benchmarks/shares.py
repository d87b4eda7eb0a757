"""Where the time of a dense training step goes: the share of each kind of work, and of the machine's matrix rate.

Trains one of the models of `benchmarks/throughput.py` on random tokens under PyTorch's profiler and sorts the time of
every operation by what it is part of. Products are those of linear layers and of the loss; what is left of the loss,
the norms, attention and the optimizer is told by name; the time in which no operation runs is Python's.

    python benchmarks/shares.py [--size 10M] [--shape 8x256] [--precision fp32] [--steps 3] [--threads 1 2]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from tenfold.config.model import ModelConfig
from tenfold.config.run import DataConfig, RunConfig, TrainingConfig
from tenfold.hardware.device import matrix_rate
from tenfold.hardware.memory import keep_freed_memory, peak_memory_bytes
from tenfold.nn.counting import count
from tenfold.nn.products import product_dtype
from tenfold.planning.stages import plan_stages
from tenfold.training.optimizers import build_optimizers
from tenfold.training.setup import DTYPES, build_model
from tenfold.training.step import train_step

sys.path.append(str(Path(__file__).parent / "peers"))
from shapes import SHAPES, VOCABULARY

# An operation counts as the first of these of which it, or what it is called by, bears the name.
KINDS: list[tuple[str, tuple[str, ...]]] = [
    ("attention, backward", ("flash_attention_for_cpu_backward",)),
    ("attention, forward", ("scaled_dot_product",)),
    ("optimizer", ("Optimizer.step",)),
    ("products of the loss", ("_ChunkedCrossEntropy/mm", "_ChunkedCrossEntropy/addmm")),
    ("loss without its products", ("_ChunkedCrossEntropy",)),
    ("products of linear layers", ("mm", "addmm", "bmm")),
    ("norms", ("_RMSNorm",)),
    ("casts and copies", ("aten::copy_",)),
    ("gradient norm and clipping", ("linalg_vector_norm", "foreach")),
]
OTHER, PYTHON = "rotary, SwiGLU, residuals, embedding", "Python, and time between operations"


def kind_of(event: Any) -> str:
    """What an event of the profiler is part of."""
    names, above = [event.name], event.cpu_parent
    while above is not None:
        names.append(above.name)
        above = above.cpu_parent
    plain = event.name.removeprefix("aten::").rstrip("_")
    within_loss = any(name.startswith("_ChunkedCrossEntropy") for name in names)
    for kind, wanted in KINDS:
        for part in wanted:
            if "/" in part:
                if within_loss and plain == part.partition("/")[2]:
                    return kind
            elif part in ("mm", "addmm", "bmm"):
                if plain == part:
                    return kind
            elif any(part in name for name in names):
                return kind
    return OTHER


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="10M", choices=list(SHAPES))
    parser.add_argument("--shape", default="8x256", help="sequences x tokens")
    parser.add_argument("--precision", default="fp32", choices=list(DTYPES))
    parser.add_argument("--steps", type=int, default=3, help="measured with the profiler, and as many without")
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[torch.get_num_threads()], help="measured with each number of them"
    )
    arguments = parser.parse_args()
    keep_freed_memory()  # as `tenfold train` does
    batch_size, length = map(int, arguments.shape.split("x"))
    config = RunConfig(
        model=ModelConfig(vocab_size=VOCABULARY, tie_embeddings=False, **SHAPES[arguments.size]),
        data=DataConfig(sequence_length=length),
        training=TrainingConfig(steps=100, batch_size=batch_size, precision=arguments.precision),
    )
    device = torch.device("cpu")
    model = build_model(config, plan_stages(config)[0].sharing, device)
    optimizers = build_optimizers(model, config.optim)
    shape = (batch_size, length + 1)
    batch = torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(0))

    def step(number: int) -> float:
        began = time.perf_counter()
        train_step(model, optimizers, batch, number, 1e-3, config)
        return time.perf_counter() - began

    step(1)
    shares: dict[int, dict[str, float]] = {}  # by number of threads: seconds of a step by kind
    plain: dict[int, float] = {}
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        step(2)
        plain[threads] = statistics.median(step(3 + number) for number in range(arguments.steps))
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            profiled = sum(step(100 + number) for number in range(arguments.steps))
        seconds: dict[str, float] = {}
        for event in profiler.events():
            kind = kind_of(event)
            seconds[kind] = seconds.get(kind, 0.0) + event.self_cpu_time_total / 1e6
        seconds[PYTHON] = max(0.0, profiled - sum(seconds.values()))
        shares[threads] = {kind: spent / arguments.steps for kind, spent in seconds.items()}
    first, last = shares[arguments.threads[0]], shares[arguments.threads[-1]]
    table = Table("part of the step", box=None)
    for threads in shares:
        table.add_column(f"ms, {threads} thread{'s' * (threads > 1)}", justify="right")
        table.add_column("share", justify="right")
    if len(shares) > 1:
        table.add_column("times faster", justify="right")
    for kind in sorted(last, key=lambda kind: -last[kind]):
        row = [kind]
        for spent in shares.values():
            row += [f"{spent.get(kind, 0.0) * 1e3:,.0f}", f"{spent.get(kind, 0.0) / sum(spent.values()):.1%}"]
        table.add_row(*row, *([f"{first.get(kind, 0.0) / last[kind]:.2f}"] if len(shares) > 1 and last[kind] else []))
    console = Console(width=110)
    console.print(table)
    multiplied = product_dtype(torch.empty(0, dtype=DTYPES[arguments.precision]))
    flops_per_step = count(model, length).flops_per_token * batch_size * length
    for threads, spent in plain.items():
        torch.set_num_threads(threads)
        rate = matrix_rate(device, multiplied, seconds=1.0)
        console.print(
            f"{batch_size * length / spent:,.0f} tokens/s without the profiler, {threads} threads; "
            f"{flops_per_step / spent / 1e9:,.0f} GFLOP/s, {flops_per_step / spent / rate:.0%} of the "
            f"{rate / 1e9:,.0f} that a square product reaches in {str(multiplied).removeprefix('torch.')}; "
            f"peak memory {peak_memory_bytes(device) / 1e6:,.0f} MB",
            soft_wrap=True,
            highlight=False,
        )


if __name__ == "__main__":
    main()
