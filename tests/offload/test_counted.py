"""What a forward pass leaves in memory, counted without it, is what a real one leaves."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from tenfold.config.model import ModelConfig
from tenfold.nn.decoder import Decoder
from tenfold.nn.objective import loss_sum, make_example
from tenfold.nn.recompute import Recompute
from tenfold.offload.counted import saved_bytes

LENGTH, SEQUENCES = 24, 3
TOKENS = torch.arange(SEQUENCES * (LENGTH + 1)).view(SEQUENCES, -1) * 7 % 50
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"norm": "layernorm", "activation": "gelu", "positions": "learned", "bias": True},
    "llama": {"tie_embeddings": False, "heads": 4, "kv_heads": 2, "qk_norm": True},
    "bert": {"norm": "layernorm", "norm_position": "post", "objective": "masked", "mask_token": 3},
    "documents": {"document_end": 55},  # none ends within a sequence
    "mixture": {"moe": {"experts": 8, "ffn": 8, "prototypes": 2, "top_k": 2, "shared_experts": 1, "z_loss": 0.1}},
}


def on_meta(model):
    with torch.device("meta"):
        return Decoder(model.config, 32, model.dtype)


def forward(model, example):
    hidden, statistics = model(example.inputs)
    return loss_sum(model, hidden, example, 512), statistics


def saved_by_hooks(model):
    """Bytes of storages, but of parameters, that autograd is given to save, by layer; and those besides."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    example = make_example(TOKENS, model.config, 0, 0)
    given = parameters | {x.untyped_storage().data_ptr() for x in example if x is not None}
    held, now, sizes = [], [-1], {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            held.append(storage)  # so that no address is used twice
            sizes.setdefault(storage.data_ptr(), {"bytes": storage.nbytes(), "layers": set()})["layers"].add(now[0])
        return tensor

    for number, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(lambda *_, number=number: now.__setitem__(0, number))
        layer.register_forward_hook(lambda *_: now.__setitem__(0, -1))
    with saved_tensors_hooks(pack, lambda x: x):
        forward(model, example)
    layers = [sum(e["bytes"] for e in sizes.values() if e["layers"] == {n}) for n in range(len(model.layers))]
    return layers, sum(e["bytes"] for e in sizes.values()) - sum(layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_without_recompute_it_is_what_hooks_of_autograd_see(tiny_decoder, shape, dtype):
    model = tiny_decoder("sandwich", dtype=dtype, **SHAPES[shape])
    layers, outside = saved_by_hooks(model)
    found = saved_bytes(on_meta(model), SEQUENCES, LENGTH)
    assert found.layers == layers
    assert found.outside == outside


def saved_for_real(model):
    """Bytes that a real forward pass leaves allocated while its graph is there."""

    def graphs():
        loss, statistics = forward(model, example)
        return loss.grad_fn, statistics.grad_fn

    example = make_example(TOKENS, model.config, 0, 0)
    graphs()
    gc.collect()
    gc.disable()  # nothing older is freed under way
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as memory:
        graph = graphs()
    gc.enable()
    assert all(graph[:1])
    return sum(event.self_cpu_memory_usage for event in memory.key_averages())


@pytest.mark.parametrize("recompute", ["none", "selective", "full", Recompute("full", 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", ["llama", "mixture"])
def test_however_layers_recompute_it_is_what_a_real_pass_leaves(tiny_decoder, shape, dtype, recompute):
    model = tiny_decoder(dtype=dtype, recompute=recompute, **SHAPES[shape])
    found = saved_bytes(model, SEQUENCES, LENGTH)
    assert sum(found.layers) + found.outside == pytest.approx(saved_for_real(model), abs=64)


def test_each_layer_by_itself_as_it_recomputes(tiny_decoder):
    found = {mode: saved_bytes(tiny_decoder(recompute=mode, dtype=torch.float32), SEQUENCES, LENGTH) for mode in MODES}
    none, full, half = (found[mode].layers for mode in MODES)
    assert full == 4 * [4 * SEQUENCES * LENGTH * 16]  # its input alone
    assert half == [none[0], full[1], none[2], full[3]]
    assert len({each.outside for each in found.values()}) == 1


MODES = ("none", "full", Recompute("full", 2))


def test_of_a_capacity_the_most_is_counted(tiny_decoder):
    moe = SHAPES["mixture"]["moe"]
    dropless, capacity = (
        tiny_decoder(dtype=torch.float32, moe={**moe, "capacity": capacity}) for capacity in ("dropless", "one")
    )
    found = saved_bytes(capacity, SEQUENCES, LENGTH)
    assert found == saved_bytes(dropless, SEQUENCES, LENGTH)
    assert capacity.training
    assert sum(found.layers) > sum(saved_by_hooks(capacity)[0])


def test_the_model_is_as_it_was(tiny_decoder):
    model = tiny_decoder("all")
    before = dict(model.named_parameters())
    saved_bytes(model, SEQUENCES, LENGTH)
    assert dict(model.named_parameters()) == before
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.layers)


@pytest.mark.parametrize("chunk", [SEQUENCES * LENGTH, 8])
def test_logits_of_one_chunk_are_most_of_what_the_loss_takes_besides(tiny_decoder, chunk):
    found = saved_bytes(tiny_decoder(dtype=torch.float32), SEQUENCES, LENGTH, chunk)
    logits = 4 * chunk * 64  # the vocabulary is padded
    assert logits < found.loss < 1.7 * logits


def test_a_large_model_is_counted_in_a_moment():
    config = ModelConfig(vocab_size=32000, layers=4, hidden=4096, heads=32, ffn=14336)
    with torch.device("meta"):
        model = Decoder(config, 8192, torch.bfloat16)
    found = saved_bytes(model, 1, 8192, 8192)
    assert 8192 * 4096 * 2 * 10 < found.layers[1] == found.layers[2] < 8192 * 4096 * 4 * 40
