"""Linear, norms, feed-forward and a whole block against formulas, loops and torch's own modules."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from tenfold.nn.attend import Context
from tenfold.nn.decoder import Block
from tenfold.nn.layers import Linear, Norm
from tenfold.nn.moe import FeedForward


def test_linear_is_weight_times_input_plus_bias(randomize, sample):
    linear = randomize(Linear(3, 2))
    x = sample(3)
    by_hand = [sum(linear.weight[o, i] * x[i] for i in range(3)) + linear.bias[o] for o in range(2)]
    torch.testing.assert_close(linear(x), torch.stack(by_hand))


def test_linear_keeps_fp32_weights_and_works_in_the_dtype_of_its_input(sample):
    linear = Linear(4, 4)
    y = linear(sample(2, 4, dtype=torch.bfloat16))
    assert (linear.weight.dtype, y.dtype) == (torch.float32, torch.bfloat16)
    y.sum().backward()
    assert linear.weight.grad.dtype == torch.float32


def test_layernorm_follows_its_formula(tiny_config, randomize, sample):
    norm = randomize(Norm(tiny_config(norm="layernorm", norm_eps=0.1), 5))
    row = sample(5)
    mean = sum(row.tolist()) / 5
    variance = sum((value - mean) ** 2 for value in row.tolist()) / 5
    expected = [
        (value - mean) / math.sqrt(variance + 0.1) * w + b
        for value, w, b in zip(row.tolist(), norm.weight.tolist(), norm.bias.tolist(), strict=True)
    ]
    torch.testing.assert_close(norm(row).tolist(), expected)


def test_rmsnorm_follows_its_formula_and_has_no_bias(tiny_config, randomize, sample):
    norm = randomize(Norm(tiny_config(norm="rmsnorm", norm_eps=0.1), 5))
    row = sample(5)
    scale = math.sqrt(sum(value**2 for value in row.tolist()) / 5 + 0.1)
    expected = [value / scale * w for value, w in zip(row.tolist(), norm.weight.tolist(), strict=True)]
    torch.testing.assert_close(norm(row).tolist(), expected)
    assert norm.bias is None


def test_a_gpt2_block_equals_torchs_pre_norm_encoder_layer(tiny_config, randomize, sample, copy_attention):
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
    y, statistics = block(x, Context(None))
    torch.testing.assert_close(y, theirs(x, src_mask=mask))
    assert statistics.numel() == 0


def test_gelu_feed_forward_is_the_exact_gelu_between_two_matrices(tiny_config, randomize, sample):
    config = tiny_config(activation="gelu", bias=True)
    module = randomize(FeedForward(config, 5))
    x = sample(config.hidden)
    up = (module.up.weight @ x + module.up.bias).tolist()
    inner = torch.tensor([u * (1 + math.erf(u / math.sqrt(2))) / 2 for u in up], dtype=torch.float64)
    torch.testing.assert_close(module(x), module.down.weight @ inner + module.down.bias)


def test_swiglu_feed_forward_is_silu_of_the_gate_times_up(tiny_config, randomize, sample):
    config = tiny_config(activation="swiglu")
    module = randomize(FeedForward(config, 5))
    x = sample(config.hidden)
    gate, up = (module.gate.weight @ x).tolist(), (module.up.weight @ x).tolist()
    inner = torch.tensor([g / (1 + math.exp(-g)) * u for g, u in zip(gate, up, strict=True)], dtype=torch.float64)
    torch.testing.assert_close(module(x), module.down.weight @ inner)
    assert module.up.bias is None


@pytest.mark.parametrize("rows", [(3,), (2, 3), (1, 2, 3)])
def test_rmsnorm_and_its_gradients_equal_torchs(tiny_config, randomize, sample, rows):
    norm = randomize(Norm(tiny_config(norm="rmsnorm", norm_eps=0.1), 5))
    x, grad = sample(*rows, 5).requires_grad_(), sample(*rows, 5, seed=2)
    ours = torch.autograd.grad(norm(x), (x, norm.weight), grad)
    theirs = torch.autograd.grad(F.rms_norm(x, (5,), norm.weight, 0.1), (x, norm.weight), grad)
    torch.testing.assert_close(ours, theirs)
    assert torch.autograd.gradcheck(lambda x, w: functional_call(norm, {"weight": w}, x), (x, norm.weight))


def test_rmsnorm_of_bf16_is_computed_in_fp32_and_rounded_once(tiny_config, sample):
    norm = Norm(tiny_config(norm="rmsnorm"), 64)
    norm.weight.data = sample(64, dtype=torch.float32)
    x = sample(4, 64, seed=2, dtype=torch.float32).bfloat16().requires_grad_()
    assert torch.equal(norm(x), norm(x.float()).bfloat16())
    norm(x).sum().backward()
    assert (x.grad.dtype, norm.weight.grad.dtype) == (torch.bfloat16, torch.float32)


def test_rmsnorm_keeps_its_input_and_one_number_a_row(tiny_config, sample):
    norm, x, kept = Norm(tiny_config(norm="rmsnorm"), 64), sample(8, 64, dtype=torch.float32).requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        norm(x)
    assert sum(t.numel() for t in kept) == 8 * 64 + 64 + 8
