"""tenfold report: one HTML page about a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from tenfold.reporting.report import write_report

DESCRIPTION = """Make one self-contained HTML page from a run directory; a run that still goes on has one too.

Example: tenfold report runs/demo --out demo.html"""


@dataclass(frozen=True)
class ReportArguments:
    run: Annotated[Path, tyro.conf.Positional]
    """Run directory, as given to `tenfold train --out`."""
    out: Path | None = None
    """File to write; unset: report.html in the run directory."""


def main(argv: list[str]) -> int:
    """Write the report and print where it is."""
    arguments = tyro.cli(ReportArguments, args=argv, prog="tenfold report", description=DESCRIPTION)
    print(write_report(arguments.run, arguments.out))
    return 0
