"""Reading a run file, laying flags over it, and writing the effective configuration."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import tomllib
import typing
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
import tyro
from pydantic import BaseModel, ValidationError

from tenfold.config.run import RunConfig
from tenfold.config.units import AXES
from tenfold.errors import TenfoldError

SectionT = TypeVar("SectionT", bound=BaseModel)


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file, or one clear error."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TenfoldError(f"there is no run file {path}") from None
    except IsADirectoryError:
        raise TenfoldError(f"{path} is a folder; a run file is a .toml file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TenfoldError(f"{path} is not valid TOML: {error}") from None


def build(model: type[SectionT], raw: dict[str, Any], source: str) -> SectionT:
    """Check `raw` against `model`; every fault is told with its dotted path, its value and the nearest right key."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise TenfoldError(describe(error, model, source)) from None


def load_run(path: Path, flags: Sequence[str] = (), prog: str = "tenfold train RUN.toml") -> RunConfig:
    """The run file at `path` with command-line `flags` (`--optim.lr 3e-4`) laid over it."""
    raw = read_toml(path)
    config = build(RunConfig, raw, str(path))
    if not flags:
        return config
    # A table that the file leaves out counts as its default, to which a flag adds.
    default: BaseModel = RunConfig.model_fields["training"].default
    raw = {"training": default.model_dump(exclude_defaults=True)} | raw
    raw = raw | {"stages": [dict(stage) for stage in raw.get("stages", [{}])]}
    if raw.get("parallel") == "auto":
        raw["parallel"] = dict.fromkeys(AXES, "auto")
    named = {flag.split("=")[0] for flag in flags}
    if "--model.preset" in named:  # a flag wins over the file, and a preset is a whole model
        raw["model"] = {}
    for dotted, value in parse_flags(config, flags, prog):
        *parents, leaf = dotted.split(".")
        table: Any = raw
        for key in parents:
            table = table[int(key)] if isinstance(table, list) else table.setdefault(key, {})
        table[leaf] = value
    # training.tokens and training.steps exclude each other: the one given as a flag wins over the file's.
    for flag, other in (("--training.tokens", "steps"), ("--training.steps", "tokens")):
        if flag in named and f"--training.{other}" not in named:
            raw["training"].pop(other, None)
    return build(RunConfig, raw, f"{path} and flags")


def parse_flags(config: BaseModel, flags: Sequence[str], prog: str) -> Iterator[tuple[str, Any]]:
    """The (dotted path, value) pairs that `flags` give; their types and help are those of the config's own model."""
    default = _unchecked(config)
    with warnings.catch_warnings():  # tyro's doubt about values of types of one's own is not the user's
        warnings.filterwarnings("ignore", module=r"tyro\b")
        parsed = tyro.cli(type(default), default=default, args=list(flags), prog=prog, description=type(config).__doc__)
    known = {path for path, _ in leaves(config)}
    for flag in flags:
        if not flag.startswith("--"):
            continue
        path = flag.split("=")[0].removeprefix("--").replace("-", "_")
        if path not in known:  # a switch turned off: --training.no-compile
            head, dot, leaf = path.rpartition(".")
            path = f"{head}{dot}{leaf.removeprefix('no_')}"
        value: Any = parsed
        for key in path.split("."):
            value = value[int(key)] if isinstance(value, list) else getattr(value, key)
        yield path, value


@functools.cache
def _mirror(model: type[BaseModel]) -> type:
    """The model as a plain dataclass: flags are read into it, and `build` then checks all of them together."""
    fields = []
    for key, hint in typing.get_type_hints(model, include_extras=True).items():
        if key not in model.model_fields:
            continue
        inner, many = inner_model(hint)
        kind = hint if inner is None else list[_mirror(inner)] if many else _mirror(inner)  # type: ignore[misc]
        fields.append((key, typing.Annotated[kind, tyro.conf.arg(help=model.model_fields[key].description)]))
    made = dataclasses.make_dataclass(model.__name__, fields)
    made.__doc__ = model.__doc__
    return made


def inner_model(hint: Any) -> tuple[type[BaseModel] | None, bool]:
    """The section a field holds, if it holds one, and whether it is a list of them."""
    inner = typing.get_args(hint)[0] if typing.get_origin(hint) is list else hint
    is_section = isinstance(inner, type) and issubclass(inner, BaseModel)
    return (inner if is_section else None), inner is not hint


def _unchecked(section: BaseModel) -> Any:
    values = {}
    for key in type(section).model_fields:
        value = getattr(section, key)
        if isinstance(value, BaseModel):
            value = _unchecked(value)
        elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
            value = [_unchecked(item) for item in value]
        values[key] = value
    return _mirror(type(section))(**values)


def leaves(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a configuration with its dotted path."""
    for key in type(section).model_fields:
        value = getattr(section, key)
        if isinstance(value, BaseModel):
            yield from leaves(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
            for number, item in enumerate(value):
                yield from leaves(item, f"{prefix}{key}.{number}.")
        else:
            yield f"{prefix}{key}", value


def dump_toml(config: BaseModel, whole: bool = True) -> str:
    """The whole configuration as TOML: it alone builds the same configuration again. Not `whole`: only what it sets,
    as a run file has it."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True, exclude_unset=not whole))


def describe(error: ValidationError, model: type[BaseModel], source: str) -> str:
    """A validation error as lines for people: path, value, what would be right."""
    lines = []
    for fault in error.errors():
        path = ".".join(str(part) for part in fault["loc"])
        if fault["type"] == "extra_forbidden":
            lines.append(f"unknown key `{path}`{_nearest(path, model)}")
        elif fault["type"] == "missing":
            lines.append(f"`{path}` is missing")
        else:
            message = fault["msg"].removeprefix("Value error, ")
            shown = "" if isinstance(fault["input"], dict | list | BaseModel) else f" = {fault['input']!r}"
            lines.append(f"`{path}`{shown}: {message}" if path else message)
    return f"{source}: " + "\n  ".join(lines)


def _nearest(path: str, model: type[BaseModel]) -> str:
    parts = path.split(".")
    numbers = [part for part in parts if part.isdigit()]
    plain = ".".join(part for part in parts if not part.isdigit())
    known = list(_paths(model))
    alike = [name for name in known if name.count(".") == plain.count(".")]
    close = difflib.get_close_matches(plain, alike, n=1, cutoff=0.75)
    same_leaf = [name for name in known if name.rpartition(".")[2] == parts[-1]]
    near_leaf = difflib.get_close_matches(parts[-1], [name.rpartition(".")[2] for name in known], n=1)
    best = same_leaf[0] if same_leaf else close[0] if close else ""
    if not best and near_leaf:
        best = next(name for name in known if name.rpartition(".")[2] == near_leaf[0])
    if not best:
        return f"; the keys here are {', '.join(model.model_fields)}" if len(parts) == 1 else ""
    head, _, rest = best.partition(".")
    if numbers and inner_model(model.model_fields[head].annotation)[1]:
        best = f"{head}.{numbers[0]}.{rest}"
    return f"; did you mean `{best}`?"


def _paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for key, field in model.model_fields.items():
        inner, _ = inner_model(field.annotation)
        yield f"{prefix}{key}"
        if inner is not None:
            yield from _paths(inner, f"{prefix}{key}.")
