"""Sharing and delinking in models of other people, with PyTorch's optimizers, in a loop of the user's own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.optim import SGD, Adafactor, AdamW, Muon

import tenfold
from tenfold.sharing.patterns import Pattern
from tenfold.sharing.tying import tables, tied_pattern

from .conftest import CAUSAL, layers_of

PEERS = (*CAUSAL, "bert", "torch", "tenfold")
TOKENS = torch.arange(22).view(2, 11) * 7 % 50


def muon_and_adamw(model, layers):
    matrices = [parameter for parameter in layers.parameters() if parameter.dim() == 2]
    held = {id(parameter) for parameter in matrices}
    return [Muon(matrices, lr=0.01), AdamW([p for p in model.parameters() if id(p) not in held], lr=0.01)]


OPTIMIZERS = {
    "adamw": lambda model, _: [AdamW(model.parameters(), lr=0.01)],
    "adafactor": lambda model, _: [Adafactor(model.parameters(), lr=0.01)],
    "sgd": lambda model, _: [SGD(model.parameters(), lr=0.01, momentum=0.9)],
    "muon": muon_and_adamw,
}


def train(peer, optimizers, steps):
    for _ in range(steps):
        logits = peer.logits()
        torch.nn.functional.cross_entropy(logits.flatten(0, -2), torch.arange(logits[..., 0].numel()) % 7).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("kind", PEERS)
def test_layers_with_equal_weights_shared_and_delinked_again_are_the_same_function_to_the_last_bit(peer, kind):
    it = peer(kind)
    for layer in it.layers:
        layer.load_state_dict(it.layers[0].state_dict())
    expected = it.logits()
    tenfold.share(it.layers)
    assert torch.equal(it.logits(), expected)
    tenfold.delink(it.layers, pattern={"cycle": 2})
    assert torch.equal(it.logits(), expected)
    tenfold.delink(it.layers)
    assert torch.equal(it.logits(), expected)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", PEERS)
def test_delinking_in_training_changes_no_logit_and_frees_every_layer(peer, kind, optimizer):
    it = peer(kind)
    tenfold.share(it.layers)
    optimizers = OPTIMIZERS[optimizer](it.model, it.layers)
    train(it, optimizers, 2)
    expected = it.logits()
    for pattern in ({"groups": 2}, "none"):
        tenfold.delink(it.layers, optimizers, pattern)
        assert torch.equal(it.logits(), expected)
        assert {str(tied_pattern(column)) for column in tables(it.layers).values()} == {str(Pattern.parse(pattern, 4))}
    held = [p for one in optimizers for group in one.param_groups for p in group["params"]]
    assert len(held) == len(set(held))
    assert set(held) == set(it.model.parameters())
    train(it, optimizers, 1)
    for column in tables(it.layers).values():
        values = [holder.parameter for holder in column]
        if values[0].dim() > 1 and values[0].grad is None:
            assert all(not torch.equal(values[0], other) for other in values[1:])


@pytest.mark.parametrize("kind", PEERS)
@pytest.mark.parametrize("pattern", ["all", "sandwich"])
def test_a_shared_model_trains_as_separate_layers_whose_gradients_are_averaged_by_hand(peer, kind, pattern):
    shared, separate = peer(kind, torch.float64), peer(kind, torch.float64)
    blocks = Pattern.parse(pattern, 4)
    tenfold.share(shared.layers, pattern)
    for layer, block in enumerate(blocks.blocks):
        separate.layers[layer].load_state_dict(shared.layers[blocks.first_layer(block)].state_dict())
    optimizers = [AdamW(it.model.parameters(), lr=0.01) for it in (shared, separate)]
    for _ in range(4):
        for it in (shared, separate):
            logits = it.logits()
            target = torch.arange(logits[..., 0].numel()) % 7
            torch.nn.functional.cross_entropy(logits.flatten(0, -2), target).backward()
        for column in tables(separate.layers).values():
            for block in set(blocks.blocks):
                grads = [h.parameter for h, b in zip(column, blocks.blocks, strict=True) if b == block]
                mean = torch.stack([parameter.grad for parameter in grads]).mean(0)
                for parameter in grads:
                    parameter.grad.copy_(mean)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(shared.logits(), separate.logits(), rtol=1e-9, atol=1e-9)
    for name, column in tables(shared.layers).items():
        for mine, theirs in zip(column, tables(separate.layers)[name], strict=True):
            torch.testing.assert_close(mine.parameter, theirs.parameter, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("kind", CAUSAL)
def test_generation_with_a_cache_works_while_shared_and_after_delinking(peer, kind):
    it = peer(kind)
    it.model.eval()
    tenfold.share(it.layers)
    first = None
    for pattern in ("all", {"groups": 2}, "none"):
        tenfold.delink(it.layers, pattern=pattern)
        cached, plain = (
            it.model.generate(
                TOKENS[:1, :5],
                attention_mask=torch.ones(1, 5, dtype=torch.long),
                max_new_tokens=10,
                do_sample=False,
                use_cache=use_cache,
                pad_token_id=0,
            )
            for use_cache in (True, False)
        )
        assert torch.equal(cached, plain)
        first = cached if first is None else first
        assert torch.equal(cached, first)
        assert cached.shape == (1, 15)


@pytest.mark.parametrize("kind", [*CAUSAL, "bert"])
def test_buffers_and_attributes_of_layers_and_tied_embeddings_stay(peer, kind):
    it = peer(kind, tie_word_embeddings=True)
    for number, layer in enumerate(it.layers):
        layer.register_buffer("mine", torch.tensor([float(number)]))
    indices = [getattr(layer, "self_attn", getattr(layer, "attn", None)) for layer in it.layers]
    indices = [attention.layer_idx for attention in indices if attention is not None]
    assert indices in ([], [0, 1, 2, 3])
    tenfold.share(it.layers)
    optimizer = AdamW(it.model.parameters(), lr=0.01)
    train(it, [optimizer], 2)
    tenfold.delink(it.layers, optimizer)
    train(it, [optimizer], 1)
    assert it.model.get_input_embeddings().weight is it.model.get_output_embeddings().weight
    assert [layer.mine.item() for layer in it.layers] == [0, 1, 2, 3]
    now = [getattr(layer, "self_attn", getattr(layer, "attn", None)) for layer in it.layers]
    assert [attention.layer_idx for attention in now if attention is not None] == indices


@pytest.mark.parametrize("kind", [*CAUSAL, "bert"])
def test_what_save_pretrained_wrote_of_a_shared_model_is_small_and_loads_by_sharing_again(peer, kind, tmp_path):
    it = peer(kind, tie_word_embeddings=True)
    it.model.save_pretrained(tmp_path / "separate")
    tenfold.share(it.layers, "sandwich")
    it.model.save_pretrained(tmp_path / "shared")
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("separate", "shared")]
    assert sizes[1] < 0.9 * sizes[0]
    again = type(it.model).from_pretrained(tmp_path / "shared")  # warns of the layers that are not in the file
    tenfold.share(layers_of(again), "sandwich")
    it.model.eval()
    assert torch.equal(again(TOKENS).logits, it.logits())
    assert again.get_input_embeddings().weight is again.get_output_embeddings().weight


@pytest.mark.parametrize("kind", [*CAUSAL, "bert"])
def test_a_delinked_model_is_saved_as_any_other(peer, kind, tmp_path):
    it = peer(kind)
    tenfold.share(it.layers)
    whole = copy.deepcopy(it.model)
    tenfold.delink(layers_of(whole))
    whole.save_pretrained(tmp_path)
    again = type(it.model).from_pretrained(tmp_path)
    it.model.eval()
    assert torch.equal(again(TOKENS).logits, it.logits())
    assert {p.data_ptr() for p in whole.parameters()} & {p.data_ptr() for p in it.model.parameters()} == set()


@pytest.mark.parametrize("kind", ["gpt2", "qwen3-moe"])
def test_a_state_dict_has_every_layer_by_name_and_loads_into_separate_layers(peer, kind):
    it, free = peer(kind), peer(kind)
    tenfold.share(it.layers, {"cycle": 2})
    assert it.model.state_dict().keys() == free.model.state_dict().keys()
    free.model.load_state_dict(it.model.state_dict())
    assert torch.equal(free.logits(), it.logits())


@pytest.mark.parametrize("kind", CAUSAL)
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_of_transformers_gives_the_same_gradients(peer, kind, reentrant):
    plain, recomputed = peer(kind, torch.float64), peer(kind, torch.float64)
    recomputed.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    recomputed.model.enable_input_require_grads()
    for it in (plain, recomputed):
        it.model.train()
        tenfold.share(it.layers, {"groups": 2})
        it.logits().square().mean().backward()
    for mine, theirs in zip(plain.model.parameters(), recomputed.model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-12)
