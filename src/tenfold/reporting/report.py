"""Run directories made into one self-contained HTML page, and its plots into files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tenfold.errors import TenfoldError
from tenfold.reporting.history import History
from tenfold.reporting.metrics import write_atomically

if TYPE_CHECKING:
    from tenfold.reporting.axes import Plot


def write_report(run: Path, *others: Path, out: Path | None = None, images: Path | None = None) -> Path:
    """Write the report of the run directory `run`, or with `others` of all of them side by side; where it is.

    `out` is by default report.html in `run`, of several runs comparison.html in the present folder. Into the folder
    `images` goes each plot as SVG and PNG. Raises TenfoldError where there is no run, no metrics yet, no readable
    config.toml, or no way to write.
    """
    paths = [run, *others]
    histories = [History.read(path) for path in paths]
    # Here: matplotlib takes a second that other commands need not wait.
    from tenfold.reporting.comparison import build_comparison, name_runs
    from tenfold.reporting.overlays import comparison_plots
    from tenfold.reporting.page import build_page
    from tenfold.reporting.plots import all_plots
    from tenfold.reporting.svg import drawing

    out = out or (Path("comparison.html") if others else run / "report.html")
    if out.exists() and not out.is_file():  # a device would be exchanged for a file
        raise TenfoldError(f"cannot write the report {out}: it is no regular file; give another --out")
    if others:
        runs = name_runs(paths, histories)
        plots = comparison_plots(runs)
    else:
        plots = all_plots(histories[0])
    with drawing():
        page = build_comparison(runs, plots) if others else build_page(histories[0], plots)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, page)
    except OSError as error:
        raise TenfoldError(f"cannot write the report {out}: {error.strerror or error}") from None
    if images is not None:
        _write_images(images, plots)
    return out


def _write_images(folder: Path, sections: Sequence[tuple[str, Sequence[Plot]]]) -> None:
    from tenfold.reporting.svg import drawing, light_colours, to_file, to_svg

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with drawing(light_colours()):
            for plot in (plot for _, plots in sections for plot in plots):
                for label, draw in plot.views:
                    figure = draw()
                    if figure is None:
                        continue
                    name = "-".join([plot.name, *label.replace("/", " per ").split()])
                    write_atomically(folder / f"{name}.svg", to_file(to_svg(figure, name, plot.title)))
                    figure.savefig(folder / f"{name}.png", dpi=160, facecolor="white")
    except OSError as error:
        raise TenfoldError(f"cannot write the images into {folder}: {error.strerror or error}") from None
