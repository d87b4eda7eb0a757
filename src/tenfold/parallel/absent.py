"""Tensors that have a shape and no memory: they stand for what is elsewhere. To read one gives no number, loudly."""

from __future__ import annotations

import torch
from torch import Tensor

from tenfold.parallel.pieces import local_of

_MARK = 1
"""Bytes more than the one number takes, by which a tensor of one element is told from one that is there."""


def absent(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of a shape and of no memory but for one number, which is none."""
    storage = torch.UntypedStorage(dtype.itemsize + _MARK, device=device)
    number = torch.empty(0, dtype=dtype, device=device).set_(storage, 0, (), ())
    return number.fill_(torch.nan).expand(shape)


def is_absent(tensor: Tensor) -> bool:
    """Whether a tensor, or this rank's shard of it, is of `absent`'s kind."""
    local = local_of(tensor)
    held, needed = local.untyped_storage().nbytes(), local.numel() * local.element_size()
    return held < needed or (local.numel() == 1 and held == needed + _MARK)


def drop_memory(tensor: Tensor) -> None:
    """Let go of the memory of a tensor, or of this rank's shard of it."""
    local = getattr(tensor, "_local_tensor", tensor)
    local.data = absent(local.shape, local.dtype, local.device)
