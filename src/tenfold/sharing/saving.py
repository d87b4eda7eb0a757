"""Shared layers in files that hold every tensor once."""

from __future__ import annotations

from tenfold.sharing.tying import Layers, holders

_NAMES = "_tied_weights_keys"


def declare_ties(layers: Layers) -> None:
    """Tell each layer which of its parameters an earlier layer has, for `save_pretrained` of transformers.

    It refuses to write tensors that share memory unless a module declares, in an attribute of this name, which names
    it may leave out. Those of the lowest layer are written.
    """
    seen: set[object] = set()
    for layer in layers:
        mine = {name: holder.parameter for name, holder in holders(layer).items()}
        again = {name: name for name, parameter in mine.items() if parameter in seen}
        if again:
            setattr(layer, _NAMES, again)
        elif _NAMES in vars(layer):
            delattr(layer, _NAMES)
        seen.update(mine.values())
