"""Which collectives a piece of code calls, and how much a rank puts into them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_SPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_RESULT_FIRST = ("_allgather_base_", "_reduce_scatter_base_", "alltoall_base_")  # their tensors: result, then input


class Collectives(TorchDispatchMode):
    """Inside of `with Collectives() as seen:` every call of this thread is seen; on a CPU its backward passes too, for
    there they run in the same thread."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []
        """(name, elements of the largest tensor it works on) in order; names are the operators' ("all_reduce")."""
        self.bytes = 0
        """That this rank puts into all of them."""

    @property
    def counts(self) -> Counter[str]:
        """Calls by name."""
        return Counter(name for name, _ in self.calls)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if func.namespace in _SPACES and name != "wait_tensor":
            tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
            self.calls.append((name, max((each.numel() for each in tensors), default=0)))
            given = [] if name.startswith("recv") else tensors[1:] if name in _RESULT_FIRST else tensors
            self.bytes += sum(each.numel() * each.element_size() for each in given)
        operator = OPDEFS.get(func._schema.name)
        if operator is not None:  # one of our own: what it calls is to be seen too
            with self:
                return operator._init_fn(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
