"""Models for tests of placements: parts as a plain model's are, in bytes small enough to count by hand."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

from tenfold.offload.placement import Part, Placement, explicit
from tenfold.offload.tiers import TierName


def part(name: str, layers: tuple[int, ...], weights: int, piece: int | None = None, **more) -> Part:
    """Of fp32 weights, gradients and AdamW's two moments; stepped in pieces of `piece` bytes of weights."""
    activations = more.pop("activations", 0)
    each = {"weights": 1, "gradients": 1, "moments": 2}
    held = {kind: weights * times for kind, times in each.items()} | (
        {"activations": activations} if activations else {}
    )
    step = min(weights, weights if piece is None else piece)
    return Part(name, layers, held, {kind: step * times for kind, times in each.items()}, **more)


def plain(layers: int, weights: int, piece: int | None = None, activations: int = 0, embedding: int = 0) -> list[Part]:
    """A model whose layers share nothing, and its embedding if it has one."""
    found = [part(f"layers.{each}", (each,), weights, piece, activations=activations) for each in range(layers)]
    if embedding:
        found.append(part("embedding", (), embedding, piece, ends=("embedding",)))
    return found


def unlike(most: int) -> st.SearchStrategy[list[Part]]:
    """Models of two to so many layers of which each has a size of its own, and an embedding."""
    return st.builds(
        lambda sizes, piece, embedding: (
            [part(f"layers.{number}", (number,), size, piece) for number, size in enumerate(sizes)]
            + [part("embedding", (), embedding, piece, ends=("embedding",))]
        ),
        st.lists(st.integers(10, 100), min_size=2, max_size=most),
        st.integers(1, 10),
        st.integers(5, 200),
    )


def here(parts: Sequence[Part]) -> Placement:
    """All on the device."""
    return explicit([], parts, 0)


def every_placement(parts: Sequence[Part], tiers: Sequence[TierName], activations: bool) -> Iterator[Placement]:
    """All placements in these tiers, the slow way; lots of a mixture's experts go with what else is of their unit."""
    items = [
        (each, kind)
        for each in parts
        for kind in each.bytes
        if (kind != "weights" or each.layers) and (kind != "activations" or activations)
    ]
    for chosen in itertools.product(tiers, repeat=len(items)):
        found: dict[str, Any] = {each.name: dict.fromkeys(each.bytes, "device") for each in parts}
        for (each, kind), tier in zip(items, chosen, strict=True):
            found[each.name][kind] = tier
        if all(found[each.unit or each.name]["weights"] == found[each.name]["weights"] for each in parts):
            yield Placement.of(found)
