"""What parameters become when a model is delinked, by their canonical names: of no tensor is anything asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tenfold.nn.decoder import Decoder
from tenfold.nn.low_rank import LEFT, RIGHT
from tenfold.sharing.tying import Sharing, patterns, ranks, tables

_LAYER = "layers.{}.{}"
_SIDES = (LEFT, RIGHT)


class Lineage:
    """What the parameters of a `model`, whose layers share as `before` says, become when it is delinked to `after`."""

    def __init__(self, model: Decoder, before: Sharing, after: Sharing) -> None:
        self._layers, self._places = model.layers, tables(model.layers)
        self._sharings = [(sharing, patterns(self._layers, self._places, sharing)) for sharing in (before, after)]
        changes = list(self._differences())
        self.origins = self._origins([name for name, _ in model.named_parameters()])
        """For each parameter afterwards: the one that it comes from, and how many shared that for each that shares it
        now. New routers are not among them, nor what has begun."""
        self.origins |= {
            name + side: (name + side, 1.0) for name, had, rank in changes if had and rank for side in _SIDES
        }
        self.folded = [name for name, had, rank in changes if had and not rank]
        """Weights to which is added what their low-rank difference is."""
        self.begun = {name + side for name, had, rank in changes if rank and not had for side in _SIDES}
        """Parameters of low-rank differences that there are from now on."""

    def _origins(self, names: Sequence[str]) -> dict[str, tuple[str, float]]:
        origins = {name: (name, 1.0) for name in names if not name.startswith("layers.")}
        (_, befores), (_, afters) = self._sharings
        for name in self._places:
            before, pattern = befores[name], afters[name]
            for block in range(pattern.stored_blocks):
                layer = pattern.first_layer(block)
                parent = before.blocks[layer]
                source = _LAYER.format(before.first_layer(parent), name)
                origins[_LAYER.format(layer, name)] = (source, before.uses(parent) / pattern.uses(block))
        return origins

    def _differences(self) -> Iterator[tuple[str, int, int]]:
        """Each weight of a layer with the rank of its difference before and after."""
        for name, column in self._places.items():
            had, now = (ranks(patterns[name], sharing, column) for sharing, patterns in self._sharings)
            for layer in range(len(column)):
                yield _LAYER.format(layer, name), had[layer], now[layer]
