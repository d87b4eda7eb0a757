"""Help and errors fit the terminal."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tenfold.cli.help import error_lines, fitted
from tenfold.cli.main import COMMANDS, main


def help_of(command: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main([command, "--help"]) == 0
    return capsys.readouterr().out


# One example line of `completion` is a path to be typed as it stands; it needs its 80 columns.
@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize("command", list(COMMANDS))
def test_no_line_of_help_is_wider_than_the_terminal(
    command: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = help_of(command, columns, monkeypatch, capsys)
    wide = [line for line in shown.splitlines() if len(line) > columns]
    assert not wide
    assert shown.startswith("usage: tenfold")
    assert shown.count("usage:") == 1
    assert "{None}" not in shown
    assert shown.lower().index("example") < shown.index("--help")


@pytest.mark.parametrize("command", ["train", "prepare", "generate", "report", "doctor"])
def test_help_fits_a_narrow_terminal_too(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert all(len(line) <= 60 for line in help_of(command, 60, monkeypatch, capsys).splitlines())


def test_help_of_train_has_a_table_for_every_section(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = help_of("train", 80, monkeypatch, capsys)
    for section in ("model", "model.moe", "data", "training", "optim", "checkpoint", "stages.0"):
        assert f"\n {section} options\n" in shown


def test_the_list_of_commands_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert all(len(line) <= 80 for line in capsys.readouterr().out.splitlines())


def test_a_long_example_goes_on_as_a_shell_reads_it() -> None:
    example = '  tenfold train run.toml --out "runs/a --b c" --optim.lr 3e-4 --stages.0.until 10% --dry-run'
    lines = fitted(example, 50).splitlines()
    assert all(len(line) <= 50 for line in lines)
    assert all(line.endswith(" \\") for line in lines[:-1])
    script = "printf '%s\\n' " + "\n".join(lines)
    asked = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
    assert asked.splitlines() == [
        "tenfold", "train", "run.toml", "--out", "runs/a --b c", "--optim.lr", "3e-4", "--stages.0.until", "10%",
        "--dry-run",
    ]  # fmt: skip


def test_flags_that_may_be_unset_keep_their_column() -> None:
    text = "usage: tenfold x\n\n options\n ----\n  --out {None}|PATH  where\n  --tokens INT       how many\n"
    assert fitted(text, 80).splitlines()[-2:] == ["  --out PATH         where", "  --tokens INT       how many"]


def test_an_error_is_wrapped_at_words_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    message = "tenfold: " + "words of an error " * 10 + "\n  second line"
    assert error_lines(message) == message
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    lines = error_lines(message).splitlines()
    assert all(len(line) <= 60 for line in lines)
    assert " ".join(" ".join(lines).split()) == " ".join(message.split())
    assert lines[-1] == "  second line"
