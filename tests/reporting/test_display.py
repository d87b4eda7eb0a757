"""The display: plain lines without a terminal, a live picture on one, both from the same events."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tenfold.reporting.display import Display
from tenfold.reporting.tables import closing_table, dry_run_table

TERMINAL = {"TERM": "xterm-256color"}


def show(
    example: SimpleNamespace, console: Console, quiet: bool = False, events: list[dict[str, Any]] | None = None
) -> str:
    with Display(example.total_tokens, quiet=quiet, console=console) as display:
        display.note("a [note] with brackets")
        for event in example.events() if events is None else events:
            display.event(event)
    return console.file.getvalue()  # type: ignore[attr-defined]


def plain_console() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=40)


def test_without_a_terminal_there_is_one_plain_line_for_each_logged_step(example: SimpleNamespace) -> None:
    text = show(example, plain_console())
    steps = [event for event in example.events() if event["event"] == "step"]
    titles = [line for line in text.splitlines() if "grad" in line and "of rate" in line]
    assert "\x1b" not in text
    assert "\r" not in text
    assert len(titles) == 1
    rows = [line for line in text.splitlines() if len(line) == len(titles[0]) and line.split()[0].isdigit()]
    assert len(rows) == len(steps)


def test_columns_stand_below_their_titles_whatever_the_numbers(example: SimpleNamespace) -> None:
    lines = [line for line in show(example, plain_console()).splitlines() if line.startswith("   ")]
    title = lines[0]
    end = title.index("loss") + len("loss")
    assert all(len(line) == len(title) for line in lines)
    assert all(line[end - 1].isdigit() and line[end] == " " for line in lines[1:])


def test_everything_that_happened_has_its_line(example: SimpleNamespace) -> None:
    text = show(example, plain_console())
    for part in (
        "a [note] with brackets",
        "stage 1/2: pseudo, shares all, 4.39M of 15.2M parameters stored, 240 steps",
        "step 240: validation loss",
        "delinked pseudo -> real, stored parameters 4.39M -> 15.2M, optimizer moments: rescale, "
        "logits equal to the last bit",
        "stopped at step 400: interrupted (Ctrl-C); --resume goes on from here",
        "goes on from step 395",
        "finished at step 600",
    ):
        assert part in text


def test_on_a_terminal_every_event_passes_through_the_live_display(example: SimpleNamespace) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, _environ=TERMINAL, width=120, height=40)
    text = show(example, console)
    assert "\x1b" in text
    for part in ("stage 2/2", "of matrix rate", "GiB of 8 GiB", "9.83M of 9.83M tokens", "learning rate", "[note]"):
        assert part in text


def test_the_live_display_stands_before_the_first_event() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, _environ=TERMINAL, width=80)
    with Display(1000, console=console):
        pass
    assert "measuring" in console.file.getvalue()  # type: ignore[attr-defined]


def test_quiet_shows_nothing(example: SimpleNamespace) -> None:
    assert show(example, Console(file=io.StringIO(), force_terminal=True), quiet=True) == ""


def test_time_left_is_from_the_recent_rate_of_the_current_stage() -> None:
    display = Display(1000, console=plain_console())
    assert display.seconds_left() is None
    display.event({"event": "step", "step": 1, "stage": "a", "tokens": 100, "tokens_per_second": 90.0})
    assert display.seconds_left() == pytest.approx(10)
    display.event({"event": "step", "step": 2, "stage": "b", "tokens": 500, "tokens_per_second": 5.0})
    assert display.seconds_left() == pytest.approx(100)


def test_a_step_with_missing_numbers_is_shown_with_dashes() -> None:
    console = plain_console()
    with Display(1000, console=console) as display:
        display.event({"event": "step", "step": 1, "stage": "a", "tokens": 10, "loss": None})
    assert "–" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_closing_table_says_what_the_run_came_to(example: SimpleNamespace) -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(
        closing_table(
            example.events()[-1], [example.delink, {**example.delink, "logits_equal": False, "max_difference": 0.5}]
        )
    )
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("stored parameters", "4.39M", "unigram loss 6.4120", "bigram loss 4.3180", "equal to the last bit"):
        assert part in text
    assert "DIFFERENT, by up to 0.5" in text
    assert "Read & return" in text


def test_the_dry_run_table_has_a_row_for_each_stage(example: SimpleNamespace) -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(dry_run_table(example.stages))
    rows = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert rows[0].split() == [
        *("stage", "sharing", "params", "experts", "stored", "active", "FLOPs", "steps", "tokens"),
    ]
    assert rows[1].split() == ["pseudo", "all", "15.2M", "–", "4.39M", "7.34M", "48.23M", "240", "3.93M"]
    assert rows[2].split() == ["real", "none", "15.2M", "–", "15.2M", "7.34M", "48.23M", "360", "5.9M"]


def test_sources_and_lengths_are_told_as_they_change() -> None:
    console = Console(file=io.StringIO(), width=200)
    display = Display(1000, console=console)
    stage = {"name": "a", "sharing": "all", "sequence_lengths": [64, 128, 256]}
    with display:
        display.event({"event": "start", "stages": [stage]})
        for step, length in ((1, 64), (2, 64), (3, 128)):
            display.event({"event": "step", "step": step, "stage": "a", "tokens": step, "sequence_length": length})
        display.event(
            {"event": "validation", "step": 3, "validation_loss": 2.5, "source_losses": {"web": 3.0, "code": 2.0}}
        )
    console.print(closing_table({"stages": [], "epochs": {"web": 0.7, "code": 3.1}}, []))
    shown = console.file.getvalue()
    assert "tokens in sequences of 64 to 256" in shown
    assert shown.count("sequences of 128 tokens, 64 before") == 1
    assert "validation loss 2.5000, web 3.0000, code 2.0000" in shown
    assert "read: web 0.70 epochs, code 3.10 epochs" in shown


def test_an_offloaded_run_tells_where_its_state_lies_and_what_that_cost(example: SimpleNamespace) -> None:
    console = Console(file=io.StringIO(), force_terminal=False, width=100)
    lines = show(example, console, events=example.offloaded()).splitlines()
    text = "\n".join(" ".join(line.split()) for line in lines)
    for part in (
        "step 0: where the state of pseudo lies, and what that is to cost:\nall state stays on the device",
        "step 240: where the state of real lies, and what that is to cost:\nstate of kind tier",
        "layers 0-5 moments disk 120 MiB 240 MiB 1.2 s 0.3 s",
        "step 600: what real took, without its first step:\nof a step foreseen measured difference\n"
        "time 1.9 s 2 s +5.3%\nmemory of a rank, at most 232 MiB 400 MiB +72.4%\n"
        "waiting for transfers 0.3 s 0.25 s -16.7%",
        "read from disk 120 MiB 120 MiB +0.0%",
    ):
        assert part in text
    waits = [line for line in lines if line.strip().startswith("waits")]
    real = [event for event in example.events() if event["event"] == "step" and event["stage"] == "real"]
    assert waits == [" " * 9 + "waits 0.25 s a step; disk 120 MiB, 120 MiB read, 120 MiB written a step"] * len(real)
    assert max(map(len, waits)) <= 100


def test_the_live_display_tells_what_lies_below_the_device(example: SimpleNamespace) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, _environ=TERMINAL, width=100, height=40)
    assert "disk 120 MiB, 120 MiB read" in show(example, console, events=example.offloaded())
    console = Console(file=io.StringIO(), force_terminal=True, _environ=TERMINAL, width=100, height=40)
    assert "below the device" not in show(example, console)


def test_quiet_shows_no_tables_either(example: SimpleNamespace) -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    assert show(example, console, quiet=True, events=example.offloaded()) == ""
