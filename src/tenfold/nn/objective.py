"""What a model is trained to predict: from a batch of tokens to inputs and targets."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Example(NamedTuple):
    """Inputs [B, T] and what is to be predicted at each place [B, T] (int64; `loss.IGNORE` is left out)."""

    inputs: Tensor
    targets: Tensor


def next_token_example(batch_BS: Tensor) -> Example:
    """Each token predicts the next: `batch_BS` [B, T + 1]."""
    return Example(batch_BS[:, :-1], batch_BS[:, 1:])
