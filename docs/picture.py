"""README's picture, from a finished demo: python docs/picture.py runs/demo docs/demo.svg."""

from __future__ import annotations

import sys
from pathlib import Path

from tenfold.reporting.history import History
from tenfold.reporting.metrics import write_atomically
from tenfold.reporting.plots import loss_plot
from tenfold.reporting.svg import drawing, light_colours, to_file, to_svg


def main(run: Path, out: Path) -> None:
    """Write the loss plot of `run` as a file that stands alone."""
    with drawing(light_colours()):
        figure = loss_plot(History.read(run), "tokens")
        assert figure is not None
        write_atomically(out, to_file(to_svg(figure, "loss", "Loss against tokens")))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
