"""README's picture, from a finished demo: python docs/picture.py runs/demo docs/demo.svg."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tenfold.reporting.history import History
from tenfold.reporting.metrics import write_atomically
from tenfold.reporting.plots import loss_plot
from tenfold.reporting.style import CSS


def main(run: Path, out: Path) -> None:
    """Write the loss plot of `run` as a file that stands alone: with its size, colours and background."""
    plot = loss_plot(History.read(run), "tokens")
    colours = re.findall(r"--[\w]+: #\w+", CSS.split("@media")[0])  # those of the light theme
    style = f":root {{ {'; '.join(colours)} }} text {{ font-family: sans-serif; fill: #17202b }}"
    head = '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="720"'
    plot = plot.replace("<svg", head, 1)
    plot = plot.replace("<defs>", f'<style>{style}</style><rect width="100%" height="100%" fill="#fff"/><defs>', 1)
    write_atomically(out, plot)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
