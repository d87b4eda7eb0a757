"""The paper's run, planned: M6-10T on 512 V100s, with either optimizer and several host memories.

    python benchmarks/paper_plans.py [--optimizer adamw] [--memory 512GiB 768GiB 1.5TiB]

Each row is `tenfold plan examples/m6-10t.toml --cluster 64x8:v100-32gb,host_memory=...`, and takes minutes.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

import tenfold
from tenfold.config.load import load_run
from tenfold.planning.plans import Plan

GIB, DAY = 2**30, 86400
RUN = Path(__file__).parents[1] / "examples" / "m6-10t.toml"


def row(found: Plan) -> list[str]:
    """What the table tells of a plan."""
    cells = []
    for each in found.stages:
        if each.delinking is not None:
            cells.append(f"{each.delinking.seconds:.0f}")
        cells += [f"{each.step.seconds:.0f}", f"{each.tokens_per_second * DAY / 1e9:.2f}B"]
    if found.unfit:
        return [*cells, *(f"{each.stage.name}: {each.rejected[0].why}" for each in found.unfit)]
    real = found.stages[-1].table[0]
    cells.append(", ".join(f"{size / GIB:.0f}" for size in (real.device_bytes, real.host_bytes, real.disk_bytes)))
    return [*cells, f"{found.seconds / DAY:.0f}", str(found.stages[-1].candidate)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", nargs="+", default=["adamw", "adafactor"])
    parser.add_argument("--memory", nargs="+", default=["512GiB", "768GiB", "1.5TiB"], help="of a node's host")
    asked = parser.parse_args()
    columns = ["optimizer", "host", "Pseudo s", "tokens a day", "delinking s", "Real s", "tokens a day"]
    table = Table(*columns, "GiB of device, host, disk", "days", "Real's layout", "took s")
    for optimizer in asked.optimizer:
        config = load_run(RUN, [f"--optim.name={optimizer}"])
        for memory in asked.memory:
            began = time.monotonic()
            cells = row(tenfold.plan(config, f"64x8:v100-32gb,host_memory={memory}"))
            took = f"{time.monotonic() - began:.0f}"
            print(optimizer, memory, *cells, took, sep=" | ", flush=True)
            table.add_row(optimizer, memory, *cells, *[""] * (len(columns) + 1 - len(cells)), took)
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
