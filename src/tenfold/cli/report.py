"""tenfold report: one HTML page about a run, or about several side by side."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from tenfold.errors import TenfoldError
from tenfold.reporting.report import write_report

DESCRIPTION = """Make one self-contained HTML page from a run directory, or from several, side by side. A run that still
goes on has one too.

Examples:
  tenfold report runs/demo --out demo.html
  tenfold report runs/a runs/b runs/c
  tenfold report runs/demo --images figures"""


@dataclass(frozen=True)
class ReportArguments:
    runs: Annotated[list[Path], tyro.conf.Positional]
    """Run directories, as given to `tenfold train --out`."""
    out: Path | None = None
    """File to write; unset: report.html in the run directory, for several runs comparison.html here."""
    images: Path | None = None
    """Folder for each plot as a file of its own, SVG and PNG."""


def main(argv: list[str]) -> int:
    """Write the report and print where it is."""
    arguments = tyro.cli(ReportArguments, args=argv, prog="tenfold report", description=DESCRIPTION)
    if not arguments.runs:
        raise TenfoldError("tenfold report needs a run directory, for example: tenfold report runs/demo")
    seen = [run.resolve() for run in arguments.runs]
    twice = next((run for run in arguments.runs if seen.count(run.resolve()) > 1), None)
    if twice is not None:
        raise TenfoldError(f"{twice} is given twice; name each run once")
    first, *others = arguments.runs
    print(write_report(first, *others, out=arguments.out, images=arguments.images))
    return 0
