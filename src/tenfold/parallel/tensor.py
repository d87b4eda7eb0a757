"""Tensor ranks: each has some heads, a part of the inner widths and some rows of the vocabulary (Megatron-LM, arXiv
1909.08053), and between the products positions of its own (sequence parallelism, arXiv 2205.05198).

A layer costs two gathers of the sequence and two reduce-scatters, and their mirror images in the backward pass: the
gradient of a gather is a reduce-scatter, and the other way round. Without gradients sequences are whole on every rank,
and two sums over the ranks take the place of the four.

Shapes: B sequences, T positions (of one context rank), S = T / ranks, D hidden, I inner (this rank's part), V rows of
the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tenfold.config.model import ModelConfig
from tenfold.nn.layers import Linear
from tenfold.nn.products import linear as product
from tenfold.nn.ranks import TensorRanks
from tenfold.parallel.collectives import all_gather, all_reduce, reduce_scatter
from tenfold.parallel.splits import heads_of, vocabulary_of


class TensorGroup(TensorRanks):
    """This rank, `rank` of the `size` in `group`, which split a model of `config`."""

    def __init__(self, group: dist.ProcessGroup, size: int, rank: int, config: ModelConfig) -> None:
        self.group, self.size, self.rank = group, size, rank
        self._rows = [vocabulary_of(config, size, each) for each in range(size)]
        self.first_row = self._rows[rank].start

    def gather(self, x_BSD: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return x_BSD
        out: Tensor = _Gather.apply(x_BSD, self.group)
        return out

    def own(self, x_BT: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return x_BT
        return x_BT.unflatten(1, (self.size, -1))[:, self.rank]

    def mine(self, x_BT: Tensor) -> Tensor:
        mine_BT = torch.zeros_like(x_BT, dtype=torch.bool)
        mine_BT.unflatten(1, (self.size, -1))[:, self.rank] = True
        return mine_BT

    def project(self, linear: Linear, x_BTI: Tensor) -> Tensor:
        y_BSD = self.sum(product(x_BTI, linear.weight, None))
        # After the sum, so that it is added once; each rank's gradient of it is that of its positions.
        return y_BSD if linear.bias is None else y_BSD + linear.bias.to(y_BSD.dtype)

    def sum(self, y_BTD: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self.add(y_BTD)
        out: Tensor = _Sum.apply(y_BTD, self.group)
        return out

    def embed(self, tokens_BT: Tensor, weight_VD: Tensor) -> Tensor:
        row_BT = tokens_BT - self.first_row
        here_BT = (row_BT >= 0) & (row_BT < len(weight_VD))
        x_BTD = F.embedding(row_BT.where(here_BT, 0), weight_VD)
        return self.sum(x_BTD.where(here_BT[..., None], 0))

    def add(self, x: Tensor) -> Tensor:
        return all_reduce(x, self.group)

    def maximum(self, x: Tensor) -> Tensor:
        return all_reduce(x, self.group, "max")

    def gather_vocabulary(self, logits_BTV: Tensor) -> Tensor:
        most = max(map(len, self._rows))
        parts = all_gather(F.pad(logits_BTV, (0, most - logits_BTV.shape[-1])), self.group)
        return torch.cat([part[..., : len(rows)] for part, rows in zip(parts, self._rows, strict=True)], -1)

    def key_heads(self, config: ModelConfig) -> int:
        return len(heads_of(config, self.size, self.rank)[1])


class _Gather(torch.autograd.Function):
    """[B, S, ...] of every rank to [B, T, ...]; the gradient is summed over the ranks, whose parts of it differ."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _scatter(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    """This rank's [B, S, ...] of the sum of [B, T, ...]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _scatter(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gather(grad, ctx.group), None


def _gather(x_BS: Tensor, group: dist.ProcessGroup) -> Tensor:
    return all_gather(x_BS, group).transpose(0, 1).flatten(1, 2)


def _scatter(x_BT: Tensor, group: dist.ProcessGroup) -> Tensor:
    return reduce_scatter(x_BT.unflatten(1, (group.size(), -1)).transpose(0, 1), group)
