"""The events of a run for a report: all of them, or of a very long run the steps that keep a line's looks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tenfold.reporting.metrics import damaged, metrics_file, read_metrics

_STEP = b'{"event": "step"'
_LOSS = re.compile(rb'"loss": (-?[0-9.e+-]+)')
_NORM = re.compile(rb'"grad_norm": (-?[0-9.e+-]+)')
_KEPT_OF_A_BUCKET = 4


def read_events(run: Path, most_steps: int = 8000) -> list[dict[str, Any]]:
    """The events in `run`, in order, with about `most_steps` of the steps at most.

    Of a longer file each stretch of lines leaves its steps with the lowest and the highest loss, the highest gradient
    norm, and its last: memory does not grow with the file, and most lines are never parsed.
    """
    path = metrics_file(run)
    count = _count_lines(path)
    if count <= most_steps:
        return read_metrics(run)
    stride = -(-count * _KEPT_OF_A_BUCKET // most_steps)
    kept: dict[int, dict[str, Any]] = {}
    with path.open("rb") as file:
        for number, line in _chosen(file, stride):
            try:
                event = json.loads(line)
            except ValueError:
                event = None
            if isinstance(event, dict):
                kept[number] = event
            elif line.strip() and number < count:
                raise damaged(path, number)
    return [kept[number] for number in sorted(kept)]


def _count_lines(path: Path) -> int:
    count, last = 0, b"\n"
    with path.open("rb") as file:
        while block := file.read(2**20):
            count += block.count(b"\n")
            last = block[-1:]
    return count + (last != b"\n")


def _chosen(lines: Iterator[bytes], stride: int) -> Iterator[tuple[int, bytes]]:
    """The numbered lines to parse: all but most whole steps. A bucket ends after `stride` steps, and at a delinking."""
    bucket: dict[str, tuple[float, int, bytes]] = {}
    filled = 0
    for number, line in enumerate(lines, start=1):
        if line.startswith(_STEP) and line.endswith(b"}\n"):
            loss, norm = _LOSS.search(line), _NORM.search(line)
            if loss is not None:
                value = float(loss[1])
                if "lowest" not in bucket or value < bucket["lowest"][0]:
                    bucket["lowest"] = (value, number, line)
                if "highest" not in bucket or value > bucket["highest"][0]:
                    bucket["highest"] = (value, number, line)
            if norm is not None and ("norm" not in bucket or float(norm[1]) > bucket["norm"][0]):
                bucket["norm"] = (float(norm[1]), number, line)
            bucket["last"] = (0.0, number, line)
            filled += 1
        else:
            yield number, line
        if filled == stride or line.startswith(b'{"event": "delink"'):
            yield from {number: line for _, number, line in bucket.values()}.items()
            bucket, filled = {}, 0
    yield from {number: line for _, number, line in bucket.values()}.items()
