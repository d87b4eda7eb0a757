"""Unigram and bigram models counted on the tokens a run trained on: what a language model has to beat to be one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tenfold.data.mixing import MixedSequences
from tenfold.data.sampling import PackedSequences

COUNTED_AT_MOST = 50_000_000
_SMOOTHING = (0.5, 1.0, 3.0, 10.0, 30.0, 100.0)


@dataclass(frozen=True)
class NgramLosses:
    """Losses in nats per token on held-out text, and how many training tokens were counted."""

    unigram: float
    bigram: float
    counted_tokens: int


def ngram_losses(
    train: PackedSequences | MixedSequences, samples: int, validation: PackedSequences, limit: int, vocab_size: int
) -> NgramLosses:
    """Count the first `samples` training sequences, at most an epoch, and predict what a validation of `limit` reads.

    Counted are the very targets the model trained on, each with the token before it; at most 50 million. Unigram:
    (c(b) + 1) / (N + V). Bigram, smoothed towards it: (c(ab) + s * unigram(b)) / (c(a) + s), with the s that does best
    on the held-out text itself, which favours this baseline.
    """
    samples = min(samples, len(train), max(1, COUNTED_AT_MOST // train.sequence_length))
    counts = np.zeros(vocab_size, dtype=np.int64)  # c(b)
    begun = np.zeros(vocab_size, dtype=np.int64)  # c(a)
    coded = np.empty((samples, train.sequence_length), dtype=np.int64)
    for first in range(0, samples, 1024):
        rows = train.batch(first, min(1024, samples - first))
        counts += np.bincount(rows[:, 1:].ravel(), minlength=vocab_size)
        begun += np.bincount(rows[:, :-1].ravel(), minlength=vocab_size)
        coded[first : first + len(rows)] = rows[:, :-1] * vocab_size + rows[:, 1:]
    pairs, pair_counts = np.unique(coded, return_counts=True)

    row = validation.split
    held_out = row.read(0, min(limit * validation.sequence_length + 1, row.tokens)).astype(np.int64)
    before, target = held_out[:-1], held_out[1:]
    unigram = (counts + 1) / (coded.size + vocab_size)
    wanted = before * vocab_size + target
    place = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    seen = np.where(pairs[place] == wanted, pair_counts[place], 0)
    bigram = min(
        float(-np.log((seen + smoothing * unigram[target]) / (begun[before] + smoothing)).mean())
        for smoothing in _SMOOTHING
    )
    return NgramLosses(float(-np.log(unigram[target]).mean()), bigram, coded.size)
