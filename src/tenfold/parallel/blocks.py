"""Attention to a part of the keys, with what is needed to put parts together: the log of the sum of exponentials.

Of one softmax over several blocks of keys each block's output counts by its share of that sum; and given the output and
the sum of all blocks, the gradients of each are what its own backward pass gives (FlashAttention, arXiv 2205.14135;
Ring Attention, arXiv 2310.01889).

Shapes: B sequences, H query heads, K key heads, T queries, S keys, W width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tenfold.nn.products import product_dtype

_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_cuda = torch.ops.aten._scaled_dot_product_flash_attention
_cuda_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
PIECE = 512
"""Queries whose scores exist at once where there is no kernel."""


def attend_block(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Output [B, H, T, W] of `q` to the keys `k` and values `v` [B, K, S, W], and log-sum-exp [B, H, T], fp32 or wider.

    With `causal` there are as many keys as queries, and each query sees those up to its own.
    """
    q, k, v = (x.to(product_dtype(x)) for x in (q, k, v))
    if q.device.type == "cpu":
        out, lse = _cpu(q, k, v, 0.0, causal)
        return out, lse
    if _kernel_takes(q):
        out, lse, *_ = _cuda(q, k, v, 0.0, causal)
        return out, lse
    return _plain(q, k, v, causal)


def attend_block_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of one block's q, k and v; `out` and `lse` are of all blocks together."""
    grad, q, k, v, out = (x.to(product_dtype(x)) for x in (grad, q, k, v, out))
    lse = lse.contiguous()
    if q.device.type == "cpu":
        grad_q, grad_k, grad_v = _cpu_backward(grad, q, k, v, out, lse, 0.0, causal)
    elif _kernel_takes(q):
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the random numbers of a dropout
        grad_q, grad_k, grad_v = _cuda_backward(
            grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, unused, unused
        )
    else:
        grad_q, grad_k, grad_v = _plain_backward(grad, q, k, v, out, lse, causal)
    if grad_k.shape[1] != k.shape[1]:  # by query head
        grad_k, grad_v = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (grad_k, grad_v))
    return grad_q, grad_k, grad_v


def _kernel_takes(q: Tensor) -> bool:
    """Whether PyTorch's flash attention for CUDA is used: for half precision, from compute capability 8 on."""
    fits = q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return fits and q.device.type == "cuda" and torch.cuda.get_device_capability(q.device) >= (8, 0)


def _scores(q: Tensor, k: Tensor, first: int, causal: bool) -> Tensor:
    """Of `PIECE` queries, from `first` on, [B, H, PIECE, S]."""
    piece = q[:, :, first : first + PIECE]
    scores = (piece @ k.transpose(2, 3)).to(torch.promote_types(q.dtype, torch.float32)) * q.shape[-1] ** -0.5
    if not causal:
        return scores
    seen = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).tril(first)
    return scores.masked_fill_(~seen, -torch.inf)


def _by_query_head(q: Tensor, *keys: Tensor) -> list[Tensor]:
    return [x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in keys]


def _plain(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    k, v = _by_query_head(q, k, v)
    outs, sums = [], []
    for first in range(0, q.shape[2], PIECE):
        scores = _scores(q, k, first, causal)
        sums.append(scores.logsumexp(-1))
        outs.append((scores - sums[-1][..., None]).exp_().to(q.dtype) @ v)
    return torch.cat(outs, 2), torch.cat(sums, 2)


def _plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    k, v = _by_query_head(q, k, v)
    grad_k, grad_v, grads_q = torch.zeros_like(k), torch.zeros_like(v), []
    for first in range(0, q.shape[2], PIECE):
        here = (slice(None), slice(None), slice(first, first + PIECE))
        shares = (_scores(q, k, first, causal) - lse[here][..., None]).exp_()
        along = (grad[here] * out[here]).sum(-1, keepdim=True, dtype=shares.dtype)
        grad_v += shares.to(q.dtype).transpose(2, 3) @ grad[here]
        grad_scores = shares.mul_((grad[here] @ v.transpose(2, 3)).sub(along)).mul_(q.shape[-1] ** -0.5).to(q.dtype)
        grads_q.append(grad_scores @ k)
        grad_k += grad_scores.transpose(2, 3) @ q[here]
    return torch.cat(grads_q, 2), grad_k, grad_v
