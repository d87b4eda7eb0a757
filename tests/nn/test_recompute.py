"""Recompute: nothing changes but what is kept for the backward pass, and that is what the mode says."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from tenfold.config.model import ModelConfig
from tenfold.nn.attend import Context
from tenfold.nn.attention import rotary_table
from tenfold.nn.decoder import Block
from tenfold.nn.init import initialize
from tenfold.nn.recompute import Recompute
from tenfold.sharing.patterns import Pattern
from tenfold.sharing.tying import Sharing, tie

TOKENS = torch.arange(14).view(2, 7) * 3 % 50
MOE = {"experts": 8, "ffn": 8, "prototypes": 2, "top_k": 2}
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"norm": "layernorm", "activation": "gelu", "positions": "learned", "bias": True},
    "llama": {"tie_embeddings": False, "heads": 4, "kv_heads": 2, "qk_norm": True},
    "bert": {"norm": "layernorm", "norm_position": "post", "objective": "masked", "mask_token": 3},
    "documents": {"document_end": 9},
    "mixture": {"moe": {**MOE, "shared_experts": 1}},
}


def gradients_of(model):
    model.zero_grad()
    hidden, statistics = model(TOKENS)
    (hidden.square().sum() + statistics.sum()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("recompute", ["selective", "full", Recompute("selective", 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_the_same_to_the_last_bit(tiny_decoder, shape, dtype, recompute):
    plain = tiny_decoder("sandwich", dtype=dtype, **SHAPES[shape])
    again = tiny_decoder("sandwich", dtype=dtype, recompute=recompute, **SHAPES[shape])
    assert same(gradients_of(again), gradients_of(plain))


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_a_second_backward_pass_through_one_graph_is_the_first(tiny_decoder, mode):
    model = tiny_decoder(recompute=mode, **SHAPES["mixture"])
    loss = model(TOKENS)[0].square().sum()
    first, second = (torch.autograd.grad(loss, model.layers[0].attention.wq.weight, retain_graph=True) for _ in "12")
    assert torch.equal(*first, *second)


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("mode", "again"), [("none", 0), ("selective", 0), ("full", 6), ("half", 3)])
def test_selective_makes_no_product_twice_and_full_all_but_the_last(tiny_decoder, mode, again):
    recompute = Recompute("full", 2) if mode == "half" else Recompute(mode)
    model = tiny_decoder(recompute=recompute)  # SwiGLU: seven products a layer, each with two in its backward pass
    with Products() as products:
        hidden = model(TOKENS)[0]
        assert products.count == 7 * 4
        hidden.sum().backward()
    assert products.count == (3 * 7 + again) * 4


@pytest.mark.parametrize(("layers", "found"), [(1, [3]), (2, [1, 3]), (3, [1, 2, 3]), (4, [0, 1, 2, 3]), (None, 4)])
def test_layers_that_recompute_are_spread_over_the_depth(tiny_decoder, layers, found):
    model = tiny_decoder(recompute=Recompute("full", layers))
    wanted = list(range(found)) if isinstance(found, int) else found
    assert [index for index, layer in enumerate(model.layers) if layer.recompute == "full"] == wanted


BATCH, LENGTH, WIDTH = 2, 64, 32
STREAM = BATCH * LENGTH * WIDTH  # numbers in a layer's output


def kept_bytes(mode, dtype=torch.float32, **fields):
    """What a layer has allocated when its forward pass is over, its output included."""
    config = ModelConfig(**{"vocab_size": 50, "layers": 1, "hidden": WIDTH, "heads": 4, "ffn": 80, **fields})
    block = Block(config, mode)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=dtype, requires_grad=True)
    context = Context(rotary_table(LENGTH, 8, 1e4, x.device))
    block(x, context)
    gc.collect()
    gc.disable()  # nothing older is freed under way
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as memory:
        out = block(x, context)
    gc.enable()
    assert out[0].shape == x.shape
    return sum(event.self_cpu_memory_usage for event in memory.key_averages())


def test_a_layer_keeps_its_input_the_results_of_products_or_all():
    """In numbers a token. Llama: q, k, v and wo of D = 32 each, gate and up of F = 80; the last product is not kept."""
    none, selective, full = (kept_bytes(mode) for mode in ("none", "selective", "full"))
    assert full == 4 * STREAM  # the output: its input was there before
    a_token = 4 * BATCH * LENGTH
    assert selective - full == pytest.approx(a_token * (4 * WIDTH + 2 * 80), abs=64)
    # Besides: both norms' results, attention's output, the sum after it instead of wo, silu(gate) and its product.
    assert none - full > a_token * (6 * WIDTH + 4 * 80)
    assert selective < 0.55 * none


def test_of_a_mixture_copies_by_expert_are_not_kept():
    moe = {"experts": 8, "ffn": 16, "top_k": 4}
    none, selective, full = (kept_bytes(mode, moe=moe) for mode in ("none", "selective", "full"))
    a_token = 4 * BATCH * LENGTH
    choice = 2 * a_token * 4  # int64; statistics besides
    assert full == pytest.approx(4 * STREAM + choice, abs=512)
    assert selective - full == pytest.approx(a_token * (4 * WIDTH + 4 * 2 * 16 + 8), abs=512)
    assert none - selective > a_token * 4 * WIDTH


@pytest.mark.parametrize("shape", ["gpt2", "bert"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_whatever_the_shape_selective_is_between_none_and_full(shape, dtype):
    none, selective, full = (kept_bytes(mode, dtype, **SHAPES[shape]) for mode in ("none", "selective", "full"))
    assert full < selective < none


def test_sums_of_relaxed_layers_are_made_again(tiny_decoder):
    def parameters_kept(mode):
        model = tiny_decoder(recompute=mode, dtype=torch.float32)
        tie(model.layers, Sharing(Pattern.parse("all", 4), rank=2))
        initialize(model, 0)
        model(TOKENS)
        gc.collect()
        gc.disable()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as memory:
            out = model(TOKENS)
        gc.enable()
        assert out[0].shape == (2, 7, 16)
        return sum(event.self_cpu_memory_usage for event in memory.key_averages())

    plain = sum(p.numel() for p in tiny_decoder(dtype=torch.float32).layers.parameters() if p.dim() == 2)
    assert parameters_kept("none") - parameters_kept("selective") > 4 * plain
