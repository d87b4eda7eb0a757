"""Loss on held-out text."""

from __future__ import annotations

import math

import torch

from tenfold.data.sampling import PackedSequences
from tenfold.nn.decoder import Decoder
from tenfold.nn.objective import HELD_OUT, loss_sum, make_example


@torch.no_grad()
def held_out_loss(model: Decoder, sequences: PackedSequences, limit: int, batch_size: int, chunk: int) -> float:
    """Mean loss in nats per predicted token over the first `limit` sequences of `sequences` (or all), in batches."""
    count = min(limit, len(sequences))
    device = model.embedding.weight.device
    total, tokens = 0.0, 0
    for first in range(0, count, batch_size):
        batch = torch.from_numpy(sequences.batch(first, min(batch_size, count - first))).to(device)
        example = make_example(batch, model.config, HELD_OUT, first)
        hidden, _ = model(example.inputs)
        total += loss_sum(model, hidden, example, chunk).item()
        tokens += example.targets.numel()
    return total / tokens


def bits_per_byte(loss: float, sequences: PackedSequences) -> float | None:
    """The loss (nats per token) in bits per byte of text, at the split's mean bytes per token.

    None where the bytes of the text are not known: tokens made elsewhere, without a tokenizer that tells.
    """
    if sequences.split.text_bytes is None:
        return None
    return loss / math.log(2) * sequences.split.tokens / sequences.split.text_bytes
