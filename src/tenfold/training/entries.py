"""How offload sees the parameters of our models: what a rank has of each, for which experts, and where it is used."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor, nn

from tenfold.nn.decoder import Decoder
from tenfold.nn.moe import Experts
from tenfold.offload.placement import End
from tenfold.offload.units import Entry, Unit
from tenfold.parallel.layout import Layout
from tenfold.parallel.sums import spread_of


def entries(
    model: Decoder, layout: Layout
) -> tuple[Callable[[str, nn.Parameter], Entry], list[set[nn.Parameter]] | None]:
    """How to see a parameter, by its canonical name; with FSDP2 also the groups in which it gathers parameters."""
    names = {parameter: name for name, parameter in layout.named(model).items()}
    stacks = {each for module in model.modules() if isinstance(module, Experts) for each in module.parameters()}
    added = layout.added(model)
    shards: dict[nn.Parameter, Tensor] = {}
    groups = None
    if not layout.alone:
        from tenfold.parallel.data import groups_of, shards_of  # here: FSDP2 takes seconds to import

        found = [shards_of(group) for group in groups_of(model)]
        groups = [set(each) for each in found] or None
        shards = {parameter: memory for each in found for parameter, memory in each.items()}

    def entry_of(_: str, parameter: nn.Parameter) -> Entry:
        name, memory = names[parameter], shards.get(parameter)
        experts = _experts(layout, name) if parameter in stacks else []
        most = spread_of(name, layout.shapes[name], layout.model_config, layout.degrees, 0).elements
        if memory is None:
            return Entry(name, parameter, parameter, experts=experts, added=parameter in added, most=most)
        local: Tensor = parameter._local_tensor  # type: ignore[attr-defined]
        first = layout.piece(name).rows.start * math.prod(local.shape[1:])
        return Entry(name, parameter, local, memory, first, experts, parameter in added, most)

    return entry_of, groups


def _experts(layout: Layout, name: str) -> list[range]:
    """For which experts each row stands that this rank has of a stack; of a matrix that is none: nothing."""
    count, rows = layout.model_config.moe.experts, layout.piece(name).stack()
    each = count // layout.shapes[name][0]
    return [range(row * each, (row + 1) * each) for row in rows] if len(layout.shapes[name]) == 3 else []


def ends(unit: Unit) -> tuple[End, ...]:
    """Where what is outside of layers is used."""
    if unit.name == "embedding":
        return ("embedding",)
    return ("embedding",) if unit.name in ("positions", "embedding_norm", "projection") else ("head",)
