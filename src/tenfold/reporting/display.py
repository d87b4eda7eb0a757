"""What a person sees while a run goes on: a live display on a terminal, plain lines anywhere else."""

from __future__ import annotations

import collections
import statistics
import time
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tenfold.reporting.foreseen import foreseen_line, outcome_table
from tenfold.reporting.format import (
    MISSING,
    describe_check,
    format_bytes,
    format_count,
    format_logits,
    format_number,
    format_pattern,
    format_seconds,
    format_share,
    format_sharing,
)
from tenfold.reporting.placement import placement_table, traffic_line
from tenfold.reporting.tables import closing_table, dry_run_table

__all__ = [
    "Display",
    "closing_table",
    "dry_run_table",
    "format_bytes",
    "format_count",
    "format_seconds",
]

# Plain lines: title and width of each column, in the order of `Display._cells`.
COLUMNS = [
    ("step", 7),
    ("stage", 10),
    ("tokens", 8),
    ("done", 6),
    ("left", 8),
    ("loss", 8),
    ("tok/s", 8),
    ("of rate", 8),
    ("memory", 10),
    ("grad", 9),
    ("lr", 9),
]


class Display:
    """Shows the events of a run as they come. A context manager; with `quiet` it shows nothing at all.

    "of rate" is the share of the measured matrix rate. Time left is the run's tokens still to come over the recent
    tokens a second of the current stage.
    """

    def __init__(self, total_tokens: int, quiet: bool = False, console: Console | None = None) -> None:
        self._total = max(total_tokens, 1)
        self._quiet = quiet
        self._console = console or Console()
        self._live: Live | None = None
        self._start: dict[str, Any] = {}
        self._stages: list[dict[str, Any]] = []
        self._stage = ""
        self._step: dict[str, Any] = {}
        self._seen = time.monotonic()  # when the last step was shown
        self._validation: dict[str, Any] = {}
        self._rates: collections.deque[float] = collections.deque(maxlen=10)
        self._titled = False
        self._placed: dict[str, dict[str, Any]] = {}  # by stage

    def __enter__(self) -> Display:
        if not self._quiet and self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(get_renderable=self._picture, console=self._console, refresh_per_second=2)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def note(self, text: str) -> None:
        """A line that stays, above the live display."""
        if not self._quiet:
            self._console.print(Text(text), soft_wrap=not self._console.is_terminal)

    def _table(self, table: RenderableType) -> None:
        if not self._quiet:
            self._console.print(table)

    def event(self, event: dict[str, Any]) -> None:
        """Take in one event of `metrics.jsonl`."""
        match event.get("event"):
            case "start":
                self._start, self._stages = event, event.get("stages") or []
                self._stage = self._stages[0]["name"] if self._stages else ""
                for number, stage in enumerate(self._stages, start=1):
                    self.note(f"stage {number}/{len(self._stages)}: {_describe(stage)}")
            case "step":
                self._take_step(event)
            case "validation":
                self._validation = event
                loss, bits = format_number(event.get("validation_loss"), ".4f"), event.get("bits_per_byte")
                more = "" if bits is None else f", {format_number(bits)} bits per byte"
                if (accuracy := event.get("masked_accuracy")) is not None:
                    more = f", {format_share(accuracy)} of masked tokens right"
                for name, of_source in (event.get("source_losses") or {}).items():
                    more += f", {name} {format_number(of_source, '.4f')}"
                self.note(f"step {event.get('step')}: validation loss {loss}{more}")
            case "evaluation":
                values = ", ".join(
                    f"{key.replace('_', ' ')} {format_number(value, '.4g')}"
                    for key, value in (event.get("values") or {}).items()
                    if isinstance(value, float) or value is None
                )
                self.note(f"step {event.get('step')}: {event.get('name')} ({event.get('task')}): {values}")
            case "delink":
                self._change_stage(event.get("stage_to", ""))
                stored = f"{format_count(event.get('stored_before'))} -> {format_count(event.get('stored_after'))}"
                self.note(
                    f"step {event.get('step')}: delinked {event.get('stage_from')} -> {event.get('stage_to')}, "
                    f"stored parameters {stored}, optimizer moments: {event.get('moments')}, "
                    f"logits {format_logits(event)}"
                )
            case "placement":
                stage = str(event.get("stage", ""))
                self._placed[stage] = event
                self.note(f"step {event.get('step')}: where the state of {stage} lies, and what that is to cost:")
                self._table(placement_table(event))
            case "plan":
                for line in event.get("lines") or []:
                    self.note(line)
            case "measured" if not event.get("last"):
                self.note(f"{'':>9}{foreseen_line(event)}")
            case "measured":
                stage = str(event.get("stage", ""))
                self.note(f"step {event.get('step')}: what {stage} took, without its first step:")
                self._table(outcome_table(event, self._placed.get(stage)))
            case "check":
                self.note(f"step {event.get('step')}: {describe_check(event)}")
            case "split":
                stored = f"{format_count(event.get('stored_before'))} -> {format_count(event.get('stored_after'))}"
                self.note(
                    f"step {event.get('step')}: {event.get('stage_to')} now shares "
                    f"{format_pattern(event.get('pattern_to'))}, stored parameters {stored}, optimizer moments: "
                    f"{event.get('moments')}, logits {format_logits(event)}"
                )
            case "resume":
                self.note(f"goes on from step {event.get('step')}")
            case "stop":
                reason = event.get("reason", "no reason given")
                self.note(f"stopped at step {event.get('step')}: {reason}; --resume goes on from here")
            case "end":
                self.note(f"finished at step {event.get('step')} after {format_seconds(event.get('seconds'))}")
        if self._live is not None:
            self._live.refresh()

    def _take_step(self, event: dict[str, Any]) -> None:
        self._change_stage(event.get("stage", ""))
        length, before = event.get("sequence_length"), self._step.get("sequence_length")
        if length is not None and before is not None and length != before:
            self.note(f"step {event.get('step')}: sequences of {length:,} tokens, {before:,} before")
        self._step, self._seen = event, time.monotonic()
        if event.get("tokens_per_second"):
            self._rates.append(event["tokens_per_second"])
        if self._quiet or self._live is not None:
            return
        if not self._titled:
            self._line([title for title, _ in COLUMNS])
            self._titled = True
        self._line(self._cells())
        if told := traffic_line(self._step.get("offload")):
            self.note(f"{'':>9}{told}")

    def _change_stage(self, name: str) -> None:
        if name != self._stage:
            self._stage = name
            self._rates.clear()

    def seconds_left(self) -> float | None:
        """Seconds to the end of the run, as of the last step; None until the stage has been measured."""
        if not self._rates:
            return None
        return max(self._total - self._step.get("tokens", 0), 0) / statistics.median(self._rates)

    def _cells(self) -> list[str]:
        step = self._step
        return [
            str(step.get("step", MISSING)),
            self._stage,
            format_count(step.get("tokens")),
            format_share(step.get("tokens", 0) / self._total),
            format_seconds(self.seconds_left()),
            format_number(step.get("loss"), ".4f"),
            format_count(step.get("tokens_per_second")),
            format_share(step.get("flops_share")),
            format_bytes(step.get("memory_bytes")),
            format_number(step.get("grad_norm"), ".3g"),
            format_number(step.get("lr"), ".3g"),
        ]

    def _line(self, cells: list[str]) -> None:
        parts = [cell[:width].rjust(width) for cell, (_, width) in zip(cells, COLUMNS, strict=True)]
        self._console.print(Text("  ".join(parts)), soft_wrap=True)

    def _picture(self) -> RenderableType:
        """The live display as of now."""
        step = self._step
        tokens = step.get("tokens", 0)
        left = self.seconds_left()
        if left is not None:  # count down between steps
            left = max(left - (time.monotonic() - self._seen), 0)
        numbers = [stage["name"] for stage in self._stages]
        place = f"stage {numbers.index(self._stage) + 1}/{len(numbers)}  " if self._stage in numbers else ""
        stage = next((stage for stage in self._stages if stage["name"] == self._stage), {})
        head = Table.grid(expand=True)
        head.add_column()
        head.add_column(justify="right")
        length = step.get("sequence_length")
        lengths = f"  sequences of {length:,}" if stage.get("sequence_lengths") and length else ""
        pattern = format_sharing(stage)
        head.add_row(
            Text.assemble(place, (self._stage, "bold cyan"), f"  shares {pattern}{lengths}"),
            Text(f"{format_count(stage.get('stored_parameters'))} parameters stored"),
        )
        bar = Table.grid(expand=True, padding=(0, 1))
        bar.add_column(ratio=1)
        bar.add_column(justify="right", no_wrap=True)
        time_left = "measuring" if left is None else f"{format_seconds(left)} left"
        done = f"{format_share(tokens / self._total)}  {format_count(tokens)} of {format_count(self._total)} tokens"
        bar.add_row(ProgressBar(total=self._total, completed=tokens), Text(f"{done}  {time_left}"))
        title = f"tenfold  {self._start.get('run', '')}".rstrip()
        return Panel(Group(head, bar, self._gauges()), title=Text(title, style="bold"), title_align="left")

    def _gauges(self) -> RenderableType:
        step = self._step
        limit = (self._start.get("machine") or {}).get("memory_limit_bytes")
        memory = format_bytes(step.get("memory_bytes")) + (f" of {format_bytes(limit)}" if limit else "")
        gauges = [
            ("loss", format_number(step.get("loss"), ".4f")),
            ("validation", format_number(self._validation.get("validation_loss"), ".4f")),
            ("tokens/s", format_count(step.get("tokens_per_second"))),
            ("of matrix rate", format_share(step.get("flops_share"))),
            ("memory", memory),
            ("gradient norm", format_number(step.get("grad_norm"), ".3g")),
            ("learning rate", format_number(step.get("lr"), ".3g")),
            ("step", f"{step.get('step', MISSING)}"),
        ]
        table = Table.grid(expand=True, padding=(0, 1))
        for _ in range(4):
            table.add_column(ratio=1)
        for row in (gauges[:4], gauges[4:]):
            table.add_row(*(Text.assemble((f"{name}\n", "dim"), (value, "bold")) for name, value in row))
        if not (told := traffic_line(step.get("offload"))):
            return table
        return Group(table, Text.assemble(("below the device\n", "dim"), (told, "bold")))


def _describe(stage: dict[str, Any]) -> str:
    counts = (stage.get("stored_parameters"), stage.get("total_parameters"), stage.get("steps"), stage.get("tokens"))
    stored, total, steps, tokens = (format_count(count) for count in counts)
    pattern = format_sharing(stage)
    lengths = stage.get("sequence_lengths") or []
    in_sequences = f" in sequences of {' to '.join(f'{length:,}' for length in lengths[:1] + lengths[1:][-1:])}"
    rule = f", or less: it ends by {stage['ends_by']}" if stage.get("ends_by") else ""
    return (
        f"{stage.get('name')}, shares {pattern}, {stored} of {total} parameters stored, {steps} steps, {tokens} tokens"
        f"{in_sequences if lengths else ''}{rule}"
    )
