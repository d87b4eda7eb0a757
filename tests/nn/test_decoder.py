"""The decoder as a whole: its parts in order, sharing, names, causality, precision, recompute."""

from __future__ import annotations

import pytest
import torch

from tenfold.nn.attend import Context
from tenfold.nn.attention import rotary_table

TOKENS = torch.arange(14).view(2, 7) * 3 % 50
SHAPES = {
    "gpt2": {"norm": "layernorm", "activation": "gelu", "positions": "learned", "bias": True},
    "llama": {"tie_embeddings": False, "heads": 4, "kv_heads": 2, "qk_norm": True},
    "moe": {"moe": {"experts": 4, "prototypes": 2, "ffn": 8}},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_forward_pass_is_embedding_layers_norm_and_output_in_order(tiny_decoder, shape):
    model = tiny_decoder("sandwich", **SHAPES[shape])
    x = model.embedding.weight[TOKENS]
    rotary = None
    if model.positions is None:
        rotary = rotary_table(7, model.config.head_width, model.config.rope_theta, x.device)
    else:
        x = x + model.positions.weight[torch.arange(7)]
    for layer in range(4):
        x = model.layers[layer](x, Context(rotary))[0]
    matrix = model.embedding.weight if model.config.tie_embeddings else model.head.weight
    expected = model.norm(x) @ matrix[:50].t()
    hidden, statistics = model(TOKENS)
    torch.testing.assert_close(model.logits(hidden), expected)
    assert statistics.shape == (4, 3 + 4 if shape == "moe" else 0)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_later_token_changes_no_earlier_logits(tiny_decoder, shape):
    model = tiny_decoder(**SHAPES[shape])
    changed = TOKENS.clone()
    changed[:, 4] = 49
    before, after = (model.logits(model(tokens)[0]) for tokens in (TOKENS, changed))
    torch.testing.assert_close(before[:, :4], after[:, :4], rtol=1e-12, atol=1e-12)
    assert (before[:, 4:] != after[:, 4:]).any(-1).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_sharing_is_the_same_function_as_layers_with_equal_weights(tiny_decoder, shape):
    shared = tiny_decoder([0, 1, 0, 1], **SHAPES[shape])
    free = tiny_decoder("none", **SHAPES[shape])
    for mine, theirs in zip(free.layers, shared.layers, strict=True):
        mine.load_state_dict(theirs.state_dict())
    outside = {n: p for n, p in shared.state_dict().items() if not n.startswith("layers.")}
    free.load_state_dict(outside, strict=False)
    assert torch.equal(shared(TOKENS)[0], free(TOKENS)[0])


def test_the_gradient_of_a_shared_block_is_the_sum_over_its_layers(tiny_decoder):
    shared, free = tiny_decoder("all"), tiny_decoder("none")
    for layer in free.layers:
        layer.load_state_dict(shared.layers[0].state_dict())
    for model in (shared, free):
        model(TOKENS)[0].square().sum().backward()
    for name, parameter in shared.layers[0].named_parameters():
        total = sum(dict(layer.named_parameters())[name].grad for layer in free.layers)
        torch.testing.assert_close(parameter.grad, total)


def test_a_shared_block_goes_by_the_name_of_its_first_layer(tiny_decoder):
    model = tiny_decoder([0, 1, 1, 2])
    names = [name for name, _ in model.named_parameters()]
    assert len(names) == len(set(names)) == len(list(model.parameters()))
    assert {name.split(".")[1] for name in names if name.startswith("layers.")} == {"0", "1", "3"}
    assert "layers.1.attention.wq.weight" in names
    assert dict(model.named_parameters())["layers.3.ffn.up.weight"] is model.layers[3].ffn.up.weight


def test_logits_leave_out_the_rows_that_pad_the_vocabulary(tiny_decoder):
    model = tiny_decoder()
    assert model.embedding.weight.shape[0] == 64
    assert model.logits(model(TOKENS)[0]).shape == (2, 7, 50)


def test_bf16_is_for_activations_only(tiny_decoder):
    model = tiny_decoder(dtype=torch.bfloat16, layers=2)
    hidden, _ = model(TOKENS[:, :3])
    assert hidden.dtype == torch.bfloat16
    assert model.logits(hidden).dtype == torch.float32
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    exact, _ = tiny_decoder(layers=2)(TOKENS[:, :3])
    torch.testing.assert_close(hidden.double(), exact, rtol=0.1, atol=0.1)
