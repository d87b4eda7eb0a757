"""Loss on text against plain loops in float64, one token at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tenfold.evaluation.loss import bits_per_byte, perplexity, text_loss, windows
from tenfold.evaluation.sets import TextRow
from tenfold.nn.decoder import Decoder

SHAPES: dict[str, dict[str, Any]] = {
    "dense": {},
    "learned positions": {"positions": "learned"},
    "moe with capacity": {"moe": {"experts": 4, "ffn": 8, "capacity": "one", "capacity_factor": 0.5}},
    "documents": {"document_end": 7},
    "factorised embedding": {"embedding_width": 8},
}


def row_of(tokens: int, text_bytes: int = 100) -> TextRow:
    ids = np.random.default_rng(0).integers(0, 50, tokens, dtype=np.uint32)
    return TextRow(ids, text_bytes, words=20, path="here")


def log_probability(model: Decoder, seen: list[int], target: int) -> float:
    """-log p of `target` after `seen`, alone in a batch."""
    with torch.no_grad():
        logits = model.logits(model(torch.tensor([seen]))[0])[0, -1]
    return float(torch.logsumexp(logits, 0) - logits[target])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("window", "stride"), [(8, 8), (8, 3), (8, 1), (32, 5), (7, 7)])
def test_strided_loss_equals_a_loop_over_tokens(
    tiny_decoder: Callable[..., Decoder], shape: str, window: int, stride: int
) -> None:
    model = tiny_decoder(sharing={"groups": 2}, **SHAPES[shape])
    row = row_of(30)
    ids = row.ids.tolist()
    # Each token by the first window that holds it: windows begin at 0, stride, 2 x stride and so on.
    model.eval()
    total = 0.0
    for target in range(1, len(ids)):
        start = 0
        while start + window < target:
            start += stride
        total += log_probability(model, ids[start:target], ids[target])
    model.train()
    for batch_size in (1, 4, 50):
        found = text_loss(model, row, window, stride, batch_size=batch_size, chunk=7)
        assert found.tokens == 29
        assert found.total == pytest.approx(total, rel=1e-6)
    assert model.training


def test_transformers_strided_perplexity_is_the_same_but_for_its_first_targets(
    tiny_decoder: Callable[..., Decoder],
) -> None:
    """The loop of the transformers documentation, whose windows hold W tokens and predict W - 1 of them: ours of
    W - 1 inputs predict the same ones from the same ones, where the stride is the same."""
    model = tiny_decoder()
    ids = row_of(26).ids.astype("int64")
    most, stride, total, counted, before = 9, 4, 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + most, len(ids))
        new = end - before
        piece = torch.from_numpy(ids[begin:end])[None]
        labels = piece.clone()
        labels[:, :-new] = -100
        with torch.no_grad():
            logits = model.logits(model(piece)[0])
        pairs = torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:], ignore_index=-100, reduction="sum")
        total, counted, before = total + float(pairs), counted + int((labels[0, 1:] != -100).sum()), end
        if end == len(ids):
            break
    found = text_loss(model, row_of(26), most - 1, stride)
    assert found.tokens == counted == 25
    assert found.total == pytest.approx(total, rel=1e-6)


@given(targets=st.integers(1, 200), window=st.integers(1, 40), data=st.data())
def test_every_token_counts_once_with_the_context_promised(targets: int, window: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, window))
    counts = [0] * targets
    for start, stop, counted in windows(targets, window, stride):
        assert 0 <= start <= counted < stop <= targets
        assert stop - start <= window
        for place in range(counted, stop):
            counts[place] += 1
            assert place - start >= min(place, window - stride)
    assert counts == [1] * targets


def test_a_limit_counts_the_first_tokens_alone(tiny_decoder: Callable[..., Decoder]) -> None:
    model = tiny_decoder()
    short = TextRow(row_of(30).ids[:18], 100, 20, "here")
    for stride in (8, 3):
        assert text_loss(model, row_of(30), 8, stride, limit=17) == text_loss(model, short, 8, stride)


def test_progress_is_told_in_tokens(tiny_decoder: Callable[..., Decoder]) -> None:
    told: list[int] = []
    text_loss(tiny_decoder(), row_of(30), 8, 3, batch_size=2, advance=told.append)
    assert sum(told) == 29
    assert len(told) > 2


def test_a_model_in_bf16_is_near_the_same_model_in_fp32(tiny_decoder: Callable[..., Decoder]) -> None:
    models = [tiny_decoder(dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    single, half = (text_loss(model, row_of(30), 8, 4).mean for model in models)
    assert half == pytest.approx(single, rel=0.02)


def test_bits_per_byte_count_the_bytes_of_the_text() -> None:
    assert bits_per_byte(1.5, row_of(30, text_bytes=70)) == pytest.approx(1.5 * 30 / math.log(2) / 70)


def test_perplexity_of_no_number_at_all_is_infinite() -> None:
    assert perplexity(2.0) == pytest.approx(math.exp(2))
    assert perplexity(1e4) == math.inf
