"""What tests of the floor share: random modules and inputs in float64."""

from __future__ import annotations

import pytest
import torch


def _randomize(module, seed=0):
    """Float64, every parameter random: biases and norm weights too."""
    generator = torch.Generator().manual_seed(seed)
    module = module.double()
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5
    return module


def _sample(*shape, seed=1, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _copy_attention(ours, theirs):
    theirs.in_proj_weight.data = torch.cat((ours.wq.weight, ours.wk.weight, ours.wv.weight)).detach()
    theirs.in_proj_bias.data = torch.cat((ours.wq.bias, ours.wk.bias, ours.wv.bias)).detach()
    theirs.out_proj.load_state_dict(ours.wo.state_dict())


@pytest.fixture
def randomize():
    """Makes a module float64 and every parameter of it random: biases and norm weights too."""
    return _randomize


@pytest.fixture
def sample():
    """A random tensor of a shape."""
    return _sample


@pytest.fixture
def copy_attention():
    """Puts the weights of our attention into torch's MultiheadAttention."""
    return _copy_attention


@pytest.fixture
def threads():
    """Sets the number of OpenMP threads, for the test alone."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
