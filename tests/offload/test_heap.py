from __future__ import annotations

import pytest
import torch
from torch import nn

from tenfold.offload import heap
from tenfold.offload.heap import Heap


@pytest.fixture
def returned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """When memory was given back, and, to set, what there is of it."""
    found: list[int] = []
    monkeypatch.setattr(heap, "return_free_memory", lambda: found.append(1))
    return found


def layers_of(resident: int, limit: int, passing: int, monkeypatch: pytest.MonkeyPatch) -> nn.Sequential:
    monkeypatch.setattr(heap, "unnamed_memory_bytes", lambda: resident)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    Heap(layers, limit, passing)
    return layers


def test_memory_is_looked_at_before_every_layer_forward_and_backward(
    monkeypatch: pytest.MonkeyPatch, returned: list[int]
) -> None:
    layers = layers_of(1000, 1000, 80, monkeypatch)
    assert len(returned) == 1  # at the start
    out = layers(torch.randn(2, 4))
    assert len(returned) == 3
    out.sum().backward()
    assert len(returned) == 5


@pytest.mark.parametrize(("resident", "gives"), [(879, False), (880, False), (881, True)])
def test_it_is_given_back_where_what_passes_and_half_of_it_more_would_go_over_the_limit(
    resident: int, gives: bool, monkeypatch: pytest.MonkeyPatch, returned: list[int]
) -> None:
    layers_of(resident, 1000, 80, monkeypatch)
    assert bool(returned) is gives


def test_what_is_kept_free_is_really_given_back() -> None:
    from tenfold.hardware.memory import return_free_memory, unnamed_memory_bytes

    held = [b"x" * 100_000 for _ in range(1000)]  # below the size that the C library maps by itself
    last = b"x" * 100_000  # so that they are not at the end of the heap
    full = unnamed_memory_bytes()
    held.clear()
    return_free_memory()
    assert unnamed_memory_bytes() < full - 80_000_000
    assert len(last)
