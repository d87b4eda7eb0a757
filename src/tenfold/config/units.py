"""Quantities as people write them ("2B" tokens, "20%", "groups=4"): one parser each, for run files and flags alike."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator
from tyro.constructors import PrimitiveConstructorSpec

_T = TypeVar("_T")

_COUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kMBT]?)")
_MULTIPLE = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_count(value: Any) -> int:
    """A whole number, given as an integer or as text such as "500k", "2B" or "1.5M" (powers of ten)."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError('expected a whole number, or text such as "500k" or "2B"')
    if isinstance(value, int):
        return value
    match = _COUNT.fullmatch(value.strip().replace("_", ""))
    if match is None:
        raise ValueError(f'cannot read {value!r} as a count; write for example 2000000, "2M" or "1.5B"')
    number = Fraction(match[1]) * _MULTIPLE[match[2]]
    if number.denominator != 1:
        raise ValueError(f"{value!r} is not a whole number")
    return int(number)


def parse_share(value: Any) -> float:
    """A share between 0 and 1, given as a number or as text such as "20%"."""
    if isinstance(value, str) and (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", value)):
        value = float(match[1]) / 100
    elif isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise ValueError(f'cannot read {value!r} as a share; write for example 0.2 or "20%"') from None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError("a share lies between 0 and 1 (or 0% and 100%)")
    return float(value)


def flag(parse: Any, metavar: str, show: Any = str) -> Any:
    """How tyro reads such a value from one word of the command line."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: parse(words[0]),
        is_instance=lambda _: True,
        str_from_instance=lambda value: [show(value)],
    )


Count = Annotated[int, BeforeValidator(parse_count), flag(parse_count, "N|2M|1.5B")]
OptionalCount = Annotated[
    Annotated[int, BeforeValidator(parse_count)] | None,
    flag(lambda text: None if text == "None" else parse_count(text), "N|2M|1.5B"),
]
Share = Annotated[float, BeforeValidator(parse_share), flag(parse_share, "0.2|20%")]


_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kKMGT])(i?))?B")


def parse_bytes(value: Any) -> int:
    """Bytes, given as an integer or as text: "20GiB" (powers of 1024) or "20GB" (powers of 1000)."""
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    match = _BYTES.fullmatch(value.strip().replace("_", "")) if isinstance(value, str) else None
    if match is not None:
        number = Fraction(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index((match[2] or " ").upper())
        value = round(number)
    if type(value) is not int or value < 0:
        raise ValueError(f'cannot read {value!r} as bytes; write for example "20GiB", "500MB" or 1073741824')
    return value


_SECONDS = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd]?)")
_JOULES = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(J|Wh)")


def parse_seconds(value: str) -> float:
    """A length of time: "90m", "36h", "10d" or seconds."""
    match = _SECONDS.fullmatch(value.strip())
    if match is None or not float(match[1]):
        raise ValueError(f'cannot read {value!r} as a time; write for example "90m", "36h" or "10d"')
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def parse_joules(value: str) -> float:
    """Energy: "500kWh", "2GJ"."""
    match = _JOULES.fullmatch(value.strip())
    if match is None or not float(match[1]):
        raise ValueError(f'cannot read {value!r} as energy; write for example "500kWh" or "2GJ"')
    return float(match[1]) * 1000.0 ** " kMGT".index(match[2] or " ") * (3600 if match[3] == "Wh" else 1)


def parse_budget(value: Any) -> int | str:
    """A budget of memory: bytes (see `parse_bytes`), or a share of what there is, "60%"."""
    if isinstance(value, str) and value.strip().endswith("%"):
        parse_share(value)
        return re.sub(r"\s", "", value)
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise ValueError(f'{error}, or "60%" of what there is') from None


def budget_bytes(budget: int | str, total: int) -> int:
    """The bytes of a budget where there are `total`."""
    return int(parse_share(budget) * total) if isinstance(budget, str) else budget


Bytes = Annotated[
    Annotated[int, BeforeValidator(parse_bytes)] | None,
    flag(lambda text: None if text == "None" else parse_bytes(text), "20GiB|500MB|N"),
]
Budget = Annotated[
    Annotated[int | str, BeforeValidator(parse_budget)] | None,
    flag(lambda text: None if text == "None" else parse_budget(text), "20GiB|60%"),
]


def without_brackets(text: str) -> str:
    """A list or a table, as a flag has it, without its outer brackets."""
    text = text.strip()
    return text[1:-1].strip() if text[:1] + text[-1:] in ("[]", "{}") else text


def parse_sharing(value: Any) -> str | dict[str, int] | list[int]:
    """A sharing pattern as it stands in a run file or a flag.

    "all", "none", "sandwich", {groups = 4}, {cycle = 2} or a map such as [0, 0, 1, 1]; on the command line
    groups=4, cycle=2 and 0,0,1,1, in their brackets or without.
    """
    if isinstance(value, str):
        text = without_brackets(value)
        if text in ("all", "none", "sandwich"):
            return text
        if match := re.fullmatch(r"(groups|cycle)\s*=\s*(\d+)", text):
            value = {match[1]: int(match[2])}
        elif re.fullmatch(r"\d+(\s*,\s*\d+)*", text):
            value = [int(part) for part in text.split(",")]
    if isinstance(value, dict) and len(value) == 1:
        ((kind, number),) = value.items()
        if kind in ("groups", "cycle") and isinstance(number, int) and not isinstance(number, bool) and number > 0:
            return {kind: number}
    if isinstance(value, list | tuple) and value and all(type(block) is int and block >= 0 for block in value):
        return list(value)
    raise ValueError(
        f'cannot read {value!r} as a sharing pattern; write "all", "none", "sandwich", {{groups = 4}}, '
        "{cycle = 2} or a map from layer to block such as [0, 0, 1, 1]"
    )


def _show_sharing(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{kind}={number}" for kind, number in value.items())
    return value if isinstance(value, str) else ",".join(map(str, value))


Sharing = Annotated[
    str | dict[str, int] | list[int],
    BeforeValidator(parse_sharing),
    flag(parse_sharing, "all|none|sandwich|groups=N|cycle=N|0,0,1,1", _show_sharing),
]


def parse_until(value: Any) -> dict[str, Any]:
    """Where in the run a stage ends: at "20%" of it, at {tokens = "2B"} or at {steps = 500}, from the run's start.

    Or "auto": when a rule says so, with what it goes by, {auto = "correlation", threshold = 0.5, at_most = "40%"}; see
    `parse_auto`. On the command line 20%, tokens=2B, steps=500, auto and auto=returns,every=50, in brackets or without.
    """
    if isinstance(value, str):
        text = without_brackets(value)
        if text.endswith("%") and "=" not in text:
            return {"share": parse_share(text)}
        if text == "auto":
            return parse_auto({"auto": "correlation"})
        if match := re.fullmatch(r"(tokens|steps|share)\s*=\s*(\S+)", text):
            value = {match[1]: match[2].strip("\"'")}
        elif re.match(r"auto\s*=", text):
            value = pairs_of(text)
    if isinstance(value, dict) and "auto" in value:
        return parse_auto(value)
    if isinstance(value, dict) and len(value) == 1:
        ((kind, amount),) = value.items()
        if kind in ("tokens", "steps") and (count := parse_count(amount)) >= 0:
            return {kind: count}
        if kind == "share":
            return {kind: parse_share(amount)}
    raise ValueError(
        f'cannot read {value!r} as the end of a stage; write "20%" (of the run), {{tokens = "2B"}}, {{steps = 500}} or '
        '"auto"'
    )


def pairs_of(text: str) -> dict[str, str]:
    """What "a=1,b=2" says of each key; ValueError where it says two things of one."""
    found: dict[str, str] = {}
    for part in text.split(","):
        key, _, item = (word.strip(" \"'") for word in part.partition("="))
        if key in found:
            raise ValueError(f"{key} is given twice, as {found[key]!r} and as {item!r}: write it once")
        found[key] = item
    return found


_AUTO: dict[str, dict[str, Any]] = {
    "correlation": {"threshold": 0.5, "checks": 3, "every": 100, "split": False, "at_most": "40%"},
    "returns": {"checks": 3, "every": 100, "at_most": "40%"},
}
"""The rules that may end a stage, and their keys with defaults."""


def parse_auto(value: dict[str, Any]) -> dict[str, Any]:
    """The rule by which a stage ends: "correlation" or "returns" (docs/sharing.md), all its keys filled in.

    `every`: steps between checks; `checks`: how many in a row decide; `at_most`: where in the run the stage ends at the
    latest; `threshold` and `split`: of the correlation.
    """
    rule = value["auto"]
    if not isinstance(rule, str) or rule not in _AUTO:
        raise ValueError(f"auto = {rule!r} is no rule for the end of a stage; there are {', '.join(_AUTO)}")
    for key in value.keys() - {"auto"} - _AUTO[rule].keys():
        raise ValueError(f"auto = {rule!r} has no {key}; its keys are {', '.join(_AUTO[rule])}")
    found = {"auto": rule, **_AUTO[rule], **value}
    for key in ("checks", "every"):
        found[key] = _of_key(key, parse_count, found[key])
        if found[key] < 1:
            raise ValueError(f"{key} = {found[key]}: it must be at least 1")
    if "threshold" in found:
        found["threshold"] = _of_key("threshold", parse_share, found["threshold"])
        if not 0 < found["threshold"] < 1:
            raise ValueError(
                f"threshold = {found['threshold']}: a correlation that is to be fallen under lies in (0, 1)"
            )
    if "split" in found:
        split = {"true": True, "false": False}.get(str(found["split"]).lower())
        if split is None:
            raise ValueError(f"split = {found['split']!r}: it is true or false")
        found["split"] = split
    found["at_most"] = _of_key("at_most", parse_until, found["at_most"])
    if "auto" in found["at_most"]:
        raise ValueError('at_most = "auto": it is the place where the stage ends at the latest, such as "40%"')
    return found


def _of_key(key: str, parse: Callable[[Any], _T], value: Any) -> _T:
    try:
        return parse(value)
    except ValueError as error:
        raise ValueError(f"{key} = {value!r}: {error}") from None


def _show_until(value: Any) -> str:
    if not value:
        return "None"
    return ",".join(f"{kind}={_show_until(item) if isinstance(item, dict) else item}" for kind, item in value.items())


def _until_flag(text: str) -> Any:
    return None if text == "None" else parse_until(text)


Until = Annotated[
    dict[str, Any] | None,
    BeforeValidator(lambda value: None if value is None else parse_until(value)),
    flag(_until_flag, "20%|tokens=2B|steps=500|auto", _show_until),
]


def parse_weights(value: Any) -> dict[str, float]:
    """Weights of the sources of a mixture by name, {web = 0.7, code = 0.3}; web=0.7,code=0.3 on the command line."""
    if isinstance(value, str):
        pairs = pairs_of(without_brackets(value))
        try:
            value = {name: float(weight) for name, weight in pairs.items()}
        except ValueError:
            raise ValueError(f"cannot read {value!r} as weights; write for example web=0.7,code=0.3") from None
    if not isinstance(value, dict) or not value:
        raise ValueError("expected the sources' weights, for example {web = 0.7, code = 0.3}")
    for name, weight in value.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise ValueError(f"the weight of {name} is {weight!r}; it must be a number of at least 0")
    if not any(value.values()):
        raise ValueError("all weights are 0: give one source more")
    return {name: float(weight) for name, weight in value.items()}


def show_pairs(value: Any) -> str:
    """A table as `pairs_of` reads it."""
    return ",".join(f"{key}={item}" for key, item in value.items()) if isinstance(value, dict) else str(value)


Weights = Annotated[
    dict[str, float] | None,
    BeforeValidator(lambda value: None if value is None else parse_weights(value)),
    flag(lambda text: None if text == "None" else parse_weights(text), "web=0.7,code=0.3", show_pairs),
]


def parse_foreseen(value: Any) -> dict[str, Any]:
    """What a plan foresaw of a stage, {seconds = 0.41, device_bytes = "1.2GiB", cluster = "8:h100"}: of a step, of the
    rank that holds most, and for what ranks. On the command line seconds=0.41,device_bytes=1.2GiB,cluster=8:h100."""
    if isinstance(value, str):
        head, _, cluster = without_brackets(value).partition("cluster=")  # whose name may have commas
        value = {**pairs_of(head.rstrip(", ")), "cluster": cluster}
    if not isinstance(value, dict) or value.keys() != {"seconds", "device_bytes", "cluster"}:
        raise ValueError('expected {seconds = 0.41, device_bytes = "1.2GiB", cluster = "8:h100"}, as a plan writes it')
    try:
        seconds = float(value["seconds"])
    except (TypeError, ValueError):
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise ValueError(f"seconds = {value['seconds']!r}: a step takes a number of seconds above 0")
    size = _of_key("device_bytes", parse_bytes, value["device_bytes"])
    return {"seconds": seconds, "device_bytes": size, "cluster": str(value["cluster"])}


Foreseen = Annotated[
    dict[str, Any] | None,
    BeforeValidator(lambda value: None if value is None else parse_foreseen(value)),
    flag(
        lambda text: None if text == "None" else parse_foreseen(text),
        "seconds=0.41,device_bytes=1.2GiB,cluster=8:h100",
        show_pairs,
    ),
]


AXES = ("data_replicate", "data_shard", "tensor", "context", "pipeline", "expert")
"""The axes along which ranks split a run. `expert` folds over data_shard and context; the others multiply."""


def parse_degree(value: Any) -> int | str:
    """A number of ranks, or "auto"."""
    if value == "auto" or (type(value) is int and value > 0):
        degree: int | str = value
        return degree
    raise ValueError('expected a number of ranks, 1 or more, or "auto"')


def _degree_of(text: str) -> int | str:
    return parse_degree(int(text) if text.isdecimal() else text)


Degree = Annotated[int | str, BeforeValidator(parse_degree), flag(_degree_of, "N|auto")]


def parse_lengths(value: Any) -> int | dict[str, float | int]:
    """A sequence length, or one that grows: {from = 64, to = 1024, over = "50%", root = 1}.

    `to` may be left out (the run's own length), `over` is a share of the stage or a number of steps, and `root` 2 grows
    as the square root of progress. On the command line 64 and from=64,to=1024,over=50%.
    """
    if isinstance(value, str):
        text = without_brackets(value)
        value = int(text) if text.isdecimal() else pairs_of(text)
    if isinstance(value, dict) and {"from", "over"} <= value.keys() <= {"from", "to", "over", "root"}:
        lengths = {key: parse_count(value[key]) for key in ("from", "to") if key in value}
        over, root = value["over"], float(value.get("root", 1))
        over = int(over) if isinstance(over, str) and over.isdecimal() else over
        over = over if type(over) is int else parse_share(over)
        if all(length > 0 for length in lengths.values()) and over > 0 and 0 < root < math.inf:
            return {**lengths, "over": over, "root": root}
    elif type(value) is int and value > 0:
        return value
    raise ValueError(
        f"cannot read {value!r} as a sequence length; write a number of tokens, or "
        '{from = 64, to = 1024, over = "50%"} (over a share of the stage, or a number of steps)'
    )


Lengths = Annotated[
    int | dict[str, float | int] | None,
    BeforeValidator(lambda value: None if value is None else parse_lengths(value)),
    flag(lambda text: None if text == "None" else parse_lengths(text), "N|from=64,over=50%", show_pairs),
]


def parse_recompute(value: Any) -> str:
    """What layers make again in the backward pass; true and false are "full" and "none"."""
    named: dict[Any, str] = {True: "full", "true": "full", False: "none", "false": "none"}
    mode = named.get(value, value) if isinstance(value, bool | str) else value
    if mode in ("none", "selective", "full"):
        return str(mode)
    raise ValueError('expected "none", "selective" or "full" (or true, which is "full")')


Recompute = Annotated[
    Literal["none", "selective", "full"],
    BeforeValidator(parse_recompute),
    flag(parse_recompute, "none|selective|full"),
]
OptionalRecompute = Annotated[
    Annotated[Literal["none", "selective", "full"], BeforeValidator(parse_recompute)] | None,
    flag(lambda text: None if text == "None" else parse_recompute(text), "none|selective|full"),
]
