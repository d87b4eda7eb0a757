"""The reference of the run file, made from the models themselves: `python -m tenfold.config.reference`."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from tenfold.config.load import inner_model
from tenfold.config.presets import PRESETS
from tenfold.config.run import RunConfig

_HEAD = """# The run file

TOML. Every key is a flag too: `[optim] lr = 3e-4` is `--optim.lr 3e-4`, and a key of the first stage
`--stages.0.until 10%`. An unknown key is an error that names the nearest right one. Counts of tokens and
`vocab_size` of `[data]` may be written "500k", "2B"; shares 0.2 or "20%"; bytes "20GiB" (powers of 1024) or "20GB".
This page is made from the code (`make docs`); `tenfold train --help` says the same.
"""


def reference() -> str:
    """The page, in Markdown."""
    parts = [_HEAD, *_sections(RunConfig, "")]
    presets = "\n".join(f"- `{name}`" for name in PRESETS)
    return "\n".join([*parts, f"## Presets of `model.preset`\n\n{presets}\n"])


def _sections(model: type[BaseModel], path: str) -> Iterator[str]:
    hints = typing.get_type_hints(model)
    nested, rows = [], []
    for key, field in model.model_fields.items():
        inner, many = inner_model(hints[key])
        if inner is not None:
            nested.append((inner, f"{path}.{key}" if path else key, many))
            continue
        default = "required" if field.default is PydanticUndefined else _show(field.default)
        rows.append(f"| `{key}` | {_kind(hints[key])} | {default} | {field.description} |")
    if rows:
        yield "| key | values | default | what it is |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"
    for inner, name, many in nested:
        yield f"## `[[{name}]]`\n" if many else f"## `[{name}]`\n"
        yield f"{(inner.__doc__ or '').strip()}\n"
        yield from _sections(inner, name)


def _kind(hint: Any) -> str:
    arguments = [argument for argument in typing.get_args(hint) if argument is not type(None)]
    if typing.get_origin(hint) is Literal:
        return ", ".join(f"`{argument}`" for argument in arguments)
    if arguments and typing.get_origin(hint) not in (dict, list):
        return " or ".join(_kind(argument) for argument in arguments)
    names = {int: "whole number", float: "number", str: "text", bool: "true or false"}
    return names.get(hint, "table" if typing.get_origin(hint) is dict else "list")


def _show(value: object) -> str:
    return "unset" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    print(reference(), end="")
