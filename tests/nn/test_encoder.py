"""The encoder against PyTorch's own layers and the BERT and ALBERT of transformers, with the same weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tenfold.config.model import ModelConfig
from tenfold.nn.counting import count
from tenfold.nn.decoder import Decoder
from tenfold.sharing.patterns import Pattern
from tenfold.sharing.tying import Sharing, tie

TOKENS = torch.arange(14).view(2, 7) * 3 % 50
BERT = {
    "objective": "masked",
    "mask_token": 49,
    "norm": "layernorm",
    "norm_position": "post",
    "embedding_norm": True,
    "activation": "gelu",
    "positions": "learned",
    "bias": True,
}
MEGATRON = {**BERT, "norm_position": "pre", "embedding_norm": False}
ALBERT = {**BERT, "embedding_width": 8}
SHAPES = {"bert": BERT, "megatron": MEGATRON, "albert": ALBERT, "rotary": {"objective": "masked", "mask_token": 49}}


@pytest.fixture
def encoder(tiny_decoder, randomize):
    """An encoder with every parameter random, biases and norms too."""
    return lambda shape, sharing="none", **fields: randomize(tiny_decoder(sharing, **{**SHAPES[shape], **fields}))


@pytest.mark.parametrize("shape", ["bert", "megatron"])
def test_a_layer_is_torchs_own_encoder_layer(encoder, copy_attention, sample, shape):
    model = encoder(shape, vocab_multiple=2)
    theirs = nn.TransformerEncoderLayer(
        16, 2, 24, 0.0, "gelu", norm_first=shape == "megatron", batch_first=True, dtype=torch.float64
    )
    block = model.layers[0]
    copy_attention(block.attention, theirs.self_attn)
    theirs.linear1.load_state_dict(block.ffn.up.state_dict())
    theirs.linear2.load_state_dict(block.ffn.down.state_dict())
    theirs.norm1.load_state_dict(block.attention_norm.state_dict())
    theirs.norm2.load_state_dict(block.ffn_norm.state_dict())
    x = sample(2, 7, 16)
    context = {}
    model.layers[0].register_forward_pre_hook(lambda _module, given: context.update(given=given[1]))
    model(TOKENS)
    torch.testing.assert_close(block(x, context["given"])[0], theirs(x))


@pytest.mark.parametrize("shape", SHAPES)
def test_every_token_changes_the_logits_of_every_place(encoder, shape):
    model = encoder(shape)
    for place in (0, 6):
        changed = TOKENS.clone()
        changed[:, place] = 48
        before, after = (model.logits(model(tokens)[0]) for tokens in (TOKENS, changed))
        assert (before != after).any(-1).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sharing", ["none", "all"])
def test_names_cover_every_parameter_and_all_of_them_learn(encoder, shape, sharing):
    model = encoder(shape, sharing)
    names = dict(model.named_parameters())
    assert len(names) == len(list(model.parameters()))
    model.logits(model(TOKENS)[0]).square().sum().backward()
    assert all(parameter.grad is not None for parameter in names.values())


def test_a_factorised_decoder_is_narrow_at_both_ends(tiny_decoder):
    model = tiny_decoder(embedding_width=8)
    hidden, _ = model(TOKENS)
    expected = (hidden @ model.transform.dense.weight.t()) @ model.embedding.weight[:50].t()
    torch.testing.assert_close(model.logits(hidden), expected)
    assert model.embedding.weight.shape == (64, 8)
    assert hidden.shape == (2, 7, 16)


def transformers_model(kind, **fields):
    transformers = pytest.importorskip("transformers", reason="needs the peer library transformers")
    shape = {
        "vocab_size": 50,
        "hidden_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 32,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "attention_probs_dropout_prob": 0.0,
        "hidden_dropout_prob": 0.0,
        **fields,
    }
    config = getattr(transformers, f"{kind}Config")(**shape)
    return getattr(transformers, f"{kind}ForMaskedLM")(config).double().eval()


def copied(pairs):
    for ours, theirs in pairs:
        theirs.load_state_dict(ours.state_dict())


@torch.no_grad()
def test_logits_are_those_of_bert(encoder):
    model, theirs = encoder("bert", vocab_multiple=2), transformers_model("Bert")
    inner = theirs.bert.embeddings
    inner.token_type_embeddings.weight.zero_()  # left out by ours
    copied([(model.embedding, inner.word_embeddings), (model.positions, inner.position_embeddings)])
    copied([(model.embedding_norm, inner.LayerNorm)])
    for mine, layer in zip(model.layers, theirs.bert.encoder.layer, strict=True):
        own = layer.attention.self
        copied([(mine.attention.wq, own.query), (mine.attention.wk, own.key), (mine.attention.wv, own.value)])
        copied([(mine.attention.wo, layer.attention.output.dense), (mine.ffn.up, layer.intermediate.dense)])
        copied([(mine.attention_norm, layer.attention.output.LayerNorm), (mine.ffn.down, layer.output.dense)])
        copied([(mine.ffn_norm, layer.output.LayerNorm)])
    head = theirs.cls.predictions
    copied([(model.transform.dense, head.transform.dense), (model.transform.norm, head.transform.LayerNorm)])
    head.decoder.weight.copy_(model.embedding.weight)
    head.decoder.bias.copy_(model.output_bias)
    torch.testing.assert_close(model.logits(model(TOKENS)[0]), theirs(TOKENS).logits)


@torch.no_grad()
def test_logits_are_those_of_albert_when_all_layers_share(encoder):
    model = encoder("albert", "all", vocab_multiple=2)
    theirs = transformers_model("Albert", embedding_size=8)
    inner = theirs.albert.embeddings
    inner.token_type_embeddings.weight.zero_()  # left out by ours
    copied([(model.embedding, inner.word_embeddings), (model.positions, inner.position_embeddings)])
    copied([(model.embedding_norm, inner.LayerNorm)])
    copied([(model.projection, theirs.albert.encoder.embedding_hidden_mapping_in)])
    mine, layer = model.layers[0], theirs.albert.encoder.albert_layer_groups[0].albert_layers[0]
    own = layer.attention
    copied([(mine.attention.wq, own.query), (mine.attention.wk, own.key), (mine.attention.wv, own.value)])
    copied([(mine.attention.wo, own.dense), (mine.attention_norm, own.LayerNorm), (mine.ffn.up, layer.ffn)])
    copied([(mine.ffn.down, layer.ffn_output), (mine.ffn_norm, layer.full_layer_layer_norm)])
    head = theirs.predictions
    copied([(model.transform.dense, head.dense), (model.transform.norm, head.LayerNorm)])
    head.decoder.weight.copy_(model.embedding.weight)
    head.decoder.bias.copy_(model.output_bias)
    torch.testing.assert_close(model.logits(model(TOKENS)[0]), theirs(TOKENS).logits)


# Published: BertForMaskedLM has 109,514,298 parameters (bert-base-uncased), of which two token types of 768 are not
# ours; AlbertForMaskedLM 11,221,680, of which two of 128.
@pytest.mark.parametrize(
    ("preset", "sharing", "published", "token_types"),
    [("bert-base", "none", 109_514_298, 2 * 768), ("albert-base", "all", 11_221_680, 2 * 128)],
)
def test_presets_have_their_published_number_of_parameters(preset, sharing, published, token_types):
    config = ModelConfig(preset=preset, vocab_multiple=1)
    with torch.device("meta"):
        model = Decoder(config, 512)
    tie(model.layers, Sharing(Pattern.parse(sharing, 12)))
    assert count(model, 512).stored == published - token_types


@pytest.mark.parametrize(("kind", "published"), [("Bert", 109_514_298), ("Albert", 11_221_680)])
def test_the_published_numbers_are_those_of_transformers(kind, published):
    transformers = pytest.importorskip("transformers", reason="needs the peer library transformers")
    fields = {"Albert": {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}}.get(kind, {})
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForMaskedLM")(getattr(transformers, f"{kind}Config")(**fields))
    assert sum(parameter.numel() for parameter in model.parameters()) == published


def test_operations_of_an_encoder_equal_a_hand_count():
    T, D, E, L, F, V = 32, 16, 8, 3, 24, 64
    config = ModelConfig(
        vocab_size=V,
        layers=L,
        hidden=D,
        heads=2,
        ffn=F,
        activation="gelu",
        objective="masked",
        mask_share=0.25,
        embedding_width=E,
    )
    with torch.device("meta"):
        model = Decoder(config, T)
    layer = 4 * 2 * D * D + 2 * 2 * D * T + 2 * 2 * D * F  # every position sees all T
    head = (2 * D * E + 2 * E * V) / 4  # at a quarter of the places
    assert count(model, T).flops_per_token == 3 * (L * layer + 2 * E * D + head)
