"""Does Pseudo-to-Real pay, and with which hand-over of the optimizer's state?

Trains one small model on Python's own library, never sharing and sharing for the first part of the run, with each
choice of `moments`, over several seeds, all for the same tokens. Prints held-out loss at the end (mean and standard
deviation over seeds), loss right after delinking and some steps later, and training seconds. With `--objective masked`
the model is an encoder, and its accuracy on masked tokens is printed besides. With `--experts` it is a mixture of 8
experts in 2 prototypes, which share one set of weights in the first part of the run; `--sharing none` then leaves the
layers free throughout. With `--rank 8` every run that shares is made once more with a relaxed stage of that rank after
the first stage, which lasts as long again.

    python benchmarks/delinking.py [--seeds 3] [--tokens 300000] [--share 0.25] [--sharing all]
        [--moments copy rescale reset] [--objective next-token] [--experts layer] [--rank 0] [--undivided]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tenfold.config.load import build
from tenfold.config.run import RunConfig
from tenfold.config.units import parse_sharing
from tenfold.data.mixture import open_data
from tenfold.reporting.format import logits_kept
from tenfold.training.run import Run
from tenfold.training.setup import resolve

MIXTURE = {"experts": 8, "prototypes": 2, "ffn": 192, "balance_loss": 0.01}


def configuration(
    seed: int,
    tokens: int,
    share: float,
    sharing: Any,
    moments: str | None,
    objective: str,
    experts: str = "free",
    rank: int = 0,
    divide: bool = True,
) -> RunConfig:
    """The run of one seed; `moments` None never shares, `rank` 0 has no relaxed stage."""
    real: dict[str, Any] = {"name": "real", "sharing": "none"}
    stages = [real]
    if moments is not None:
        pseudo = {"name": "pseudo", "sharing": sharing, "until": {"share": share}, "experts": experts}
        stages = [pseudo, {**real, "moments": moments}]
        if rank:
            stages[1:1] = [{**pseudo, "name": "relaxed", "rank": rank, "until": {"share": 2 * share}}]
    raw = {
        "model": {
            "objective": objective,
            "layers": 6,
            "hidden": 128,
            "heads": 4,
            "ffn": 384,
            "activation": "swiglu",
            "qk_norm": True,
            "init_std": 0.05,
            "moe": {} if experts == "free" else MIXTURE,
        },
        "data": {"path": "python-stdlib", "vocab_size": 1024, "sequence_length": 128},
        "training": {
            "tokens": tokens,
            "batch_size": 8,
            "seed": seed,
            "precision": "fp32",
            "validate_every": 20,
            "validation_sequences": 48,
            "log_every": 1000,
        },
        "optim": {"lr": 2e-3, "warmup": 0.05, "divide_shared": divide},
        "checkpoint": {"every": 0, "keep": 1},
        "stages": stages,
    }
    return build(RunConfig, raw, "benchmark")


def measure(config: RunConfig) -> dict[str, float]:
    """Train and return held-out losses and seconds."""
    device = torch.device("cpu")
    data = open_data(config.data)
    config = resolve(config, data.vocab_size, device, data.mask_token())
    events: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        Run(config, data, Path(folder), device, events.append, print).run()
    losses = {event["step"]: event["validation_loss"] for event in events if event["event"] == "validation"}
    end = next(event for event in events if event["event"] == "end")
    found = {"final": end["stages"][-1]["validation_loss"], "seconds": sum(stage["seconds"] for stage in end["stages"])}
    found["unigram"] = end["unigram_loss"]
    for event in events:
        if "masked_accuracy" in event:
            found["accuracy"] = event["masked_accuracy"]  # the last one stays
        if event["event"] == "delink":  # the last one stays
            assert logits_kept(event)
            at = event["step"]
            # The change of the loss over the first steps after delinking: a bad hand-over shows here.
            after = next(step for step in sorted(losses) if step > at)
            found["after"] = losses[after] - losses[at]
    return found


def main() -> None:
    """Run all, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=300_000)
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--sharing", type=parse_sharing, default="all")
    parser.add_argument("--moments", nargs="+", default=["copy", "rescale", "reset"])
    parser.add_argument("--objective", default="next-token")
    parser.add_argument("--experts", choices=["free", "prototype", "layer"], default="free")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--undivided", action="store_true", help="share at the learning rate of free layers")
    arguments = parser.parse_args()
    table = Table("run", "final loss", "difference to never", "loss change after delinking", "seconds", box=None)
    masked = arguments.objective == "masked"
    if masked:
        table.add_column("masked tokens right")
    console, never = Console(), []
    kinds = [(None, 0), *((moments, rank) for moments in arguments.moments for rank in sorted({0, arguments.rank}))]
    for moments, rank in kinds:
        name = "never shared" if moments is None else f"shared, {f'rank {rank}, ' if rank else ''}{moments}"
        found = []
        for seed in range(1, arguments.seeds + 1):
            how = (arguments.tokens, arguments.share, arguments.sharing, moments, arguments.objective)
            config = configuration(seed, *how, arguments.experts, rank, not arguments.undivided)
            found.append(measure(config))
            console.print(f"{name}, seed {seed}: {found[-1]}")
        finals = [each["final"] for each in found]
        never = never or finals
        table.add_row(
            name,
            _spread(finals),
            _spread([mine - theirs for mine, theirs in zip(finals, never, strict=True)]),
            _spread([each["after"] for each in found]) if moments else "",
            _spread([each["seconds"] for each in found], 0),
            *([_spread([each["accuracy"] for each in found])] if masked else []),
        )
    console.print(table)
    console.print(f"a unigram model: {_spread([each['unigram'] for each in found])}")


def _spread(values: list[float], digits: int = 3) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.{digits}f} ± {deviation:.{digits}f}"


if __name__ == "__main__":
    main()
