"""`tenfold doctor`: what this machine is, and what on it will hurt training."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import tyro

from tenfold.errors import TenfoldError

DESCRIPTION = """Tell what this machine is and how fast, and warn of what will hurt training, with the remedy.

Measures for some ten seconds: matrix products, and the disk of the present folder (with a file of at most 1 GiB
that is gone afterwards). With --save FILE.toml it measures for about a minute what training is made of, and writes it
as a cluster for tenfold plan; let nothing else run meanwhile.

Examples:
  tenfold doctor
  tenfold doctor --disks runs /scratch
  tenfold doctor --quick --json
  tenfold doctor --save here.toml
  tenfold plan run.toml --cluster here.toml  # what it is for"""


@dataclass(frozen=True)
class DoctorArguments:
    disks: tuple[Path, ...] = (Path("."),)
    """Folders whose disks are looked at."""
    quick: bool = False
    """Measure nothing."""
    json: bool = False
    """Print one JSON object: every fact, and the advice."""
    save: Path | None = None
    """Measure this machine in detail, and write it as a cluster to this file."""


def main(argv: list[str]) -> int:
    """Print what was found."""
    arguments = tyro.cli(DoctorArguments, args=argv, prog="tenfold doctor", description=DESCRIPTION)

    from rich.console import Console

    from tenfold.hardware.examination import examine
    from tenfold.reporting.advice import advise
    from tenfold.reporting.machine import machine_report

    if arguments.save is not None:
        return _save(arguments, arguments.save)
    facts = examine(arguments.disks, arguments.quick)
    advice = advise(facts)
    if arguments.json:
        print(json.dumps(facts | {"advice": [entry._asdict() for entry in advice]}, indent=2, ensure_ascii=False))
    else:
        Console().print(machine_report(facts, advice))
    return 0


def _save(arguments: DoctorArguments, path: Path) -> int:
    """Measure, write, and tell in short what was found."""
    import time

    from rich.console import Console

    from tenfold.hardware.memory import keep_freed_memory
    from tenfold.planning.here import check_savable, measure_here, save_cluster
    from tenfold.reporting.machine import cluster_report

    if arguments.quick or arguments.json:
        raise TenfoldError("--save measures and writes a file: leave out --quick and --json")
    check_savable(path)
    keep_freed_memory()  # as training does
    console, began = Console(stderr=True), time.monotonic()
    with console.status("measuring") as status:
        cluster = measure_here(arguments.disks[0], lambda what: status.update(f"measuring: {what}"))
    save_cluster(cluster, path)
    console.print(cluster_report(cluster.model_dump()))
    for note in cluster.notes:
        console.print(f"note: {note}", highlight=False)
    console.print(f"written to {path} after {time.monotonic() - began:.0f} s: --cluster {path} plans for this machine")
    return 0
