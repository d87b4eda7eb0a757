"""What tests read from run directories, and runs that are stopped; commands that refuse."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tenfold.checkpoint.store import list_checkpoints, load_checkpoint
from tenfold.cli.main import main
from tenfold.reporting.metrics import MetricsWriter, read_metrics


def of_kind(run: Path, kind: str) -> list[dict[str, Any]]:
    """The events of one kind in their order."""
    return [event for event in read_metrics(run) if event["event"] == kind]


def losses(run: Path) -> dict[int, float]:
    """Training loss by step; each step stands once, and they ascend."""
    events = of_kind(run, "step")
    steps = [event["step"] for event in events]
    assert steps == sorted(set(steps))
    return {event["step"]: event["loss"] for event in events}


def final_state(run: Path) -> dict[str, torch.Tensor]:
    """Weights and optimizer state of the newest checkpoint."""
    _, weights, optimizer = load_checkpoint(list_checkpoints(run / "checkpoints")[-1])
    return {name: tensor.clone() for name, tensor in (weights | optimizer).items()}  # they are views of the file


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one message of a command that exits with code 2, in one line."""
    capsys.readouterr()
    try:
        code: object = main(arguments)
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err + shown.out
    return " ".join(shown.err.split())


@contextlib.contextmanager
def stopping_at(*steps: int) -> Iterator[None]:
    """Runs of this process get a SIGTERM as soon as they have told one of these steps."""
    original = MetricsWriter.write

    def write(self: MetricsWriter, event: dict[str, Any]) -> None:
        original(self, event)
        if event["event"] == "step" and event["step"] in steps:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MetricsWriter, "write", write)
        yield
