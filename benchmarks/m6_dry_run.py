"""M6-10T on 512 fake ranks: the dry run of its Pseudo stage, the delinking and the Real stage, and what that takes.

    python benchmarks/m6_dry_run.py [--layers 48] [--degrees data_shard=512 expert=128]

As `tenfold plan examples/m6-10t.toml --cluster 64x8:v100-32gb --dry-run`, on degrees that are given, and so without the
search for the best ones.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path

from tenfold.config.load import load_run
from tenfold.parallel.mesh import Degrees
from tenfold.planning.stages import plan_stages
from tenfold.planning.terms import Candidate
from tenfold.training.dry_run import dry_run

GIB = 2**30
RUN = Path(__file__).parents[1] / "examples" / "m6-10t.toml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--degrees", nargs="+", default=["data_shard=512", "expert=128"], metavar="AXIS=N")
    parser.add_argument("--real", nargs="+", metavar="AXIS=N", help="of the Real stage, where it lies otherwise")
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="full")
    asked = parser.parse_args()
    config = load_run(RUN, [f"--model.layers={asked.layers}"])
    stages = plan_stages(config)
    candidates = [
        Candidate(
            Degrees(**{axis: int(number) for axis, number in (each.split("=") for each in degrees)}),
            asked.micro_batch_size,
            asked.recompute,
        )
        for degrees in (asked.degrees, asked.real or asked.degrees)
    ]
    began = time.monotonic()
    found = dry_run(config, stages, candidates, note=lambda words: print(words, flush=True))
    for each in found.counted:
        sizes = {what: f"{size / GIB:.2f}" for what, size in (each.items | each.peaks).items()}
        print(f"{each.stage}, rank {each.rank}: {each.seconds:.0f} s; GiB: {sizes}")
        if each.delinking:
            sent = sum(exchange.bytes * count for exchange, count in each.delinking.items())
            print(f"  the delinking sends {sent / GIB:.2f} GiB in {sum(each.delinking.values())} messages")
    apart = [row for row in found.rows if not row.agrees]
    for row in apart:
        print(f"  disagrees: {row}")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{time.monotonic() - began:.0f} s, {used.ru_utime + used.ru_stime:.0f} s of CPU, {used.ru_maxrss / 2**20:.2f} "
        f"GiB in a process; {len(found.rows)} numbers compared, {len(apart)} more than 3% apart"
    )


if __name__ == "__main__":
    main()
