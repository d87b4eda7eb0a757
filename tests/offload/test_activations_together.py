"""Activations in a tier together with what else there is: offloaded weights, the disk tier, FSDP2."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from offload.cases_activations import freeze_scalars
from offload.loops import Model, optimizers_of, train
from offload.memory_tier import MemoryTier
from offload.stores import all_given_back
from offload.test_engine import assert_same_state, offloaded
from ranks import on_ranks
from tenfold.nn.decoder import Decoder
from tenfold.nn.init import initialize
from tenfold.offload.activations import ActivationStore, working_bytes
from tenfold.offload.counted import saved_bytes
from tenfold.offload.disk import Disk
from tenfold.offload.host import Host
from tenfold.offload.slab import Slab

CPU = torch.device("cpu")


def test_with_weights_that_are_offloaded_too():
    torch.manual_seed(1)
    plain, model = Model(), None
    torch.manual_seed(1)
    model = Model()
    wanted, mine = optimizers_of("adamw", plain), optimizers_of("adamw", model)
    weights, activations = MemoryTier(delay=2), MemoryTier(delay=2)
    offload = offloaded(model, mine, ("weights", "gradients", "moments"), weights)
    noted = offload._noted
    store = ActivationStore(activations, Slab(8 << 12, CPU), smallest=1, first=(noted.pack_ours, noted.unpack))
    for layer in model.layers:
        store.attach(layer)
    assert train(model, mine, 2, 2) == train(plain, wanted, 2, 2)
    assert_same_state(offload, mine, plain, wanted, "weights and activations")
    assert activations.bytes_read > 0
    assert all_given_back(store)


def test_on_a_real_disk(tiny_config, tmp_path):
    """With the slab that the count of bytes asks for."""
    config = tiny_config(layers=6, hidden=64, ffn=160)
    model = Decoder(config, 128)
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    tokens = torch.arange(4 * 128).view(4, 128) * 7 % 50

    def gradients():
        model.zero_grad()
        model(tokens)[0].square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients()
    tier = Disk([tmp_path])
    store = ActivationStore(tier, Slab(working_bytes(saved_bytes(model, 4, 128).layers), CPU))
    for layer in model.layers:
        store.attach(layer)
    for _ in range(3):
        assert all(torch.equal(*pair) for pair in zip(gradients(), expected, strict=True))
    assert tier.bytes_read > 0
    assert (store.late, store.outside) == (0, 0)
    store.finish()
    assert (tier.held, store.slab.taken) == (0, 0)
    tier.close()


def test_with_layers_that_are_compiled():
    compiled, ran = [], []

    def backend(graph, _):
        compiled.append(graph)

        def run(*inputs):
            ran.append(graph)
            return graph(*inputs)

        return run

    def gradients(store):
        torch.compiler.reset()
        torch.manual_seed(1)
        model = Model()
        for layer in model.layers:
            layer.compile(backend=backend)
        attached = [] if store is None else [store.attach(layer) for layer in model.layers]
        for _ in range(2):
            model(torch.arange(18).view(2, 9)).backward()
        found = [parameter.grad for parameter in model.parameters()]
        for each in attached:
            each.remove()
        ran.clear()
        model(torch.arange(18).view(2, 9))
        assert len(ran) == len(model.layers)
        return found

    expected = gradients(None)
    before = len(compiled)
    store = ActivationStore(MemoryTier(), Slab(0, CPU), smallest=1)
    assert all(torch.equal(*pair) for pair in zip(gradients(store), expected, strict=True))
    assert len(compiled) == 2 * before > 0
    assert store.tier.bytes_read > 0
    assert all_given_back(store)


def test_with_weights_that_fsdp_shards():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(61, (2, 2, 3, 9), generator=generator).tolist()
    case = "offload.cases_activations:sharded"
    plain, alone = on_ranks(2, case, tokens, None, True), Model()
    freeze_scalars(alone)
    store = ActivationStore(MemoryTier(), Slab(0, CPU), smallest=1)
    for layer in alone.layers:
        store.attach(layer)
    alone(torch.tensor(tokens[0][0])).backward()
    for reshard, pages in ((True, 0), (True, 8), (False, 0)):
        found = on_ranks(2, case, tokens, pages, reshard)
        assert [losses for losses, _ in found] == [losses for losses, _ in plain]
        for _, written in found:  # no weight among it, and without a slab all else, in two steps
            assert written == 2 * store.tier.bytes_written if pages == 0 else written > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none")
@pytest.mark.parametrize("size", [0, 1 << 20, 1 << 29])
def test_on_a_gpu(tiny_config, tmp_path, size):
    """By pinned memory and by disk, several steps without a word to the device between them."""
    config = tiny_config(layers=6, hidden=256, ffn=512, moe={"experts": 4, "top_k": 2})
    model = Decoder(config, 512, torch.bfloat16)
    initialize(model, 0)
    model.cuda()
    tokens = torch.arange(4 * 512, device="cuda").view(4, 512) * 7 % 50

    def gradients():
        model.zero_grad()
        with sdpa_kernel(SDPBackend.MATH):  # which adds in the same order every time
            for _ in range(3):
                model(tokens)[0].float().square().sum().backward()
        return [parameter.grad.clone() for parameter in model.layers.parameters()]

    expected = gradients()
    for tier in (Host(1 << 28, torch.device("cuda")), Disk([tmp_path])):
        store = ActivationStore(tier, Slab(size, torch.device("cuda")))
        attached = [store.attach(layer) for layer in model.layers]
        assert all(torch.equal(*pair) for pair in zip(gradients(), expected, strict=True))
        for each in attached:
            each.remove()
        torch.cuda.synchronize()
        store.finish()
        assert (tier.bytes_read > 0) == (size < 1 << 29)
        assert (tier.held, store.slab.taken) == (0, 0)
        tier.close()
