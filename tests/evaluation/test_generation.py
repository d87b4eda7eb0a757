"""Generation against the model's own logits, token by token, without a cache."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tenfold.evaluation.generation import choose, generate, generate_batch
from tenfold.nn.decoder import Block, Decoder
from tenfold.sharing.delinking import delink
from tenfold.sharing.patterns import Pattern
from tenfold.sharing.tying import Sharing

SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"positions": "learned", "norm": "layernorm", "activation": "gelu", "bias": True},
    "llama": {"positions": "rotary"},
    "grouped": {"heads": 4, "kv_heads": 2, "qk_norm": True},
    "multi-query": {"heads": 4, "kv_heads": 1},
    "moe": {"moe": {"experts": 4, "prototypes": 2, "ffn": 8}},
    "moe with capacity": {"moe": {"experts": 4, "ffn": 8, "capacity": "one", "capacity_factor": 0.5}},
    "documents": {"document_end": 7},
    "documents, learned positions": {"document_end": 7, "positions": "learned"},
}
PATTERNS: list[Any] = ["none", "all", {"groups": 2}, {"cycle": 2}, "sandwich"]
WINDOW = 8


@pytest.fixture
def model(tiny_decoder: Callable[..., Decoder]) -> Decoder:
    return tiny_decoder(sharing="all", max_positions=WINDOW)


def next_logits(model: Decoder, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(model(torch.tensor([tokens[-WINDOW:]]))[0])[0, -1]


def written(model: Decoder, prompts: list[list[int]], *arguments: Any, **options: Any) -> list[list[int]]:
    texts: list[list[int]] = [[] for _ in prompts]
    for row, token in generate_batch(model, prompts, *arguments, **options):
        texts[row].append(token)
    return texts


def test_temperature_zero_takes_the_likeliest_token_even_past_the_window(model: Decoder) -> None:
    tokens = [3, 1]
    for token in generate(model, [3, 1], 12, temperature=0):
        assert token == int(next_logits(model, tokens).argmax())
        tokens.append(token)
    assert len(tokens) == 14


@pytest.mark.parametrize("sharing", PATTERNS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_with_the_cache_it_writes_token_for_token_what_it_writes_without(
    tiny_decoder: Callable[..., Decoder], shape: str, sharing: Any
) -> None:
    model = tiny_decoder(sharing=sharing, max_positions=WINDOW, **SHAPES[shape])
    prompts = [[3, 1], [5, 9, 2, 7, 7, 1], [4] * 11]  # the last is longer than the window, the others outgrow it
    for options in ({"temperature": 0}, {"temperature": 1.5, "top_k": 20, "top_p": 0.9}):
        assert written(model, prompts, 9, **options) == written(model, prompts, 9, **options, cached=False)


def test_delinked_layers_write_what_the_shared_block_wrote(tiny_decoder: Callable[..., Decoder]) -> None:
    model = tiny_decoder(sharing="all", max_positions=20)
    shared = list(generate(model, [3, 1, 4], 15, temperature=1.0))
    delink(model.layers, [], Sharing(Pattern.parse("none", 4)), "copy")
    assert list(generate(model, [3, 1, 4], 15, temperature=1.0)) == shared
    for parameter in model.layers[2].parameters():
        parameter.data *= 1.5
    changed = [list(generate(model, [3, 1, 4], 15, temperature=0, cached=cached)) for cached in (True, False)]
    assert changed[0] == changed[1] != shared


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_each_prompt_of_a_batch_is_continued_as_if_alone(
    tiny_decoder: Callable[..., Decoder], data: st.DataObject
) -> None:
    shape = data.draw(st.sampled_from(list(SHAPES)))
    model = tiny_decoder(sharing=data.draw(st.sampled_from(PATTERNS)), max_positions=WINDOW, **SHAPES[shape])
    token = st.integers(0, 49)
    prompts = data.draw(st.lists(st.lists(token, min_size=1, max_size=10), min_size=1, max_size=4, unique_by=tuple))
    options = data.draw(
        st.fixed_dictionaries(
            {
                "temperature": st.sampled_from([0, 0.7, 2.0]),
                "top_k": st.sampled_from([0, 5]),
                "top_p": st.sampled_from([1.0, 0.8]),
                "seed": st.integers(0, 3),
                "stop": st.sampled_from([None, *range(5)]),
            }
        )
    )
    together = written(model, prompts, 7, **options, batch_size=data.draw(st.integers(1, 4)))
    assert together == [list(generate(model, prompt, 7, **options)) for prompt in prompts]


def test_equal_prompts_draw_from_streams_of_their_own(model: Decoder) -> None:
    prompts = [[5], [7], [5], [5]]
    texts = written(model, prompts, 12, temperature=2.0)
    assert len({tuple(text) for text in texts}) == 4
    assert texts == written(model, prompts, 12, temperature=2.0, batch_size=2)
    assert texts[0] == list(generate(model, [5], 12, temperature=2.0))
    assert written(model, [[5], [5]], 12, temperature=2.0) == [texts[0], texts[2]]


def test_the_same_seed_writes_the_same_and_another_seed_does_not(model: Decoder) -> None:
    texts = [list(generate(model, [5], 20, temperature=2.0, seed=seed)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_a_token_costs_one_position_in_every_layer(tiny_decoder: Callable[..., Decoder]) -> None:
    model = tiny_decoder(sharing="all", max_positions=WINDOW)
    seen: list[tuple[int, ...]] = []
    for module in model.modules():
        if isinstance(module, Block):
            module.register_forward_hook(lambda _module, inputs, _output: seen.append(tuple(inputs[0].shape[:2])))
    assert len(list(generate(model, [3, 1, 4], 8, temperature=0))) == 8
    prompt, steps, past = [(1, 3)] * 4, [(1, 1)] * 4 * 5, [(1, WINDOW)] * 4 * 2
    assert seen == prompt + steps + past


def test_tokens_come_as_they_are_chosen(model: Decoder) -> None:
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    model.register_forward_hook(count)
    tokens = generate(model, [3], 5)
    for number in range(1, 6):
        next(tokens)
        assert calls == number


def test_it_ends_at_the_stop_token_without_giving_it_out(model: Decoder) -> None:
    free = list(generate(model, [3, 1], 12, temperature=0))
    stop = free[4]
    assert list(generate(model, [3, 1], 12, temperature=0, stop=stop)) == free[: free.index(stop)]


def test_a_row_ends_when_it_is_told_to_and_the_others_go_on(model: Decoder) -> None:
    texts = written(model, [[3], [4], [5]], 6, temperature=0)
    told = {0: 2, 2: 4}
    found: dict[int, list[int]] = {0: [], 1: [], 2: []}
    rows = generate_batch(model, [[3], [4], [5]], 6, 0, ended=lambda row: len(found[row]) == told.get(row))
    for row, token in rows:
        found[row].append(token)
    assert [found[row] for row in range(3)] == [texts[0][:2], texts[1], texts[2][:4]]


def test_a_model_in_training_is_in_training_still_between_tokens(model: Decoder) -> None:
    model.train()
    for _ in generate(model, [3], 3):
        assert model.training
        assert torch.is_grad_enabled()


def plain_choice(logits: list[float], draw: float, temperature: float, top_k: int, top_p: float) -> int:
    """The cut distribution and its inversion, one token after the other."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    top = max(logits)
    weights = {token: math.exp((logits[token] - top) / temperature) for token in order}
    if top_k:
        order = order[:top_k]
    total, kept, before = sum(weights[token] for token in order), [], 0.0
    for token in order:
        if before < top_p * total or not kept:
            kept.append(token)
        before += weights[token]
    if not top_k and top_p == 1:
        kept.sort()
    target, before = draw * sum(weights[token] for token in kept), 0.0
    for token in kept:
        before += weights[token]
        if before > target:
            return token
    return kept[-1]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("top_k", [0, 1, 7])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.4])
def test_choices_equal_a_plain_walk_over_the_cut_distribution(temperature: float, top_k: int, top_p: float) -> None:
    chance = random.Random(2)
    rows = [[chance.gauss(0, 2) for _ in range(30)] for _ in range(200)]
    draws = [chance.random() for _ in rows]
    found = choose(torch.tensor(rows, dtype=torch.float64), draws, temperature, top_k, top_p)
    assert found == [plain_choice(*each, temperature, top_k, top_p) for each in zip(rows, draws, strict=True)]


def test_draws_follow_the_model(model: Decoder) -> None:
    logits = next_logits(model, [7])
    drawn = torch.tensor(choose(logits.expand(4000, -1), [(n + 0.5) / 4000 for n in range(4000)], 1.0, 0, 1.0))
    frequencies = drawn.bincount(minlength=50) / 4000
    assert (frequencies - logits.softmax(0)).abs().max() < 1e-3


def test_what_has_no_probability_is_never_drawn_at_either_end() -> None:
    logits = torch.tensor([[-math.inf, 1.0, -math.inf, 2.0, -math.inf]]).expand(3, -1)
    draws = [0.0, 1 - 2**-53, 0.5]
    for top_k in (0, 4):
        assert set(choose(logits, draws, 1.0, top_k, 1.0)) <= {1, 3}
    assert choose(logits, draws, 1e-300, 0, 1.0) == [3, 3, 3]


def test_rows_that_pad_the_vocabulary_are_never_written(model: Decoder) -> None:
    assert len(model.embedding.weight) == 64
    drawn = {token for seed in range(10) for token in generate(model, [7], 20, temperature=100.0, seed=seed)}
    assert max(drawn) < 50
    assert len(drawn) > 30
