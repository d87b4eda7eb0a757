"""`tenfold delink`: make a finer checkpoint of a coarser one, on disk, without the model."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from tenfold.config.stage import Part, StageConfig
from tenfold.config.units import Sharing

DESCRIPTION = """Free layers that share in a checkpoint, and experts: each gets a copy of what it used, optimizer state
included, as a run does where a stage begins. It goes through the files piece by piece, in less than 1 GiB of memory
whatever the model's size, and leaves the old checkpoint as it is.

CHECKPOINT is a run directory (its newest checkpoint) or one checkpoint in it. OUT is a new run directory, to evaluate,
to generate from, or to begin a run from (start.checkpoint); it gets its name when all of it is written. To begin a
finer run no such conversion is needed: start.checkpoint reads the coarser checkpoint itself.

Examples:
  tenfold delink runs/pseudo runs/free
  tenfold delink runs/pseudo/checkpoints/step-00000500 runs/four --sharing groups=4
  tenfold delink runs/pseudo runs/free-attention --sharing all --parts ffn norms
  tenfold delink runs/pseudo runs/free --moments reset"""


@dataclass(frozen=True)
class DelinkArguments:
    checkpoint: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
    """A run directory, or a checkpoint in it (step-...)."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """A new run directory for the delinked checkpoint."""
    sharing: Sharing = "none"
    """Which layers go on sharing."""
    parts: tuple[Part, ...] = tuple(StageConfig().parts)
    """What of a layer goes on being shared."""
    experts: Literal["free", "prototype", "layer"] = "free"
    """Which routed experts go on sharing; freed ones get a router."""
    moments: Literal["copy", "rescale", "reset"] = "rescale"
    """What optimizer state freed layers start from."""


def main(argv: list[str]) -> int:
    """Write the checkpoint and print what it is."""
    arguments = tyro.cli(DelinkArguments, args=argv, prog="tenfold delink", description=DESCRIPTION)

    from tenfold.reporting.format import format_bytes, format_count
    from tenfold.training.offline import OfflineDelinking
    from tenfold.training.setup import checkpoint_at

    began = time.monotonic()
    path = checkpoint_at(arguments.checkpoint)
    work = OfflineDelinking(
        path, arguments.out, arguments.sharing, arguments.parts, arguments.moments, arguments.experts
    )
    with _progress(work.bytes) as advance:
        made = work.write(advance)
    before, after = work.stored_parameters
    print(f"{made}: {work.saved.sharing} -> {work.after}, moments {arguments.moments}")
    print(
        f"  stored parameters {format_count(before)} -> {format_count(after)}, {format_bytes(work.bytes)} in "
        f"{time.monotonic() - began:.1f} s"
    )
    return 0


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar with speed and time left, on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("delinking"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        yield lambda done: progress.advance(task, done)
