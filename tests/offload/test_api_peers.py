"""`tenfold.offload` on models of transformers, against the same loop without."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from offload.loops import ALL, TOKENS, assert_same, equal, two


def peer(kind, checkpointing=None):
    transformers = pytest.importorskip("transformers")
    nothing = {"bos_token_id": None, "eos_token_id": None}
    if kind == "gpt2":
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=4, n_head=2, n_positions=32, **nothing)
        )
    else:
        config = transformers.MixtralConfig(
            vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=32, num_local_experts=4, num_experts_per_tok=2,
            output_router_logits=True, pad_token_id=None, **nothing,
        )  # fmt: skip
        model = transformers.MixtralForCausalLM(config)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    return model.train()


def train_peer(model, optimizer, clip, steps=3):
    losses = []
    torch.manual_seed(2)  # of dropout
    for step in range(steps):
        for part in range(2):
            loss = model(input_ids=(TOKENS + step + part) % 50, labels=TOKENS).loss / 2
            loss.backward()
            losses.append(loss.item())
        clip()
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("checkpointing", [None, "non-reentrant", "reentrant"])
@pytest.mark.parametrize("kind", ["gpt2", "mixtral"])
def test_models_of_transformers_train_to_the_same_bits(offload, kind, checkpointing):
    plain, model = two(peer, kind, checkpointing)
    wanted, mine = (AdamW(each.parameters(), lr=1e-2) for each in (plain, model))
    calls = {plain: 0, model: 0}
    for each in calls:
        first = each.transformer.h[0].mlp if kind == "gpt2" else each.model.layers[0].mlp

        def count(*_, each=each):
            calls[each] += 1

        first.register_forward_pre_hook(count)
    handle = offload(model, mine)
    losses = train_peer(model, mine, lambda: handle.clip_grad_norm_(0.1))
    assert losses == train_peer(plain, wanted, lambda: clip_grad_norm_(plain.parameters(), 0.1))
    assert calls[model] == calls[plain] == (6 if checkpointing is None else 12)
    assert_same(plain, [wanted], model, [mine])
    assert handle.placement.tier("layers.3", "weights") == "disk"
    if kind == "mixtral" and checkpointing is None:
        handle.close()
        model.eval(), plain.eval()
        assert equal(model(TOKENS).logits, plain(TOKENS).logits)
        assert equal(dict(plain.state_dict()), dict(model.state_dict()))


def test_activations_too(offload):
    plain, model = two(peer, "gpt2")
    wanted, mine = AdamW(plain.parameters(), lr=1e-2), AdamW(model.parameters(), lr=1e-2)
    rules = [*ALL, {"layers": "0-3", "activations": "disk"}]
    handle = offload(model, mine, placement=rules, activations_bytes="1MiB")
    store = handle._engine.activations["disk"]
    store.smallest = 1
    losses = train_peer(model, mine, lambda: None)
    assert losses == train_peer(plain, wanted, lambda: None)
    assert store.tier.bytes_written > 0
    assert_same(plain, [wanted], model, [mine])


def test_mixed_precision_and_layers_of_which_a_part_is_frozen(offload):
    plain, model = two(peer, "gpt2")
    for each in (plain, model):
        for layer in each.transformer.h:
            layer.mlp.c_fc.requires_grad_(False)
    wanted, mine = (AdamW(filter(lambda p: p.requires_grad, each.parameters()), lr=1e-2) for each in (plain, model))
    offload(model, mine)
    with torch.autocast("cpu", torch.bfloat16):
        losses = [train_peer(model, mine, lambda: None), train_peer(plain, wanted, lambda: None)]
    assert losses[0] == losses[1]
    assert_same(plain, [wanted], model, [mine])


def test_saving_a_model_of_transformers(offload, tmp_path_factory):
    plain, model = two(peer, "mixtral")
    offload(model, AdamW(model.parameters(), lr=1e-2))
    folder = tmp_path_factory.mktemp("saved")
    model.save_pretrained(folder)
    assert equal(dict(type(model).from_pretrained(folder).state_dict()), dict(plain.state_dict()))
