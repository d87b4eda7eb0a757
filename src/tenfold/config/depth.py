"""Which layers are meant: so many of them spread evenly over the depth, or those that a run file names.

A *place* is where in the forward pass something is used: -1 before the layers (the embedding), 0..depth-1 the layers,
`depth` behind them (the head).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Annotated

from pydantic import AfterValidator

_ITEM = re.compile(
    r"all|embedding|head|(?P<first>\d+)(-(?P<last>\d+))?|every (?P<step>[1-9]\d*)( from (?P<begin>\d+))?"
)


def is_chosen(number: int, count: int, total: int) -> bool:
    """Whether `number` (from 0) is among the `count` of `total` that lie most evenly."""
    return (number + 1) * count // total > number * count // total


_WRITTEN = {
    "layers": '"all", "3", "4-11", "0-3,8", "every 2" (0, 2, 4, ...), "every 2 from 1", "embedding" or "head"',
    "experts": '"all", "3", "8-63", "0-3,8", "every 2" (0, 2, 4, ...) or "every 2 from 1"',
}


def _items(text: str, what: str = "layers") -> list[re.Match[str]]:
    items = [(part, _ITEM.fullmatch(" ".join(part.split()))) for part in text.split(",")]
    for part, match in items:
        if match is None or (what == "experts" and match[0] in ("embedding", "head")):
            raise ValueError(f"cannot read {part.strip()!r} as {what}; write {_WRITTEN[what]}")
        if match["last"] is not None and int(match["last"]) < int(match["first"]):
            raise ValueError(f"{what} {part.strip()!r} run backwards: write {match['last']}-{match['first']}")
    return [match for _, match in items if match is not None]


def _numbers(item: re.Match[str], count: int) -> range:
    """What an item names of `count` things, and more if it names one that is not there."""
    if item["first"] is not None:
        return range(int(item["first"]), int(item["last"] or item["first"]) + 1)
    begin = int(item["begin"] or 0)
    return range(begin, max(count, begin + 1), int(item["step"] or 1))


def places_of(text: str, depth: int) -> frozenset[int]:
    """The places that `text` names in a model of `depth` layers; "all" is embedding and head, too.

    Raises ValueError for what is not layers, and for a layer that is not there.
    """
    found: set[int] = set()
    ends = {"all": range(-1, depth + 1), "embedding": [-1], "head": [depth]}
    for item in _items(text):
        named: Sequence[int] = ends.get(item[0]) or _numbers(item, depth)
        if item[0] not in ends and named[-1] >= depth:
            raise ValueError(f"{item[0]!r} names layer {named[-1]}, and the layers are 0 to {depth - 1}")
        found.update(named)
    return frozenset(found)


def experts_of(text: str, count: int) -> frozenset[int]:
    """The experts of a layer that `text` names, of `count`: as layers are, without embedding and head.

    Raises ValueError for what is not experts, and for one that is not there.
    """
    found: set[int] = set()
    for item in _items(text, "experts"):
        named = _numbers(item, count)
        if named[-1] >= count:
            raise ValueError(f"{item[0]!r} names expert {named[-1]}, and the experts are 0 to {count - 1}")
        found.update(named)
    return frozenset(found)


def _checked(text: str) -> str:
    _items(text)
    return text


def _checked_experts(text: str) -> str:
    _items(text, "experts")
    return text


Layers = Annotated[str, AfterValidator(_checked)]
Experts = Annotated[str, AfterValidator(_checked_experts)]


def ranges(numbers: Iterable[int]) -> str:
    """Numbers in few signs: 0-3, 8."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def joined(names: Iterable[str]) -> str:
    """Parts as people say it: "layers 0-3, 8", "layers 0-11 (shared)", "experts 8-15 of layers 0-3", "embedding".

    Of lots of many experts that are no neighbours the name is as "layers.3.experts.5+63": 5 and 63 more.
    """
    layers, others = [], []
    experts: dict[str, set[str]] = {}
    for name in names:
        number, _, some = name.removeprefix("layers.").partition(".experts.")
        if some:
            experts.setdefault(number, set()).update(some.split(","))
        elif number.isdecimal():
            layers.append(number)
        else:
            others.append(name if number == name else _layers([number]))
    alike: dict[str, list[str]] = {}
    for number, runs in experts.items():
        alike.setdefault(_experts_told(runs), []).append(number)
    some_of = []
    for told, of in alike.items():
        own = [number for number in of if number.isdecimal()]
        some_of += [f"{told} of {_layers(each)}" for each in (own, *([one] for one in of if one not in own)) if each]
    return ", ".join(([_layers(layers)] if layers else []) + some_of + others)


def _layers(told: Sequence[str]) -> str:
    if not told[0].isdecimal():
        return f"layers {told[0].replace(',', ', ')} (shared)"
    return f"layer{'s' * (len(told) > 1)} {ranges(map(int, told))}"


def _experts_told(runs: Collection[str]) -> str:
    numbers: set[int] = set()
    if any("+" in run for run in runs):
        count = sum(1 + int(run.partition("+")[2] or 0) if "+" in run else _length(run) for run in runs)
        return f"{count:,} experts by load"
    for run in runs:
        first, _, last = run.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return f"expert{'s' * (len(numbers) > 1)} {ranges(numbers)}"


def _length(run: str) -> int:
    first, _, last = run.partition("-")
    return int(last or first) - int(first) + 1
