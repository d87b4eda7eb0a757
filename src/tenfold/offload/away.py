"""What stands in a parameter's `grad` for a gradient that is below the device: not to be read, and not to be missed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tenfold.errors import TenfoldError


class AwayGradient(Tensor):
    """A tensor of a parameter's shape without numbers, which raises TenfoldError for whoever computes with it.

    So clipping, scaling of losses and optimizers that know nothing of offload fail, where a `grad` of None would have
    them leave the parameter out. What autograd adds to it is kept in `more`, until that leaves too.
    """

    of: str
    more: Tensor | None

    @staticmethod
    def __new__(cls, parameter: Tensor, name: str) -> AwayGradient:
        made: AwayGradient = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
        made.of, made.more = name, None
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.aten.add_.Tensor and isinstance(args[0], cls) and in_backward():
            away, new = args[0], args[1]
            away.more = new.clone(memory_format=torch.contiguous_format) if away.more is None else away.more.add_(new)
            return away
        names = ", ".join(_names([*args, *(kwargs or {}).values()]))
        raise TenfoldError(
            f"the gradient of {names} is below the device, and {function} asks for it: clip by clip_grad_norm_ of what "
            "tenfold.offload gave, clear by zero_grad() or grad = None; for a GradScaler or whatever else reads "
            "gradients, leave them on the device (a placement of weights and moments alone)"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"AwayGradient({self.of})"


def in_backward() -> bool:
    """Whether a backward pass is under way: what runs forward now is recomputed."""
    return torch._C._current_graph_task_id() != -1


def _names(arguments: Sequence[Any]) -> list[str]:
    found = []
    for each in arguments:
        if isinstance(each, AwayGradient):
            found.append(each.of)
        elif isinstance(each, list | tuple):
            found += _names(each)
    return found[:1]
