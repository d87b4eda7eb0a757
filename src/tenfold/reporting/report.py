"""A run directory made into one self-contained HTML page."""

from __future__ import annotations

from pathlib import Path

from tenfold.errors import TenfoldError
from tenfold.reporting.history import History
from tenfold.reporting.metrics import write_atomically
from tenfold.reporting.page import build_page


def write_report(run: Path, out: Path | None = None) -> Path:
    """Write the report of the run directory `run` to `out` (`run`/report.html by default) and return where it is.

    Raises TenfoldError where there is no run, no metrics yet, no readable config.toml, or no way to write `out`.
    """
    history = History.read(run)
    from tenfold.reporting.plots import all_plots  # here: matplotlib takes a second that other commands need not wait

    out = out or run / "report.html"
    if out.exists() and not out.is_file():  # a device would be exchanged for a file
        raise TenfoldError(f"cannot write the report {out}: it is no regular file; give another --out")
    page = build_page(history, all_plots(history))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, page)
    except OSError as error:
        raise TenfoldError(f"cannot write the report {out}: {error.strerror or error}") from None
    return out
