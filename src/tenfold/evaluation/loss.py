"""Loss on text laid end to end: window after window, or with windows that overlap."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy.typing as npt
import torch

from tenfold.data.sampling import PackedSequences
from tenfold.evaluation.inference import inference
from tenfold.nn.decoder import Decoder
from tenfold.nn.loss import IGNORE
from tenfold.nn.objective import Example, loss_sum

ItemT = TypeVar("ItemT")


class Row(Protocol):
    """Documents as tokens end to end, such as `data.shards.TokenSplit`."""

    @property
    def tokens(self) -> int:
        """How many, with the one that ends each document."""

    @property
    def text_bytes(self) -> int | None:
        """Bytes of the text in UTF-8, where they are known."""

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Tokens start .. stop - 1."""


class TextLoss(NamedTuple):
    """The sum of -log p in nats, and the tokens it is over."""

    total: float
    tokens: int

    @property
    def mean(self) -> float:
        """Nats per token."""
        return self.total / self.tokens


def batches(items: Iterable[ItemT], size: int) -> Iterator[list[ItemT]]:
    """The items, `size` at a time."""
    rest = iter(items)
    return iter(lambda: list(islice(rest, size)), [])


def windows(targets: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(start, stop, counted) of every window: its inputs are tokens start .. stop - 1 of the row, each predicts the
    one after it, and those from `counted` on count: all of the first window, then the last `stride`. So each of the
    row's `targets` (its tokens but the first) counts once, with at least window - stride tokens before it to see,
    where the row has them."""
    counted = 0
    for start in range(0, targets, stride):
        stop = min(start + window, targets)
        yield start, stop, counted
        counted = stop
        if stop == targets:
            return


def text_loss(
    model: Decoder,
    row: Row,
    window: int,
    stride: int,
    limit: int | None = None,
    batch_size: int = 8,
    chunk: int = 2048,
    advance: Callable[[int], None] = lambda tokens: None,
) -> TextLoss:
    """The loss on the first `limit` predicted tokens of `row` (None: all), `batch_size` windows at once.

    `stride` = `window` is what training's batches see: windows end to end. `advance` is told the tokens as they are
    counted. Nothing depends on how windows are batched: what is short is padded behind its end.
    """
    device = model.device
    targets = row.tokens - 1 if limit is None else min(limit, row.tokens - 1)
    loss = TextLoss(0.0, 0)
    for batch in batches(windows(targets, window, stride), batch_size):
        longest = max(stop - start for start, stop, _ in batch)
        inputs_BT = torch.zeros(len(batch), longest, dtype=torch.int64)
        targets_BT = torch.full_like(inputs_BT, IGNORE)
        for number, (start, stop, counted) in enumerate(batch):
            tokens = torch.from_numpy(row.read(start, stop + 1).astype("int64"))
            inputs_BT[number, : stop - start] = tokens[:-1]
            targets_BT[number, counted - start : stop - start] = tokens[counted - start + 1 :]
        inputs_BT, targets_BT = inputs_BT.to(device), targets_BT.to(device)
        with inference(model):
            hidden_BTD, _ = model(inputs_BT)
            counts_BT = targets_BT != IGNORE  # logits are made where they count alone
            part = Example(inputs_BT, targets_BT[counts_BT])
            total = loss_sum(model, hidden_BTD[counts_BT], part, chunk).item()
        loss = TextLoss(loss.total + total, loss.tokens + len(part.targets))
        advance(len(part.targets))
    return loss


def held_out_loss(model: Decoder, sequences: PackedSequences, limit: int, batch_size: int, chunk: int) -> float:
    """Mean loss in nats per token over the tokens of the first `limit` sequences of `sequences`, or of all its text."""
    window = sequences.sequence_length
    return text_loss(model, sequences.split, window, window, limit * window, batch_size, chunk).mean


def bits_per_byte(loss: float, row: Row) -> float | None:
    """The loss (nats per token) in bits per byte of text, at the row's mean bytes per token.

    None where the bytes of the text are not known: tokens made elsewhere, without a tokenizer that tells.
    """
    if row.text_bytes is None:
        return None
    return loss / math.log(2) * row.tokens / row.text_bytes


def perplexity(loss: float) -> float:
    """exp(loss), or infinity where that is no number."""
    return math.exp(loss) if loss < 700 else math.inf
