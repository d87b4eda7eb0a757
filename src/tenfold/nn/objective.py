"""What a model is trained to predict: from a batch of tokens to inputs and targets, and the loss over them.

Shapes: B sequences, T positions, S = T + 1 tokens of a sample, P predicted places of a sequence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tenfold.config.model import ModelConfig
from tenfold.data.sampling import mix
from tenfold.nn.loss import IGNORE, cross_entropy_sum
from tenfold.nn.moe import BALANCE, Z_LOSS

if TYPE_CHECKING:
    from tenfold.nn.decoder import Decoder

HELD_OUT = "validation"
"""The seed of masks for held-out text: the same in every run, so that losses compare."""


class Example(NamedTuple):
    """Inputs [B, T] and what is to be predicted [B, P] (int64; `loss.IGNORE` is left out)."""

    inputs: Tensor
    targets: Tensor
    places: Tensor | None = None
    """The positions that predict, int64 [B, P]; None where all of them do, in order."""

    def split(self, size: int) -> Iterator[Example]:
        """Micro-batches of `size` sequences."""
        for first in range(0, len(self.inputs), size):
            rows = slice(first, first + size)
            yield Example(self.inputs[rows], self.targets[rows], None if self.places is None else self.places[rows])


def cut_sequences(batch_BS: Tensor, length: int) -> Tensor:
    """Samples of T + 1 tokens cut into T / length sequences of length + 1: the token between two ends the one and
    begins the other, so that every token but a sample's first is a target once, as before."""
    return batch_BS.unfold(1, length + 1, length).flatten(0, 1)


def make_example(batch_BS: Tensor, config: ModelConfig, seed: int | str, first_sample: int) -> Example:
    """What the model's objective makes of samples `first_sample` and on, `batch_BS` [B, T + 1]."""
    if config.objective == "masked":
        return masked_example(batch_BS, config, seed, first_sample)
    return next_token_example(batch_BS)


def next_token_example(batch_BS: Tensor) -> Example:
    """Each token predicts the next: `batch_BS` [B, T + 1]."""
    return Example(batch_BS[:, :-1], batch_BS[:, 1:])


def masked_example(batch_BS: Tensor, config: ModelConfig, seed: int | str, first_sample: int) -> Example:
    """BERT's masking (arXiv 1810.04805, section 3.1) of the first T tokens of `batch_BS` [B, T + 1].

    In every sequence round(mask_share x T) places, at least one, are predicted. Of these 80% read the mask token, 10% a
    token drawn from the whole vocabulary, 10% stay. Which and what is a function of (seed, sample index, position).
    Where documents are masked their ends, which show where they lie, are neither hidden nor drawn.
    """
    assert config.vocab_size is not None
    assert config.mask_token is not None
    tokens_BT = batch_BS[:, :-1]
    batch, positions = tokens_BT.shape
    count = max(1, round(config.mask_share * positions))
    random = _random_words(seed, first_sample, batch, positions)
    if config.document_end is not None:
        random[0][(tokens_BT == config.document_end).cpu().numpy()] = np.iinfo(np.uint64).max
    places_BP = np.sort(np.argsort(random[0], axis=1, kind="stable")[:, :count], axis=1)
    kind_BP, draw_BP = (np.take_along_axis(words, places_BP, axis=1) for words in random[1:])
    # The upper half of a word, as a fraction of 2^32: a share of it, or a token.
    kind_BP, draw_BP = kind_BP >> np.uint64(32), draw_BP >> np.uint64(32)
    drawn_BP = (draw_BP * np.uint64(config.vocab_size)) >> np.uint64(32)
    places, drawn, kind = (
        torch.from_numpy(array.astype(np.int64)).to(batch_BS.device) for array in (places_BP, drawn_BP, kind_BP)
    )
    targets = tokens_BT.gather(1, places)
    tenth = 2**32 // 10
    if config.document_end is not None:
        drawn = drawn.where(drawn != config.document_end, config.mask_token)
        kind = kind.where(targets != config.document_end, 9 * tenth)
    read = targets.where(kind >= 9 * tenth, drawn).where(kind >= 8 * tenth, config.mask_token)
    return Example(tokens_BT.scatter(1, places, read), targets, places)


def _random_words(seed: int | str, first_sample: int, batch: int, positions: int) -> npt.NDArray[np.uint64]:
    """Three random 64-bit words for every position of every sample, uint64 [3, B, T], by hashing a counter."""
    digest = hashlib.blake2b(f"mask/{seed}".encode(), digest_size=24).digest()
    keys = np.frombuffer(digest, dtype="<u8")[:, None, None]
    counter_BT: npt.NDArray[np.uint64] = np.arange(positions, dtype=np.uint64)[None]
    samples_B1 = np.arange(first_sample, first_sample + batch, dtype=np.uint64)[:, None]
    return mix(np.add(mix(samples_B1 ^ keys), counter_BT, dtype=np.uint64))


def loss_sum(model: Decoder, hidden: Tensor, example: Example, chunk: int) -> Tensor:
    """The sum over predicted places of -log p(target), a scalar; logits are made at these places alone.

    Where ranks split sequences `hidden` is of this rank's positions, and the sum over the ranks is the whole.
    """
    ranks, targets, counted = model.ranks, example.targets, None
    if ranks.split:
        inner = ranks.tensor.gather(model.before_output(hidden))
        targets = ranks.tensor.sequences(ranks.context.own(_at_all_places(example)))
        counted = ranks.tensor.mine(targets)
        if example.places is not None:
            predicted = targets != IGNORE
            inner, targets, counted = inner[predicted], targets[predicted], counted[predicted]
    else:
        hidden = at_places(hidden, example)
        if not torch.is_grad_enabled():  # a question, asked on every rank
            wide = torch.promote_types(hidden.dtype, torch.float32)
            return ranks.pipeline.from_last(
                lambda: _loss_sum(model, model.before_output(hidden), targets, chunk), (), wide
            )
        inner = model.before_output(hidden)
    return _loss_sum(model, inner, targets, chunk, counted)


def _loss_sum(model: Decoder, inner: Tensor, targets: Tensor, chunk: int, counted: Tensor | None = None) -> Tensor:
    weight, bias, ranks = model.output_weight, model.output_bias, model.ranks.tensor
    return cross_entropy_sum(inner, weight, targets, model.vocab_size, chunk, bias, ranks, counted)


def balance_loss(model: Decoder, statistics_LS: Tensor) -> Tensor | None:
    """What routing adds to the loss, weighted, over the tokens of `statistics_LS`; None where nothing is routed."""
    moe = model.config.moe
    if not moe.experts:
        return None
    return moe.balance_loss * statistics_LS[:, BALANCE].sum() + moe.z_loss * statistics_LS[:, Z_LOSS].sum()


def backward(model: Decoder, part: Example, valid_tokens: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """One micro-batch forward and backward, as a share of the step's mean; its summed loss and its statistics."""
    hidden, statistics_LS = model(part.inputs)
    loss = objective = loss_sum(model, hidden, part, chunk)
    if (routing := balance_loss(model, statistics_LS)) is not None:
        objective = objective + routing
    (objective / valid_tokens).backward()
    return loss.detach(), statistics_LS.detach()


def _at_all_places(example: Example) -> Tensor:
    """Targets for all positions [B, T], `IGNORE` where none is predicted."""
    if example.places is None:
        return example.targets
    return torch.full_like(example.inputs, IGNORE).scatter(1, example.places, example.targets)


def at_places(hidden_BTD: Tensor, example: Example) -> Tensor:
    """The hidden states that predict, [B, P, D]."""
    if example.places is None:
        return hidden_BTD
    return hidden_BTD.gather(1, example.places[..., None].expand(-1, -1, hidden_BTD.shape[-1]))
