"""Similarity of layers, against a plain loop in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tenfold.nn.decoder import Decoder
from tenfold.sharing import similarity
from tenfold.sharing.similarity import layer_similarity, seen_layers


@pytest.mark.parametrize("chunk", [7, 2**20])
def test_it_is_the_cosine_of_all_weights_of_two_layers(
    tiny_decoder: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(similarity, "_CHUNK", chunk)
    model = tiny_decoder("none", moe={"experts": 3})
    found = layer_similarity([layer.ffn for layer in model.layers])
    vectors = [torch.cat([weight.flatten() for weight in layer.ffn.parameters()]) for layer in model.layers]
    for first, row in enumerate(found):
        for second, value in enumerate(row):
            expected = torch.nn.functional.cosine_similarity(vectors[first], vectors[second], dim=0).item()
            assert value == pytest.approx(expected, abs=1e-4)
    assert found[0][1] < 0.9


def test_layers_that_share_are_alike_and_the_others_are_not(tiny_decoder: Callable[..., Decoder]) -> None:
    model = tiny_decoder({"groups": 2})
    found = layer_similarity([layer.attention for layer in model.layers])
    assert found[0][1] == found[2][3] == 1.0
    assert abs(found[0][2]) < 0.9


def test_of_many_layers_some_are_looked_at_the_first_and_the_last_among_them() -> None:
    assert seen_layers(5) == [0, 1, 2, 3, 4]
    seen = seen_layers(100)
    assert len(seen) == len(set(seen)) == 32
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (0, 99)


def test_weights_of_nothing_are_like_nothing() -> None:
    layers = [torch.nn.Linear(2, 2, bias=False) for _ in range(2)]
    torch.nn.init.zeros_(layers[0].weight)
    assert layer_similarity(layers)[0][1] == 0.0
