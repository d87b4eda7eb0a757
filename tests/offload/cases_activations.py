"""What ranks compute with activations in a tier. Run by `test_activations_together.py`."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from offload.loops import VOCABULARY, Model, optimizers_of
from offload.memory_tier import MemoryTier
from tenfold.offload.activations import ActivationStore
from tenfold.offload.slab import Slab


def freeze_scalars(model: Model) -> set[torch.nn.Parameter]:
    """Parameters without a dimension, which FSDP2 does not take, are not trained; what they are."""
    found = {each for each in model.parameters() if not each.dim()}
    for each in found:
        each.requires_grad_(False)
    return found


def sharded(rank_tokens: list[list[list[int]]], pages: int | None, reshard: bool) -> tuple[list[float], int]:
    """Losses of a model that FSDP2 shards, and the bytes that were written."""
    torch.manual_seed(3)
    model, mesh = Model(), init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    scalars = freeze_scalars(model)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard, ignored_params=scalars)
    fully_shard(model, mesh=mesh, ignored_params=scalars)
    store = None
    if pages is not None:
        store = ActivationStore(MemoryTier(delay=3), Slab(pages << 12, torch.device("cpu")), smallest=1)
        for layer in model.layers:
            store.attach(layer)
    (optimizer, *_), losses = optimizers_of("adamw", model), []
    for tokens in rank_tokens:
        loss = model(torch.tensor(tokens[torch.distributed.get_rank()]) % VOCABULARY)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    if store is None:
        return losses, 0
    store.finish()
    assert (store.slab.taken, store.tier.held) == (0, 0)
    return losses, store.tier.bytes_written
