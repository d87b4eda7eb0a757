"""The counting baselines against plain loops."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path

import pytest

from tenfold.config.run import PrepareConfig
from tenfold.data.prepare import prepare
from tenfold.data.sampling import PackedSequences
from tenfold.evaluation.ngram import _SMOOTHING, ngram_losses


def test_unigram_and_bigram_losses_equal_a_loop_over_counts(tmp_path: Path) -> None:
    for number in range(12):
        words = " ".join(f"{'abc'[(number * index) % 3]}{'xy'[index % 2]}" for index in range(150))
        (tmp_path / f"{number}.txt").write_text(f"{number} {words}")
    options = PrepareConfig(vocab_size=270, validation_fraction=0.3, workers=1)
    data = prepare(str(tmp_path), tmp_path / "shards", options, show_progress=False)
    train = PackedSequences(data.split("train"), 16, seed=3)
    held_out = PackedSequences(data.split("validation"), 16, None)
    found = ngram_losses(train, 11, held_out, 5, data.vocab_size)

    rows = train.batch(0, 11).tolist()
    pairs = Counter(pair for row in rows for pair in itertools.pairwise(row))
    single = Counter(token for row in rows for token in row[1:])
    begun = Counter(token for row in rows for token in row[:-1])
    tokens = 11 * 16

    def unigram(token: int) -> float:
        return (single[token] + 1) / (tokens + data.vocab_size)

    targets = [
        (int(row[place]), int(row[place + 1]))
        for row in held_out.batch(0, min(5, len(held_out)))
        for place in range(16)
    ]
    plain = -sum(math.log(unigram(after)) for _, after in targets) / len(targets)
    best = min(
        -sum(
            math.log((pairs[before, after] + smoothing * unigram(after)) / (begun[before] + smoothing))
            for before, after in targets
        )
        / len(targets)
        for smoothing in _SMOOTHING
    )
    assert found.unigram == pytest.approx(plain)
    assert found.bigram == pytest.approx(best)
    assert found.bigram < found.unigram
    assert found.counted_tokens == tokens


def test_no_sequence_is_counted_twice_when_the_run_has_epochs(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text(f"{number} one two three " * 20)
    options = PrepareConfig(vocab_size=270, validation_fraction=0.3, workers=1)
    data = prepare(str(tmp_path), tmp_path / "shards", options, show_progress=False)
    train, held_out = (PackedSequences(data.split(name), 8, seed=1) for name in ("train", "validation"))
    once = ngram_losses(train, len(train), held_out, 5, data.vocab_size)
    assert ngram_losses(train, 10 * len(train), held_out, 5, data.vocab_size) == once
    assert once.counted_tokens == len(train) * 8
