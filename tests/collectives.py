"""Which collectives a piece of code calls, and how large."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Collectives(TorchDispatchMode):
    """Inside of `with Collectives() as seen:` every call of this thread is seen, of its backward passes too."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []
        """(name, elements that this rank puts in) in order; names are those of the operators ("all_reduce")."""

    @property
    def counts(self) -> Counter[str]:
        """Calls by name."""
        return Counter(name for name, _ in self.calls)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd") and name != "wait_tensor":
            tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
            self.calls.append((name, max((each.numel() for each in tensors), default=0)))
        operator = OPDEFS.get(func._schema.name)
        if operator is not None:  # one of our own: what it calls is to be seen too
            with self:
                return operator._init_fn(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
