"""A weight that is the sum of two: a matrix that others may hold too, and a low-rank difference of a module's own.

    weight = matrix + left @ right        left [..., O, r], zero at first; right [..., r, I], random

Relaxed Recursive Transformers (arXiv 2410.20672, section 2.2) share layers in this way. A stack of matrices, as
experts are, has a difference for each. `module.weight` is then the sum, whoever reads it, and is made when it is read;
the module's parameters are `weight` (the matrix, under its old name), `weight_left` and `weight_right`.

The sum is made, and not x @ matrix^T + (x @ right^T) @ left^T: so it works in any module, whatever that does with its
weight, in the arithmetic of a plain weight, and folding the difference in changes no bit of the output. What it costs
besides is a product of left and right in each forward pass, and the sum's memory until the backward pass, which
recomputation spares.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

LEFT, RIGHT = "_left", "_right"


def draw(shape: torch.Size, key: str) -> Tensor:
    """Normal numbers (mean 0, deviation 1) that are a function of `key` alone, fp32 on the CPU."""
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little"))
    return torch.randn(shape, generator=generator)


def low_rank_sum(matrix: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """matrix [..., O, I] + left [..., O, r] @ right [..., r, I], in their own dtype, inside autocast too."""
    kind = matrix.device.type
    with torch.autocast("cpu" if kind == "meta" else kind, enabled=False):  # there is none for "meta"
        if matrix.dim() == 2:
            return torch.addmm(matrix, left, right)
        stacks = (each.flatten(0, -3) for each in (matrix, left, right))
        return torch.baddbmm(*stacks).view_as(matrix)


def differing(module: nn.Module) -> tuple[str, ...]:
    """The parameters of `module` itself that have a difference."""
    found: tuple[str, ...] = getattr(type(module), "_differing", ())
    return found


def rank_of(module: nn.Module, name: str) -> int:
    """The rank of the difference of a parameter of `module`; 0: it has none."""
    return module.get_parameter(name + RIGHT).shape[-2] if name in differing(module) else 0


def differences(module: nn.Module, name: str) -> tuple[nn.Parameter, ...]:
    """Left and right of a parameter of `module`, if it has a difference."""
    return tuple(module.get_parameter(name + side) for side in (LEFT, RIGHT)) if name in differing(module) else ()


def useful_rank(parameter: Tensor) -> int:
    """The rank at which a difference is any matrix at all; 0 for what has fewer than two dimensions."""
    return min(parameter.shape[-2:]) if parameter.dim() >= 2 else 0


@torch.no_grad()
def add_difference(module: nn.Module, name: str, rank: int, key: str) -> tuple[nn.Parameter, nn.Parameter]:
    """Give a parameter of `module` a difference of `rank`, zero at first; or let one that it has grow, unchanged.

    Returns left and right. New rows of `right` are a function of `key`, with deviation 1 / sqrt(rank): so the first
    step of an optimizer that moves every number equally far (Adam) moves the sum as it would a free weight.
    """
    matrix, had = module._parameters[name], rank_of(module, name)
    assert matrix is not None
    assert had < rank <= useful_rank(matrix), (name, had, rank)
    *stack, rows, columns = matrix.shape
    left = matrix.new_zeros(*stack, rows, rank)
    right = matrix.new_empty(*stack, rank, columns)
    start_right(right, key)
    if had:
        left[..., :had], right[..., :had, :] = differences(module, name)
    pair = nn.Parameter(left, matrix.requires_grad), nn.Parameter(right, matrix.requires_grad)
    module._parameters[name + LEFT], module._parameters[name + RIGHT] = pair
    if not had:
        _change(module, (*differing(module), name))
    return pair


def start_right(right: Tensor, key: str) -> None:
    """Fill `right` [..., r, I] as `add_difference` tells, one matrix of a stack at a time."""
    if right.device.type != "meta":
        for index, part in enumerate(right.flatten(0, -3) if right.dim() > 2 else (right,)):
            part.copy_(draw(part.shape, f"{key}/{index}").mul_(right.shape[-2] ** -0.5))


@torch.no_grad()
def fold_difference(module: nn.Module, name: str) -> None:
    """Add the difference of a parameter of `module` to its matrix, in place, and take it away."""
    matrix = module._parameters[name]
    assert matrix is not None
    matrix.copy_(low_rank_sum(matrix, *differences(module, name)))
    del module._parameters[name + LEFT], module._parameters[name + RIGHT]
    _change(module, tuple(each for each in differing(module) if each != name))


def held(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of `module` itself by name, without differences."""
    hidden = {name + side for name in differing(module) for side in (LEFT, RIGHT)}
    for name, parameter in module._parameters.items():
        if parameter is not None and name not in hidden:
            yield name, parameter


def held_inside(module: nn.Module) -> Iterator[nn.Parameter]:
    """All parameters of `module` and of those in it, each once, without differences."""
    yield from dict.fromkeys(parameter for inner in module.modules() for _, parameter in held(inner))


@torch.no_grad()
def matrices_inside(module: nn.Module) -> Iterator[Tensor]:
    """What `module` computes with: its parameters one after another, of stacks the matrices one by one."""
    for inner in module.modules():
        for name, parameter in held(inner):
            if parameter.dim() < 2:
                yield parameter.detach()
                continue
            stacks = (parameter.detach(), *differences(inner, name))
            for matrix, *sides in zip(*(each.reshape(-1, *each.shape[-2:]) for each in stacks), strict=True):
                yield low_rank_sum(matrix, *sides) if sides else matrix


def _change(module: nn.Module, names: tuple[str, ...]) -> None:
    base: type[nn.Module] = getattr(type(module), "_plain", type(module))
    module.__class__ = _class_of(base, names) if names else base


_CLASSES: dict[tuple[Any, ...], type[nn.Module]] = {}  # so that modules of one class are of one class afterwards too


def _class_of(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """A class like `base` whose attributes `names` are sums. A property is found before a module's parameters are."""
    if (base, names) not in _CLASSES:
        found = {name: property(functools.partial(_read, name=name)) for name in names}
        own = {"_plain": base, "_differing": names, "__reduce_ex__": _reduce}
        _CLASSES[base, names] = type(base.__name__, (base,), own | found)
    return _CLASSES[base, names]


def _reduce(module: Any, _protocol: int) -> tuple[Any, ...]:
    """How such a module is copied and pickled: its class has no place where it could be found by name."""
    return _blank, (module._plain, module._differing), module.__getstate__()


def _blank(base: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    found = _class_of(base, names)
    return found.__new__(found)


_plainly: ContextVar[bool] = ContextVar("plainly", default=False)


@contextmanager
def read_plainly() -> Iterator[None]:
    """While open, an attribute that has a difference is the parameter alone: for who looks for parameters by name."""
    token = _plainly.set(True)
    try:
        yield
    finally:
        _plainly.reset(token)


def _read(module: nn.Module, name: str) -> Tensor:
    parameters: dict[str, Any] = module._parameters
    if not torch.compiler.is_compiling() and _plainly.get():
        plain: Tensor = parameters[name]
        return plain
    return low_rank_sum(parameters[name], parameters[name + LEFT], parameters[name + RIGHT])
