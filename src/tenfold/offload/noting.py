"""What stands for weights in a working copy that autograd saves: their place there, since they may leave meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tenfold.offload.weights import WorkingCopies


class NotedWeights:
    """Hooks on saved tensors (`torch.autograd.graph.saved_tensors_hooks`) for weights in working copies."""

    def __init__(self, weights: WorkingCopies) -> None:
        self._weights = weights

    def pack_ours(self, tensor: Tensor) -> object:
        """What stands for a tensor that lies in a working copy; None for any other."""
        place = self._weights.place_of(tensor)
        return None if place is None else (*place, tensor.dtype, tensor.size(), tensor.stride())

    def pack(self, tensor: Tensor) -> object:
        """What stands for any tensor."""
        packed = self.pack_ours(tensor)
        if packed is not None:
            return packed
        # Where an operation saves what it made, the tensor itself would hold the graph that holds it.
        return tensor if tensor.is_leaf else tensor.detach()

    def unpack(self, packed: Any) -> Tensor:
        """The tensor again."""
        return packed if isinstance(packed, Tensor) else self._weights.view(*packed)

    def before(self, others: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None) -> tuple[Any, Any]:
        """Our hooks before those of others (checkpointing), who are not asked of a tensor in a working copy: it is such
        a one in the recomputation too."""
        if others is None:
            return self.pack, self.unpack
        pack, unpack = others

        def ours_first(tensor: Tensor) -> tuple[bool, Any]:
            packed = self.pack_ours(tensor)
            return (False, pack(tensor)) if packed is None else (True, packed)

        return ours_first, lambda packed: self.unpack(packed[1]) if packed[0] else unpack(packed[1])
