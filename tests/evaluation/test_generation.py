"""Generation against the model's own logits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from tenfold.evaluation.generation import generate
from tenfold.nn.decoder import Decoder


@pytest.fixture
def model(tiny_decoder: Callable[..., Decoder]) -> Decoder:
    return tiny_decoder(sharing="all", max_positions=8)


def next_logits(model: Decoder, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(model(torch.tensor([tokens[-8:]]))[0])[0, -1]


def test_temperature_zero_takes_the_likeliest_token_even_past_the_context(model: Decoder) -> None:
    tokens = [3, 1]
    for token in generate(model, [3, 1], 12, temperature=0):
        assert token == int(next_logits(model, tokens).argmax())
        tokens.append(token)
    assert len(tokens) == 14


def test_the_same_seed_writes_the_same_and_another_seed_does_not(model: Decoder) -> None:
    texts = [list(generate(model, [5], 20, temperature=2.0, seed=seed)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_top_k_draws_only_from_the_k_likeliest(model: Decoder) -> None:
    allowed = set(next_logits(model, [7]).topk(3).indices.tolist())
    drawn = {next(iter(generate(model, [7], 1, temperature=5.0, top_k=3, seed=seed))) for seed in range(40)}
    assert drawn == allowed


def test_top_p_draws_only_from_the_smallest_set_that_reaches_p(model: Decoder) -> None:
    probabilities = next_logits(model, [7]).softmax(0)
    ordered = probabilities.sort(descending=True)
    size = int((ordered.values.cumsum(0) < 0.5).sum()) + 1
    drawn = {next(iter(generate(model, [7], 1, temperature=1.0, top_p=0.5, seed=seed))) for seed in range(300)}
    assert drawn <= set(ordered.indices[:size].tolist())
    assert len(drawn) > size // 2


def test_draws_follow_the_model(model: Decoder) -> None:
    probabilities = next_logits(model, [7]).softmax(0)
    counts = Counter(next(iter(generate(model, [7], 1, temperature=1.0, seed=seed))) for seed in range(2000))
    frequencies = torch.tensor([counts[token] / 2000 for token in range(len(probabilities))])
    assert (frequencies - probabilities).abs().max() < 0.03


def test_it_ends_at_the_stop_token_without_giving_it_out(model: Decoder) -> None:
    free = list(generate(model, [3, 1], 12, temperature=0))
    stop = free[4]
    assert list(generate(model, [3, 1], 12, temperature=0, stop=stop)) == free[: free.index(stop)]


def test_rows_that_pad_the_vocabulary_are_never_written(model: Decoder) -> None:
    assert len(model.embedding.weight) == 64
    drawn = {next(iter(generate(model, [7], 1, temperature=100.0, seed=seed))) for seed in range(400)}
    assert max(drawn) < 50
