"""Initial weights: a function of seed, canonical name and expert, of nothing else."""

from __future__ import annotations

import math

import pytest
import torch

MOE = {"experts": 4, "ffn": 8, "shared_experts": 1}


@pytest.mark.parametrize("moe", [{}, MOE], ids=["dense", "moe"])
def test_a_layer_starts_the_same_whatever_the_sharing_pattern(tiny_decoder, moe):
    free = dict(tiny_decoder("none", moe=moe).named_parameters())
    for sharing in ("all", {"groups": 2}, {"cycle": 2}, "sandwich"):
        shared = dict(tiny_decoder(sharing, moe=moe).named_parameters())
        assert shared.keys() < free.keys()
        assert all(torch.equal(shared[name], free[name]) for name in shared)


@pytest.mark.parametrize("moe", [{}, MOE], ids=["dense", "moe"])
def test_no_two_matrices_of_a_model_start_equal(tiny_decoder, moe):
    model = tiny_decoder("none", moe=moe)
    matrices = [p for _, p in model.named_parameters() if p.dim() > 1 and p.any()]
    parts = [part for p in matrices for part in (p.unbind() if p.dim() == 3 else [p])]
    firsts = [tuple(part.flatten()[:8].tolist()) for part in parts]
    assert len(set(firsts)) == len(firsts) > 4 * 6


def test_seeds_give_different_weights_and_the_same_seed_the_same(tiny_decoder):
    one, two, again = (tiny_decoder(seed=seed).state_dict() for seed in (1, 2, 1))
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert all(not torch.equal(one[name], two[name]) for name in one if one[name].dim() == 2)


def test_weights_neither_read_nor_move_the_global_random_state(tiny_decoder):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = tiny_decoder().state_dict()
    torch.manual_seed(6)
    second = tiny_decoder().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert before.numel()


def test_initialize_leaves_the_global_random_state_alone(tiny_decoder):
    from tenfold.nn.init import initialize

    model = tiny_decoder()
    before = torch.get_rng_state()
    initialize(model, 3)
    assert torch.equal(before, torch.get_rng_state())


def test_an_expert_is_drawn_alone_so_more_experts_change_none_of_the_first(tiny_decoder):
    few = dict(tiny_decoder(moe={"experts": 2, "ffn": 8}).named_parameters())
    many = dict(tiny_decoder(moe={"experts": 6, "ffn": 8}).named_parameters())
    for name in ("layers.1.ffn.experts.up", "layers.1.ffn.experts.gate", "layers.1.ffn.experts.down"):
        assert torch.equal(few[name], many[name][:2])


def test_norms_start_at_one_and_biases_and_padding_at_zero(tiny_decoder):
    model = tiny_decoder(norm="layernorm", bias=True, qk_norm=True, tie_embeddings=False, moe={**MOE, "bias_rate": 0.1})
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert (parameter == 1).all(), name
        elif name.endswith("bias"):
            assert (parameter == 0).all(), name
    assert not model.embedding.weight[50:].any()
    assert not model.head.weight[50:].any()
    assert model.embedding.weight[:50].any(1).all()
    assert model.head.weight[:50].any(1).all()


@pytest.mark.parametrize("moe", [{}, {"experts": 4, "ffn": 64, "shared_experts": 1}], ids=["dense", "moe"])
def test_matrices_have_the_stated_spread_and_those_into_the_residual_stream_a_smaller_one(tiny_decoder, moe):
    model = tiny_decoder(hidden=64, ffn=64, init_std=0.02, layers=2, moe=moe)
    residual = 0.02 / math.sqrt(2 * 2)
    checked = 0
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or parameter.numel() < 2000:
            continue
        into_stream = name.removesuffix(".weight").endswith(("wo", "down"))
        rows = parameter[:50] if name.startswith("embedding") else parameter
        # Of n draws the spread is known to about 1 / sqrt(2 n): at 3200 and more, 5% is four times that.
        assert rows.std().item() == pytest.approx(residual if into_stream else 0.02, rel=0.05), name
        assert abs(rows.mean().item()) < 0.002, name
        checked += 1
    assert checked > 10
