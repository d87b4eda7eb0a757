"""A stage's model, optimizers and what of their state is not on the device, as the run file says it."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from tenfold.config.offload import Key, OffloadConfig, staying
from tenfold.config.run import RunConfig
from tenfold.errors import TenfoldError
from tenfold.hardware.device import matrix_rate
from tenfold.hardware.disk import measure_disk
from tenfold.hardware.memory import address_space_is_limited, unnamed_memory_bytes
from tenfold.nn.counting import layer_costs
from tenfold.nn.decoder import Decoder
from tenfold.nn.init import Memory
from tenfold.offload.budget import Budgets, choose
from tenfold.offload.counted import saved_bytes
from tenfold.offload.disk import Disk
from tenfold.offload.engine import Offload
from tenfold.offload.experts import Lots, by_load, by_rules, evenly
from tenfold.offload.forecast import Compute, Forecast, Rates, describe, forecast
from tenfold.offload.heap import Heap
from tenfold.offload.host import Host, link_rate
from tenfold.offload.loads import Loads
from tenfold.offload.moments import Inventory
from tenfold.offload.parts import parts_of
from tenfold.offload.pinned import pinnable_bytes
from tenfold.offload.placement import Part, Placement, explicit
from tenfold.offload.tiers import Emit, Tier, TierName
from tenfold.parallel.layout import Layout
from tenfold.planning.stages import Stage
from tenfold.training.entries import ends, entries
from tenfold.training.optimizers import build_optimizers
from tenfold.training.setup import memory_for_state, recompute_of

_STEP_RATE = 2e9
"""Bytes of weights that AdamW steps in a second, for a forecast."""


@dataclass
class Begun:
    """What a stage trains with; `placed` is the `placement` event's, where something may be offloaded. An `offload`
    without it keeps optimizer state on the device, in another format."""

    model: Decoder
    optimizers: list[Optimizer]
    offload: Offload | None = None
    placed: dict[str, Any] | None = None


def budgets_of(wanted: OffloadConfig, device: torch.device, host: int, disk: int) -> Budgets:
    """Bytes that a stage may use of each tier, with so many in those below the device."""
    budget = wanted.device_budget
    whole = memory_for_state(device)
    if isinstance(budget, str):
        budget = int(whole * float(budget.rstrip("%")) / 100)
    return Budgets(whole if budget is None else budget, host, disk)


class Tiers:
    """The tiers below the device that any stage of a run needs, and how fast they are. Without any, nothing is opened.

    Raises TenfoldError where a folder cannot be used.
    """

    def __init__(
        self, configs: Sequence[OffloadConfig], device: torch.device, rank: int, ranks: int, note: Emit
    ) -> None:
        self.device, self.by_name, self._host = device, dict[TierName, Tier](), 0
        configs = [config for config in configs if config.on]
        self.folders = [Path(folder) for folder in dict.fromkeys(each for one in configs for each in one.disk)]
        if self.folders:
            self.by_name["disk"] = Disk(self.folders, rank, note)
        if configs and device.type == "cuda":
            given = [config.host_budget for config in configs]
            sizes = [pinnable_bytes()[0] // ranks if size is None else size for size in given]
            self._host = max(sizes)
            self.by_name["host"] = Host(self._host, device)
        self._ranks = ranks
        self.before = unnamed_memory_bytes() if device.type == "cpu" else 0
        """Bytes of this process on a CPU, before it has any model."""

    @property
    def free(self) -> int:
        """Bytes that are free in the folders, for each rank."""
        return sum(shutil.disk_usage(folder).free for folder in self.folders) // self._ranks

    def budgets(self, wanted: OffloadConfig) -> Budgets:
        """Bytes that a stage may use of each tier."""
        disk = self.by_name.get("disk")
        return budgets_of(wanted, self.device, self._host, self.free + (disk.held if disk else 0))

    @property
    def lowest(self) -> Tier | None:
        """The last of them."""
        return self.by_name.get("disk", self.by_name.get("host"))

    @cached_property
    def rates(self) -> Rates:
        """Measured, at the first question."""
        disks = [measure_disk(folder, 2**28) for folder in self.folders]
        return Rates.of(disks, link_rate(self.device) if "host" in self.by_name else None, self._ranks)

    def close(self) -> None:
        """Let all go."""
        for tier in self.by_name.values():
            tier.close()


Moved = dict[str, dict[str, float]]
"""`bytes_read` and `bytes_written` by tier, `stalled` seconds by kind of state."""


class Meter:
    """What the steps of an offloaded stage move, and wait for. What is done between steps is not counted."""

    def __init__(self, offload: Offload, tiers: Tiers) -> None:
        self._offload, self._tiers = offload, tiers
        self._before, self._first = self._so_far(), True
        self._window, self._stage = _Sum(), _Sum()

    def begin_step(self) -> None:
        """A step begins."""
        self._before = self._so_far()

    def end_step(self, seconds: float) -> None:
        """It took so long."""
        now = self._so_far()
        moved = {
            what: {name: value - self._before[what].get(name, 0) for name, value in values.items()}
            for what, values in now.items()
        }
        self._window.add(moved, seconds)
        if not self._first:  # there optimizer state begins, which is not read
            self._stage.add(moved, seconds)
        self._first = False

    def window(self) -> dict[str, Any]:
        """Of a step, since the last time; `tier_bytes` are those that lie there now."""
        found, self._window = self._window.mean(), _Sum()
        del found["seconds"]
        return {"tier_bytes": self._tier_bytes(), **found}

    def outcome(self) -> dict[str, Any] | None:
        """Of a step of the stage, without its first; None where there is no other."""
        if not self._stage.steps:
            return None
        found = self._stage.mean()
        stalled = sum(found["stalled"].values())
        return {"tier_bytes": self._tier_bytes(), "stalled_seconds": stalled, **found}

    def _tier_bytes(self) -> dict[str, int]:
        return {name: tier.held for name, tier in self._tiers.by_name.items()}

    def _so_far(self) -> Moved:
        tiers = self._tiers.by_name
        return {
            "bytes_read": {name: tier.bytes_read for name, tier in tiers.items()},
            "bytes_written": {name: tier.bytes_written for name, tier in tiers.items()},
            "stalled": self._offload.waited(),
        }


class _Sum:
    """Of what several steps moved."""

    def __init__(self) -> None:
        self.steps, self._seconds = 0, 0.0
        self._moved: Moved = {}

    def add(self, moved: Moved, seconds: float) -> None:
        self.steps, self._seconds = self.steps + 1, self._seconds + seconds
        for what, values in moved.items():
            mine = self._moved.setdefault(what, {})
            for name, value in values.items():
                mine[name] = mine.get(name, 0.0) + value

    def mean(self) -> dict[str, Any]:
        found = {
            what: {name: each / self.steps for name, each in values.items()} for what, values in self._moved.items()
        }
        return {"seconds": self._seconds / self.steps, **found}


def begin_stage(
    config: RunConfig,
    stage: Stage,
    wanted: OffloadConfig,
    key: Key,
    layout: Layout,
    tiers: Tiers,
    only: Container[str] | None = None,
    loads: Loads | None = None,
) -> Begun:
    """The model of a stage with initial weights (`only` those of these names), and its optimizers, with all of their
    state in its place.

    `wanted` is what the run file says for the stage, with `key` for the paths of its keys; `loads` what experts saw so
    far, by which a budget tells them apart. Raises TenfoldError where a budget is too small for it.
    """
    wanted.check_device(key, layout.device.type)
    config = config.of_stage(stage.config)
    seed = config.training.seed
    if not wanted.on and config.optim.state == "fp32":
        model = layout.build(seed, None, only)
        return Begun(model, build_optimizers(model, config.optim, layout))
    made: list[tuple[Offload, dict[str, Any] | None, Plan]] = []

    def housed(model: Decoder) -> Memory:
        optimizers = build_optimizers(model, config.optim, layout, state=False)
        made.append(_offload(model, optimizers, config, stage, wanted, key, layout, tiers, loads))
        return made[0][0].filling

    model = layout.build(seed, housed, only)
    ((offload, placed, plan),) = made
    layout.before_pass, layout.before_schedule = offload.begin_pass, offload.gradients.begin_passes
    if wanted.device_budget is not None and layout.device.type == "cpu":
        Heap(model.layers, tiers.before + tiers.budgets(wanted).device, plan.passing)
    return Begun(model, list(offload.inventory.optimizers), offload, placed)


def _offload(
    model: Decoder,
    optimizers: Sequence[Optimizer],
    config: RunConfig,
    stage: Stage,
    wanted: OffloadConfig,
    key: Key,
    layout: Layout,
    tiers: Tiers,
    loads: Loads | None,
) -> tuple[Offload, dict[str, Any] | None, Plan]:
    plan = place_state(model, optimizers, config, stage, wanted, key, layout, tiers.budgets(wanted), loads)
    inventory, placement, groups = plan.inventory, plan.placement, plan.groups
    users = {parameter: len(layers) for parameter, layers in layout.users(model).items()}
    offload = Offload(
        inventory,
        lambda portion, kind: placement.tier(portion.name, kind),
        tiers.by_name,
        step_in_backward=wanted.step_in_backward,
        users=lambda parameter: users.get(parameter, 1),
        norm_kind=math.inf if config.optim.norm == "inf" else 2.0,
        order=groups,
        activations=plan.saved,
        put_off=wanted.on and not config.training.compile,  # hooks on layers would be compiled with them
    )
    if groups is not None:
        from tenfold.parallel.data import before_gathering, groups_of

        for number, group in enumerate(groups_of(model)):
            before_gathering(group, _begin(offload, number))
    if not wanted.on:
        return offload, None, plan
    cost = _forecast(config, stage, layout, plan.parts, placement, tiers, wanted)
    return offload, describe(plan.parts, placement, cost, plan.other, plan.in_backward), plan


class Plan(NamedTuple):
    """What a stage has of state, and where it is to lie."""

    inventory: Inventory
    parts: list[Part]
    placement: Placement
    groups: list[set[nn.Parameter]] | None
    """With FSDP2 those that it gathers together."""
    saved: list[int]
    """Bytes that each layer leaves for its backward pass and that could be elsewhere meanwhile."""
    other: int
    """Bytes of the device for all else that a step takes besides state."""
    passing: int
    """Those of them that are taken in a layer, or in the loss, and free again behind it."""
    micro_batches: int
    in_backward: bool
    """Whether the optimizer steps in the one backward pass of a step."""


def place_state(
    model: Decoder,
    optimizers: Sequence[Optimizer],
    config: RunConfig,
    stage: Stage,
    wanted: OffloadConfig,
    key: Key,
    layout: Layout,
    budgets: Budgets,
    loads: Loads | None = None,
) -> Plan:
    """Where the state of a stage is to lie: by rules, or within budgets. The model needs no memory.

    Where `loads` tell what experts saw so far, a budget makes lots by that, and reckons that gradients of zeros are not
    moved, which they are not on a CPU.
    Raises TenfoldError where a budget is too small for it.
    """
    config = config.of_stage(stage.config)
    entry_of, groups = entries(model, layout)
    numbers = [int(name) for name, _ in model.layers.named_children()]
    form, seed = config.optim.state, config.training.seed
    depth, experts, schedule = config.model.layers, config.model.moe.experts, layout.config.pipeline_schedule
    micro_batches = passes_of(config, stage, layout)[0]
    if loads is not None and not loads.steps:
        loads = None
    lots: Lots = evenly if loads is None else by_load(loads, micro_batches)
    if wanted.device_budget is None:
        lots = by_rules(wanted.placement, depth, experts, lambda number: f"{key('placement')}.{number}")
    inventory = Inventory(model, list(model.layers), optimizers, entry_of, numbers, form, seed, lots)
    saved, stays, passing = _activations(config, stage, layout, inventory) if wanted.on else ([], 0, 0)
    other = stays + passing
    parts = parts_of(inventory, ends, saved, loads, micro_batches)
    if wanted.device_budget is None:
        placement = explicit(wanted.placement, parts, depth, experts)
    else:
        together = config.optim.name == "adafactor" and not layout.alone
        if together:
            budgets = Budgets(*map(min, *((each.device, each.host, each.disk) for each in layout.of_all(budgets))))

        def chosen(kept: int) -> Placement:
            return choose(
                parts,
                budgets,
                other + kept,
                micro_batches=micro_batches,
                activations=wanted.activations,
                step_in_backward=wanted.step_in_backward,
                staying=staying(config.optim.name, config.training.compile, schedule, asdict(layout.degrees)),
                key=key,
            )

        def weights_below(placement: Placement) -> list[str]:
            return [part.name for part in parts if placement.tier(part.name, "weights") != "device"]

        placement = chosen(0)
        # Memory that passes is kept free for the next layer, with gaps (`Heap`), unless the budget is too small for
        # that, or weights would leave for it, which come in every pass.
        keeps = layout.device.type == "cpu" and not address_space_is_limited()
        for kept in [3 * passing // 2, 3 * passing // 4] if keeps else []:
            with suppress(TenfoldError):
                roomier = chosen(kept)
                if weights_below(roomier) == weights_below(placement):
                    placement, other = roomier, other + kept
                    break
        if together:
            placement = _of_first(placement, layout)
    in_backward = wanted.step_in_backward and micro_batches == 1
    return Plan(inventory, parts, placement, groups, saved, other, passing, micro_batches, in_backward)


def _of_first(placement: Placement, layout: Layout) -> Placement:
    """That of the first rank with the same layers, whose shards are never the shorter ones: all of them step whole
    parameters together, in an order that hangs on where these lie."""
    mine = layout.mesh.place["pipeline"]
    return next(each for place, each in layout.of_all((mine, placement)) if place == mine)


def passes_of(config: RunConfig, stage: Stage, layout: Layout) -> tuple[int, int, int]:
    """Micro-batches of a step, and sequences and tokens of a sequence in one."""
    mine = stage.batch_size // layout.data
    micro = min(config.training.micro_batch_size or mine, mine)
    length = stage.lengths[-1]
    return -(-mine // micro), micro * (config.data.sequence_length // length), length


def _activations(config: RunConfig, stage: Stage, layout: Layout, inventory: Inventory) -> tuple[list[int], int, int]:
    """Bytes that each layer of this rank leaves for its backward pass and that could be elsewhere meanwhile; of all
    else that a step takes besides state those that stay for the backward pass, and those that pass."""
    _, sequences, length = passes_of(config, stage, layout)
    chunk = config.training.loss_chunk
    saved = saved_bytes(layout.whole, sequences, length, chunk)
    with torch.device("meta"):
        keeping = Decoder(config.model, config.data.sequence_length, layout.whole.dtype)
    most = max(saved_bytes(keeping, sequences, length, chunk).layers)
    split = layout.degrees.tensor * layout.degrees.context
    recompute = recompute_of(config.training)
    depth = config.model.layers
    movable = [0 if recompute.of(layer, depth) != "none" else size // split for layer, size in enumerate(saved.layers)]
    largest = max(entry.room * entry.dtype.itemsize for unit in inventory.units for entry in unit.entries)
    # In the backward pass of a layer there are also what it makes again, gradients of about as much, and the
    # gradient of a parameter that is about to be added, or to leave; and at any time the memory in which an optimizer
    # sees state that is kept in another format.
    passing = most * (2 if config.training.recompute != "none" else 1) // split
    stays = sum(saved.layers) // split - sum(movable)
    passing += largest + inventory.open_size
    return movable, stays + saved.outside // split, saved.loss // split + passing


def _forecast(
    config: RunConfig,
    stage: Stage,
    layout: Layout,
    parts: Sequence[Part],
    placement: Placement,
    tiers: Tiers,
    wanted: OffloadConfig,
) -> Forecast:
    micro_batches, sequences, length = passes_of(config, stage, layout)
    split = layout.degrees.tensor * layout.degrees.context
    recompute = recompute_of(config.training)
    recomputed = [recompute.of(layer, config.model.layers) == "full" for layer in range(config.model.layers)]
    compute = Compute.of(
        layer_costs(layout.whole, length),
        recomputed,
        sequences * length // split,
        matrix_rate(layout.device, layout.whole.dtype),
        sum(part.bytes["weights"] for part in parts) / _STEP_RATE,
    )
    return forecast(parts, placement, tiers.rates, compute, micro_batches, wanted.step_in_backward)


def _begin(offload: Offload, number: int) -> Callable[[bool], None]:
    return lambda backward: offload.weights.begin(number, backward, torch.is_grad_enabled())
