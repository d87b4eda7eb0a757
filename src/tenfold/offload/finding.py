"""The layers of a model of somebody else's, and what of it is used before and behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from tenfold.errors import TenfoldError
from tenfold.offload.placement import End
from tenfold.offload.units import Unit


def find_layers(model: nn.Module) -> nn.ModuleList:
    """The model's list of layers: of the `nn.ModuleList`s of several members of one class that are in no other such
    list (as experts are), the longest, and of those the one with most parameters.

    Raises TenfoldError where there is none.
    """
    found = _lists(model)
    if not found:
        raise TenfoldError(
            f"no layers were found: {type(model).__name__} has no nn.ModuleList of several modules of one class. Name "
            "them: tenfold.offload(..., layers=[...]), in the order in which they are used"
        )
    return max(found, key=lambda each: (len(each), sum(one.numel() for one in each.parameters())))


def _lists(module: nn.Module) -> list[nn.ModuleList]:
    if isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(each) for each in module}) == 1:
        return [module] if any(True for _ in module.parameters()) else []
    return [each for child in module.children() for each in _lists(child)]


def ends_of(model: nn.Module, layers: Sequence[nn.Module]) -> Callable[[Unit], tuple[End, ...]]:
    """Whether a unit outside of layers is used before them, behind them or both, by where its names stand in the model.

    What a model has on both sides of its layers under one name or two (a tied head) is of both.
    """
    in_layers = {id(parameter) for layer in layers for parameter in layer.parameters()}
    ends: dict[int, set[End]] = {}
    side: End = "embedding"
    for _, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in in_layers:
            side = "head"
        else:
            ends.setdefault(id(parameter), set()).add(side)

    def of(unit: Unit) -> tuple[End, ...]:
        mine = set[End]().union(*(ends[id(entry.parameter)] for entry in unit.entries))
        both: tuple[End, ...] = ("embedding", "head")
        return tuple(end for end in both if end in mine)

    return of
