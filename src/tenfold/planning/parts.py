"""The state of a rank cut into parts, as `offload` cuts it: the same names, bytes and pieces, by arithmetic.

`offload.units` cuts parameters that have no memory; this counts the cuts of ranks that nobody started, where a stack of
experts may have thousands of slices. Tests hold the one against the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol

from tenfold.config.offload import PlacementRule
from tenfold.config.run import OptimConfig, RunConfig
from tenfold.offload import units
from tenfold.offload.codec import SMALL, BFloat16, Codec, Int8
from tenfold.offload.experts import MOST, lots_by_rules, rows_of_lot
from tenfold.offload.placement import End, Part
from tenfold.offload.tiers import ALIGN, Kind, aligned
from tenfold.offload.units import APART, name_of, told_layers
from tenfold.parallel.mesh import Degrees
from tenfold.planning.holdings import Held
from tenfold.planning.stages import Stage

_FP32 = 4
"""Bytes of a weight, a gradient, and a number that an optimizer sees."""

_LOTS = 96
"""The experts of a model are told apart in at most about so many lots, for of many layers each is little enough."""


class Stack(Protocol):
    """Experts of a layer that one tensor has: a `Held`, or an `offload.units.Entry`."""

    @property
    def experts(self) -> Sequence[range]:
        """Those that each row stands for."""

    @property
    def numel(self) -> int:
        """Numbers."""


Lots = Callable[[tuple[int, ...], Sequence[Stack]], Sequence[int]]
"""For the layers and the stacks of a unit the lot of each row; none: experts are not told apart."""


@dataclass(frozen=True)
class State:
    """The parts of a rank, and what is not in them."""

    parts: tuple[Part, ...]
    open_size: int
    """Bytes of the largest piece's state as an optimizer sees it, where it is kept in another format."""
    largest: int
    """Bytes of the largest parameter."""
    moments: int
    """Bytes of optimizer state where all of it is on the device, in the optimizer itself."""
    frozen: int
    """Bytes of parameters that are not trained."""


def together(_: tuple[int, ...], __: Sequence[Stack]) -> Sequence[int]:
    """No experts apart from others."""
    return ()


def evenly(most: int | None = None, on_pages: bool = False) -> Lots:
    """As a budget makes lots (`offload.experts.evenly`), or of each layer at most so many; `on_pages`: only where every
    expert fills whole pages of memory."""

    def lots(_: tuple[int, ...], stacks: Sequence[Stack]) -> Sequence[int]:
        rows = len(stacks[0].experts)
        elements = [each.numel // rows for each in stacks]
        if on_pages and any(each * _FP32 % ALIGN for each in elements):
            return ()
        size = rows_of_lot(rows, elements, _FP32, most)
        return [row // size for row in range(rows)] if size < rows else ()

    return lots


def by_rules(rules: Sequence[PlacementRule], depth: int, experts: int) -> Lots:
    """As rules name experts (`offload.experts.by_rules`), in a model of `depth` layers of so many."""

    def lots(layers: tuple[int, ...], stacks: Sequence[Stack]) -> Sequence[int]:
        numbers = lots_by_rules(rules, depth, experts, layers)
        return [numbers[each.start] for each in stacks[0].experts] if numbers else ()

    return lots


def lots_of(config: RunConfig, stage: Stage, degrees: Degrees) -> Lots:
    """Which experts of a layer a plan places together: those that rules of the run do, or lots that rules can name, for
    these begin with a page on every rank."""
    model, wanted = config.model, config.offload.of_stage(stage.config.offload)
    if wanted.placement:
        return by_rules(wanted.placement, model.layers, model.moe.experts)
    most = min(MOST, _LOTS // model.layers)
    return together if most < 2 or degrees.tensor > 1 else evenly(most, on_pages=degrees.shard > 1)


def state_of(
    held: Sequence[Held],
    optim: OptimConfig,
    activations: dict[int, int] | None = None,
    lots: Lots = together,
) -> State:
    """The state of a rank that holds `held`, trained as `optim` says.

    `activations` are the bytes of each layer that could be elsewhere between its passes, `lots` says which experts of a
    layer are placed together.
    """
    trained = [each for each in held if each.trained]
    by_layers: dict[tuple[int, ...], list[Held]] = {}
    by_module: dict[str, list[Held]] = {}
    for each in trained:
        if each.layers:
            by_layers.setdefault(each.layers, []).append(each)
        else:
            by_module.setdefault(each.name.rpartition(".")[0] or each.name, []).append(each)
    named = [(f"layers.{told_layers(using)}", using, entries) for using, entries in sorted(by_layers.items())]
    named += [(name, (), entries) for name, entries in by_module.items()]
    kept = _kept(named, activations or {})
    parts, open_size = [], 0
    cut: dict[tuple[object, ...], list[_Cut]] = {}  # of units that are alike
    for name, using, entries in named:
        stacks = [each for each in entries if each.experts and optimizer_of(each, optim) == "adamw"]
        of_rows = tuple(lots(using, stacks)) if stacks else ()
        key = (
            of_rows,
            *((each.shape, each.room, each.before_sharding, each.added, optimizer_of(each, optim)) for each in entries),
            *(each.experts for each in stacks if of_rows),
        )
        if key not in cut:
            cut[key] = _cut(entries, optim, of_rows)
        saved = kept.get(name, 0)
        for portion in cut[key]:
            with_activations = saved and portion is cut[key][0]
            parts.append(
                Part(
                    name_of(name, portion.experts),
                    using,
                    {**portion.sizes, "activations": saved} if with_activations else portion.sizes,
                    portion.pieces,
                    () if using else ends_of(name),
                    portion.experts,
                    name if len(cut[key]) > 1 else "",
                    added=portion.added,
                )
            )
            open_size = max(open_size, portion.open_size)
    return State(
        tuple(parts),
        open_size,
        max((each.room * _FP32 for each in trained), default=0),
        sum(_FP32 * sum(map(math.prod, _moments(each, optim))) for each in trained),
        sum(each.room * _FP32 for each in held if not each.trained),
    )


def ends_of(unit: str) -> tuple[End, ...]:
    """Where what is outside of layers is used."""
    return ("embedding",) if unit in ("embedding", "positions", "embedding_norm", "projection") else ("head",)


def _kept(named: Sequence[tuple[str, tuple[int, ...], list[Held]]], activations: dict[int, int]) -> dict[str, int]:
    """Bytes of activations that go with each unit: those of a layer with that of its units which fewest layers use."""
    keeper: dict[int, tuple[int, str]] = {}
    for name, using, _ in named:
        for layer in using:
            if layer not in keeper or len(using) < keeper[layer][0]:
                keeper[layer] = len(using), name
    found: dict[str, int] = {}
    for layer, size in activations.items():
        name = keeper[layer][1]
        found[name] = found.get(name, 0) + size
    return found


@dataclass
class _Cut:
    """A portion of a unit, of so many pieces."""

    count: int = 0
    experts: tuple[int, ...] = ()
    sizes: dict[Kind, int] = field(default_factory=lambda: {"weights": 0, "gradients": 0, "moments": 0})
    pieces: dict[Kind, int] = field(default_factory=lambda: {"weights": 0, "gradients": 0, "moments": 0})
    open_size: int = 0
    added: int = 0

    def add(self, weights: int, moments: int, seen: int, count: int, added: bool) -> None:
        """`count` pieces that are alike, of so many bytes."""
        self.added += count * weights if added else 0
        sizes: dict[Kind, int] = {"weights": weights, "gradients": weights, "moments": moments}
        for kind, size in sizes.items():
            self.sizes[kind] += count * size
            self.pieces[kind] = max(self.pieces[kind], size)
        self.open_size, self.count = max(self.open_size, seen), self.count + count


def _cut(entries: Sequence[Held], optim: OptimConfig, lots: Sequence[int]) -> list[_Cut]:
    """The bytes of a unit's portions, each in all and in its largest piece; see `offload.units.Unit.cut`."""
    portions: dict[int | None, _Cut] = {None: _Cut()}
    experts: dict[int, set[int]] = {}

    def add(slices: Sequence[tuple[Held, int, int]], lot: int | None = None, count: int = 1) -> None:
        """`count` pieces that are alike, of slices `begin` to `end` of parameters' memory."""
        size = aligned(sum(_apart((end - begin) * _FP32) for _, begin, end in slices))
        added = any(each.added for each, _, _ in slices)
        portions.setdefault(lot, _Cut()).add(size, *_state(slices, optim), count, added)

    def slice_up(each: Held, begin: int, end: int, lot: int | None = None) -> None:
        whole = max(0, min(end, each.numel) - begin) // units.PIECE
        if whole:
            add([(each, begin, begin + units.PIECE)], lot, whole)
        for first in range(begin + whole * units.PIECE, end, units.PIECE):
            add([(each, first, min(first + units.PIECE, end))], lot)

    small: dict[tuple[str, bool], list[tuple[Held, int, int]]] = {}
    for each in entries:
        optimizer = optimizer_of(each, optim)
        if lots and each.experts and optimizer == "adamw":
            row = each.numel // len(each.experts)
            for lot, numbers in groupby(range(len(each.experts)), lots.__getitem__):
                rows = list(numbers)
                last = rows[-1] == len(each.experts) - 1
                slice_up(each, rows[0] * row, each.room if last else (rows[-1] + 1) * row, lot)
                experts.setdefault(lot, set()).update(one for number in rows for one in each.experts[number])
        elif each.room <= units.PIECE:
            run = small.setdefault((optimizer, each.added), [])
            if sum(end for _, _, end in run) + each.room > units.PIECE:
                add(run)
                run = small[optimizer, each.added] = []
            run.append((each, 0, each.room))
        elif optimizer != "adamw":  # needs all of it at once
            add([(each, 0, each.room)])
        else:
            slice_up(each, 0, each.room)
    for run in small.values():
        add(run)
    for lot, told in experts.items():
        portions[lot].experts = tuple(sorted(told))
    return [portion for portion in portions.values() if portion.count]


def _state(slices: Sequence[tuple[Held, int, int]], optim: OptimConfig) -> tuple[int, int]:
    """Bytes that are kept of a piece's optimizer state, and those that an optimizer sees where these are others; see
    `offload.moments.Inventory.lay_out`."""
    kept = seen = 0
    coded = False
    for each, begin, end in slices:
        numbers = max(min(end, each.numel) - begin, 0)
        for shape in _moments(each, optim):
            alike = shape == each.shape
            count = numbers if alike else math.prod(shape)
            codec = _codec(each, optim) if alike else None
            coded |= codec is not None
            seen += _apart(count * _FP32)
            kept += _apart(count * _FP32 if codec is None else codec.size(count))
    return aligned(kept), aligned(seen) if coded else 0


def optimizer_of(held: Held, optim: OptimConfig) -> str:
    """Which optimizer trains a parameter: with Muon two share them (`training.optimizers.build_optimizers`)."""
    if optim.name != "muon":
        return optim.name
    return "muon" if held.layers and len(held.shape) == 2 and ".router." not in held.name else "adamw"


def _moments(held: Held, optim: OptimConfig) -> list[tuple[int, ...]]:
    """The shapes of the tensors of state that an optimizer keeps of a parameter."""
    optimizer, shape = optimizer_of(held, optim), held.shape
    if optimizer == "adamw":
        return [shape, shape]
    if optimizer == "muon":
        return [shape]
    if len(shape) < 2:
        return [shape]
    return [(*shape[:-2], 1, shape[-1]), (*shape[:-1], 1)]


def _codec(held: Held, optim: OptimConfig) -> Codec | None:
    if optim.state == "fp32" or held.before_sharding < SMALL:
        return None
    return BFloat16() if optim.state == "bf16" else Int8(True)


def _apart(size: int) -> int:
    return -(-size // APART) * APART
