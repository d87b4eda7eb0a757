"""Offload on one GPU, in under eight minutes: plain, granular at several budgets, all of it, and FSDP2's own policy.

    python benchmarks/gpu_offload.py                  # host memory below the device
    python benchmarks/gpu_offload.py --disk /fast/dir # and disk below that, where host memory does not do

Prints, for each way, the step's time, the share of it in which the device computes, the device's peak memory, and
whether losses are those of the plain way to the last bit. Says so and ends where there is no CUDA device.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from tenfold.config.load import build
from tenfold.config.offload import key_of
from tenfold.config.run import RunConfig
from tenfold.nn.decoder import Decoder
from tenfold.parallel.mesh import Degrees, Mesh
from tenfold.planning.stages import plan_stages
from tenfold.training.offloading import Tiers, begin_stage
from tenfold.training.setup import layout_of
from tenfold.training.step import train_step

MODEL: dict[str, Any] = {"vocab_size": 32768, "layers": 24, "hidden": 2048, "heads": 16, "ffn": 5632}
LENGTH = 2048
STEPS = 4


def config_of(options: argparse.Namespace, offload: dict[str, Any]) -> RunConfig:
    """The run of one way."""
    raw = {
        "model": MODEL,
        "data": {"sequence_length": LENGTH},
        "training": {
            "steps": 100,
            "batch_size": options.batch,
            "precision": "bf16",
            "recompute": "full",
            "device": "cuda",
        },
        "offload": offload,
        "stages": [{"sharing": "none"}],
    }
    return build(RunConfig, raw, "benchmark")


def batches(options: argparse.Namespace) -> list[torch.Tensor]:
    """The same for every way."""
    generator = torch.Generator().manual_seed(1)
    shape = (options.batch, LENGTH + 1)
    return [torch.randint(MODEL["vocab_size"], shape, generator=generator).cuda() for _ in range(STEPS + 1)]


def measure(step: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Steps of a way, the last of them watched by the profiler."""
    losses, seconds = [], []
    data = batches(options)
    torch.cuda.reset_peak_memory_stats()
    for number, batch in enumerate(data[:-1]):
        torch.cuda.synchronize()
        began = time.perf_counter()
        losses.append(step(number, batch))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as watched:
        began = time.perf_counter()
        step(len(data) - 1, data[-1])
        torch.cuda.synchronize()
        took = time.perf_counter() - began
    kernels = [event for event in watched.events() if "Memcpy" not in event.name and "Memset" not in event.name]
    busy = sum(event.device_time_total for event in kernels) / 1e6
    return {
        "losses": losses,
        "seconds": statistics.median(seconds[1:]),
        "busy": busy / took,
        "memory": torch.cuda.max_memory_allocated(),
    }


def ours(options: argparse.Namespace, offload: dict[str, Any]) -> dict[str, Any]:
    """With Tenfold's offload, or without any."""
    config, device = config_of(options, offload), torch.device("cuda")
    (stage,) = plan_stages(config)
    tiers = Tiers([config.offload], device, 0, 1, print)
    layout = layout_of(config, stage.sharing, Mesh(Degrees(), "cuda"), device)
    begun = begin_stage(config, stage, config.offload, key_of(0, None), layout, tiers)

    def step(number: int, batch: torch.Tensor) -> float:
        result = train_step(begun.model, begun.optimizers, batch, number + 1, 1e-4, config, 0, 1, layout, begun.offload)
        return result.loss

    try:
        return measure(step, options)
    finally:
        tiers.close()


def fsdp(options: argparse.Namespace) -> dict[str, Any]:
    """FSDP2 with `CPUOffloadPolicy` on every layer: all or nothing, fetched when it is needed."""
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555", "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("cpu:gloo,cuda:nccl")
    config = config_of(options, {})
    with torch.device("meta"):
        model = Decoder(config.model, LENGTH, torch.bfloat16)
    for layer in model.layers:
        fully_shard(layer, offload_policy=CPUOffloadPolicy())
    fully_shard(model, offload_policy=CPUOffloadPolicy())
    model.to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else nn.init.ones_(parameter)
        assert parameter.device.type == "cpu", name
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(_: int, batch: torch.Tensor) -> float:
        hidden, _statistics = model(batch[:, :-1])
        logits = model.logits(hidden)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    try:
        return measure(step, options)
    finally:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8, help=f"sequences of {LENGTH} tokens")
    parser.add_argument("--disk", help="a folder on a fast disk, for a tier below host memory")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/gpu_offload.py needs a CUDA device, and PyTorch finds none here: nothing was measured")
        return
    disk = {"disk": [options.disk]} if options.disk else {}
    everything = {"layers": "all", "weights": "host", "gradients": "host", "moments": "host"}
    plain = ours(options, {})
    ways: list[tuple[str, Any]] = [("plain", lambda: plain)]
    for share in (75, 50, 25):
        budget = math.floor(share / 100 * plain["memory"])
        ways.append((f"granular, {share}%", lambda budget=budget: ours(options, {"device_budget": budget, **disk})))
    ways.append(("all offloaded", lambda: ours(options, {"placement": [everything]})))
    ways.append(("FSDP2's CPUOffloadPolicy", lambda: fsdp(options)))
    table = Table("way", "s / step", "to plain", "device busy", "peak GiB", "losses equal")
    for name, way in ways:
        gc.collect()
        torch.cuda.empty_cache()
        try:
            found = way()
        except Exception as error:  # one way that fails leaves the others to be measured
            table.add_row(name, f"failed: {error}")
            continue
        table.add_row(
            name,
            f"{found['seconds']:.3f}",
            f"{found['seconds'] / plain['seconds']:.2f}",
            f"{found['busy']:.0%}",
            f"{found['memory'] / 2**30:.2f}",
            str(found["losses"] == plain["losses"]),
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
