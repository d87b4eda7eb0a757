"""Models of other people, tiny, with random weights: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GROUPED = {"num_key_value_heads": 1}
EXPERTS = {"num_experts_per_tok": 2}
GPT2 = {"vocab_size": 64, "n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 32}
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None}
CAUSAL = ("gpt2", "llama", "qwen3", "mixtral", "qwen3-moe")


@dataclass
class Peer:
    """A model, its layers, and its function of fixed tokens."""

    model: nn.Module
    layers: nn.ModuleList
    logits: Callable[[], torch.Tensor]


def _build(kind: str, **more: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    t = transformers
    if kind == "gpt2":
        config = t.GPT2Config(**GPT2, **NO_TOKENS, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **more)
        return t.GPT2LMHeadModel(config)
    if kind == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(**SMALL, **GROUPED, **more))
    if kind == "qwen3":
        return t.Qwen3ForCausalLM(t.Qwen3Config(**SMALL, **GROUPED, head_dim=8, **more))
    if kind == "mixtral":
        return t.MixtralForCausalLM(t.MixtralConfig(**SMALL, **GROUPED, **EXPERTS, num_local_experts=4, **more))
    if kind == "qwen3-moe":
        width = {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 8}
        return t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**SMALL, **GROUPED, **EXPERTS, **width, **more))
    assert kind == "bert"
    drop = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    return t.BertForMaskedLM(t.BertConfig(**SMALL, **drop, **more))


@pytest.fixture
def peer(tiny_decoder: Callable[..., nn.Module]) -> Callable[..., Peer]:
    """A model of somebody by name: gpt2, llama, qwen3, mixtral, qwen3-moe, bert, torch, tenfold."""
    tokens = torch.arange(22).view(2, 11) * 7 % 50

    def build(kind: str, dtype: torch.dtype = torch.float32, **more: Any) -> Peer:
        torch.manual_seed(0)
        if kind == "tenfold":
            ours = tiny_decoder(dtype=dtype, moe={"experts": 4, "prototypes": 2, "ffn": 8})
            return Peer(ours, ours.layers, lambda: ours.logits(ours(tokens)[0]))
        if kind == "torch":
            layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0, batch_first=True)
            encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
            for parameter in encoder.parameters():  # its layers begin as copies of one
                nn.init.normal_(parameter, std=0.2)
            encoder, x = encoder.to(dtype), torch.linspace(-1, 1, 2 * 5 * 16, dtype=dtype).view(2, 5, 16)
            return Peer(encoder, encoder.layers, lambda: encoder(x))
        model = _build(kind, **more).to(dtype)
        if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # PyTorch's grouped product has no float64
        return Peer(model, layers_of(model), lambda: model(tokens).logits)

    return build


def layers_of(model: nn.Module) -> nn.ModuleList:
    """The layers of a model of transformers."""
    base = model.base_model
    return base.h if hasattr(base, "h") else base.encoder.layer if hasattr(base, "encoder") else base.layers
