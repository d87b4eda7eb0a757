"""`tenfold doctor`: what this machine is, and what on it will hurt training."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import tyro

DESCRIPTION = """Tell what this machine is and how fast, and warn of what will hurt training, with the remedy.

Measures for some ten seconds: matrix products, and the disk of the present folder (with a file of at most 1 GiB
that is gone afterwards).

Examples:
  tenfold doctor
  tenfold doctor --disks runs /scratch
  tenfold doctor --quick --json"""


@dataclass(frozen=True)
class DoctorArguments:
    disks: tuple[Path, ...] = (Path("."),)
    """Folders whose disks are looked at."""
    quick: bool = False
    """Measure nothing."""
    json: bool = False
    """Print one JSON object: every fact, and the advice."""


def main(argv: list[str]) -> int:
    """Print what was found."""
    arguments = tyro.cli(DoctorArguments, args=argv, prog="tenfold doctor", description=DESCRIPTION)

    from rich.console import Console

    from tenfold.hardware.examination import examine
    from tenfold.reporting.advice import advise
    from tenfold.reporting.machine import machine_report

    facts = examine(arguments.disks, arguments.quick)
    advice = advise(facts)
    if arguments.json:
        print(json.dumps(facts | {"advice": [entry._asdict() for entry in advice]}, indent=2, ensure_ascii=False))
    else:
        Console().print(machine_report(facts, advice))
    return 0
