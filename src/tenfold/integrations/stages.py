"""The stages of a run whose loop belongs to somebody else: what is shared when, and a model brought there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

from torch import nn
from torch.optim import Optimizer

from tenfold.config.units import parse_until
from tenfold.errors import TenfoldError
from tenfold.sharing.api import PatternSpec, delink, read_sharing, reorder, share
from tenfold.sharing.delinking import Moments
from tenfold.sharing.patterns import Pattern
from tenfold.sharing.tying import PARTS, Layers, Sharing, part_of, tables, tied_pattern

DELINKS_ALONE = (
    "delinking in a callback works on one process only: DistributedDataParallel would not see the new parameters. "
    "Train the first stage alone, [('100%', pattern)], delink the saved model, and train on"
)

Where = str | Callable[[Any], Layers]
"""Where a model has its layers: a dotted name ("model.layers"), or a function of the model."""

StageSpec = tuple[Any, PatternSpec] | tuple[Any, PatternSpec, Iterable[str]]
"""(until, pattern) or (until, pattern, parts). `until`: a share of the run ("20%", 0.2), or a number of steps (500)."""


class Stages:
    """What a run shares from which optimizer step on."""

    def __init__(self, stages: Sequence[StageSpec], moments: Moments = "rescale") -> None:
        """Raises TenfoldError for stages that cannot be read or do not go on to the end of the run."""
        if not stages:
            raise TenfoldError('stages are missing; give for example [("20%", "all"), ("100%", "none")]')
        if moments not in ("copy", "rescale", "reset"):
            raise TenfoldError(f"moments = {moments!r} cannot be had in a callback; copy, rescale and reset can")
        self.moments = moments
        self._ends = [_read_end(stage[0]) for stage in stages]
        self._specs = [(stage[1], stage[2] if len(stage) > 2 else PARTS) for stage in stages]
        if self._ends[-1] != {"share": 1.0}:
            raise TenfoldError(f'the last stage ends at {stages[-1][0]!r}; it must end with the run ("100%")')
        for number, (before, end) in enumerate(pairwise(self._ends), 1):
            if before.keys() == end.keys() and max(end.values()) <= max(before.values()):
                raise TenfoldError(
                    f"stages.{number} would have no steps: it ends at {stages[number][0]!r}, and the stage before it "
                    f"at {stages[number - 1][0]!r}"
                )

    def __len__(self) -> int:
        return len(self._specs)

    @property
    def need_length(self) -> bool:
        """Whether a stage ends at a share of the run, so that the run must have an end."""
        return any("share" in end for end in self._ends[:-1])

    def sharings(self, layers: Layers) -> list[Sharing]:
        """What each stage shares of a model's layers; TenfoldError if one does not refine the one before."""
        found = [read_sharing(pattern, parts, len(layers)) for pattern, parts in self._specs]
        there = {part_of(layers[0], name) for name in tables(layers)}
        for number in range(1, len(found)):
            found[number].check_refines(found[number - 1], f"stages.{number}", there)
        return found

    def at(self, step: int, steps: float) -> int:
        """The number of the stage that trains after `step` of a run's `steps` optimizer steps."""
        for number, end in enumerate(self._ends[:-1]):
            if step < (end["steps"] if "steps" in end else round(end["share"] * steps)):
                return number
        return len(self) - 1

    def enter(self, model: nn.Module, layers: Layers, number: int, optimizers: Sequence[Optimizer] = ()) -> bool:
        """Make the model's layers share what stage `number` shares, whatever they share now; whether that was a change.

        Groups that have their parameters in the model's order keep to it, as a checkpoint of the optimizer needs it:
        loops that resume make the optimizer anew.
        """
        wanted, now = self.patterns(layers, number), _patterns(layers)
        if wanted == now:
            return False
        pattern, parts = self._specs[number]
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        ordered = [group for group in groups if (places := _places(model, group)) == sorted(places)]
        if all(wanted[name].refines(now[name]) for name in now):
            delink(layers, optimizers, pattern, parts=parts, moments=self.moments)
        else:
            share(layers, pattern, parts=parts, optimizer=optimizers)
        for group in ordered:
            places = _places(model, group)
            reorder(group, sorted(range(len(places)), key=places.__getitem__))
        return True

    def of(self, layers: Layers) -> int | None:
        """The stage that shares what the layers share now; None if there is none."""
        now = _patterns(layers)
        return next((number for number in range(len(self)) if self.patterns(layers, number) == now), None)

    def patterns(self, layers: Layers, number: int) -> dict[str, Pattern]:
        """The pattern that each parameter of a layer has in stage `number`, by its name in the layer."""
        sharing = self.sharings(layers)[number]
        return {name: sharing.of(part_of(layers[0], name), name) for name in tables(layers)}


def find_layers(model: nn.Module, where: Where) -> Layers:
    """The layers of a model; TenfoldError, with the lists that it has, if they are not there."""
    if not isinstance(where, str):
        return where(model)
    found: Any = model
    for step in where.split("."):
        found = getattr(found, step, None)
    if not isinstance(found, nn.ModuleList | nn.Sequential):
        lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
        raise TenfoldError(
            f"{type(model).__name__} has no list of layers called {where!r}; its lists are {', '.join(lists) or 'none'}"
        )
    return list(found)


def _patterns(layers: Layers) -> dict[str, Pattern]:
    return {name: tied_pattern(column) for name, column in tables(layers).items()}


def _places(model: nn.Module, group: dict[str, Any]) -> list[int]:
    """Where in the model's parameters those of a group are; all others count as its end."""
    order = {parameter: place for place, parameter in enumerate(model.parameters())}
    return [order.get(parameter, len(order)) for parameter in group["params"]]


def _read_end(until: Any) -> dict[str, float | int]:
    value = {"steps": until} if type(until) is int else {"share": until} if isinstance(until, float) else until
    try:
        end = parse_until(value)
    except ValueError as error:
        raise TenfoldError(str(error)) from None
    if "tokens" in end:
        raise TenfoldError(f"a stage in a callback ends at a share of the run or after steps, not at {until!r}")
    return end
