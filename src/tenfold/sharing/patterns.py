"""Sharing patterns: which layers use one set of weights, as partitions with a refinement order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable

from tenfold.errors import TenfoldError


class Pattern:
    """The map layer -> block, in canonical form: blocks are numbered in the order in which layers first use them.

    Two patterns are equal when the same layers share. `str(pattern)` shows the map.
    """

    def __init__(self, blocks: Iterable[Hashable]) -> None:
        seen: dict[Hashable, int] = {}
        self.blocks: tuple[int, ...] = tuple(seen.setdefault(block, len(seen)) for block in blocks)

    @classmethod
    def parse(cls, spec: str | dict[str, int] | list[int] | tuple[int, ...], layers: int) -> Pattern:
        """The pattern that a run file's `sharing` means for a model of `layers` layers.

        "all": one block. "none": a block for each layer. {"groups": g}: g blocks, each for layers / g consecutive
        layers. {"cycle": c}: c blocks in turn. "sandwich": the first and the last layer free, the others one block
        (Subformer). A list is the map itself.

        Raises TenfoldError when the numbers do not fit `layers`.
        """
        if spec == "all":
            return cls([0] * layers)
        if spec == "none":
            return cls(range(layers))
        if spec == "sandwich":
            return cls([0, *[1] * (layers - 2), 2][:layers] if layers > 1 else [0])
        if isinstance(spec, dict):
            ((kind, number),) = spec.items()
            if layers % number:
                fitting = ", ".join(str(count) for count in range(1, layers + 1) if layers % count == 0)
                raise TenfoldError(
                    f"sharing {{{kind} = {number}}} does not divide the model's {layers} layers evenly; {fitting} would"
                )
            return cls(layer // (layers // number) if kind == "groups" else layer % number for layer in range(layers))
        if isinstance(spec, str):
            raise TenfoldError(f"there is no sharing pattern {spec!r}")
        if len(spec) != layers:
            raise TenfoldError(f"the sharing map {list(spec)} names {len(spec)} layers, but the model has {layers}")
        return cls(spec)

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return len(self.blocks)

    @property
    def stored_blocks(self) -> int:
        """Distinct blocks."""
        return len(set(self.blocks))

    def uses(self, block: int) -> int:
        """Layers that use `block`."""
        return Counter(self.blocks)[block]

    def first_layer(self, block: int) -> int:
        """The lowest layer that uses `block`: the block is saved under that layer's name."""
        return self.blocks.index(block)

    def segments(self) -> list[tuple[int, ...]]:
        """The segments: shortest runs of consecutive layers that no block crosses, as the blocks of their layers."""
        last = {block: layer for layer, block in enumerate(self.blocks)}
        runs: list[tuple[int, ...]] = []
        start, end = 0, 0
        for layer, block in enumerate(self.blocks):
            end = max(end, last[block])
            if layer == end:
                runs.append(self.blocks[start : layer + 1])
                start = layer + 1
        return runs

    def neighbours(self) -> list[tuple[int, int]]:
        """Layers that share a block and follow one another among those that use it."""
        last: dict[int, int] = {}
        pairs = []
        for layer, block in enumerate(self.blocks):
            if block in last:
                pairs.append((last[block], layer))
            last[block] = layer
        return pairs

    def cut(self, pairs: Iterable[tuple[int, int]]) -> Pattern:
        """The pattern in which blocks are split between the layers of these `neighbours`."""
        cuts = {second for _, second in pairs}
        return Pattern(
            (block, sum(1 for earlier in range(layer + 1) if self.blocks[earlier] == block and earlier in cuts))
            for layer, block in enumerate(self.blocks)
        )

    def refines(self, coarser: Pattern) -> bool:
        """True when layers that share here share in `coarser` too."""
        if self.layers != coarser.layers:
            return False
        parent: dict[int, int] = {}
        return all(
            parent.setdefault(mine, theirs) == theirs for mine, theirs in zip(self.blocks, coarser.blocks, strict=True)
        )

    def check_refines(self, coarser: Pattern, where: str) -> None:
        """Raise TenfoldError, with both patterns, unless this one can be reached from `coarser` by delinking."""
        if not self.refines(coarser):
            raise TenfoldError(
                f"{where}: {self} does not refine {coarser}; delinking only frees layers, so layers that share after "
                "it must have shared before it"
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pattern) and self.blocks == other.blocks

    def __hash__(self) -> int:
        return hash(self.blocks)

    def __str__(self) -> str:
        return "(" + ",".join(map(str, self.blocks)) + ")"

    def __repr__(self) -> str:
        return f"Pattern({list(self.blocks)})"
