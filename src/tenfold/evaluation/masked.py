"""An encoder on held-out text, and filling in what is masked."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from tenfold.config.model import ModelConfig
from tenfold.data.mixing import MixedSequences
from tenfold.data.sampling import PackedSequences
from tenfold.errors import TenfoldError
from tenfold.evaluation.inference import inference
from tenfold.evaluation.ngram import COUNTED_AT_MOST
from tenfold.nn.decoder import Decoder
from tenfold.nn.objective import HELD_OUT, at_places, make_example


class MaskedLoss(NamedTuple):
    """Nats per masked token, and the share of them whose likeliest token is the right one."""

    loss: float
    accuracy: float


MASK = "[MASK]"
"""How a person writes a masked token, whatever the tokenizer calls it."""


def masked_loss(model: Decoder, sequences: PackedSequences, limit: int, batch_size: int, chunk: int) -> MaskedLoss:
    """Over the masked tokens of the first `limit` sequences (or all); their masks are the same in every run."""
    count = min(limit, len(sequences))
    device = model.device
    loss, right, tokens = 0.0, 0, 0
    for first in range(0, count, batch_size):
        batch = torch.from_numpy(sequences.batch(first, min(batch_size, count - first))).to(device)
        example = make_example(batch, model.config, HELD_OUT, first)
        targets_N = example.targets.flatten()
        with inference(model):
            hidden_ND = at_places(model(example.inputs)[0], example).flatten(0, 1)
            for rows, targets in zip(hidden_ND.split(chunk), targets_N.split(chunk), strict=True):
                logits = model.logits(rows)
                loss += F.cross_entropy(logits, targets, reduction="sum").item()
                right += int((logits.argmax(-1) == targets).sum())
        tokens += targets_N.numel()
    return MaskedLoss(loss / tokens, right / tokens)


def masked_unigram_loss(
    train: PackedSequences | MixedSequences, samples: int, validation: PackedSequences, limit: int, config: ModelConfig
) -> tuple[float, int]:
    """What an encoder has to beat: (c(b) + 1) / (N + V) counted on the first `samples` training sequences, once each.

    The loss in nats per token at the very places that `masked_loss` masks, and N, at most 50 million.
    """
    assert config.vocab_size is not None
    samples = min(samples, len(train), max(1, COUNTED_AT_MOST // train.sequence_length))
    counts = np.zeros(config.vocab_size, dtype=np.int64)
    for first in range(0, samples, 1024):
        rows = train.batch(first, min(1024, samples - first))[:, :-1]
        counts += np.bincount(rows.ravel(), minlength=config.vocab_size)
    held_out = torch.from_numpy(validation.batch(0, min(limit, len(validation))))
    targets = make_example(held_out, config, HELD_OUT, 0).targets.numpy()
    counted = int(counts.sum())
    return float(-np.log((counts[targets] + 1) / (counted + config.vocab_size)).mean()), counted


def encode_masked(tokenizer: Tokenizer, text: str, mask_token: int) -> list[int]:
    """The tokens of a text in which [MASK] stands for masked tokens; a TenfoldError where there is none."""
    pieces = text.split(MASK)
    if len(pieces) == 1:
        raise TenfoldError(
            f"the model is an encoder (model.objective = masked): it fills in, and cannot write on. Put {MASK} into "
            f'the prompt: --prompt "the {MASK} of"'
        )
    tokens: list[int] = []
    for number, piece in enumerate(pieces):
        tokens += [mask_token] * (number > 0)
        tokens += tokenizer.encode(piece, add_special_tokens=False).ids
    return tokens


def fill_masks(model: Decoder, tokens: list[int], top: int) -> list[list[tuple[int, float]]]:
    """For every mask token in `tokens` the `top` likeliest ids with their probabilities, likeliest first."""
    if len(tokens) > model.max_positions:
        raise TenfoldError(f"the prompt has {len(tokens):,} tokens, and the model sees {model.max_positions:,}")
    given = torch.tensor([tokens], device=model.device)
    with inference(model):
        hidden, _ = model(given)
        likely = model.logits(hidden[given == model.config.mask_token]).softmax(-1).topk(min(top, model.vocab_size))
    return [
        list(zip(ids, probabilities, strict=True))
        for ids, probabilities in zip(likely.indices.tolist(), likely.values.tolist(), strict=True)
    ]
