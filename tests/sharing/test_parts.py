"""Which parameter of whose layer is what part, written out by hand."""

from __future__ import annotations

import pytest

import tenfold
from tenfold.sharing.patterns import Pattern
from tenfold.sharing.tying import PARTS, holders, part_of, tables, tied_pattern

LLAMA_ATTENTION = "self_attn.q_proj.weight self_attn.k_proj.weight self_attn.v_proj.weight self_attn.o_proj.weight"
LLAMA_NORMS = "input_layernorm.weight post_attention_layernorm.weight"
LLAMA_FFN = "mlp.gate_proj.weight mlp.up_proj.weight mlp.down_proj.weight"
LLAMA_EXPERTS = "mlp.experts.gate_up_proj mlp.experts.down_proj"
QWEN_NORMS = f"{LLAMA_NORMS} self_attn.q_norm.weight self_attn.k_norm.weight"
BY_HAND = {
    "gpt2": {
        "attention": "attn.c_attn.weight attn.c_attn.bias attn.c_proj.weight attn.c_proj.bias",
        "ffn": "mlp.c_fc.weight mlp.c_fc.bias mlp.c_proj.weight mlp.c_proj.bias",
        "norms": "ln_1.weight ln_1.bias ln_2.weight ln_2.bias",
    },
    "llama": {"attention": LLAMA_ATTENTION, "ffn": LLAMA_FFN, "norms": LLAMA_NORMS},
    "qwen3": {"attention": LLAMA_ATTENTION, "ffn": LLAMA_FFN, "norms": QWEN_NORMS},
    "mixtral": {
        "attention": LLAMA_ATTENTION,
        "experts": LLAMA_EXPERTS,
        "router": "mlp.gate.weight",
        "norms": LLAMA_NORMS,
    },
    "qwen3-moe": {
        "attention": LLAMA_ATTENTION,
        "experts": LLAMA_EXPERTS,
        "router": "mlp.gate.weight",
        "norms": QWEN_NORMS,
    },
    "bert": {
        "attention": "attention.self.query.weight attention.self.query.bias attention.self.key.weight "
        "attention.self.key.bias attention.self.value.weight attention.self.value.bias "
        "attention.output.dense.weight attention.output.dense.bias",
        "ffn": "intermediate.dense.weight intermediate.dense.bias output.dense.weight output.dense.bias",
        "norms": "attention.output.LayerNorm.weight attention.output.LayerNorm.bias "
        "output.LayerNorm.weight output.LayerNorm.bias",
    },
    "torch": {
        "attention": "self_attn.in_proj_weight self_attn.in_proj_bias self_attn.out_proj.weight "
        "self_attn.out_proj.bias",
        "ffn": "linear1.weight linear1.bias linear2.weight linear2.bias",
        "norms": "norm1.weight norm1.bias norm2.weight norm2.bias",
    },
    "tenfold": {
        "attention": "attention.wq.weight attention.wk.weight attention.wv.weight attention.wo.weight",
        "experts": "ffn.experts.gate ffn.experts.up ffn.experts.down",
        "router": "ffn.router.weight",
        "norms": "attention_norm.weight ffn_norm.weight",
    },
}


@pytest.mark.parametrize("kind", BY_HAND)
def test_every_parameter_belongs_to_the_part_that_a_reader_would_say(peer, kind):
    layer = peer(kind).layers[0]
    found = {part: {name for name in holders(layer) if part_of(layer, name) == part} for part in PARTS}
    assert found == {part: set(BY_HAND[kind].get(part, "").split()) for part in PARTS}


def test_attention_that_is_written_with_capitals():
    transformers = pytest.importorskip("transformers")
    size = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 3, "num_heads": 2}
    layers = transformers.T5Model(transformers.T5Config(**size)).encoder.block[1:]  # the first has a bias of its own
    tenfold.share(layers, parts=("attention",))
    shared = {name for name, column in tables(layers).items() if tied_pattern(column).stored_blocks == 1}
    assert shared == {f"layer.0.SelfAttention.{leaf}.weight" for leaf in "qkvo"}
    norms = {name for name in holders(layers[0]) if part_of(layers[0], name) == "norms"}
    assert norms == {"layer.0.layer_norm.weight", "layer.1.layer_norm.weight"}


@pytest.mark.parametrize(("kind", "part"), [(kind, part) for kind, parts in BY_HAND.items() for part in parts])
def test_sharing_one_part_shares_its_parameters_and_no_others(peer, kind, part):
    layers = peer(kind).layers
    tenfold.share(layers, {"groups": 2}, parts=(part,))
    shared = {name for name, column in tables(layers).items() if tied_pattern(column) == Pattern([0, 0, 1, 1])}
    free = {name for name, column in tables(layers).items() if tied_pattern(column) == Pattern(range(4))}
    assert shared == set(BY_HAND[kind][part].split())
    assert shared | free == set(tables(layers))
