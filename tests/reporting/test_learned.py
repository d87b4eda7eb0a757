"""Losses read off run directories."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tenfold.errors import TenfoldError
from tenfold.reporting.learned import observed

A_STEP = 1000


def run_of(folder: Path, stages: list[tuple[str, int, int]], delinked: int | None = None) -> Path:
    """A run of (name, stored parameters, steps), whose loss is 5 / step."""
    planned = [
        {"name": name, "stored_parameters": stored, "total_parameters": 100, "steps": steps, "tokens": steps * A_STEP}
        for name, stored, steps in stages
    ]
    events: list[dict[str, Any]] = [{"event": "start", "run": folder.name, "stages": planned}]
    step = 0
    for number, (name, _, steps) in enumerate(stages):
        if number:
            step = delinked or step
            events.append({"event": "delink", "step": step})
        for _ in range(steps):
            step += 1
            events.append({"event": "step", "step": step, "stage": name, "tokens": step * A_STEP, "loss": 5 / step})
    folder.mkdir()
    (folder / "config.toml").write_text("[optim]\nwarmup = 0.1\n", encoding="utf-8")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    return folder


def test_a_run_is_never_shared_shared_or_delinked_where_it_was(tmp_path: Path) -> None:
    free = observed(run_of(tmp_path / "a", [("real", 100, 50)]))
    assert (free.kind, free.shared_tokens) == ("never shared", 0)
    shared = observed(run_of(tmp_path / "b", [("pseudo", 20, 50)]))
    assert (shared.kind, shared.shared_tokens) == ("shared", math.inf)
    both = observed(run_of(tmp_path / "c", [("pseudo", 20, 20), ("real", 100, 30)]))
    assert (both.kind, both.shared_tokens) == ("delinked", 20 * A_STEP)
    early = observed(run_of(tmp_path / "d", [("pseudo", 20, 20), ("real", 100, 30)], delinked=12))
    assert early.shared_tokens == 12 * A_STEP


def test_the_warm_up_is_left_out(tmp_path: Path) -> None:
    found = observed(run_of(tmp_path / "a", [("real", 100, 50)]))
    assert list(found.tokens) == [step * A_STEP for step in range(6, 51)]
    assert list(found.losses) == [5 / step for step in range(6, 51)]


def test_stages_that_curves_do_not_know_are_refused(tmp_path: Path) -> None:
    run = run_of(tmp_path / "a", [("one", 20, 20), ("four", 40, 20), ("real", 100, 20)])
    with pytest.raises(TenfoldError, match="has the stages one, four, real"):
        observed(run)
