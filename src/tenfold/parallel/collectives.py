"""Collectives as functions: a new tensor from an old one, waited for, on NCCL as on gloo.

These are PyTorch's functional operators, which `torch.compile` traces too. No gradient passes: `tensor.py` and its
like say what the gradient of each is.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # defines the operators and their fake versions
from torch import Tensor

from tenfold.nn.recompute import KEPT, SUMS

_ops = torch.ops._c10d_functional
KEPT.add(_ops.reduce_scatter_tensor.default)
SUMS.add(_ops.reduce_scatter_tensor.default)


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Every rank's `x`, all of one shape: [ranks, *x.shape]."""
    out: Tensor = _ops.all_gather_into_tensor(x.contiguous()[None], group.size(), group.group_name)
    return _wait(out)


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks of `x[this rank]`, of `x` [ranks, ...]."""
    out: Tensor = _ops.reduce_scatter_tensor(x.contiguous(), "sum", group.size(), group.group_name)
    return _wait(out)[0]


def all_reduce(x: Tensor, group: dist.ProcessGroup, operation: str = "sum") -> Tensor:
    """The sum ("sum") or maximum ("max") over the ranks."""
    out: Tensor = _ops.all_reduce(x.contiguous(), operation, group.group_name)
    return _wait(out)


def broadcasts(x: Tensor, group: dist.ProcessGroup) -> Iterator[Tensor]:
    """Every rank's `x`, all of one shape, one after another; each is on its way while that before is used."""
    x = x.contiguous()

    def start(source: int) -> Tensor:
        given = x if source == group.rank() else torch.empty_like(x)
        out: Tensor = _ops.broadcast(given, source, group.group_name)
        return out

    coming = start(0)
    for source in range(group.size()):
        here = coming
        if source + 1 < group.size():
            coming = start(source + 1)
        yield _wait(here)


def exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`x[r]` [ranks, ...] goes to rank r, and what rank r sent here comes to stand in its place."""
    ones = [1] * group.size()
    out: Tensor = _ops.all_to_all_single(x.contiguous(), ones, ones, group.group_name)
    return _wait(out)


def _wait(x: Tensor) -> Tensor:
    out: Tensor = _ops.wait_tensor(x)
    return out
