"""Documents inside a training sequence: where they lie, positions that restart, attention that does not cross them.

Sequences are cut from documents laid end to end, each followed by the token that ends it. Nothing T x T is made: each
document is a small causal attention of its own, so the shorter the documents, the less work.

Shapes: B sequences, T positions, H heads, W width of a head, N documents of the batch.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Documents(NamedTuple):
    """Where the documents of a batch lie."""

    starts: Tensor
    """int32 [N + 1]: where each begins in the batch's sequences laid end to end, and after them B * T."""
    positions: Tensor
    """int64 [B, T]: each token's place in its document, from 0."""


def documents_of(tokens_BT: Tensor, end: int) -> Documents:
    """The documents of a batch: one begins with each sequence and after each token `end`, which belongs to the
    document that it ends. What a sequence holds of a document that began before it counts as one."""
    begins_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
    begins_BT[:, 1:] = tokens_BT[:, :-1] == end
    place_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
    began_BT = torch.where(begins_BT, place_T, 0).cummax(1).values
    starts = begins_BT.flatten().nonzero()[:, 0]
    return Documents(F.pad(starts, (0, 1), value=tokens_BT.numel()).to(torch.int32), place_T - began_BT)


def attend_within(q_BHTW: Tensor, k_BHTW: Tensor, v_BHTW: Tensor, starts_N: Tensor, causal: bool = True) -> Tensor:
    """softmax(q k^T / sqrt(W)) v of each document by itself, [B, H, T, W]; `starts_N` as in `Documents`."""
    if not q_BHTW.is_cuda:
        out: Tensor = _document_attention(q_BHTW, k_BHTW, v_BHTW, starts_N, causal)[0]
        return out
    if q_BHTW.dtype in (torch.bfloat16, torch.float16) and torch.cuda.get_device_capability(q_BHTW.device) >= (8, 0):
        from torch.nn.attention.varlen import varlen_attn  # here: it looks for CUDA when it is imported

        batch, _, length, _ = q_BHTW.shape
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHTW, k_BHTW, v_BHTW))
        window = (-1, 0 if causal else -1)
        y = varlen_attn(q, k, v, starts_N, starts_N, length, length, window_size=window)
        assert isinstance(y, Tensor)  # it returns more only when asked to
        return y.unflatten(0, (batch, length)).transpose(1, 2)
    mask_B1TT = document_mask(starts_N, len(q_BHTW), q_BHTW.shape[2], causal)
    return F.scaled_dot_product_attention(q_BHTW, k_BHTW, v_BHTW, attn_mask=mask_B1TT)


def document_mask(starts_N: Tensor, batch: int, length: int, causal: bool = True) -> Tensor:
    """Which keys (last) each query may see, bool [B, 1, T, T]: for devices without a kernel for documents."""
    begins = torch.zeros(batch * length + 1, dtype=torch.int32, device=starts_N.device)
    document_BT = begins.index_fill(0, starts_N.long(), 1).cumsum(0)[:-1].view(batch, length)
    same = document_BT[:, None, :, None] == document_BT[:, None, None, :]
    return same.tril() if causal else same


# An operator of our own, so that torch.compile sees one node whatever the number of documents.
@torch.library.custom_op("tenfold::document_attention", mutates_args=())
def _document_attention(
    q_BHTW: Tensor, k_BHTW: Tensor, v_BHTW: Tensor, starts_N: Tensor, causal: bool
) -> tuple[Tensor, Tensor]:
    """Output [B, H, T, W], laid out by position, and log-sum-exp [B, H, T]."""
    out, lse = _empty_results(q_BHTW)
    for place in _places(starts_N, q_BHTW.shape[2]):
        out[place], lse[place] = _flash(q_BHTW[place], k_BHTW[place], v_BHTW[place], 0.0, causal)
    return out, lse


@torch.library.custom_op("tenfold::document_attention_backward", mutates_args=())
def _document_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, starts_N: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    grads = tuple(_empty_results(x)[0] for x in (q, k, v))
    for place in _places(starts_N, q.shape[2]):
        saved = (q[place], k[place], v[place], out[place], lse[place])
        parts = _flash_backward(grad[place], *saved, 0.0, causal)
        for whole, part in zip(grads, parts, strict=True):
            whole[place] = part
    return grads  # type: ignore[return-value]


def _places(starts_N: Tensor, length: int) -> list[tuple[slice, slice, slice]]:
    """For each document the index of its part of a tensor [B, H, T, ...]."""
    starts = starts_N.tolist()
    places = []
    for start, stop in pairwise(starts):
        row = start // length
        places.append((slice(row, row + 1), slice(None), slice(start - row * length, stop - row * length)))
    return places


def _empty_results(q_BHTW: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, length, width = q_BHTW.shape
    statistic = q_BHTW.dtype if q_BHTW.dtype == torch.float64 else torch.float32
    out = q_BHTW.new_empty(batch, length, heads, width).transpose(1, 2)
    return out, q_BHTW.new_empty(batch, heads, length, dtype=statistic)


@_document_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, starts_N: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    return _empty_results(q)


@_document_attention_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, starts_N: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_results(q)[0], _empty_results(k)[0], _empty_results(v)[0]


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor, bool], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, starts_N, ctx.causal = inputs
    ctx.save_for_backward(q, k, v, *output, starts_N)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, starts_N = ctx.saved_tensors
    return *_document_attention_backward(grad, q, k, v, out, lse, starts_N, ctx.causal), None, None


_document_attention.register_autograd(_backward, setup_context=_save)
