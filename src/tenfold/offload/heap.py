"""Freed memory of tensors on a CPU that the C library keeps for the next ones: held to what a budget leaves for it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tenfold.hardware.memory import return_free_memory, unnamed_memory_bytes


class Heap:
    """Looks at this process' resident memory before each of `layers`, forward and backward, and has the C library give
    back what it keeps free, where the layer would else go over `limit` bytes.

    `passing`: bytes that the model takes while it is in a layer, or in the loss, and has given back behind it.
    To keep freed memory spares a page fault for every page of every gradient and activation
    (`hardware.memory.keep_freed_memory`); so it is given back only where that is needed.
    """

    def __init__(self, layers: Iterable[nn.Module], limit: int, passing: int) -> None:
        self._most = limit - 3 * passing // 2  # of what comes not all fits into what is free
        self.returned = 0
        """How many times memory was given back."""
        for layer in layers:
            layer.register_forward_pre_hook(lambda *_: self.check())
            layer.register_forward_hook(self._after)
        self.check()

    def check(self) -> None:
        """Between layers."""
        if unnamed_memory_bytes() > self._most:
            return_free_memory()
            self.returned += 1

    def _after(self, _module: nn.Module, _inputs: object, outputs: object) -> None:
        for each in tree_leaves(outputs):
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(lambda _: self.check())
                return
