"""Held-out loss against torch's own cross-entropy."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tenfold.config.run import PrepareConfig
from tenfold.data.prepare import prepare
from tenfold.data.sampling import PackedSequences
from tenfold.evaluation.loss import bits_per_byte, held_out_loss
from tenfold.nn.decoder import Decoder


@pytest.fixture
def sequences(tmp_path: Path) -> PackedSequences:
    (tmp_path / "a.txt").write_text("the cat sat on the mat and the dog sat on the log " * 20)
    options = PrepareConfig(vocab_size=260, validation_fraction=0.0, workers=1)
    data = prepare(str(tmp_path / "a.txt"), tmp_path / "shards", options, show_progress=False)
    return PackedSequences(data.split("train"), 16, None)


@pytest.mark.parametrize("batch_size", [1, 3, 5, 100])
def test_held_out_loss_is_the_mean_over_tokens_for_any_batch(
    tiny_decoder: Callable[..., Decoder], sequences: PackedSequences, batch_size: int
) -> None:
    model = tiny_decoder(vocab_size=260)
    tokens = torch.from_numpy(sequences.batch(0, 5))
    logits = model.logits(model(tokens[:, :-1])[0])
    expected = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()
    assert held_out_loss(model, sequences, 5, batch_size, chunk=7) == pytest.approx(expected)


def test_bits_per_byte_count_the_bytes_of_the_text(sequences: PackedSequences) -> None:
    split = sequences.split
    assert split.text_bytes == len("the cat sat on the mat and the dog sat on the log " * 20)
    total_bits = 1.5 * split.tokens / math.log(2)
    assert bits_per_byte(1.5, sequences) == pytest.approx(total_bits / split.text_bytes)
