"""What shared parameters train on is the mean of their layers' gradients, however the loop is written."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tenfold
from tenfold.sharing.averaging import averages_gradients
from tenfold.sharing.tying import tables, tied_pattern


class Stack(nn.Module):
    """Four layers in a row, recomputed in the backward pass or not."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)).double()
        self.reentrant = reentrant

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


X = torch.linspace(-1, 1, 60, dtype=torch.float64).view(10, 6)


def pull(model, rows=slice(None)):
    """A backward pass over some rows of X."""
    model(X[rows].clone().requires_grad_()).square().sum().backward()


def separate(model):
    """A model with separate layers of the same weights and no hooks."""
    free = Stack()
    free.load_state_dict(model.state_dict())
    return free


def expected(model):
    """For each place of a parameter the mean of the gradients of the layers that share it, from separate layers."""
    free = separate(model)
    pull(free)
    means = {}
    for name, column in tables(model.layers).items():
        each = [holder.parameter.grad for holder in tables(free.layers)[name]]
        blocks = tied_pattern(column).blocks
        for layer, block in enumerate(blocks):
            same = [grad for grad, other in zip(each, blocks, strict=True) if other == block]
            means[layer, name] = torch.stack(same).mean(0)
    return means


def check(model, wanted):
    for name, column in tables(model.layers).items():
        for layer, holder in enumerate(column):
            torch.testing.assert_close(holder.parameter.grad, wanted[layer, name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("pattern", ["all", {"groups": 2}, {"cycle": 2}, "sandwich", [0, 1, 0, 0]])
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["kept", "recomputed", "recomputed reentrant"])
def test_the_gradient_is_the_mean_over_the_layers_that_share(pattern, reentrant):
    model = Stack(reentrant)
    tenfold.share(model.layers, pattern)
    wanted = expected(model)
    pull(model)
    check(model, wanted)


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["kept", "recomputed", "recomputed reentrant"])
def test_micro_batches_add_up_to_the_mean_of_the_whole(reentrant):
    model = Stack(reentrant)
    tenfold.share(model.layers, [0, 1, 0, 0])
    wanted = expected(model)
    for rows in (slice(0, 3), slice(3, 4), slice(4, 10)):
        pull(model, rows)
    check(model, wanted)


def test_autograd_grad_gives_the_mean_too():
    model = Stack()
    tenfold.share(model.layers)
    wanted = expected(model)
    (found,) = torch.autograd.grad(model(X).square().sum(), [model.layers[0][0].weight])
    torch.testing.assert_close(found, wanted[0, "0.weight"], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("pattern", [{"groups": 2}, [0, 1, 0, 0], "none"])
def test_delinking_changes_how_many_share_and_a_free_layer_has_its_own_gradient(pattern):
    model = Stack()
    tenfold.share(model.layers)
    tenfold.delink(model.layers, pattern=pattern)
    wanted = expected(model)
    pull(model)
    check(model, wanted)


def test_nothing_of_ours_is_left_on_layers_that_are_free():
    model = Stack()
    tenfold.share(model.layers)
    assert averages_gradients(model.layers)
    tenfold.delink(model.layers)
    assert not averages_gradients(model.layers)
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_sharing_again_does_not_divide_twice():
    model = Stack()
    tenfold.share(model.layers, {"cycle": 2})
    tenfold.share(model.layers, {"cycle": 2})
    tenfold.share(model.layers)
    wanted = expected(model)
    pull(model)
    check(model, wanted)


def through_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, through_torch_save], ids=["deepcopy", "torch.save"])
def test_a_copy_of_the_model_shares_and_averages_on_its_own(copied):
    model = Stack()
    tenfold.share(model.layers, [0, 1, 0, 0])
    twin = copied(model)
    assert not set(twin.parameters()) & set(model.parameters())
    wanted = expected(twin)
    pull(twin)
    check(twin, wanted)
    assert all(parameter.grad is None for parameter in model.parameters())
    twin.zero_grad()
    tenfold.delink(twin.layers)
    wanted = expected(twin)
    pull(twin)
    check(twin, wanted)
    wanted = expected(model)
    pull(model)
    check(model, wanted)


def test_another_dtype_and_frozen_parameters_in_between_change_nothing():
    model = Stack()
    tenfold.share(model.layers)
    model.requires_grad_(False)
    model(X)
    model.float().double().requires_grad_(True)
    wanted = expected(model)
    pull(model)
    check(model, wanted)


def test_a_frozen_model_that_is_shared_averages_once_it_is_trained():
    model = Stack().requires_grad_(False)
    tenfold.share(model.layers)
    model.requires_grad_(True)
    wanted = expected(model)
    pull(model)
    check(model, wanted)


def test_a_compiled_model_averages_and_follows_a_delinking():
    model = Stack()
    tenfold.share(model.layers)
    compiled = torch.compile(model, backend="aot_eager")
    for pattern in ("all", {"groups": 2}, "none"):
        model.zero_grad()
        tenfold.delink(model.layers, pattern=pattern)
        wanted = expected(model)
        pull(compiled)
        check(model, wanted)


def test_a_parameter_outside_the_layers_is_left_alone():
    model = Stack()
    head = nn.Linear(6, 2).double()
    tenfold.share(model.layers)
    free = separate(model)
    for mine in (model, free):
        head.zero_grad()
        head(mine(X)).square().sum().backward()
        mine.head_grad = head.weight.grad.clone()
    assert torch.equal(model.head_grad, free.head_grad)
