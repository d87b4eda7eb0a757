"""Rotary positions and attention against loops and torch's own module."""

from __future__ import annotations

import cmath
import math

import pytest
import torch
from torch import nn

from tenfold.nn.attend import Context
from tenfold.nn.attention import Attention, rotary_table, rotate


def test_rotary_turns_each_pair_as_a_complex_number(sample):
    width, theta = 6, 100.0
    x = sample(1, 1, 5, width)
    turned = rotate(x, rotary_table(5, width, theta, torch.device("cpu")))
    for position in range(5):
        for pair in range(width // 2):
            number = complex(x[0, 0, position, pair], x[0, 0, position, pair + width // 2])
            number *= cmath.exp(1j * position * theta ** (-2 * pair / width))
            found = complex(turned[0, 0, position, pair], turned[0, 0, position, pair + width // 2])
            assert abs(found - number) < 1e-6


def test_rotary_products_depend_on_the_distance_alone(sample):
    q, k = sample(8, seed=1), sample(8, seed=2)
    table = rotary_table(12, 8, 10000.0, torch.device("cpu"))
    q_all, k_all = (rotate(v.expand(1, 1, 12, 8), table)[0, 0] for v in (q, k))
    products = [float(q_all[place + 3] @ k_all[place]) for place in range(9)]
    assert max(products) - min(products) < 1e-5


def test_rotary_of_bf16_is_computed_in_fp32(sample):
    table = rotary_table(4, 4, 10000.0, torch.device("cpu"))
    x = sample(1, 1, 4, 4, dtype=torch.bfloat16)
    assert torch.equal(rotate(x, table), rotate(x.float(), table).bfloat16())


def attention_loop(module, config, x_TD):
    """Attention of one sequence, position by position and head by head."""
    T, W, group = len(x_TD), config.head_width, config.heads // config.key_heads

    def heads_of(project, count, norm):
        rows = torch.stack([project.weight @ x + (0 if project.bias is None else project.bias) for x in x_TD])
        heads = rows.view(T, count, W)
        if norm is not None:
            heads = heads / (heads.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * norm.weight
        return heads

    def turned(heads):
        if config.positions != "rotary":
            return heads
        out = torch.empty_like(heads)
        for t in range(T):
            for i in range(W // 2):
                angle = t * config.rope_theta ** (-2 * i / W)
                a, b = heads[t, :, i], heads[t, :, i + W // 2]
                out[t, :, i] = a * math.cos(angle) - b * math.sin(angle)
                out[t, :, i + W // 2] = b * math.cos(angle) + a * math.sin(angle)
        return out

    q = turned(heads_of(module.wq, config.heads, module.q_norm))
    k = turned(heads_of(module.wk, config.key_heads, module.k_norm))
    v = heads_of(module.wv, config.key_heads, None)
    rows = []
    for t in range(T):
        parts = []
        for h in range(config.heads):
            scores = torch.stack([q[t, h] @ k[s, h // group] / math.sqrt(W) for s in range(t + 1)])
            weights = scores.exp() / scores.exp().sum()
            parts.append(sum(weights[s] * v[s, h // group] for s in range(t + 1)))
        y = module.wo.weight @ torch.cat(parts)
        rows.append(y if module.wo.bias is None else y + module.wo.bias)
    return torch.stack(rows)


@pytest.mark.parametrize(
    "fields",
    [
        {"positions": "learned", "bias": True},
        {"positions": "rotary"},
        {"positions": "rotary", "heads": 4, "kv_heads": 2},
        {"positions": "rotary", "heads": 4, "kv_heads": 1, "qk_norm": True},
        {"positions": "rotary", "head_dim": 6, "qk_norm": True, "bias": True},
    ],
    ids=["plain", "rotary", "grouped", "multi-query and qk-norm", "own head width"],
)
def test_attention_equals_a_loop_over_positions_and_heads(tiny_config, fields, randomize, sample):
    config = tiny_config(**fields)
    attention = randomize(Attention(config))
    x = sample(2, 6, config.hidden)
    rotary = rotary_table(6, config.head_width, config.rope_theta, x.device) if config.positions == "rotary" else None
    expected = torch.stack([attention_loop(attention, config, sequence) for sequence in x])
    torch.testing.assert_close(attention(x, Context(rotary)), expected, rtol=1e-5, atol=1e-5)


def test_attention_equals_torchs_multihead_attention(tiny_config, randomize, sample, copy_attention):
    config = tiny_config(positions="learned", bias=True)
    attention = randomize(Attention(config))
    theirs = nn.MultiheadAttention(config.hidden, config.heads, batch_first=True, dtype=torch.float64)
    copy_attention(attention, theirs)
    x = sample(2, 7, config.hidden)
    mask = nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64)
    torch.testing.assert_close(attention(x, Context(None)), theirs(x, x, x, attn_mask=mask, need_weights=False)[0])


def test_a_later_token_changes_no_earlier_output_of_attention(tiny_config, randomize, sample):
    config = tiny_config(heads=4, kv_heads=2)
    attention = randomize(Attention(config))
    rotary = rotary_table(8, config.head_width, config.rope_theta, torch.device("cpu"))
    x = sample(1, 8, config.hidden)
    changed = x.clone()
    changed[0, 5] += 1
    before, after = attention(x, Context(rotary))[0], attention(changed, Context(rotary))[0]
    assert torch.equal(before[:5], after[:5])
    assert all(not torch.equal(before[t], after[t]) for t in range(5, 8))
