"""Activations' stores over a tier in memory, to look into."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor

from offload.memory_tier import MemoryTier
from tenfold.offload.activations import ActivationStore
from tenfold.offload.slab import Slab

CPU = torch.device("cpu")


def store_of(
    slab: int = 1 << 20, delay: int | None = None, room: int = 1 << 40, smallest: int = 1, **options: Any
) -> ActivationStore:
    """With a slab of so many bytes, and a tier of `room` bytes that takes its time as `MemoryTier` says."""
    return ActivationStore(MemoryTier(room, delay=delay), Slab(slab, CPU), smallest=smallest, **options)


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """To the last bit."""
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def all_given_back(store: ActivationStore) -> bool:
    """Whether nothing is left in slab and tier."""
    gc.collect()
    store.finish()
    return store.tier.held == 0 and store.slab.taken == 0 and not (store._sent or store._unsent or store._moving)
