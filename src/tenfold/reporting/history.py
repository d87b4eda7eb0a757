"""What a run directory tells of its run, put in order for plots and tables."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tenfold.errors import TenfoldError
from tenfold.reporting.reading import read_events

Event = dict[str, Any]


@dataclass(frozen=True)
class History:
    """The events of one run by kind; what has a step stands once for each step, in order."""

    name: str
    config: dict[str, Any]
    config_text: str
    start: Event
    steps: list[Event]
    validations: list[Event]
    delinks: list[Event]
    checks: list[Event]  # of rules that may end a stage
    splits: list[Event]  # delinkings within a stage
    similarities: list[Event]  # a step with a delinking has two, before and after it
    samples: list[Event]
    evaluations: list[Event]
    placements: list[Event]  # where state lies: of each stage, of a resumption too
    plans: list[Event]  # what of the layout was decided as the run began
    measured: list[Event]  # what was foreseen of a stage beside what was measured
    troubles: list[Event]  # note, skip, stop, resume, error, in the order of the file
    end: Event | None
    latest: Event  # the last line of the file

    @classmethod
    def read(cls, run: Path) -> History:
        """The history in the run directory `run`; TenfoldError where there is nothing to tell yet."""
        events = read_events(run)
        text = _read_config(run / "config.toml")
        steps = _once(events, "step")
        validations = _once(events, "validation")
        if not steps and not validations:
            raise TenfoldError(f"{run} has no metrics yet: the first come after training.log_every steps")
        start: Event = next((event for event in reversed(events) if event.get("event") == "start"), {})
        return cls(
            name=str(start.get("run") or run.resolve().name),
            config=tomllib.loads(text),
            config_text=text,
            start=start,
            steps=steps,
            validations=validations,
            delinks=_once(events, "delink"),
            checks=_once(events, "check"),
            splits=_once(events, "split"),
            similarities=_once(events, "similarity", "stage"),
            samples=_once(events, "sample"),
            evaluations=_once(events, "evaluation", "task", "name"),
            placements=_once(events, "placement", "stage"),
            plans=_once(events, "plan"),
            measured=_once(events, "measured", "stage"),
            troubles=[event for event in events if event.get("event") in ("note", "skip", "stop", "resume", "error")],
            end=next((event for event in reversed(events) if event.get("event") == "end"), None),
            latest=events[-1],
        )

    @property
    def all_delinks(self) -> list[Event]:
        """Delinkings between stages and within them, in order."""
        return sorted([*self.splits, *self.delinks], key=lambda event: event["step"])

    @property
    def status(self) -> str:
        """finished, stopped, failed, or not finished (still going, or cut off: the files cannot tell which)."""
        if self.end is not None:
            return "finished"
        if self.latest.get("event") == "error":
            return "failed"
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

    def newest(self, key: str) -> Any:
        """The newest value of `key`, of the end or else of a step; None where there is none."""
        return next((event[key] for event in [self.end or {}, *reversed(self.steps)] if key in event), None)

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

    @property
    def shared_pairs(self) -> list[tuple[int, int]]:
        """Pairs of layers that shared a block before the first delinking; without one, all pairs."""
        layers = self.similarities[-1]["layers"] if self.similarities else []
        blocks = _blocks(self.delinks[0].get("pattern_from")) if self.delinks else {}
        pairs = [(one, other) for one in layers for other in layers if one < other]
        return [pair for pair in pairs if blocks.get(pair[0]) == blocks.get(pair[1])] or pairs

    def similarity(self, kind: str) -> list[tuple[Event, list[float]]]:
        """For each `similarity` event the cosines of `kind` ("attention", "ffn") of the `shared_pairs`."""
        found = []
        for event in self.similarities:
            place = {layer: index for index, layer in enumerate(event["layers"])}
            values = [event[kind][place[one]][place[other]] for one, other in self.shared_pairs]
            found.append((event, [value for value in values if value is not None]))
        return [(event, values) for event, values in found if values]

    def stage_rows(self) -> list[Event]:
        """For each stage: name, sharing, stored and total parameters, tokens, seconds, rate, validation loss, joules.

        They are the `end` event's where the run has one; before that they are read off the steps so far.
        """
        told = {stage["name"]: stage for stage in (self.end or {}).get("stages") or []}
        planned = {stage["name"]: stage for stage in self.start.get("stages") or []}
        tokens = {name: last - first for name, first, last in self.spans("tokens")}
        seconds = {name: last - first for name, first, last in self.spans("seconds")}
        rows, before = [], 0.0
        for name in self.stage_names:
            losses = [e.get("validation_loss") for e in self.validations if e.get("stage") == name]
            spent = seconds.get(name)
            row: Event = {
                "name": name,
                "tokens": tokens.get(name),
                "seconds": spent,
                "tokens_per_second": tokens[name] / spent if spent else None,
                "validation_loss": losses[-1] if losses else None,
            }
            used = [event.get("joules") for event in self.steps if event.get("stage") == name]
            if used and used[-1] is not None:
                row["joules"] = used[-1] - before
                row["joules_per_token"] = row["joules"] / row["tokens"] if row["tokens"] else None
                before = used[-1]
            keys = ("sharing", "parts", "rank", "experts", "stored_parameters", "total_parameters")
            plan = {key: planned.get(name, {}).get(key) for key in keys}
            rows.append({**plan, **row, **told.get(name, {})})
        return rows


def _once(events: list[Event], kind: str, *also: str) -> list[Event]:
    """The events of one kind in order of steps; of two for the same step (and `also` the same) the later one counts."""
    latest = {
        (event["step"], *(event.get(key) for key in also)): event
        for event in events
        if event.get("event") == kind and event.get("step") is not None
    }
    return sorted(latest.values(), key=lambda event: event["step"])


def _blocks(pattern: Any) -> dict[int, int]:
    """Layer -> block, of a pattern as a `delink` event holds it."""
    if isinstance(pattern, str):
        pattern = [int(block) for block in re.findall(r"\d+", pattern.partition(")")[0])]
    return dict(enumerate(pattern or []))


def _read_config(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
        tomllib.loads(text)
    except FileNotFoundError:
        raise TenfoldError(f"there is no {path}: a run directory holds its configuration") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise TenfoldError(f"cannot read {path}: {error}") from None
    return text
