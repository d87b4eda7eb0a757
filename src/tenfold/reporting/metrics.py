"""metrics.jsonl, one event a line, and the same numbers for TensorBoard."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from tenfold.errors import TenfoldError

FILE = "metrics.jsonl"

# What stays told of steps that a resumption undoes.
_KEPT = ("note", "skip", "stop", "error", "resume")


class MetricsWriter:
    """Appends events to `run`/metrics.jsonl, each on disk's side of Python before `write` returns.

    With `resume_step` the file is first cut back to what happened up to that step (and a former `end` is taken out),
    so that each step stands once; what went wrong after it stays told. Without it a run that already has metrics is
    refused. `former` is then what the file knew: `reached`, its last step, and `idle_seconds` since its last line.
    """

    former: dict[str, Any] | None = None

    def __init__(self, run: Path, resume_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # here: it takes a second that other commands need not wait

        path = run / FILE
        if resume_step is not None:
            self.former = _trim(path, resume_step)
        elif path.exists() and path.stat().st_size:
            raise TenfoldError(
                f"{run} already holds a run's metrics; go on with it by --resume, or choose another --out"
            )
        run.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        purge = None if resume_step is None else resume_step + 1
        self._board = SummaryWriter(str(run / "tensorboard"), purge_step=purge)

    def write(self, event: dict[str, Any]) -> None:
        """One line, flushed. What is not a finite number is written as null."""
        event = _plain(event)
        self._file.write(json.dumps(event, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()
        if event.get("event") in ("step", "validation"):
            self._scalars(event)
        if event.get("event") == "evaluation":
            for key, value in event["values"].items():
                if value is not None:
                    self._board.add_scalar(f"evaluation/{event['name']}/{event['task']}/{key}", value, event["step"])

    def _scalars(self, event: dict[str, Any]) -> None:
        group = "training" if event["event"] == "step" else "validation"
        step = event["step"]
        for key, value in event.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and key != "step":
                self._board.add_scalar(f"{group}/{key}", value, step)
        for layer, imbalance in enumerate(load_imbalance(event)):
            if imbalance is not None:
                self._board.add_scalar(f"experts/layer_{layer}_largest_over_mean_load", imbalance, step)

    def close(self) -> None:
        """Write out what TensorBoard still holds and let go of the files."""
        self._file.close()
        self._board.close()


def load_imbalance(event: dict[str, Any]) -> list[float | None]:
    """For each layer of a `step` event: the load of its busiest expert over the mean load; 1 is even."""
    result: list[float | None] = []
    for loads in event.get("expert_load") or []:
        known = [load for load in loads or [] if load is not None]
        total = sum(known)
        result.append(max(known) * len(known) / total if total > 0 else None)
    return result


def metrics_file(run: Path) -> Path:
    """The metrics of the run directory `run`, or a TenfoldError that says what is missing."""
    if not run.is_dir():
        raise TenfoldError(f"there is no run directory {run}")
    path = run / FILE
    if not path.is_file():
        raise TenfoldError(
            f"there is no {FILE} in {run}: it is no run directory, its training never started, or it was "
            "delinked on disk, which trains nothing"
        )
    return path


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The events of a run, in order. A last line that was cut short (the run was killed, or writes now) is left out."""
    return _parse(metrics_file(run))


def damaged(path: Path, number: int) -> TenfoldError:
    """The error that line `number` of `path` cannot be read."""
    return TenfoldError(f"{path}, line {number} is damaged (not a JSON object); mend it or take the line out")


def _parse(path: Path) -> list[dict[str, Any]]:
    lines = path.read_bytes().rstrip(b"\n").split(b"\n")
    events = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if isinstance(event, dict):
            events.append(event)
        elif number < len(lines):
            raise damaged(path, number)
    return events


def _trim(path: Path, resume_step: int) -> dict[str, Any] | None:
    """Drop what happened after `resume_step`, and any `end`, in one atomic exchange of the file; what it knew."""
    if not path.exists():
        return None
    idle, events = max(0.0, time.time() - path.stat().st_mtime), _parse(path)
    reached = max([resume_step, *(event["step"] for event in events if event.get("event") == "step")])
    # A stage's end is saved before the delinking that follows at the same step, which is then done again.
    undone = [event.get("event") == "delink" and event["step"] >= resume_step for event in events]
    end = undone.index(True) if True in undone else len(events)
    kept = [
        event
        for number, event in enumerate(events)
        if event.get("event") in ("start", *_KEPT)
        or (number < end and event.get("step", 0) <= resume_step and event.get("event") != "end")
    ]
    text = "".join(json.dumps(event, ensure_ascii=False) + "\n" for event in kept)
    write_atomically(path, text)
    return {"reached": reached, "idle_seconds": idle}


def write_atomically(path: Path, text: str) -> None:
    """Whoever reads `path` finds the old text or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    """`value` as JSON can hold it: tensors and arrays as numbers and lists, NaN and infinities as None."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, str | int | None):
        return value
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return str(value)
