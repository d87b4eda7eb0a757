"""Offload for anyone's model and training loop: `tenfold.offload`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adafactor, Muon, Optimizer

from tenfold.config.offload import OffloadConfig, PlacementRule
from tenfold.config.units import budget_bytes, parse_bytes
from tenfold.errors import TenfoldError
from tenfold.hardware.memory import memory_limit_bytes
from tenfold.offload.budget import Budgets, choose
from tenfold.offload.disk import Disk
from tenfold.offload.engine import Offload
from tenfold.offload.finding import ends_of, find_layers
from tenfold.offload.guards import Remove, guard
from tenfold.offload.host import Host
from tenfold.offload.moments import BY_ELEMENT, Inventory
from tenfold.offload.parts import parts_of
from tenfold.offload.pinned import pinnable_bytes
from tenfold.offload.placement import Part, Placement, explicit, tier_bytes
from tenfold.offload.tiers import TIERS, Emit, Tier, TierName
from tenfold.parallel.absent import is_absent

BY_PARAMETER = (*BY_ELEMENT, Adafactor, Muon)
"""Optimizers that treat every parameter by itself, as far as is known."""
Folder = str | os.PathLike[str]


def offload(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer],
    *,
    device_budget: int | str | None = None,
    placement: Sequence[Mapping[str, Any]] | None = None,
    disk: Folder | Sequence[Folder] = (),
    host_budget: int | str | None = None,
    layers: Sequence[nn.Module] | None = None,
    other_bytes: int | str = 0,
    activations_bytes: int | str | None = None,
    step_in_backward: bool = False,
    norm_type: float = 2.0,
    note: Emit = print,
) -> Offloaded:
    """Keep state of a model and its optimizers below the device between its uses; the loop stays the same.

    Give one of `device_budget`, bytes ("20GiB") or a share ("60%") of the device's memory (of RAM, where there is no
    accelerator), into which what stays has to fit, with the least traffic; or `placement`, the rules of a run file's
    [[offload.placement]], such as `[{"layers": "every 2", "weights": "disk", "moments": "disk"}]`. Below the device are
    the host (pinned RAM, beside an accelerator; at most `host_budget`) and the folders of `disk`, on fast disks.

    `optimizer`: all that train the model. `layers`: in the order in which they are used; unset, the longest
    `nn.ModuleList` of modules of one class. `other_bytes`: of the budget, what is for activations and temporaries.
    `activations_bytes`: what a layer leaves for its backward pass; with it a budget moves activations too, and rules
    may. `step_in_backward`: update weights as soon as their gradient is whole, in every backward pass: no gradients
    wait, and none can be clipped or accumulated. `norm_type`: the norm that `clip_grad_norm_` is to go by, 2 or
    infinity. `note` takes remarks for people.

    Results are those of the same loop without it, to the last bit. Raises TenfoldError, with nothing changed, where the
    model cannot be offloaded, a budget is too small, or a folder or its room is missing.
    """
    read = _read(device_budget, placement, disk, host_budget, step_in_backward)
    optimizers = _listed(optimizer)
    _check_model(model, optimizers)
    layers = list(find_layers(model) if layers is None else layers)
    _check_layers(model, layers)
    if norm_type not in (2.0, torch.inf):
        raise TenfoldError(f"norm_type = {norm_type!r}: norms of gradients that leave are of order 2 or infinity")
    other, kept = _bytes("other_bytes", other_bytes), _bytes("activations_bytes", activations_bytes or 0)
    device = next(each.device for each in model.parameters() if each.requires_grad)
    read.check_device(str, device.type)
    _check_rules(read, len(layers), kept)
    with ExitStack() as undo:
        undo.callback(_restore_state, [(each, dict(each.state)) for each in optimizers])
        inventory = Inventory(model, layers, optimizers)
        saved = [kept] * len(layers) if kept else []
        parts = parts_of(inventory, ends_of(model, layers), saved)
        chosen = _place(read, parts, len(layers), other, bool(kept), device)
        tiers = _open(read, tier_bytes(parts, chosen, step_in_backward), device, note)
        for each in tiers.values():
            undo.callback(each.close)
        engine = Offload(
            inventory,
            lambda unit, kind: chosen.tier(unit.name, kind),
            tiers,
            step_in_backward=step_in_backward,
            norm_kind=norm_type,
            activations=saved,
            guarded=True,
        )
        undo.pop_all()
    found = Offloaded(engine, chosen, tiers, guard(engine))
    room = ", ".join(f"{name} {size:,}" for name, size in found.bytes().items())
    note(f"offload: {chosen}. Bytes of state: {room}")
    return found


class Offloaded:
    """A model and its optimizers whose state is partly away, until `close`; also a context that closes at its end.

    `placement` says where what is.
    """

    def __init__(
        self, engine: Offload, placement: Placement, tiers: Mapping[TierName, Tier], guards: Sequence[Remove]
    ) -> None:
        self.placement = placement
        self._engine, self._tiers, self._guards, self._closed = engine, tiers, guards, False

    def clip_grad_norm_(self, max_norm: float, norm_type: float | None = None) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)`, of gradients that may be away."""
        self._check_open()
        engine = self._engine
        if engine.step_in_backward:
            raise TenfoldError(
                "step_in_backward=True has used every gradient before the norm of all is known: leave it out to clip"
            )
        return engine.clip_grad_norm_(max_norm, engine.gradients.kind if norm_type is None else norm_type)

    def bytes(self) -> dict[TierName, int]:
        """Bytes of state in each tier now; on the device with the memory through which the rest passes."""
        self._check_open()
        engine = self._engine
        here = engine.weights.size + engine.space.slab.size
        here += sum(store.slab.size for store in engine.activations.values())
        for unit in engine.units:
            for entry in unit.entries:
                if unit not in engine.weights.units:
                    here += entry.numel * entry.dtype.itemsize
                gradient = entry.parameter.grad
                tensors = [*engine.inventory.tensors(entry).values(), *([] if gradient is None else [gradient])]
                here += sum(each.untyped_storage().nbytes() for each in tensors if not _stands_in(each))
        sizes: dict[TierName, int] = {"device": here, **{name: tier.held for name, tier in self._tiers.items()}}
        return {name: sizes[name] for name in TIERS if name in sizes}

    def stall(self) -> dict[str, float]:
        """Seconds that the loop has stood still for transfers so far, by the kind of state that it waited for."""
        return self._engine.waited()

    def close(self) -> None:
        """Bring all state back to the device, as plain tensors, and let tiers, threads and memory go.

        Raises TenfoldError where state cannot be read; then it is lost, and everything is let go all the same.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._bring_back()
        finally:
            for remove in self._guards:
                remove()
            try:
                self._engine.close()
            finally:
                for tier in self._tiers.values():
                    tier.close()

    def _bring_back(self) -> None:
        engine = self._engine
        engine.gradients.bring_back_all()
        for unit in engine.units:
            for entry in unit.entries:
                if engine.is_below(entry.name):
                    whole = engine.tensor_of(entry.name, entry.parameter.detach())
                    engine.forget(entry.name)
                    entry.point(whole.view(-1))
                for key, stand_in in engine.inventory.tensors(entry).items():
                    state = engine.inventory.owners[entry].optimizer.state[entry.parameter]
                    state[key] = engine.tensor_of(f"{entry.name}/{key}", stand_in)

    def _check_open(self) -> None:
        if self._closed:
            raise TenfoldError("this offload was closed: all state is on the device; call tenfold.offload anew")

    def __enter__(self) -> Offloaded:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _stands_in(tensor: Tensor) -> bool:
    return type(tensor) is not Tensor or is_absent(tensor)


def _listed(optimizer: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    given: list[Any] = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
    found = [getattr(each, "optimizer", each) for each in given]  # in Accelerate's wrapping or without
    for each in found:
        if not isinstance(each, Optimizer):
            raise TenfoldError(f"expected an optimizer of torch.optim's kind, or several; found {type(each).__name__}")
        if not isinstance(each, BY_PARAMETER):
            raise TenfoldError(
                f"{type(each).__name__} is not known to update every parameter by itself, as offload has it do; known "
                f"are {', '.join(sorted(kind.__name__ for kind in BY_PARAMETER))} and what is derived from them"
            )
    return found


def _check_model(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    if not isinstance(model, nn.Module):
        raise TenfoldError(f"expected a model, an nn.Module; found {type(model).__name__}")
    if isinstance(model, DistributedDataParallel):
        raise TenfoldError(
            "DistributedDataParallel averages gradients after they have left: offload works on one process's model, "
            "without it (or in a run of Tenfold's own with [parallel])"
        )
    for module in model.modules():
        if module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule":
            raise TenfoldError(
                f"{type(module).__name__} is compiled: weights that come and go are told by hooks, which would be "
                "compiled with it; offload the model without torch.compile"
            )
    trained = {each for one in optimizers for group in one.param_groups for each in group["params"]}
    mine = {each: name for name, each in model.named_parameters() if each.requires_grad}
    if not trained & mine.keys():
        raise TenfoldError("the optimizer trains no parameter of this model: give the one made from its parameters")
    for parameter, name in mine.items():
        if hasattr(parameter, "offloaded"):
            raise TenfoldError(f"{name} is offloaded already: close() what tenfold.offload gave for it first")
        if hasattr(parameter, "placements"):
            raise TenfoldError(
                f"{name} is sharded (FSDP or DTensor): offload works on one process's model (a run of Tenfold's own "
                "offloads sharded ones, by [offload])"
            )
        if parameter not in trained:
            raise TenfoldError(
                f"{name} is trained by none of the optimizers: give all that there are, or freeze it "
                "(requires_grad_(False))"
            )
    devices = {parameter.device for parameter in mine}
    if len(devices) > 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        raise TenfoldError(
            f"the model is on {', '.join(sorted(map(str, devices)))}: offload goes from one CUDA device, or the CPU, "
            "down; move the model there before its optimizer is made"
        )


def _check_layers(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    inside = set(model.modules())
    for number, layer in enumerate(layers):
        if not isinstance(layer, nn.Module) or layer not in inside:
            raise TenfoldError(f"layers: number {number}, {type(layer).__name__}, is no module of the model")
    if not layers or len(set(layers)) < len(layers):
        raise TenfoldError(
            "layers: none was named" if not layers else "layers: one module stands there twice; name each once"
        )


def _read(
    device_budget: int | str | None,
    placement: Sequence[Mapping[str, Any]] | None,
    disk: Folder | Sequence[Folder],
    host_budget: int | str | None,
    step_in_backward: bool,
) -> OffloadConfig:
    """The arguments as [offload] of a run file has them."""
    folders = [disk] if isinstance(disk, str | os.PathLike) else list(disk)
    if device_budget is None and not placement:
        raise TenfoldError('say what is to leave: device_budget="20GiB", or placement=[{"layers": "all", ...}]')
    try:
        rules = [PlacementRule.model_validate(dict(rule)) for rule in placement or ()]
        return OffloadConfig(
            device_budget=device_budget,
            host_budget=host_budget,  # type: ignore[arg-type]
            disk=[os.fspath(folder) for folder in folders],
            placement=rules,
            step_in_backward=step_in_backward,
        )
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"])) or "placement"
        raise TenfoldError(f"{where} = {fault['input']!r}: {fault['msg'].removeprefix('Value error, ')}") from None


def _bytes(name: str, value: int | str) -> int:
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise TenfoldError(f"{name}: {error}") from None


def _check_rules(read: OffloadConfig, depth: int, activations: int) -> None:
    for rule in read.placement:
        if rule.experts is not None:
            raise TenfoldError(
                f"placement says experts = {rule.experts!r} of layers {rule.layers!r}, and only a run of Tenfold's own "
                "knows which parameters are whose: name layers alone"
            )
    try:
        read.check(str, depth, (), 0.0)
    except ValueError as error:
        raise TenfoldError(str(error)) from None
    below = [rule for rule in read.placement if rule.activations in ("host", "disk")]
    if below and not activations:
        raise TenfoldError(
            f'placement says activations = "{below[0].activations}" of layers {below[0].layers!r}, which needs to know '
            "how many bytes a layer leaves for its backward pass: give activations_bytes"
        )


def _place(
    read: OffloadConfig, parts: Sequence[Part], depth: int, other: int, activations: bool, device: torch.device
) -> Placement:
    if read.device_budget is None:
        return explicit(read.placement, parts, depth)
    cuda = device.type == "cuda"
    whole = torch.cuda.get_device_properties(device).total_memory if cuda else memory_limit_bytes()
    host = 0
    if cuda:
        host = pinnable_bytes()[0] if read.host_budget is None else read.host_budget
    free = sum(_free_bytes(folder) for folder in read.disk)
    return choose(
        parts,
        Budgets(budget_bytes(read.device_budget, whole), host, free),
        other,
        activations=activations,
        step_in_backward=read.step_in_backward,
        key=str,
        remedies=", or lower other_bytes, with a smaller batch or checkpointing of activations",
    )


def _free_bytes(folder: str) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError as error:
        raise TenfoldError(f"disk: the folder {folder} cannot be used: {error.strerror}; make it first") from None


def _open(read: OffloadConfig, sizes: Mapping[TierName, int], device: torch.device, note: Emit) -> dict[TierName, Tier]:
    """The tiers of which something is used."""
    tiers: dict[TierName, Tier] = {}
    if sizes["disk"]:
        free = sum(_free_bytes(folder) for folder in read.disk)
        if free < sizes["disk"]:
            raise TenfoldError(
                f"disk: {sizes['disk']:,} bytes of state are to go to {', '.join(read.disk)}, where {free:,} are free: "
                "make room, name more folders, or let less leave the device"
            )
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        tiers["disk"] = Disk([Path(folder) for folder in read.disk], rank, note)
    if sizes["host"]:
        if read.host_budget is not None and sizes["host"] > read.host_budget:
            raise TenfoldError(
                f"host_budget allows {read.host_budget:,} bytes, and placement puts {sizes['host']:,} there: raise it "
                'to that, or put less in "host"'
            )
        try:
            tiers["host"] = Host(sizes["host"], device)
        except TenfoldError:
            for each in tiers.values():
                each.close()
            raise
    return tiers


def _restore_state(before: Sequence[tuple[Optimizer, dict[Any, Any]]]) -> None:
    """Take away the optimizer state that was made for what did not come about."""
    for optimizer, state in before:
        optimizer.state.clear()
        optimizer.state.update(state)
