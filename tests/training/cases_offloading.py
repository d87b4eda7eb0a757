"""What tests of offloaded runs ask for, and what a rank does in those on several ranks."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from tenfold.cli.train import train as train_run
from tenfold.config.load import load_run
from tenfold.parallel.launch import World

ALL = "{layers = 'all', weights = 'disk', gradients = 'disk', moments = 'disk'}"
SOME = "{layers = 'every 2', weights = 'disk', moments = 'disk'}, {layers = '3', gradients = 'disk'}"


def offload(tmp_path: Path, rules: str) -> str:
    """The section of a run file."""
    return f"[offload]\ndisk = ['{tmp_path}/fast']\nplacement = [{rules}]\n"


def train(file: str, flags: list[str], folder: str, resume: bool) -> int:
    """`tenfold train` in processes that are joined already, without a report."""
    world = World(dist.get_rank(), dist.get_world_size())
    with (
        mock.patch("tenfold.parallel.launch.open_world", return_value=nullcontext()),
        mock.patch("tenfold.reporting.report.write_report", lambda run: run / "report.html"),
    ):
        return train_run(load_run(Path(file), flags), Path(folder), resume, world, None)
