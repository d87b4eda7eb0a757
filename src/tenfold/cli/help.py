"""Help and errors in the width of the terminal.

The tables of flags come from tyro, which fits them; what stands above them, and errors, are wrapped here.
"""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator

# The first title that tyro prints above flags: " options", " model.moe options", " positional arguments".
_TITLE = re.compile(r"^ [\w. ]*(?:options|arguments) *$", re.MULTILINE)


_OPTIONAL = "{None}|"


def is_asked(argv: list[str]) -> bool:
    """Whether the arguments ask for help."""
    return "-h" in argv or "--help" in argv


def shown_fitting(command: Callable[[list[str]], int], argv: list[str]) -> int:
    """Run a command that is asked for help, and print what it prints in the terminal's width."""
    taken = io.StringIO()
    try:
        with contextlib.redirect_stdout(taken):
            result = command(argv)
    except SystemExit as stop:  # how argument parsers end after help
        if stop.code:
            raise
        result = 0
    print(fitted(taken.getvalue(), width()), end="")
    return result


def width() -> int:
    """Columns of the terminal, or of $COLUMNS; 80 where there is none."""
    return max(40, shutil.get_terminal_size((80, 24)).columns)


def fitted(text: str, columns: int) -> str:
    """Help in lines of at most `columns`: paragraphs wrapped, example commands continued, tables of flags as they are.

    A command that shows a usage of its own has it first; the one that the parser of flags adds is left out.
    """
    title = _TITLE.search(text)
    above, flags = (text[: title.start()], text[title.start() :]) if title else (text, "")
    own, again, _ = above.partition("\nusage: ")
    above = (own.rstrip("\n") + "\n\n" if again else above).replace(_OPTIONAL, "")
    lines = [line for paragraph in above.split("\n") for line in _wrapped(paragraph, columns)]
    lines += [_without_none(line).rstrip() for line in flags.split("\n")]
    return "\n".join(lines).replace("\n\n\n", "\n\n").rstrip("\n") + "\n"


def _wrapped(line: str, columns: int) -> Iterator[str]:
    if len(line) <= columns:
        yield line
    elif line.startswith("  tenfold "):
        yield from _continued(line, columns)
    else:
        first = re.match(r"(usage: tenfold \w+ |\s*(?:[A-Za-z.-]+  +)?)", line)
        hang = min(len(first[0]) if first else 0, columns // 2)
        yield from textwrap.wrap(
            line, columns, subsequent_indent=" " * hang, break_long_words=False, break_on_hyphens=False
        )


def _continued(example: str, columns: int) -> Iterator[str]:
    """A command over several lines as a shell reads them, broken before flags."""
    line = ""
    for part in re.split(r"""(?= --?[a-zA-Z])(?=(?:[^"]*"[^"]*")*[^"]*$)""", example):
        if line and len(line) + len(part) + 2 > columns:
            yield f"{line} \\"
            line = "     " + part
        else:
            line += part
    yield line


def _without_none(line: str) -> str:
    """What may be left unset takes a PATH, not "{None}|PATH"; what stands beside it stays in its column."""
    return re.sub(re.escape(_OPTIONAL) + r"(\S+)", r"\1" + " " * len(_OPTIONAL), line)


def error_lines(message: str) -> str:
    """An error message: wrapped at words on a terminal, left as it is where a program or a log reads it."""
    if not sys.stderr.isatty():
        return message
    columns = width()
    return "\n".join(
        wrapped
        for line in message.split("\n")
        for wrapped in (
            textwrap.wrap(line, columns, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
            if len(line) > columns
            else [line]
        )
    )
