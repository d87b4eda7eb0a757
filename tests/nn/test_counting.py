"""Counts against published sizes, sums over parameters, and hand counts of operations."""

from __future__ import annotations

import pytest
import torch

from tenfold.config.model import ModelConfig
from tenfold.config.presets import PRESETS
from tenfold.nn.counting import count
from tenfold.nn.decoder import Decoder
from tenfold.sharing.patterns import Pattern
from tenfold.sharing.tying import Sharing, tie


def on_meta(preset, sharing="none", **fields):
    """A preset's model without memory."""
    config = ModelConfig(preset=preset, **fields)
    with torch.device("meta"):
        model = Decoder(config, 1024)
    tie(model.layers, Sharing(Pattern.parse(sharing, config.layers)))
    return model


def test_gpt2_has_its_published_number_of_parameters():
    assert count(on_meta("gpt2-124m", vocab_multiple=1), 1024).total == 124_439_808


def test_padding_gpt2s_vocabulary_adds_47_rows():
    assert count(on_meta("gpt2-124m"), 1024).total == 124_439_808 + (50_304 - 50_257) * 768


def test_llama_160m_has_its_published_number_of_parameters():
    assert count(on_meta("llama-160m"), 1024).total == 162_417_408  # 32,000 needs no padding


def test_m6_10t_has_ten_trillion_expert_parameters_and_stores_a_48th_of_them_when_all_layers_share():
    experts = 48 * 10240 * 2 * 1024 * 9984
    real, pseudo = (count(on_meta("m6-10t", sharing), 1024) for sharing in ("none", "all"))
    assert real.expert == pseudo.expert == experts
    assert real.stored == real.total == pseudo.total
    outside = (21_184 + 1024) * 1024 + 2 * 1024  # embeddings with 56 padding rows, positions, last norm
    assert (pseudo.stored - outside) * 48 == real.stored - outside
    assert 209.3e9 < experts / 48 < 209.5e9


@pytest.mark.parametrize(
    ("preset", "published"), [("m6-base", 1.4e9), ("m6-10b", 1e10), ("m6-100b", 1e11), ("m6-1t", 1e12)]
)
def test_m6_presets_are_within_a_tenth_of_their_published_sizes(preset, published):
    assert count(on_meta(preset), 1024).total == pytest.approx(published, rel=0.1)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("sharing", ["all", "none"])
def test_counts_equal_sums_over_named_parameters_for_every_preset(preset, sharing):
    model = on_meta(preset, sharing, **({} if PRESETS[preset].get("vocab_size") else {"vocab_size": 8192}))
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    counts = count(model, 1024)
    assert counts.stored == sum(sizes.values())
    layers = model.config.layers
    uses = layers if sharing == "all" else 1
    inside = sum(size for name, size in sizes.items() if name.startswith("layers."))
    assert counts.total == sum(sizes.values()) + (uses - 1) * inside
    expert = sum(size for name, size in sizes.items() if ".experts." in name) * uses
    assert counts.expert == expert
    moe = model.config.moe
    share = moe.prototypes * moe.top_k / moe.experts if moe.experts else 1
    assert counts.active == counts.total - expert + expert * share


def test_a_count_needs_no_memory():
    assert {parameter.device.type for parameter in on_meta("m6-10t", "all").parameters()} == {"meta"}


def test_operations_of_a_dense_model_equal_a_hand_count():
    T, D, L, F, H, W, K = 32, 16, 3, 24, 4, 6, 2
    config = ModelConfig(vocab_size=50, layers=L, hidden=D, heads=H, kv_heads=K, head_dim=W, ffn=F, bias=True)
    with torch.device("meta"):
        model = Decoder(config, T)
    layer = 2 * D * (H * W) + 2 * D * (2 * K * W) + 2 * (H * W) * D  # q; k and v; output
    layer += 3 * 2 * D * F  # gate, up, down
    # Query times keys and weights times values; a token sees (T + 1) / 2 positions on average.
    layer += 2 * (2 * H * W) * (T + 1) / 2
    assert count(model, T).flops_per_token == 3 * (L * layer + 2 * D * 64)


def test_operations_of_a_mixture_equal_a_hand_count_of_the_chosen_experts():
    T, D, L, F, H = 32, 16, 2, 24, 2
    moe = {"experts": 8, "prototypes": 2, "top_k": 2, "ffn": F, "shared_experts": 3, "bias_rate": 0.1}
    config = ModelConfig(vocab_size=64, layers=L, hidden=D, heads=H, activation="gelu", moe=moe)
    with torch.device("meta"):
        model = Decoder(config, T)
    layer = 4 * 2 * D * D + 2 * 2 * D * (T + 1) / 2
    layer += 2 * D * 8  # router
    layer += (2 * 2 + 3) * 2 * (2 * D * F)  # four routed and three shared experts of two matrices
    assert count(model, T).flops_per_token == 3 * (L * layer + 2 * D * 64)


@pytest.mark.parametrize(("experts", "sets"), [("layer", 1), ("prototype", 2)])
@pytest.mark.parametrize("sharing", ["all", "none"])
def test_experts_that_share_are_stored_and_used_as_sets_and_counted_in_total_as_if_free(sharing, experts, sets):
    T, D, L, F, E = 32, 16, 2, 24, 8
    moe = {"experts": E, "prototypes": 2, "top_k": 2, "ffn": F, "shared_experts": 3, "bias_rate": 0.1}
    config = ModelConfig(vocab_size=64, layers=L, hidden=D, heads=2, activation="gelu", moe=moe)
    with torch.device("meta"):
        free, model = Decoder(config, T), Decoder(config, T)
    tie(model.layers, Sharing(Pattern.parse(sharing, L), experts=experts))
    counts, of_free = count(model, T), count(free, T)
    assert counts.total == of_free.total == sum(parameter.numel() for parameter in free.parameters())
    assert counts.expert == of_free.expert == L * E * 2 * D * F
    assert counts.stored == sum(parameter.numel() for parameter in model.parameters())
    less = L * ((4 - sets) * 2 * D * F + E * (D + 1))  # four chosen experts become the sets; no router, no bias
    assert counts.active == of_free.active - less
    layer = 4 * 2 * D * D + 2 * 2 * D * (T + 1) / 2 + (sets + 3) * 2 * (2 * D * F)
    assert counts.flops_per_token == 3 * (L * layer + 2 * D * 64)
