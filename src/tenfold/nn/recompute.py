"""Recompute: what of a layer is kept for its backward pass, and what is made again there.

- "none": all that autograd asks for.
- "full": the layer's input (arXiv 1604.06174). Everything else is made again, matrix products too.
- "selective": besides it what matrix products made. Attention, norms, activations, rotary turns and copies by expert
  are made again: they take much memory and little work (arXiv 2205.05198, section 5).

A routing decision is made once, in every mode: what went through an expert comes back through the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tenfold.config.depth import is_chosen
from tenfold.nn.grouped import EXPERTS
from tenfold.nn.routing import CHOOSE

Mode = Literal["none", "selective", "full"]

KEPT = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, EXPERTS}
"""The operators whose results "selective" keeps. `parallel` adds some that wait for other ranks."""
SUMS: set[Any] = set()
"""Those of them that sum the product before them over ranks, and are kept in its place."""


class Recompute(NamedTuple):
    """How the layers of a model recompute."""

    mode: Mode = "none"
    layers: int | None = None
    """How many of them do, spread evenly over the depth; None: all."""

    def of(self, layer: int, depth: int) -> Mode:
        """The mode of layer `layer` of `depth`."""
        count = depth if self.layers is None else min(self.layers, depth)
        return self.mode if is_chosen(layer, count, depth) else "none"


KEEP_ALL = Recompute()


def recomputed(mode: Mode, post_norm: bool, layer: Callable[..., Any], *inputs: Any) -> Any:
    """`layer(*inputs, decision)`, run again for the backward pass. `decision` is None or a list, filled by the first
    run and passed to the second. `post_norm`: whether a norm follows the last product."""
    # The compiler keeps the decision by a rule on the operator that makes it, and products likewise. Without it a rule
    # has to look at every operation: for the decision alone, a list costs nothing.
    keep: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # nothing in a layer is random
    if torch.compiler.is_compiling():
        keep["context_fn"] = _keep_products if mode == "selective" else _keep_routing
        return checkpoint(layer, *inputs, None, **keep)
    if mode == "selective":
        kept: list[tuple[Any, Any]] = []
        modes = _Keeping(kept, post_norm), _Reusing(kept)
        keep["context_fn"] = lambda: modes
    return checkpoint(layer, *inputs, [], **keep)


def _is_kept(operation: Any, arguments: tuple[Any, ...]) -> bool:
    if operation is torch.ops.aten.addmm.default and arguments[0].dim() == 2:
        return False  # the sum of a weight and a difference to it (`nn.low_rank`), not a product of activations
    return operation in KEPT


class _Keeping(TorchDispatchMode):
    """Keeps results of the first run, in order."""

    def __init__(self, kept: list[tuple[Any, Any]], post_norm: bool) -> None:
        super().__init__()
        self.kept, self.post_norm = kept, post_norm

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if _is_kept(func, args):
            if func in SUMS and self.kept:
                before, product = self.kept[-1]
                if isinstance(product, Tensor) and before not in SUMS and product.numel() == args[0].numel():
                    self.kept[-1] = before, _Lost(product)
            self.kept.append((func, _detached(out)))
        return out

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self.post_norm:
            return
        # What the layer adds to its input last no gradient needs: of that the shape is enough.
        for index, (func, out) in enumerate(self.kept):
            if func is EXPERTS:
                self.kept[index] = func, (_Lost(out[0]), *out[1:])
            elif index == len(self.kept) - 1 and not isinstance(out, _Lost):
                self.kept[index] = func, _Lost(out)


class _Reusing(TorchDispatchMode):
    """Gives them back in the second, instead of the operations."""

    def __init__(self, kept: list[tuple[Any, Any]]) -> None:
        super().__init__()
        self.kept, self.next = kept, 0

    def __enter__(self) -> Any:
        self.next = 0
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_kept(func, args):
            return func(*args, **(kwargs or {}))
        operation, out = self.kept[self.next]
        assert operation is func, (operation, func)
        self.next += 1
        return _detached(out)


class _Lost:
    """A tensor that is not kept: not a number, should a gradient need it after all."""

    def __init__(self, x: Tensor) -> None:
        self._like = x.new_full((), torch.nan), x.shape

    def detach(self) -> Tensor:
        scalar, shape = self._like
        return scalar.new_full(shape, torch.nan)


def _detached(out: Any) -> Any:
    return tuple(x.detach() for x in out) if isinstance(out, tuple) else out.detach()


def _keep_routing() -> Any:
    return create_selective_checkpoint_contexts(_routing)


def _keep_products() -> Any:
    return create_selective_checkpoint_contexts(_products)


def _routing(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    kept = operation is CHOOSE
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if _is_kept(operation, args):
        return CheckpointPolicy.MUST_SAVE
    return _routing(context, operation)
