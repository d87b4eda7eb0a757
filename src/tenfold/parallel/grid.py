"""Tensor ranks in a grid of rows and columns: 2D tensor parallelism (Optimus, arXiv 2104.05343; SUMMA).

Columns split heads, inner widths and the vocabulary, as tensor ranks in a line do; rows split the hidden width of the
same weights, and the sequences of a batch. So of p ranks each has 1 / p of every matrix, as in a line; but what a layer
gathers is 1 / sqrt(p) of the batch, from sqrt(p) ranks. What goes round instead are weights: a product takes the blocks
of a column's ranks one after another, the next on its way meanwhile,

    y[:, O of this column] = sum over rows l of x[:, D of l] @ block[O of this column, D of l]^T

once in the forward pass and once in the backward pass, and the gradient of a block is summed over the column. With 4
ranks less is sent than in a line where a pass has more than two or three tokens for each hidden element. (The axes
`data_shard` x `tensor` lie in the same way, but gather a segment's weights whole where this has one block at a time.)

SUMMA sends the blocks of x round a row in the same steps; here a row gathers x once, for all products that read it, and
between products, where positions are split, a rank has all D of its own: norms ask nothing of others.

Without gradients all ranks have all sequences, and each multiplies by its own block alone.

Shapes: B sequences, T positions, D hidden, I inner (of this column), O outputs and V rows of the vocabulary (likewise).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tenfold.config.model import ModelConfig
from tenfold.nn.layers import Linear
from tenfold.nn.products import linear as product
from tenfold.nn.products import product_dtype
from tenfold.nn.ranks import ALONE, TensorRanks
from tenfold.nn.recompute import KEPT
from tenfold.parallel.collectives import all_gather, all_reduce, broadcasts, exchange, reduce_scatter
from tenfold.parallel.mesh import Mesh
from tenfold.parallel.splits import share_of
from tenfold.parallel.tensor import TensorGroup


def tensor_ranks(mesh: Mesh, config: ModelConfig) -> TensorRanks:
    """The tensor ranks of a mesh that split a model of `config`: in a line or in a grid."""
    degrees, place = mesh.degrees, mesh.place["tensor"]
    if degrees.tensor == 1:
        return ALONE.tensor
    if not degrees.grid:
        return TensorGroup(mesh.group("tensor"), degrees.tensor, place, config)
    side = degrees.columns
    row, column = divmod(place, side)
    along_row = mesh.part("tensor", tuple(range(row * side, (row + 1) * side)))
    along_column = mesh.part("tensor", tuple(range(column, degrees.tensor, side)))
    assert along_row is not None
    assert along_column is not None
    return TensorGrid(along_row, along_column, side, row, column, config)


class TensorGrid(TensorGroup):
    """This rank, at `row` and `column` of a square of `side` x `side`.

    `along_row` are the ranks of its row, which have the same sequences, `along_column` those of its column, which have
    the same heads.
    """

    def __init__(
        self,
        along_row: dist.ProcessGroup,
        along_column: dist.ProcessGroup,
        side: int,
        row: int,
        column: int,
        config: ModelConfig,
    ) -> None:
        super().__init__(along_row, side, column, config)
        self._column_group, self._row = along_column, row
        self._hidden, self._embedded = (
            [share_of(width, side, each) for each in range(side)] for width in (config.hidden, config.embedding_columns)
        )
        _groups[along_column.group_name] = along_column

    def sequences(self, x_BT: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return x_BT
        return x_BT.unflatten(0, (self.size, -1))[self._row]

    def expand(self, linear: Linear, x_BTD: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            y_BTI: Tensor = _block_product(x_BTD, linear.weight, self._column_group.group_name, True)
        else:
            partial = product(x_BTD.chunk(self.size, -1)[self._row], linear.weight, None)
            y_BTI = all_reduce(partial, self._column_group)
        return y_BTI if linear.bias is None else y_BTI + linear.bias.to(y_BTI.dtype)

    def project(self, linear: Linear, x_BTI: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            y = self.sum(_block_product(x_BTI, linear.weight, self._column_group.group_name, False))
        else:
            y = _join(self.add(product(x_BTI, linear.weight, None)), self._column_group, self._hidden)
        return y if linear.bias is None else y + linear.bias.to(y.dtype)

    def embed(self, tokens_BT: Tensor, weight_VD: Tensor) -> Tensor:
        row_BT = tokens_BT - self.first_row
        here_BT = (row_BT >= 0) & (row_BT < len(weight_VD))
        # Of all rows' sequences this rank's columns of D; then its own sequences with all of D.
        part = self.sum(F.embedding(row_BT.where(here_BT, 0), weight_VD).where(here_BT[..., None], 0))
        if not torch.is_grad_enabled():
            return _join(part, self._column_group, self._embedded)
        out: Tensor = _Swap.apply(part, self._column_group, self._embedded, True)
        return out

    def columns(self, weight_VD: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return _join(weight_VD, self._column_group, self._embedded)
        out: Tensor = _Join.apply(weight_VD, self._column_group, self._embedded)
        return out


_groups: dict[str, dist.ProcessGroup] = {}  # by name, since an operator cannot be given a group


# Operators of our own: what one rank of a column sends another receives, but all of them must compile to one thing.
@torch.library.custom_op("tenfold::block_product", mutates_args=())
def _block_product(x: Tensor, block: Tensor, group: str, widening: bool) -> Tensor:
    """x [..., D] @ block^T for the blocks of a column's ranks one after another.

    Blocks are [O, D of a row], and the result, [..., O], is the sum over them (`widening`); or they are [D of a row, I]
    and the result, of x [..., I], is [..., D].
    """
    column = _groups[group]
    blocks = broadcasts(block.to(x.dtype), column)
    if not widening:
        return torch.cat([product(x, each, None) for each in blocks], -1)
    parts = x.chunk(column.size(), -1)
    return _add_up(product(part, each, None) for part, each in zip(parts, blocks, strict=True))


KEPT.add(torch.ops.tenfold.block_product.default)


@torch.library.custom_op("tenfold::block_product_backward", mutates_args=())
def _block_product_backward(
    grad: Tensor, x: Tensor, block: Tensor, group: str, widening: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of this rank's block."""
    column = _groups[group]
    blocks = broadcasts(block.to(x.dtype), column)
    # Each matrix in as many parts as there are blocks, along D: of x where that is widened, else of the gradient.
    xs = x.chunk(column.size(), -1) if widening else [x] * column.size()
    grads = [grad] * column.size() if widening else grad.chunk(column.size(), -1)
    parts = (_times(part, each) for part, each in zip(grads, blocks, strict=True))
    grad_x = torch.cat(list(parts), -1) if widening else _add_up(parts)
    flat = [(one.flatten(0, -2), other.flatten(0, -2)) for one, other in zip(grads, xs, strict=True)]
    grad_blocks = torch.stack([_times(one.t(), other).to(block.dtype) for one, other in flat])
    return grad_x, reduce_scatter(grad_blocks, column)


@_block_product.register_fake
def _(x: Tensor, block: Tensor, group: str, widening: bool) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(block) if widening else len(block) * _groups[group].size())


@_block_product_backward.register_fake
def _(grad: Tensor, x: Tensor, block: Tensor, group: str, widening: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), block.new_empty(block.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, str, bool], output: Tensor) -> None:
    x, block, ctx.group, ctx.widening = inputs
    ctx.save_for_backward(x, block)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grads = _block_product_backward(grad, *ctx.saved_tensors, ctx.group, ctx.widening)
    return *grads, None, None


_block_product.register_autograd(_backward, setup_context=_save)


def _times(one: Tensor, other: Tensor) -> Tensor:
    dtype = product_dtype(one)
    return (one.to(dtype) @ other.to(dtype)).to(one.dtype)


def _add_up(parts: Iterator[Tensor]) -> Tensor:
    total = next(parts)
    for part in parts:
        total.add_(part)
    return total


class _Join(torch.autograd.Function):
    """All D from each rank's share of it; the gradient is summed over the ranks, whose parts of it differ."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, shares: list[range]) -> Tensor:
        ctx.group, ctx.shares = group, shares
        return _join(x, group, shares)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        own = len(ctx.shares[ctx.group.rank()])
        return reduce_scatter(_cut(grad, ctx.shares), ctx.group)[..., :own], None, None


class _Swap(torch.autograd.Function):
    """A rank's share of D of all sequences becomes all D of its part of the sequences (`forth`); or back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, shares: list[range], forth: bool) -> Tensor:
        ctx.group, ctx.shares, ctx.forth = group, shares, forth
        if forth:
            return _paste(exchange(_pad(x, shares).unflatten(0, (group.size(), -1)), group), shares)
        return exchange(_cut(x, shares), group).flatten(0, 1)[..., : len(shares[group.rank()])]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        out: Tensor = _Swap.apply(grad, ctx.group, ctx.shares, not ctx.forth)
        return out, None, None, None


def _join(x: Tensor, group: dist.ProcessGroup, shares: list[range]) -> Tensor:
    return _paste(all_gather(_pad(x, shares), group), shares)


def _pad(x: Tensor, shares: list[range]) -> Tensor:
    """Ranks exchange what is of one shape: shares as wide as the widest."""
    return F.pad(x, (0, max(map(len, shares)) - x.shape[-1]))


def _cut(x: Tensor, shares: list[range]) -> Tensor:
    return torch.stack([_pad(x[..., share.start : share.stop], shares) for share in shares])


def _paste(parts: Tensor, shares: list[range]) -> Tensor:
    return torch.cat([part[..., : len(share)] for part, share in zip(parts, shares, strict=True)], -1)
