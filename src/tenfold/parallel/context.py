"""Context ranks: each has a part of every sequence, and keys and values travel round the ring of them.

Ring Attention (arXiv 2310.01889), with the order of `zigzag`, in which a causal mask leaves all ranks the same work.
While a rank's queries are at one block of keys the next is on its way. The backward pass goes round once more: a
block's gradients follow it, one step behind, and come home in the end.

Shapes: B sequences, H query heads, K key heads, T positions of one rank, W width of a head, N documents of the batch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tenfold.nn.attend import Context
from tenfold.nn.ranks import ContextRanks
from tenfold.nn.recompute import KEPT
from tenfold.parallel.blocks import attend_block, attend_block_backward
from tenfold.parallel.zigzag import Part, own_chunks, parts_of, parts_within

_groups: dict[str, dist.ProcessGroup] = {}  # by name, since an operator cannot be given a group


class SplitSequences(ContextRanks):
    """The ranks of `group` split every sequence among them, two chunks each."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.size, self.rank, self._name = group.size(), group.rank(), group.group_name
        _groups[self._name] = group

    def own(self, x_BT: Tensor) -> Tensor:
        return own_chunks(x_BT, self.size, self.rank)

    def attend(self, q_BHTW: Tensor, k_BKTW: Tensor, v_BKTW: Tensor, context: Context) -> Tensor:
        if not torch.is_grad_enabled():  # whole sequences
            return super().attend(q_BHTW, k_BKTW, v_BKTW, context)
        assert not context.caches
        starts = context.document_starts
        out: Tensor = _ring_attention(q_BHTW, k_BKTW, v_BKTW, starts, context.causal, self._name)[0]
        return out


class _Passing:
    """A tensor on its way to the next rank of a ring, and one of its shape that comes from the rank before."""

    def __init__(self, x: Tensor, group: dist.ProcessGroup) -> None:
        size, rank = group.size(), group.rank()
        self._going, self._coming = x, torch.empty_like(x)  # neither may be freed under way
        self._work = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._going, group=group, group_peer=(rank + 1) % size),
                dist.P2POp(dist.irecv, self._coming, group=group, group_peer=(rank - 1) % size),
            ]
        )

    def wait(self) -> Tensor:
        """What came."""
        for work in self._work:
            work.wait()
        return self._coming


# Operators of our own, so that torch.compile sees one node, and so does what tells what to keep of a layer.
@torch.library.custom_op("tenfold::ring_attention", mutates_args=())
def _ring_attention(
    q_BHTW: Tensor, k_BKTW: Tensor, v_BKTW: Tensor, starts_N: Tensor | None, causal: bool, group: str
) -> tuple[Tensor, Tensor]:
    """Output [B, H, T, W], laid out by position, and log-sum-exp [B, H, T], over the keys of all ranks of the group."""
    ring = _groups[group]
    size, rank = ring.size(), ring.rank()
    parts = _parts(ring, q_BHTW, starts_N, causal)
    wide = torch.promote_types(q_BHTW.dtype, torch.float32)
    out, lse = _zeros_by_position(q_BHTW, wide), q_BHTW.new_full(q_BHTW.shape[:3], -torch.inf, dtype=wide)
    block = torch.stack((k_BKTW, v_BKTW))
    for step in range(size):
        passing = _Passing(block, ring) if step + 1 < size else None
        for part in parts[(rank - step) % size]:
            queries = (part.rows, slice(None), part.queries)
            k, v = block[:, part.rows, :, part.keys]
            of_part, lse_of_part = attend_block(q_BHTW[queries], k, v, part.causal)
            before = lse[queries]
            out[queries].lerp_(of_part.to(wide), torch.sigmoid(lse_of_part - before)[..., None])
            lse[queries] = torch.logaddexp(before, lse_of_part)
        if passing is not None:
            block = passing.wait()
    return out.to(q_BHTW.dtype), lse


KEPT.add(torch.ops.tenfold.ring_attention.default)  # made again it would go round the ring again


@torch.library.custom_op("tenfold::ring_attention_backward", mutates_args=())
def _ring_attention_backward(
    grad: Tensor,
    q_BHTW: Tensor,
    k_BKTW: Tensor,
    v_BKTW: Tensor,
    out: Tensor,
    lse: Tensor,
    starts_N: Tensor | None,
    causal: bool,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's q, k and v."""
    ring = _groups[group]
    size, rank = ring.size(), ring.rank()
    parts = _parts(ring, q_BHTW, starts_N, causal)
    wide = torch.promote_types(q_BHTW.dtype, torch.float32)
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    grad_q = _zeros_by_position(q_BHTW, wide)
    block = torch.stack((k_BKTW, v_BKTW))
    own, behind = block, None
    for step in range(size):
        passing = _Passing(block, ring) if step + 1 < size else None
        grad_block = torch.zeros_like(block, dtype=wide)
        for part in parts[(rank - step) % size]:
            queries = (part.rows, slice(None), part.queries)
            k, v = block[:, part.rows, :, part.keys]
            saved = (q_BHTW[queries], k, v, out[queries], lse[queries])
            of_q, *of_keys = attend_block_backward(grad[queries], *saved, part.causal)
            grad_q[queries] += of_q
            for whole, of_part in zip(grad_block, of_keys, strict=True):
                whole[part.rows, :, part.keys] += of_part
        if step == 0:
            own = grad_block  # stays: what the others add comes home last
        else:
            behind = _Passing(grad_block if behind is None else grad_block.add_(behind.wait()), ring)
        if passing is not None:
            block = passing.wait()
    assert behind is not None
    grad_k, grad_v = (each.to(q_BHTW.dtype, copy=True) for each in own.add_(behind.wait()))
    return grad_q.to(q_BHTW.dtype), grad_k, grad_v


_last: tuple[Tensor, int, tuple[Any, ...], list[list[Part]]] | None = None


def _parts(ring: dist.ProcessGroup, q_BHTW: Tensor, starts_N: Tensor | None, causal: bool) -> list[list[Part]]:
    """What this rank's queries see. All layers of a forward pass ask the same: documents are read once, since that
    waits for a GPU."""
    global _last
    shape = (ring.size(), ring.rank(), len(q_BHTW), q_BHTW.shape[2])
    if starts_N is None:
        return parts_of(*shape, causal)
    key = (*shape, causal, starts_N.shape)
    # Held here, the tensor's memory is no other's as long as it is compared to.
    if _last is not None and (_last[0].data_ptr(), *_last[1:3]) == (starts_N.data_ptr(), starts_N._version, key):
        return _last[3]
    found = parts_within(*shape, starts_N.tolist(), causal)
    _last = (starts_N, starts_N._version, key, found)
    return found


def _zeros_by_position(q_BHTW: Tensor, dtype: torch.dtype) -> Tensor:
    batch, heads, length, width = q_BHTW.shape
    return q_BHTW.new_zeros(batch, length, heads, width, dtype=dtype).transpose(1, 2)


@_ring_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, starts_N: Tensor | None, causal: bool, group: str) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return _zeros_by_position(q, q.dtype), q.new_empty(q.shape[:3], dtype=wide)


@_ring_attention_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    starts_N: Tensor | None,
    causal: bool,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return _zeros_by_position(q, q.dtype), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, starts_N, ctx.causal, ctx.group = inputs
    ctx.save_for_backward(q, k, v, *output, starts_N)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    grads = _ring_attention_backward(grad, *ctx.saved_tensors, ctx.causal, ctx.group)
    return *grads, None, None, None


_ring_attention.register_autograd(_backward, setup_context=_save)
