"""What runs learned by tokens, for `planning.curves`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from tenfold.config.run import OptimConfig
from tenfold.errors import TenfoldError
from tenfold.planning.curves import Observed
from tenfold.reporting.history import Event, History


def observed(run: Path) -> Observed:
    """The training losses of a run by tokens, behind its warm-up, whose rates no curve knows.

    Raises TenfoldError for a run of several shared stages: curves know one, and the free one behind it.
    """
    history = History.read(run)
    planned: list[Event] = history.start.get("stages") or []
    shares = [stage["stored_parameters"] < stage["total_parameters"] for stage in planned]
    if not planned:
        raise TenfoldError(f"{run} does not tell its stages: metrics.jsonl has no start event")
    if shares not in ([True], [False], [True, False]):
        names = ", ".join(str(stage["name"]) for stage in planned)
        raise TenfoldError(
            f"{run} has the stages {names}; curves are fitted to runs of one stage, shared or not, and of a shared "
            "one that is delinked into one that shares nothing"
        )
    told = [event for event in history.steps if event.get("loss") is not None]
    if not told:
        raise TenfoldError(f"{run} has no losses yet: the first come after training.log_every steps")
    warm = _warm_up(history.config) * sum(stage["tokens"] for stage in planned)
    kept = [event for event in told if event["tokens"] > warm]
    return Observed(
        str(run),
        [event["tokens"] for event in kept],
        [event["loss"] for event in kept],
        _shared_tokens(history, planned, shares),
    )


def _shared_tokens(history: History, planned: list[Event], shares: list[bool]) -> float:
    """Tokens at the delinking: those that the last step of the shared stage comes to."""
    if shares == [False]:
        return 0.0
    delinked = [event["step"] for event in history.delinks]
    if not delinked:
        return math.inf
    first = planned[0]
    if delinked[0] == first["steps"]:
        return float(first["tokens"])
    # Ended by a rule: a step before it tells what a step's tokens are.
    return float(delinked[0] * first["tokens"] / first["steps"])


def _warm_up(config: dict[str, Any]) -> float:
    """The share of a run's tokens in which its rate rises."""
    return float((config.get("optim") or {}).get("warmup", OptimConfig.model_fields["warmup"].default))
