"""What there is of a model, as placements and budgets speak of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tenfold.offload.loads import Loads
from tenfold.offload.moments import Inventory
from tenfold.offload.placement import End, Part
from tenfold.offload.tiers import Kind
from tenfold.offload.units import Portion, Unit, keepers


def parts_of(
    inventory: Inventory,
    ends: Callable[[Unit], tuple[End, ...]],
    activations: Sequence[int] = (),
    loads: Loads | None = None,
    passes: int = 1,
) -> list[Part]:
    """A part for every portion of a unit, with its bytes on this rank. `ends`: where what is outside of layers is used.

    `activations` are the bytes that each layer of the whole model leaves for its backward pass. They are with the unit
    of the fewest layers that it is in; where these are several, all of theirs. `loads`: what experts see in a step of
    so many `passes`, where a gradient of zeros is not moved.
    """
    found, kept = [], keepers(inventory.units, inventory.numbers)
    for unit in inventory.units:
        own = [number for number, keeper in zip(inventory.numbers, kept, strict=True) if keeper is unit]
        for portion in unit.portions:
            moments = [inventory.lay_out(piece).size for piece in portion.pieces]
            weights = [piece.size for piece in portion.pieces]
            sizes: dict[Kind, int] = {"weights": sum(weights), "gradients": sum(weights), "moments": sum(moments)}
            pieces: dict[Kind, int] = {"weights": max(weights), "gradients": max(weights), "moments": max(moments)}
            if portion is unit.main and activations and (saved := sum(activations[number] for number in own)):
                sizes["activations"] = saved
            at = () if unit.layers else ends(unit)
            name = unit.name if len(unit.portions) > 1 else ""
            seen = 1.0 if loads is None else _seen(portion, loads, passes)
            added = sum(piece.size for piece in portion.pieces if any(each.entry.added for each in piece.slices))
            found.append(Part(portion.name, unit.layers, sizes, pieces, at, portion.experts, name, seen, added))
    return found


def _seen(portion: Portion, loads: Loads, passes: int) -> float:
    """`Part.seen`, by pieces: each that is zero stays where it is (`LeavingGradients`)."""
    if not portion.experts:
        return 1.0
    arrivals = loads.of(portion.layers)
    moved = sum(
        piece.size * arrivals.seen((expert for each in piece.slices for expert in each.experts), passes)
        for piece in portion.pieces
    )
    return moved / sum(piece.size for piece in portion.pieces)
