"""`tenfold completion`: a script that completes Tenfold's command line in a shell.

The script holds every command, flag and choice, so that completing starts no Python; made anew after an upgrade.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from pydantic import BaseModel

from tenfold.config.load import inner_model
from tenfold.config.presets import PRESETS
from tenfold.config.run import DataConfig, EvaluationOptions, PrepareConfig, RunConfig

DESCRIPTION = """Print a script that completes commands, flags, choices and files in a shell.

Examples, once, before a new shell is opened (zsh: into a folder on $fpath):
  tenfold completion bash > ~/.local/share/bash-completion/completions/tenfold
  tenfold completion zsh > ~/.zfunc/_tenfold
  tenfold completion fish > ~/.config/fish/completions/tenfold.fish"""


@dataclass(frozen=True)
class CompletionArguments:
    shell: Annotated[Literal["bash", "zsh", "fish"], tyro.conf.Positional]
    """The shell: bash, zsh or fish."""


@dataclass(frozen=True)
class Flag:
    """A flag with what may follow it: nothing (a switch), files, one of `choices`, or a value of the user's."""

    name: str
    help: str
    kind: Literal["switch", "files", "choice", "value"]
    choices: tuple[str, ...] = ()


def main(argv: list[str]) -> int:
    """Print the script."""
    arguments = tyro.cli(CompletionArguments, args=argv, prog="tenfold completion", description=DESCRIPTION)
    print(SCRIPTS[arguments.shell](command_flags()), end="")
    return 0


def command_flags() -> dict[str, tuple[str, list[Flag]]]:
    """What each command does, and its flags."""
    from tenfold.cli.main import COMMANDS

    return {
        name: (what, [*_flags(name), Flag("--help", "tell of this command", "switch")])
        for name, what in COMMANDS.items()
    }


_RUN_FLAGS = [
    Flag("--out", "run directory for all that the run writes", "files"),
    Flag("--resume", "go on from the newest whole checkpoint", "switch"),
    Flag("--dry-run", "print what every stage weighs and costs, and exit", "switch"),
]
_ADVISE_FLAGS = [
    Flag("--seconds", "for how long steps of each stage are timed", "value"),
    Flag("--json", "print one JSON object", "switch"),
]
_PLAN_FLAGS = [
    Flag("--cluster", "nodes x accelerators, as 64x8:v100-32gb, or a file of doctor --save", "files"),
    Flag("--objective", "what is to be least", "choice", ("time", "energy", "cost")),
    Flag("--json", "print one JSON object with everything", "switch"),
    Flag("--dry-run", "count what the plan needs, too, without memory", "switch"),
    Flag("--timeline", "draw a step of each stage, .html or .json", "files"),
    Flag("--write", "write the run file with the plan in it", "files"),
    Flag("--share-until", "runs whose losses tell how long to share", "files"),
    Flag("--target-loss", "share so as to reach this loss soonest", "value"),
    Flag("--deadline", "share so as to reach the lowest loss by then", "value"),
    Flag("--energy-budget", "share so as to reach the lowest loss for so much energy", "value"),
]
_INSPECT_FLAGS = [
    Flag("--documents", "how many of the first documents are shown", "value"),
    Flag("--json", "print the figures as one JSON object", "switch"),
]
_FILES = {"path", "cache", "tokenizer", "data", "checkpoint"}  # keys of the run file that name files or folders


def _flags(command: str) -> Iterator[Flag]:
    if command == "train":
        yield from _RUN_FLAGS
        yield from _of_section(RunConfig, "--")
    elif command == "advise":
        yield from _ADVISE_FLAGS
        yield from _of_section(RunConfig, "--")
    elif command == "plan":
        yield from _PLAN_FLAGS
        yield from _of_section(RunConfig, "--")
    elif command == "prepare":
        yield from _of_section(PrepareConfig, "--")
    elif command == "inspect":
        yield from _INSPECT_FLAGS
        yield from _of_section(DataConfig, "--")
    elif command == "eval":
        yield from _of_dataclass(importlib.import_module("tenfold.cli.eval"))
        yield from _of_section(EvaluationOptions, "--")
    else:
        yield from _of_dataclass(importlib.import_module(f"tenfold.cli.{command}"))


def _of_section(model: type[BaseModel], prefix: str) -> Iterator[Flag]:
    hints = typing.get_type_hints(model)
    for key, field in model.model_fields.items():
        inner, many = inner_model(hints[key])
        name = key.replace("_", "-")
        if inner is not None:
            yield from _of_section(inner, f"{prefix}{name}{'.0' if many else ''}.")
        elif key == "preset":
            yield Flag(prefix + name, field.description or "", "choice", tuple(PRESETS))
        else:
            yield from _of_field(prefix, name, hints[key], field.description or "", key in _FILES)


def _of_dataclass(module: types.ModuleType) -> Iterator[Flag]:
    """The flags of the dataclass that a command's arguments are read into, or else those that its usage explains."""
    found = [
        value
        for name, value in vars(module).items()
        if name.endswith("Arguments") and dataclasses.is_dataclass(value) and value.__module__ == module.__name__
    ]
    if not found:
        for name, text in re.findall(r"^(--[\w-]+)  +(.+)$", module.USAGE, re.MULTILINE):
            yield Flag(name, text, "switch" if name == "--json" else "value")
        return
    arguments: Any = found[0]
    helps, hints = _docstrings(arguments), typing.get_type_hints(arguments)
    for field in dataclasses.fields(arguments):
        if "Positional" not in str(field.type):
            yield from _of_field("--", field.name.replace("_", "-"), hints[field.name], helps.get(field.name, ""))


def _docstrings(arguments: Any) -> dict[str, str]:
    """The text beneath each field of a class."""
    (made,) = ast.parse(inspect.getsource(arguments)).body
    assert isinstance(made, ast.ClassDef)
    return {
        field.target.id: text.value.value
        for field, text in zip(made.body, made.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def _of_field(prefix: str, name: str, hint: Any, text: str, files: bool = False) -> Iterator[Flag]:
    parts = list(_parts(hint))
    choices = [choice for part in parts if typing.get_origin(part) is Literal for choice in typing.get_args(part)]
    if parts == [bool]:
        yield Flag(prefix + name, text, "switch")
        yield Flag(f"{prefix}no-{name}", f"not: {text}", "switch")
    elif choices:
        yield Flag(prefix + name, text, "choice", tuple(map(str, choices)))
    else:
        yield Flag(prefix + name, text, "files" if files or Path in parts else "value")


def _parts(hint: Any) -> Iterator[Any]:
    """The types that a hint is made of, through unions, tuples and annotations."""
    inner = [part for part in typing.get_args(hint) if part not in (type(None), ...)]
    if typing.get_origin(hint) is Literal or not inner:
        yield hint
    elif typing.get_origin(hint) is Annotated:
        yield from _parts(inner[0])
    else:
        for part in inner:
            yield from _parts(part)


Commands = dict[str, tuple[str, list[Flag]]]


def bash(commands: Commands) -> str:
    """Bash: files are readline's own completion, which answers where the function gives nothing."""
    values, flags = [], []
    for command, (_, each) in commands.items():
        for flag in each:
            if flag.kind == "choice":
                values.append(f'        {command}:{flag.name}) _tenfold_words "{" ".join(flag.choices)}"; return ;;')
        files, free = (
            "|".join(f"{command}:{flag.name}" for flag in each if flag.kind == kind) for kind in ("files", "value")
        )
        values += [f"        {files}) return ;;"] if files else []
        values += [f"        {free}) compopt +o default +o bashdefault 2>/dev/null; return ;;"] if free else []
        flags.append(f'        {command}) flags="{" ".join(flag.name for flag in each)}" ;;')
    new = "\n"
    return f"""# Completes tenfold in bash; made by: tenfold completion bash
_tenfold_words() {{
    COMPREPLY=($(compgen -W "$1" -- "$current"))
}}
_tenfold() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD - 1]}} command=${{COMP_WORDS[1]}} flags=
    COMPREPLY=()
    if [[ $COMP_CWORD -eq 1 ]]; then
        _tenfold_words "{" ".join(commands)} --help --version"
        return
    fi
    # --flag=value comes as three words
    if [[ $current == "=" ]]; then
        current=
    elif [[ $before == "=" ]]; then
        before=${{COMP_WORDS[COMP_CWORD - 2]}}
    fi
    if [[ $command == completion ]]; then
        _tenfold_words "{" ".join(SCRIPTS)} --help"
        return
    fi
    case $command:$before in
{new.join(values)}
    esac
    [[ $current == -* ]] || return
    case $command in
{new.join(flags)}
    esac
    _tenfold_words "$flags"
}}
complete -o bashdefault -o default -F _tenfold tenfold
"""


def zsh(commands: Commands) -> str:
    """Zsh: `_arguments` with the flags of the command that stands first."""
    cases, listed = [], []
    for command, (what, flags) in commands.items():
        listed.append(f"        {_quoted(f'{command}:{what}')}")
        specs = []
        for flag in flags:
            text = _plain(flag.help).replace("[", "(").replace("]", ")").replace(":", "\\:")
            after = {"switch": "", "files": ":file:_files", "value": ":value:"}.get(
                flag.kind, f":value:({' '.join(flag.choices)})"
            )
            specs.append(_quoted(f"{flag.name}{'=' if after else ''}[{text}]{after}"))
        rest = _quoted(f"*:shell:({' '.join(SCRIPTS)})" if command == "completion" else "*:file:_files")
        cases.append(f"        {command}) _arguments {' '.join([*specs, rest])} ;;")
    new = "\n"
    return f"""#compdef tenfold
# Completes tenfold in zsh; made by: tenfold completion zsh
_tenfold() {{
    local -a commands
    commands=(
{new.join(listed)}
    )
    if (( CURRENT == 2 )); then
        _describe command commands
        return
    fi
    local command=$words[2]
    shift words
    (( CURRENT-- ))
    case $command in
{new.join(cases)}
    esac
}}
if [[ $funcstack[1] == _tenfold ]]; then
    _tenfold "$@"
else
    compdef _tenfold tenfold
fi
"""


def fish(commands: Commands) -> str:
    """Fish: one line for each command and flag."""
    lines = ["# Completes tenfold in fish; made by: tenfold completion fish"]
    for command, (what, flags) in commands.items():
        lines.append(f"complete -c tenfold -f -n __fish_use_subcommand -a {command} -d {_quoted(what)}")
        where = f"complete -c tenfold -n '__fish_seen_subcommand_from {command}'"
        for flag in flags:
            after = {"switch": "", "files": " -r -F", "value": " -x"}.get(
                flag.kind, f" -x -a {_quoted(' '.join(flag.choices))}"
            )
            lines.append(f"{where} -l {flag.name.removeprefix('--')}{after} -d {_quoted(_plain(flag.help))}")
    lines.append(f"complete -c tenfold -f -n '__fish_seen_subcommand_from completion' -a {_quoted(' '.join(SCRIPTS))}")
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """The first sentence, on one line, without what shells would take for signs of theirs."""
    return " ".join(text.split()).partition(". ")[0].rstrip(".").replace("\\", "").replace("`", "").replace("$", "")


def _quoted(text: str) -> str:
    # Single quotes end nowhere inside in any of the shells when there are none inside.
    return "'" + text.replace("'", "’") + "'"


SCRIPTS: dict[str, Callable[[Commands], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
