"""Held-out loss and accuracy of an encoder, its unigram baseline, and filling in masks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tenfold.config.run import PrepareConfig
from tenfold.data.prepare import prepare
from tenfold.data.sampling import PackedSequences
from tenfold.errors import TenfoldError
from tenfold.evaluation.generation import generate
from tenfold.evaluation.masked import fill_masks, masked_loss, masked_unigram_loss
from tenfold.nn.decoder import Decoder
from tenfold.nn.objective import HELD_OUT, make_example

MASKED = {"objective": "masked", "mask_token": 260, "vocab_size": 261, "mask_share": 0.3}


@pytest.fixture
def sequences(tmp_path: Path) -> PackedSequences:
    (tmp_path / "a.txt").write_text("the cat sat on the mat and the dog sat on the log " * 20)
    options = PrepareConfig(vocab_size=260, validation_fraction=0.0, workers=1)
    data = prepare(str(tmp_path / "a.txt"), tmp_path / "shards", options, show_progress=False)
    return PackedSequences(data.split("train"), 16, None)


@pytest.mark.parametrize("batch_size", [1, 3, 100])
@pytest.mark.parametrize("chunk", [4, 100])
def test_loss_and_accuracy_are_means_over_masked_tokens(
    tiny_decoder: Callable[..., Decoder], sequences: PackedSequences, batch_size: int, chunk: int
) -> None:
    model = tiny_decoder(**MASKED)
    example = make_example(torch.from_numpy(sequences.batch(0, 7)), model.config, HELD_OUT, 0)
    logits = model.logits(model(example.inputs)[0]).detach()
    losses, hits = [], 0
    for row, (places, targets) in enumerate(zip(example.places, example.targets, strict=True)):
        for place, target in zip(places.tolist(), targets.tolist(), strict=True):
            losses.append(F.cross_entropy(logits[row, place], torch.tensor(target)).item())
            hits += int(logits[row, place].argmax() == target)
    found = masked_loss(model, sequences, 7, batch_size, chunk)
    assert found.loss == pytest.approx(sum(losses) / len(losses))
    assert found.accuracy == hits / len(losses)


def test_the_unigram_model_is_counted_on_training_text_and_asked_at_the_masks(
    tiny_config: Callable[..., object], sequences: PackedSequences
) -> None:
    config = tiny_config(**MASKED)
    counts = Counter(sequences.batch(0, 9)[:, :-1].ravel().tolist())
    targets = make_example(torch.from_numpy(sequences.batch(0, 5)), config, HELD_OUT, 0).targets  # type: ignore[arg-type]
    expected = [-math.log((counts[token] + 1) / (9 * 16 + 261)) for token in targets.flatten().tolist()]
    loss, counted = masked_unigram_loss(sequences, 9, sequences, 5, config)  # type: ignore[arg-type]
    assert loss == pytest.approx(sum(expected) / len(expected))
    assert counted == 9 * 16


def test_masks_are_filled_with_the_likeliest_tokens(tiny_decoder: Callable[..., Decoder]) -> None:
    model = tiny_decoder(**MASKED)
    tokens = [5, 260, 7, 8, 260]
    probabilities = model.logits(model(torch.tensor([tokens]))[0])[0].softmax(-1)
    fills = fill_masks(model, tokens, 3)
    assert len(fills) == 2
    for place, fill in zip((1, 4), fills, strict=True):
        assert [token for token, _ in fill] == probabilities[place].topk(3).indices.tolist()
        assert [p for _, p in fill] == pytest.approx(probabilities[place].topk(3).values.tolist())


def test_an_encoder_is_not_asked_to_write(tiny_decoder: Callable[..., Decoder]) -> None:
    with pytest.raises(TenfoldError, match="is an encoder"):
        list(generate(tiny_decoder(**MASKED), [1, 2], 3))
