"""What a run directory tells of its run, put in order for plots and tables."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tenfold.errors import TenfoldError
from tenfold.reporting.metrics import read_metrics

Event = dict[str, Any]


@dataclass(frozen=True)
class History:
    """The events of one run by kind; steps, validations and delinkings stand once each and in order."""

    name: str
    config: str
    start: Event
    steps: list[Event]
    validations: list[Event]
    delinks: list[Event]
    happenings: list[Event]  # resume, stop, delink and end, in the order of the file
    end: Event | None
    latest: Event  # the last line of the file

    @classmethod
    def read(cls, run: Path) -> History:
        """The history in the run directory `run`; TenfoldError where there is nothing to tell yet."""
        events = read_metrics(run)
        config = _read_config(run / "config.toml")
        steps = _once(events, "step")
        validations = _once(events, "validation")
        if not steps and not validations:
            raise TenfoldError(f"{run} has no metrics yet: the first come after training.log_every steps")
        start: Event = next((event for event in reversed(events) if event.get("event") == "start"), {})
        return cls(
            name=str(start.get("run") or run.resolve().name),
            config=config,
            start=start,
            steps=steps,
            validations=validations,
            delinks=_once(events, "delink"),
            happenings=[event for event in events if event.get("event") in ("resume", "stop", "delink", "end")],
            end=next((event for event in reversed(events) if event.get("event") == "end"), None),
            latest=events[-1],
        )

    @property
    def status(self) -> str:
        """finished, stopped, or not finished (still going, or cut off: the files cannot tell which)."""
        if self.end is not None:
            return "finished"
        return f"stopped: {self.latest.get('reason', '')}" if self.latest.get("event") == "stop" else "not finished"

    @property
    def stage_names(self) -> list[str]:
        """The stages that the run plans, and any other that was seen."""
        planned = [stage["name"] for stage in self.start.get("stages") or []]
        seen = [event["stage"] for event in [*self.steps, *self.validations] if event.get("stage")]
        return list(dict.fromkeys([*planned, *seen]))

    @property
    def last(self) -> Event:
        """The latest event that tells how far the run is."""
        return self.end or max([*self.steps[-1:], *self.validations[-1:]], key=lambda event: event["step"])

    def series(self, key: str, axis: str, validation: bool = False) -> tuple[list[float], list[float]]:
        """The values of `key` against `axis` ("tokens", "seconds" or "step"); null is NaN, which a line leaves open."""
        pairs = [
            (event[axis], event[key])
            for event in (self.validations if validation else self.steps)
            if key in event and event.get(axis) is not None
        ]
        return [x for x, _ in pairs], [float("nan") if y is None else y for _, y in pairs]

    def spans(self, axis: str) -> list[tuple[str, float, float]]:
        """Where each stage that was reached begins and ends on `axis`."""
        spans, begin = [], 0.0
        for name in self.stage_names:
            marks = [e[axis] for e in [*self.steps, *self.validations] if e.get("stage") == name and axis in e]
            if marks:
                spans.append((name, begin, max(marks)))
                begin = max(marks)
        return spans

    def stage_rows(self) -> list[Event]:
        """For each stage: name, sharing, stored and total parameters, tokens, seconds, rate, validation loss.

        They are the `end` event's where the run has one; before that they are read off the steps so far.
        """
        told = {stage["name"]: stage for stage in (self.end or {}).get("stages") or []}
        planned = {stage["name"]: stage for stage in self.start.get("stages") or []}
        tokens = {name: last - first for name, first, last in self.spans("tokens")}
        seconds = {name: last - first for name, first, last in self.spans("seconds")}
        rows = []
        for name in self.stage_names:
            losses = [e.get("validation_loss") for e in self.validations if e.get("stage") == name]
            spent = seconds.get(name)
            row = {
                "name": name,
                "tokens": tokens.get(name),
                "seconds": spent,
                "tokens_per_second": tokens[name] / spent if spent else None,
                "validation_loss": losses[-1] if losses else None,
            }
            plan = {key: planned.get(name, {}).get(key) for key in ("sharing", "stored_parameters", "total_parameters")}
            rows.append({**plan, **row, **told.get(name, {})})
        return rows


def _once(events: list[Event], kind: str) -> list[Event]:
    """The events of one kind in order of steps; of two for the same step the later one counts."""
    latest = {event["step"]: event for event in events if event.get("event") == kind and event.get("step") is not None}
    return [latest[step] for step in sorted(latest)]


def _read_config(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
        tomllib.loads(text)
    except FileNotFoundError:
        raise TenfoldError(f"there is no {path}: a run directory holds its configuration") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise TenfoldError(f"cannot read {path}: {error}") from None
    return text
