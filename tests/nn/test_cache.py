"""The cache of keys and values against forward passes over everything."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tenfold.nn.attend import Context

SHAPES = {
    "gpt2": {"positions": "learned", "norm": "layernorm", "activation": "gelu", "bias": True},
    "llama": {"positions": "rotary"},
    "grouped": {"heads": 4, "kv_heads": 2, "qk_norm": True},
    "multi-query, own head width": {"heads": 4, "kv_heads": 1, "head_dim": 6},
    "moe": {"moe": {"experts": 4, "prototypes": 2, "ffn": 8, "shared_experts": 1}},
    "moe with capacity": {"moe": {"experts": 4, "ffn": 8, "capacity": "one", "capacity_factor": 0.5}},
    "documents": {"document_end": 7},
    "documents, learned positions": {"document_end": 7, "positions": "learned", "heads": 4, "kv_heads": 2},
}
PATTERNS = ["none", "all", {"groups": 2}, {"cycle": 2}, "sandwich"]


def random_tokens(*shape, seed=0):
    return torch.randint(0, 12, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sharing", PATTERNS, ids=str)
def test_going_on_token_by_token_gives_the_hidden_states_of_one_pass(tiny_decoder, shape, sharing):
    model = tiny_decoder(sharing=sharing, **SHAPES[shape]).eval()
    tokens = random_tokens(2, 11)
    cache = model.new_cache(2, 32)
    parts = [model(tokens[:, :4], cache)[0]] + [model(tokens[:, [place]], cache)[0] for place in range(4, 11)]
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens)[0], rtol=1e-6, atol=1e-6)
    assert cache.lengths == [11, 11]


@torch.no_grad()
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_sequences_of_any_length_in_any_pieces_are_each_as_if_alone(tiny_decoder, data):
    model = tiny_decoder(sharing={"cycle": 2}, **SHAPES[data.draw(st.sampled_from(list(SHAPES)))]).eval()
    lengths = data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=4))
    tokens = random_tokens(len(lengths), 20)
    cache = model.new_cache(len(lengths), 32)
    model(tokens[:, : max(lengths)], cache)  # what is behind a sequence's length is padding
    cache.cut(lengths)
    for size in data.draw(st.lists(st.integers(1, 3), max_size=4)):
        new = torch.stack([row[length : length + size] for row, length in zip(tokens, cache.lengths, strict=True)])
        hidden = model(new, cache)[0]
        for row, length in enumerate(cache.lengths):
            alone = model(tokens[row : row + 1, :length])[0]
            torch.testing.assert_close(hidden[row], alone[0, -size:], rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_sequences_that_are_kept_go_on_as_they_were(tiny_decoder):
    model = tiny_decoder(sharing="all")
    tokens = random_tokens(3, 6)
    cache = model.new_cache(3, 32)
    model(tokens[:, :5], cache)
    cache.cut([5, 2, 4])
    cache.keep([2, 1])
    hidden = model(torch.stack((tokens[2, 4:5], tokens[1, 2:3])), cache)[0]
    torch.testing.assert_close(hidden[0, -1], model(tokens[2:, :5])[0][0, -1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(hidden[1, -1], model(tokens[1:2, :3])[0][0, -1], rtol=1e-6, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("shape", ["gpt2", "grouped", "moe"])
def test_bf16_stays_within_its_rounding(tiny_decoder, shape):
    model = tiny_decoder(dtype=torch.bfloat16, **SHAPES[shape])
    tokens = random_tokens(2, 9)
    cache = model.new_cache(2, 32)
    steps = [model(tokens[:, [place]], cache)[0] for place in range(9)]
    difference = (torch.cat(steps, 1).float() - model(tokens)[0].float()).abs()
    assert difference.mean() < 0.02


def test_layers_that_share_a_block_keep_their_own_keys(tiny_decoder):
    model = tiny_decoder(sharing="all")
    assert len({layer.attention.wk.weight for layer in model.layers}) == 1
    cache = model.new_cache(1, 32)
    with torch.no_grad():
        model(random_tokens(1, 4), cache)
    keys = [layer.keys[0, :, :4] for layer in cache.begin(random_tokens(1, 1))]
    assert len(keys) == 4
    assert all(not torch.equal(keys[0], other) for other in keys[1:])


def test_more_positions_than_there_is_room_for_are_refused(tiny_decoder):
    model = tiny_decoder()
    cache = model.new_cache(1, positions=4)
    with pytest.raises(ValueError, match="room for 4 positions, not 5"):
        model(random_tokens(1, 5), cache)


@torch.no_grad()
def test_the_kernel_for_one_query_equals_the_softmax_written_out(tiny_decoder):
    model = tiny_decoder(heads=4, kv_heads=2, head_dim=8)
    attention, x = model.layers[0].attention, torch.randn(1, 1, 16, dtype=torch.float64)
    cache = model.new_cache(1, 32)
    past_k, past_v = torch.randn(2, 1, 2, 5, 8, dtype=torch.float64)
    cache.begin(random_tokens(1, 5))[0].extend(past_k, past_v)
    found = attention(x, Context(None, cache.begin(random_tokens(1, 1))))
    q, k, v = (project(x).view(-1, 8) for project in (attention.wq, attention.wk, attention.wv))
    parts = []
    for head in range(4):
        keys = torch.cat((past_k[0, head // 2], k[head // 2 : head // 2 + 1]))
        values = torch.cat((past_v[0, head // 2], v[head // 2 : head // 2 + 1]))
        weights = (keys @ q[head] / 8**0.5).exp()
        parts.append((weights / weights.sum()) @ values)
    torch.testing.assert_close(found[0, 0], attention.wo(torch.cat(parts)))
