"""What `until = "auto"` and `moments = "measure"` cost beside a training step: python benchmarks/checks.py

Random tokens; each number is the least of a few rounds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from tenfold.config.load import build
from tenfold.config.run import RunConfig
from tenfold.planning.stages import plan_stages
from tenfold.sharing.delinking import delink
from tenfold.training.measuring import Coming, measure_moments
from tenfold.training.optimizers import build_optimizers
from tenfold.training.setup import build_model
from tenfold.training.step import train_step
from tenfold.training.when import Watch


def least(work: Callable[[], object], rounds: int) -> float:
    """Seconds of the fastest of some rounds, after one to get ready."""
    found = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return min(found[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    raw = {
        "model": {"layers": options.layers, "hidden": options.hidden, "heads": 4, "vocab_size": 4096},
        "data": {"sequence_length": options.length},
        "training": {"steps": 1000, "batch_size": options.batch, "precision": "fp32"},
        "stages": [
            {"name": "pseudo", "sharing": "all", "until": {"auto": "correlation"}},
            {"name": "real", "moments": "measure"},
        ],
    }
    config = build(RunConfig, raw, "benchmark")
    pseudo, real = plan_stages(config)
    model = build_model(config, pseudo.sharing, torch.device("cpu"))
    optimizers = build_optimizers(model, config.optim)
    random = torch.Generator().manual_seed(0)
    coming = Coming(torch.randint(0, 4096, (options.batch, options.length + 1), generator=random), 0, 1)

    step = least(lambda: train_step(model, optimizers, coming.batch, 1, 1e-4, config), options.rounds)
    check = least(lambda: Watch(pseudo, real, {}).check(model, coming, config), options.rounds)
    print(f"shared, {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M stored parameters")
    print(f"  a step {step:.2f} s, a check {check:.2f} s: {check / step / 100:.2%} of training at every = 100")
    freed = delink(model.layers, optimizers, real.sharing, "measure")
    step = least(lambda: train_step(model, optimizers, coming.batch, 1, 1e-4, config), options.rounds)

    def measure() -> None:
        for parameter in freed:
            for optimizer in optimizers:
                for value in optimizer.state.get(parameter, {}).values():
                    value.zero_()
        measure_moments(model, optimizers, freed, [coming], config)

    measured = least(measure, options.rounds)
    print(f"delinked, {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M stored parameters")
    print(f"  a step {step:.2f} s, one of measuring {measured:.2f} s: {8 * measured / step:.1f} steps' time for 8")


if __name__ == "__main__":
    main()
