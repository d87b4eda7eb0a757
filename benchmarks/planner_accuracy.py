"""What the planner predicts of small runs beside what they take: peak memory of a rank, and seconds of a step.

    python benchmarks/planner_accuracy.py [--folder build/offload] [--only offload]

measures the machine first, with the threads that ranks get here, one; or, to measure it once for many tables:

    OMP_NUM_THREADS=1 tenfold doctor --save here.toml
    python benchmarks/planner_accuracy.py --cluster here.toml

Every configuration is run twice, in processes of its own: for its time, as `tenfold train` runs it, and for its memory,
with what is freed given back at once, since what the C library keeps for later is not what a run needs. Memory is the
peak of the resident set less what it was before there was a model.

A virtual machine is not always as fast. So a product is timed right before and right after each run, and "pace" is how
fast it was, of the rate in the cluster's file; seconds foreseen are told for that pace, and "raw" is how far off they
are without it.
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

DENSE: dict[str, Any] = {"vocab_size": 8192, "layers": 6, "hidden": 512, "heads": 8, "ffn": 1408, "init_std": 0.05}
WIDE: dict[str, Any] = {**DENSE, "layers": 3, "hidden": 896, "heads": 14, "ffn": 2432}
DEEP: dict[str, Any] = {**DENSE, "layers": 14, "hidden": 320, "heads": 5, "ffn": 896}
SMALL: dict[str, Any] = {**DENSE, "layers": 4, "hidden": 384, "heads": 6, "ffn": 1024}
"""Muon's products are in bf16, for which a CPU may have no unit: of DENSE a step then takes minutes."""
MIXTURE: dict[str, Any] = {
    **DENSE,
    "layers": 4,
    "moe": {"experts": 16, "prototypes": 2, "ffn": 704, "balance_loss": 0.01},
}


def case(model: dict[str, Any] = DENSE, **sections: Any) -> dict[str, Any]:
    """A run file: 4 sequences of 256 tokens in one pass, but for what is given."""
    training = {"steps": 100, "batch_size": 4, "precision": "fp32", **sections.pop("training", {})}
    data, optim = {"sequence_length": 256, **sections.pop("data", {})}, sections.pop("optim", {})
    parallel = {"data_replicate": 1, "data_shard": 1, **sections.pop("parallel", {})}
    stage = {"sharing": "none", **sections.pop("stage", {})}
    return {
        "model": model,
        "data": data,
        "training": training,
        "optim": optim,
        "parallel": parallel,
        "stages": [stage],
        **sections,
    }


CASES: dict[str, dict[str, Any]] = {
    "dense": case(),
    "dense, wide": case(WIDE),
    "dense, deep": case(DEEP),
    "dense, 8 sequences": case(training={"batch_size": 8}),
    "dense, 1024 tokens": case(data={"sequence_length": 1024}, training={"batch_size": 1}),
    "shared by all": case(stage={"sharing": "all"}),
    "shared by all, wide": case(WIDE, stage={"sharing": "all"}),
    "shared by threes": case(stage={"sharing": {"groups": 2}}),
    "mixture": case(MIXTURE),
    "mixture, shared by all": case(MIXTURE, stage={"sharing": "all"}),
    "dense, 2 passes": case(training={"micro_batch_size": 2}),
    "dense, 4 passes": case(training={"micro_batch_size": 1}),
    "mixture, 2 passes": case(MIXTURE, training={"micro_batch_size": 2}),
    "dense, recompute": case(training={"recompute": "full"}),
    "dense, recompute products' neighbours": case(training={"recompute": "selective"}),
    "mixture, recompute": case(MIXTURE, training={"recompute": "full"}),
    "dense, adafactor": case(optim={"name": "adafactor"}),
    "dense, muon": case(SMALL, optim={"name": "muon"}),
    "offload, 70%": case(offload=0.7, training={"recompute": "full"}),
    "offload, 85%": case(offload=0.85, training={"recompute": "full"}),
    "offload, wide, 75%": case(WIDE, offload=0.75, training={"recompute": "full"}),
    "offload, mixture, 60%": case(MIXTURE, offload=0.6, training={"recompute": "full"}),
    "2 ranks: shard": case(parallel={"data_shard": 2}),
    "2 ranks: replicate": case(parallel={"data_replicate": 2}),
    "2 ranks: tensor": case(parallel={"tensor": 2}),
    "2 ranks: context": case(parallel={"context": 2}),
    "2 ranks: pipeline": case(parallel={"pipeline": 2}, training={"micro_batch_size": 1}),
    "2 ranks: expert": case(MIXTURE, parallel={"data_shard": 2, "expert": 2}),
    "2 ranks: shard, shared by all": case(parallel={"data_shard": 2}, stage={"sharing": "all"}),
}


def config_of(given: dict[str, Any]) -> Any:
    """The run's configuration."""
    from tenfold.config.load import build
    from tenfold.config.run import RunConfig

    return build(RunConfig, given, "benchmark")


def candidate_of(config: Any, stage: Any) -> Any:
    """The way in which the run file says that it is run."""
    from tenfold.parallel.mesh import Degrees
    from tenfold.planning.terms import Candidate

    parallel, training = config.parallel, config.training
    axes = ("data_replicate", "data_shard", "tensor", "context", "pipeline", "expert")
    degrees = Degrees(**{axis: getattr(parallel, axis) for axis in axes})
    return Candidate(
        degrees,
        training.micro_batch_size or stage.batch_size // degrees.data,
        training.recompute,
        training.recompute_layers,
        parallel.pipeline_schedule,
        reshard=parallel.reshard,
        gather=parallel.gather,
    )


def predict(given: dict[str, Any], cluster: Any) -> tuple[float, float]:
    """Bytes of the rank that needs most, and seconds of a step."""
    from tenfold.planning.evaluating import Evaluator, Found
    from tenfold.planning.stages import plan_stages

    config = config_of(given)
    (stage,) = plan_stages(config)
    candidate = candidate_of(config, stage)
    ranks = candidate.degrees.ranks
    cluster = cluster.model_copy(update={"nodes": 1, "per_node": ranks})
    found = Evaluator(config, stage, cluster).evaluate(candidate)
    if not isinstance(found, Found):
        raise SystemExit(f"the planner finds no room for it: {found}")
    return max(memory.needed for memory in found.memory), found.step.seconds


def worker(given: dict[str, Any], steps: int, returns: bool) -> None:
    """On each rank: train, and on rank 0 print what was measured, as JSON."""
    import torch
    import torch.distributed as dist

    from tenfold.config.offload import key_of
    from tenfold.hardware.memory import keep_freed_memory, memory_used_bytes, peak_memory_bytes
    from tenfold.parallel.mesh import Mesh
    from tenfold.planning.stages import plan_stages
    from tenfold.training.offloading import Tiers, begin_stage
    from tenfold.training.setup import degrees_of_stages, layout_of
    from tenfold.training.step import train_step

    if not returns:
        keep_freed_memory()
    ranks, device = int(os.environ.get("WORLD_SIZE", "1")), torch.device("cpu")
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
    config = config_of(given)
    (stage,) = stages = plan_stages(config)
    (degrees,) = degrees_of_stages(config, stages, ranks)
    warm_up()
    before = memory_used_bytes(device)
    Path("/proc/self/clear_refs").write_text("5")
    tiers = Tiers([config.offload], device, 0, 1, lambda text: print(text, file=sys.stderr))
    layout = layout_of(config, stage.sharing, Mesh(degrees, "cpu"), device)
    begun = begin_stage(config, stage, config.offload, key_of(0, None), layout, tiers)
    mine, length = stage.batch_size // layout.data, config.data.sequence_length
    generator = torch.Generator().manual_seed(layout.mesh.data_index)
    seconds = []
    for number in range(1 + steps):
        batch = torch.randint(0, config.model.vocab_size, (mine, length + 1), generator=generator)
        began = time.perf_counter()
        train_step(begun.model, begun.optimizers, batch, number + 1, 1e-3, config, 0, 1, layout, begun.offload)
        seconds.append(time.perf_counter() - began)
    told = layout.of_all((peak_memory_bytes(device) - before, statistics.median(seconds[1:])))
    tiers.close()
    if layout.number == 0:
        print(json.dumps([max(values) for values in zip(*told, strict=True)]), flush=True)
    if ranks > 1:
        dist.destroy_process_group()


def warm_up() -> None:
    """Have libraries take what they keep, whatever the model, before memory is looked at."""
    import torch

    import tenfold.parallel.data
    import tenfold.parallel.schedule  # noqa: F401  # what ranks import when they are more than one
    from tenfold.config.model import ModelConfig
    from tenfold.config.run import OptimConfig
    from tenfold.nn.decoder import Decoder
    from tenfold.nn.objective import backward, next_token_example
    from tenfold.training.optimizers import build_optimizers

    model = Decoder(ModelConfig(vocab_size=64, layers=1, hidden=256, heads=4, ffn=512), 256)
    optimizers = build_optimizers(model, OptimConfig())
    backward(model, next_token_example(torch.zeros(2, 257, dtype=torch.int64)), torch.tensor(512), 256)
    for optimizer in optimizers:
        optimizer.step()


RETURNS = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "0"}
"""With these glibc gives back all that is freed, but for the smallest pieces."""


def measure(given: dict[str, Any], steps: int, returns: bool) -> tuple[float, float]:
    """A run in processes of its own: bytes and seconds."""
    ranks = candidate_of(config_of(given), _stage(given)).degrees.ranks
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*start, __file__, "--worker", json.dumps(given), "--steps", str(steps), *["--returns"] * returns]
    environment = {**os.environ, **(RETURNS if returns else {})}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    memory, seconds = json.loads(done.stdout.splitlines()[-1])
    return memory, seconds


def _stage(given: dict[str, Any]) -> Any:
    from tenfold.planning.stages import plan_stages

    return plan_stages(config_of(given))[0]


def pace(cluster: Any) -> float:
    """How fast one thread is now in a product of this table's sizes, of the rate that the cluster's file has."""
    import torch

    from tenfold.planning.terms import Operation

    torch.set_num_threads(1)
    rows, inner, columns = 1024, 512, 1408
    a, b = torch.randn(rows, inner), torch.randn(columns, inner)
    seconds = []
    for _ in range(100):
        began = time.perf_counter()
        a @ b.T
        seconds.append(time.perf_counter() - began)
    product = Operation("product", "matrix", rows=rows, inner=inner, columns=columns)
    alone: float = cluster.model_copy(update={"per_node": 1}).seconds(product, "fp32")
    return alone / statistics.median(seconds)


def run(name: str, given: dict[str, Any], options: argparse.Namespace, cluster: Any) -> dict[str, Any]:
    """Predicted and measured of one configuration. A share in `offload` is of what it takes without."""
    given = {**given}
    if isinstance(share := given.get("offload"), float):
        whole, _ = predict({key: value for key, value in given.items() if key != "offload"}, cluster)
        given["offload"] = {"device_budget": int(share * whole), "disk": [str(options.folder)]}
    memory, seconds = predict(given, cluster)
    before = pace(cluster)
    _, took = measure(given, options.steps, False)
    fast = (before + pace(cluster)) / 2
    peak, _ = measure(given, 2, True)
    return {"memory": memory, "peak": peak, "raw": seconds, "pace": fast, "seconds": seconds / fast, "took": took}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", default="here", help="what `tenfold doctor --save` wrote")
    parser.add_argument("--folder", type=Path, default=Path("build/offload"), help="on a fast disk, for offload")
    parser.add_argument("--only", default="", help="configurations whose names begin so")
    parser.add_argument("--steps", type=int, default=5, help="timed, after one that is not; their median counts")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--returns", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(json.loads(options.worker), options.steps, options.returns)
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # before PyTorch: what is measured are CPUs
    from tenfold.planning.cluster import load_cluster

    cluster = load_cluster(options.cluster, lambda text: print(f"measuring: {text}", file=sys.stderr, flush=True))
    table = Table("configuration", "MiB foreseen", "MiB peak", "off", "pace", "s foreseen", "s measured", "off", "raw")
    off: dict[str, list[float]] = {"memory": [], "time": [], "time without pace": []}
    for name, given in CASES.items():
        if not name.startswith(options.only):
            continue
        found = run(name, given, options, cluster)
        off["memory"].append(found["memory"] / found["peak"] - 1)
        off["time"].append(found["seconds"] / found["took"] - 1)
        off["time without pace"].append(found["raw"] / found["took"] - 1)
        row = [f"{found['memory'] / 2**20:.1f}", f"{found['peak'] / 2**20:.1f}", f"{off['memory'][-1]:+.1%}"]
        row += [f"{found['pace']:.2f}", f"{found['seconds']:.3f}", f"{found['took']:.3f}"]
        row += [f"{off['time'][-1]:+.1%}", f"{off['time without pace'][-1]:+.1%}"]
        print(name, *row, sep=" | ", file=sys.stderr, flush=True)
        table.add_row(name, *row)
    console = Console(width=120)
    console.print(table)
    for what, each in off.items():
        sizes = sorted(map(abs, each))
        console.print(f"{what}: median {statistics.median(sizes):.1%}, worst {sizes[-1]:.1%}, of {len(sizes)}")


if __name__ == "__main__":
    main()
