"""Which collectives a piece of code calls, and how many bytes a rank puts into each."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_SPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_GIVEN_LAST = ("_allgather_base_", "_reduce_scatter_base_", "alltoall_base_", "allgather_into_tensor_coalesced_")


class Call(NamedTuple):
    """One call of a collective."""

    name: str
    """Of the operator: "allreduce_", "_allgather_base_", "send"."""
    elements: int
    """Of the largest tensor that it works on: of a gather's result, of what a scatter begins with."""
    bytes: int
    """That this rank puts in."""


class Traffic(TorchDispatchMode):
    """Inside of `with Traffic() as seen:` every call of this thread is seen, its backward passes on a CPU included."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        """In their order."""

    @property
    def counts(self) -> Counter[str]:
        """Calls by name."""
        return Counter(call.name for call in self.calls)

    @property
    def bytes(self) -> int:
        """That this rank puts into all of them."""
        return sum(call.bytes for call in self.calls if not call.name.startswith("recv"))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if func.namespace in _SPACES and name not in ("wait_tensor", "barrier"):
            tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
            sizes = [each.numel() for each in tensors]
            given = tensors[-1:] if name in _GIVEN_LAST else tensors
            put_in = sum(each.numel() * each.element_size() for each in given)
            self.calls.append(Call(name, max(sizes, default=0), put_in))
        return func(*args, **(kwargs or {}))
