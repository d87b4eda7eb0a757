"""Published training runs, and what the planner predicts of them: TFLOP/s of one GPU, counted as their papers do.

    python benchmarks/published_runs.py [--only 8.3B]

Layouts are the papers'; where a paper does not give the size of a pass, `micro` here is a guess, which the table tells.
Tenfold's attention is fused; that of these runs wrote its scores to memory, and multiplied the half that a causal mask
hides. Both are predicted: the first is what Tenfold should do with that layout, the second what to hold the paper to.
Sources: Shoeybi et al., arXiv 1909.08053 (8.3B, on V100s; forward and backward passes and recomputation); Narayanan et
al., arXiv 2104.04473, table 1 (the others, on A100s; equation 3, which counts recomputation too).
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from tenfold.planning.cluster import Cluster
    from tenfold.planning.pricing import Dtype
    from tenfold.planning.terms import Operation


class Published(NamedTuple):
    """A run: parameters in words, the model's shape, the layout, sequences in a step and a pass, and what was told."""

    name: str
    layers: int
    hidden: int
    heads: int
    tensor: int
    pipeline: int
    gpus: int
    batch: int
    micro: int
    teraflops: float
    """Of one GPU in a second, as published."""
    cluster: str = "a100-80gb"
    length: int = 2048


RUNS = [
    Published("8.3B", 72, 3072, 24, 8, 1, 512, 512, 8, 29.5, "v100-32gb", 1024),
    Published("1.7B", 24, 2304, 24, 1, 1, 32, 512, 4, 137),
    Published("3.6B", 30, 3072, 32, 2, 1, 64, 512, 4, 138),
    Published("7.5B", 36, 4096, 32, 4, 1, 128, 512, 4, 142),
    Published("18.4B", 40, 6144, 48, 8, 1, 256, 1024, 4, 135),
    Published("39.1B", 48, 8192, 64, 8, 2, 512, 1536, 2, 138),
    Published("76.1B", 60, 10240, 80, 8, 4, 1024, 1792, 2, 140),
    Published("145.6B", 80, 12288, 96, 8, 8, 1536, 2304, 1, 148),
    Published("529.6B", 105, 20480, 128, 8, 35, 2520, 2520, 1, 163),
    Published("1008B", 128, 25600, 160, 8, 64, 3072, 3072, 1, 163),
]
VOCABULARY = 51200

# Passes over scores, in bytes of a score of two: written, masked and softmax in one kernel, dropout with a mask of a
# byte, read for the values. Backward: the gradient written, through dropout, through softmax (both read), and each of
# the three products but the first reads one.
SCORES_FORWARD = 2 + 4 + 5 + 2
SCORES_BACKWARD = 2 + 5 + 6 + 6


def with_scores(cluster: Cluster) -> Cluster:
    """The same machines, with attention as three operations whose scores are written to memory and read again."""
    from tenfold.planning.cluster import Cluster

    class Unfused(Cluster):
        def seconds(self, operation: Operation, dtype: Dtype) -> float:
            if operation.kind != "attention":
                return super().seconds(operation, dtype)
            scores = operation.groups * operation.rows * operation.columns
            forward = operation.way == "forward"
            products = (4.0 if forward else 8.0) * scores * operation.inner
            moved = scores * (SCORES_FORWARD if forward else SCORES_BACKWARD)
            speed, memory = self.accelerator.matrix[dtype], self.accelerator.memory_rate
            return products / (speed.peak * speed.share) + moved / (memory.peak * memory.share)

    return Unfused(**dict(cluster))


def predict(run: Published) -> tuple[float, float]:
    """TFLOP/s of one GPU that the planner predicts: with attention fused, and with its scores in memory."""
    from tenfold.config.load import build
    from tenfold.config.run import RunConfig
    from tenfold.parallel.mesh import Degrees
    from tenfold.planning.cluster import load_cluster
    from tenfold.planning.stages import plan_stages
    from tenfold.planning.step import play_step
    from tenfold.planning.terms import Candidate

    model: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "layers": run.layers,
        "hidden": run.hidden,
        "heads": run.heads,
        "ffn": 4 * run.hidden,
        "norm": "layernorm",
        "activation": "gelu",
        "positions": "learned",
        "bias": True,
    }
    given = {
        "model": model,
        "data": {"sequence_length": run.length},
        "training": {"steps": 10, "batch_size": run.batch, "precision": "bf16", "recompute": "full"},
        "stages": [{"sharing": "none"}],
    }
    config = build(RunConfig, given, run.name)
    (stage,) = plan_stages(config)
    data = run.gpus // (run.tensor * run.pipeline)
    degrees = Degrees(data_replicate=data, tensor=run.tensor, pipeline=run.pipeline)
    cluster = load_cluster(f"{run.gpus // 8}x8:{run.cluster}")
    hidden, tokens = run.hidden, run.batch * run.length
    per_layer = 1 + run.length / (6 * hidden) + VOCABULARY / (16 * run.layers * hidden)
    operations = 96 * tokens * run.layers * hidden**2 * per_layer / run.gpus / 1e12

    def played(cluster: Cluster) -> float:
        return operations / play_step(config, stage, Candidate(degrees, run.micro, "full"), cluster).seconds

    return played(cluster), played(with_scores(cluster))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[run.name for run in RUNS])
    options = parser.parse_args()
    table = Table("run", "GPUs", "tensor x pipeline", "a pass", "published", "fused", "as then", "off", "planned in s")
    for run in RUNS:
        if run.name in options.only:
            began = time.perf_counter()
            fused, found = predict(run)
            row = [run.name, f"{run.gpus} x {run.cluster}", f"{run.tensor} x {run.pipeline}", str(run.micro)]
            row += [f"{run.teraflops:.1f}", f"{fused:.1f}", f"{found:.1f}", f"{found / run.teraflops - 1:+.0%}"]
            row.append(f"{time.perf_counter() - began:.1f}")
            print(" | ".join(row), flush=True)
            table.add_row(*row)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
