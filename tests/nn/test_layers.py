"""Linear, norms, rotary positions, attention and feed-forward against formulas, loops and torch's own modules."""

from __future__ import annotations

import cmath
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tenfold.nn.decoder import Block
from tenfold.nn.layers import Attention, Linear, Norm, rotary_table, rotate
from tenfold.nn.moe import FeedForward


def randomize(module, seed=0):
    """Float64, every parameter random: biases and norm weights too."""
    generator = torch.Generator().manual_seed(seed)
    module = module.double()
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5
    return module


def sample(*shape, seed=1, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_linear_is_weight_times_input_plus_bias():
    linear = randomize(Linear(3, 2))
    x = sample(3)
    by_hand = [sum(linear.weight[o, i] * x[i] for i in range(3)) + linear.bias[o] for o in range(2)]
    torch.testing.assert_close(linear(x), torch.stack(by_hand))


def test_linear_keeps_fp32_weights_and_works_in_the_dtype_of_its_input():
    linear = Linear(4, 4)
    y = linear(sample(2, 4, dtype=torch.bfloat16))
    assert (linear.weight.dtype, y.dtype) == (torch.float32, torch.bfloat16)
    y.sum().backward()
    assert linear.weight.grad.dtype == torch.float32


def test_layernorm_follows_its_formula(tiny_config):
    norm = randomize(Norm(tiny_config(norm="layernorm", norm_eps=0.1), 5))
    row = sample(5)
    mean = sum(row.tolist()) / 5
    variance = sum((value - mean) ** 2 for value in row.tolist()) / 5
    expected = [
        (value - mean) / math.sqrt(variance + 0.1) * w + b
        for value, w, b in zip(row.tolist(), norm.weight.tolist(), norm.bias.tolist(), strict=True)
    ]
    torch.testing.assert_close(norm(row).tolist(), expected)


def test_rmsnorm_follows_its_formula_and_has_no_bias(tiny_config):
    norm = randomize(Norm(tiny_config(norm="rmsnorm", norm_eps=0.1), 5))
    row = sample(5)
    scale = math.sqrt(sum(value**2 for value in row.tolist()) / 5 + 0.1)
    expected = [value / scale * w for value, w in zip(row.tolist(), norm.weight.tolist(), strict=True)]
    torch.testing.assert_close(norm(row).tolist(), expected)
    assert norm.bias is None


def test_rotary_turns_each_pair_as_a_complex_number():
    width, theta = 6, 100.0
    x = sample(1, 1, 5, width)
    turned = rotate(x, rotary_table(5, width, theta, torch.device("cpu")))
    for position in range(5):
        for pair in range(width // 2):
            number = complex(x[0, 0, position, pair], x[0, 0, position, pair + width // 2])
            number *= cmath.exp(1j * position * theta ** (-2 * pair / width))
            found = complex(turned[0, 0, position, pair], turned[0, 0, position, pair + width // 2])
            assert abs(found - number) < 1e-6


def test_rotary_products_depend_on_the_distance_alone():
    q, k = sample(8, seed=1), sample(8, seed=2)
    table = rotary_table(12, 8, 10000.0, torch.device("cpu"))
    q_all, k_all = (rotate(v.expand(1, 1, 12, 8), table)[0, 0] for v in (q, k))
    products = [float(q_all[place + 3] @ k_all[place]) for place in range(9)]
    assert max(products) - min(products) < 1e-5


def test_rotary_of_bf16_is_computed_in_fp32():
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
def test_attention_equals_a_loop_over_positions_and_heads(tiny_config, fields):
    config = tiny_config(**fields)
    attention = randomize(Attention(config))
    x = sample(2, 6, config.hidden)
    rotary = rotary_table(6, config.head_width, config.rope_theta, x.device) if config.positions == "rotary" else None
    expected = torch.stack([attention_loop(attention, config, sequence) for sequence in x])
    torch.testing.assert_close(attention(x, rotary), expected, rtol=1e-5, atol=1e-5)


def test_attention_equals_torchs_multihead_attention(tiny_config):
    config = tiny_config(positions="learned", bias=True)
    attention = randomize(Attention(config))
    theirs = nn.MultiheadAttention(config.hidden, config.heads, batch_first=True, dtype=torch.float64)
    copy_attention(attention, theirs)
    x = sample(2, 7, config.hidden)
    mask = nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64)
    torch.testing.assert_close(attention(x, None), theirs(x, x, x, attn_mask=mask, need_weights=False)[0])


def test_a_later_token_changes_no_earlier_output_of_attention(tiny_config):
    config = tiny_config(heads=4, kv_heads=2)
    attention = randomize(Attention(config))
    rotary = rotary_table(8, config.head_width, config.rope_theta, torch.device("cpu"))
    x = sample(1, 8, config.hidden)
    changed = x.clone()
    changed[0, 5] += 1
    before, after = attention(x, rotary)[0], attention(changed, rotary)[0]
    assert torch.equal(before[:5], after[:5])
    assert all(not torch.equal(before[t], after[t]) for t in range(5, 8))


def copy_attention(ours, theirs):
    theirs.in_proj_weight.data = torch.cat((ours.wq.weight, ours.wk.weight, ours.wv.weight)).detach()
    theirs.in_proj_bias.data = torch.cat((ours.wq.bias, ours.wk.bias, ours.wv.bias)).detach()
    theirs.out_proj.load_state_dict(ours.wo.state_dict())


def test_a_gpt2_block_equals_torchs_pre_norm_encoder_layer(tiny_config):
    config = tiny_config(norm="layernorm", activation="gelu", positions="learned", bias=True)
    block = randomize(Block(config))
    theirs = nn.TransformerEncoderLayer(
        config.hidden,
        config.heads,
        config.ffn,
        dropout=0.0,
        activation=F.gelu,
        layer_norm_eps=config.norm_eps,
        batch_first=True,
        norm_first=True,
        dtype=torch.float64,
    )
    copy_attention(block.attention, theirs.self_attn)
    theirs.norm1.load_state_dict(block.attention_norm.state_dict())
    theirs.norm2.load_state_dict(block.ffn_norm.state_dict())
    theirs.linear1.load_state_dict(block.ffn.up.state_dict())
    theirs.linear2.load_state_dict(block.ffn.down.state_dict())
    x = sample(2, 6, config.hidden)
    mask = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
    y, statistics = block(x, None)
    torch.testing.assert_close(y, theirs(x, src_mask=mask))
    assert statistics.numel() == 0


def test_gelu_feed_forward_is_the_exact_gelu_between_two_matrices(tiny_config):
    config = tiny_config(activation="gelu", bias=True)
    module = randomize(FeedForward(config, 5))
    x = sample(config.hidden)
    up = (module.up.weight @ x + module.up.bias).tolist()
    inner = torch.tensor([u * (1 + math.erf(u / math.sqrt(2))) / 2 for u in up], dtype=torch.float64)
    torch.testing.assert_close(module(x), module.down.weight @ inner + module.down.bias)


def test_swiglu_feed_forward_is_silu_of_the_gate_times_up(tiny_config):
    config = tiny_config(activation="swiglu")
    module = randomize(FeedForward(config, 5))
    x = sample(config.hidden)
    gate, up = (module.gate.weight @ x).tolist(), (module.up.weight @ x).tolist()
    inner = torch.tensor([g / (1 + math.exp(-g)) * u for g, u in zip(gate, up, strict=True)], dtype=torch.float64)
    torch.testing.assert_close(module(x), module.down.weight @ inner)
    assert module.up.bias is None
