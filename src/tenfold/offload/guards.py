"""What a model and its optimizers give and take by themselves while state of theirs is away: real numbers, or an error.

State dicts have real tensors and are loaded into the tiers; what would copy or move a model around us is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tenfold.errors import TenfoldError
from tenfold.offload.engine import Offload
from tenfold.offload.moments import zero_state
from tenfold.offload.units import Entry
from tenfold.parallel.absent import absent

Remove = Callable[[], object]
Given = dict[Entry, tuple[str, weakref.ref[Tensor]]]
"""The tensor of a parameter in the last state dict, and its key there."""


def guard(offload: Offload) -> list[Remove]:
    """Put all of it around the model and the optimizers of `offload`; what takes each away again."""
    model = offload.inventory.model
    entries = {entry.parameter: entry for unit in offload.units for entry in unit.entries}
    undo: list[Remove] = []
    given: Given = {}
    for module in model.modules():
        mine = {name: entries[each] for name, each in module._parameters.items() if each in entries}
        undo += [*_Weights(offload, module, mine, given).hook(), *_refuse(module, mine)]
    for optimizer in offload.inventory.optimizers:
        undo += _Moments(offload, optimizer, entries).hook()
    for entry in entries.values():
        undo.append(_mark(entry.parameter))
    return undo


def _mark(parameter: nn.Parameter) -> Remove:
    """Have sharing and delinking (`sharing.tying`) see that it is offloaded."""
    parameter.offloaded = True  # type: ignore[attr-defined]
    return lambda: delattr(parameter, "offloaded")


class _Weights:
    """A module's own parameters in state dicts of the model."""

    def __init__(self, offload: Offload, module: nn.Module, entries: dict[str, Entry], given: Given) -> None:
        self._offload, self._module, self._entries, self._given = offload, module, entries, given
        self._away = {name: entry for name, entry in entries.items() if offload.is_below(entry.name)}

    def hook(self) -> list[Remove]:
        if not self._entries:
            return []
        return [
            self._module.register_state_dict_post_hook(lambda *given: self._give(*given)).remove,
            self._module.register_load_state_dict_pre_hook(self._before_loading).remove,
            self._module.register_load_state_dict_post_hook(self._after_loading).remove,
        ]

    def _give(self, _: nn.Module, state: dict[str, Any], prefix: str, __: object) -> None:
        """In RAM: they are away since the device has no room for them. What layers share is one tensor, as ever."""
        for name, entry in self._away.items():
            key = prefix + name
            if key not in state:
                continue
            before, given = self._given.get(entry, ("", None))
            real = None if given is None else given()
            if real is None or state.get(before) is not real:
                real = self._offload.tensor_of(entry.name, entry.parameter.detach()).cpu()
                self._given[entry] = (key, weakref.ref(real))
            state[key] = real

    def _before_loading(self, _: nn.Module, __: object, prefix: str, metadata: dict[str, Any], *___: object) -> None:
        if metadata.get("assign_to_params_buffers", False):
            raise TenfoldError(
                f"load_state_dict(assign=True) would put other parameters in place of those offloaded, {prefix}"
                f"{next(iter(self._entries))} among them: load without assign, or close() what tenfold.offload gave"
            )
        for entry in self._away.values():
            whole = self._offload.tensor_of(entry.name, entry.parameter.detach())
            self._offload.forget(entry.name)
            entry.point(whole.view(-1))

    def _after_loading(self, *_: object) -> None:
        for entry in self._away.values():
            whole = entry.local.detach()
            entry.leave()
            self._offload.write(entry.name, whole)


class _Moments:
    """The state of parameters in state dicts of an optimizer."""

    def __init__(self, offload: Offload, optimizer: Optimizer, entries: dict[nn.Parameter, Entry]) -> None:
        self._offload, self._optimizer, self._entries = offload, optimizer, entries

    def hook(self) -> list[Remove]:
        return [
            self._optimizer.register_state_dict_post_hook(self._give).remove,
            self._optimizer.register_load_state_dict_pre_hook(self._load).remove,
        ]

    def _away(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """What stands for the tensors of a parameter's state that are away."""
        entry = self._entries.get(parameter)
        if entry is None:
            return {}
        tensors = self._offload.inventory.tensors(entry)
        return {key: each for key, each in tensors.items() if self._offload.is_below(f"{entry.name}/{key}")}

    def _numbered(self, saved: dict[str, Any]) -> Iterator[tuple[Any, nn.Parameter]]:
        """The number of each parameter in a state dict that fits."""
        numbers = chain.from_iterable(group["params"] for group in saved["param_groups"])
        return zip(numbers, chain.from_iterable(each["params"] for each in self._optimizer.param_groups), strict=True)

    def _give(self, _: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        state = dict(saved["state"])
        for number, parameter in self._numbered(saved):
            if away := self._away(parameter):
                name = self._entries[parameter].name
                real = {key: self._offload.tensor_of(f"{name}/{key}", each).cpu() for key, each in away.items()}
                state[number] = state[number] | real
        return {**saved, "state": state}

    def _load(self, _: Optimizer, saved: dict[str, Any]) -> dict[str, Any] | None:
        """Write what is to be away to its tier, and leave for PyTorch to load what stands for it there."""
        groups, theirs = self._optimizer.param_groups, saved["param_groups"]
        if [len(each["params"]) for each in groups] != [len(each["params"]) for each in theirs]:
            return None  # PyTorch says what is wrong
        state = dict(saved["state"])
        for number, parameter in self._numbered(saved):
            away = self._away(parameter)
            if not away:
                continue
            entry = self._entries[parameter]
            found = dict(state.get(number) or zero_state(self._offload.inventory.owners[entry], entry))
            for key, each in away.items():
                if not isinstance(found.get(key), Tensor) or found[key].shape != each.shape:
                    is_there = (
                        f"of shape {tuple(found[key].shape)}" if isinstance(found.get(key), Tensor) else "not there"
                    )
                    raise TenfoldError(
                        f"the state of {entry.name} cannot be loaded: its {key} is {is_there}, and this optimizer "
                        f"({type(self._optimizer).__name__}) has one of {tuple(each.shape)}: make it as that was"
                    )
            for key, each in away.items():
                real = found[key] if state.get(number) else torch.zeros(each.shape, dtype=each.dtype)
                self._offload.write(f"{entry.name}/{key}", real.to(each.device).contiguous())
                found[key] = absent(each.shape, entry.dtype, each.device)  # which PyTorch leaves as it is
            state[number] = found
        return {**saved, "state": state}


def _refuse(module: nn.Module, entries: dict[str, Entry]) -> list[Remove]:
    """Refuse copies of a module, and moves of it to another device or dtype."""
    ours: dict[str, Any] = {}

    def copied(*_: object) -> None:
        raise TenfoldError(
            f"{type(module).__name__} cannot be copied or pickled while it is offloaded: take its state_dict(), which "
            "has all of it, make copies (AveragedModel too) before, or close() what tenfold.offload gave first"
        )

    def moved(move: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for entry in entries.values():
            probe = torch.zeros(1, dtype=entry.dtype, device=entry.local.device)
            after = move(probe)
            if (after.dtype, after.device) != (probe.dtype, probe.device):
                raise TenfoldError(
                    f"{type(module).__name__} cannot go from {probe.dtype} on {probe.device} to {after.dtype} on "
                    f"{after.device} while it is offloaded: do it before, or close() what tenfold.offload gave first"
                )
        if recurse:
            for child in module.children():
                child._apply(move)
        return module

    ours["__reduce_ex__"] = copied
    if entries:
        ours["_apply"] = moved
    vars(module).update(ours)
    return [lambda name=name: vars(module).pop(name) for name in ours]  # type: ignore[misc]
