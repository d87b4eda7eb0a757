"""Unigram and bigram models counted on the training tokens: what a language model has to beat to be one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tenfold.data.sampling import PackedSequences
from tenfold.data.shards import TokenSplit

_COUNTED_AT_MOST = 50_000_000
_SMOOTHING = (0.5, 1.0, 3.0, 10.0, 30.0, 100.0)


@dataclass(frozen=True)
class NgramLosses:
    """Losses in nats per token on held-out text, and how many training tokens were counted."""

    unigram: float
    bigram: float
    counted_tokens: int


def ngram_losses(train: TokenSplit, validation: PackedSequences, limit: int, vocab_size: int) -> NgramLosses:
    """Count the training split (its first 50 million tokens) and predict the targets that `held_out_loss` reads.

    Unigram: (c(b) + 1) / (N + V). Bigram, smoothed towards it: (c(ab) + s * unigram(b)) / (c(a) + s), with the s
    that does best on the held-out text itself, which favours this baseline.
    """
    tokens = train.read(0, min(train.tokens, _COUNTED_AT_MOST)).astype(np.int64)
    held_out = validation.batch(0, min(limit, len(validation)))
    before, target = held_out[:, :-1].ravel(), held_out[:, 1:].ravel()

    counts = np.bincount(tokens, minlength=vocab_size)
    unigram = (counts + 1) / (len(tokens) + vocab_size)
    pairs, pair_counts = np.unique(tokens[:-1] * vocab_size + tokens[1:], return_counts=True)
    wanted = before * vocab_size + target
    place = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    seen = np.where(pairs[place] == wanted, pair_counts[place], 0)
    # The last training token begins no pair, so that c(a) is the sum of c(ab) over b.
    begun = np.bincount(tokens[:-1], minlength=vocab_size)[before]
    bigram = min(
        float(-np.log((seen + smoothing * unigram[target]) / (begun + smoothing)).mean()) for smoothing in _SMOOTHING
    )
    return NgramLosses(float(-np.log(unigram[target]).mean()), bigram, len(tokens))
