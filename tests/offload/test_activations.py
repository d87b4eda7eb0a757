"""Activations kept in a tier: nothing changes in what is computed, and nothing is left behind."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from nn.test_recompute import SHAPES, TOKENS
from offload.stores import all_given_back, same, store_of
from tenfold.errors import TenfoldError
from tenfold.nn.recompute import Recompute


def attach(model, store, layers=None):
    return [store.attach(layer) for index, layer in enumerate(model.layers) if layers is None or index in layers]


def gradients_of(model, tokens=TOKENS):
    model.zero_grad()
    hidden, statistics = model(tokens)
    loss = hidden.square().sum() + statistics.sum()
    loss.backward()
    return {"loss": loss.detach()} | {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


# (pages of the slab, delay of the tier): from no slab at all to one that everything fits in.
ROOM = [(0, None), (3, None), (13, 0), (13, 5), (24, None), (1 << 10, None)]


@pytest.mark.parametrize(
    ("shape", "room"), [("mixture", room) for room in ROOM] + [(shape, (13, None)) for shape in SHAPES], ids=str
)
def test_gradients_are_the_same_to_the_last_bit(tiny_decoder, shape, room):
    expected = gradients_of(tiny_decoder("sandwich", dtype=torch.float32, **SHAPES[shape]))
    model, (pages, delay) = tiny_decoder("sandwich", dtype=torch.float32, **SHAPES[shape]), room
    store = store_of(pages << 12, delay)
    attach(model, store)
    for _ in range(2):
        assert same(gradients_of(model), expected)
        assert all_given_back(store)
    assert (store.tier.bytes_read > 0) == (pages < 1 << 10)
    assert (store.outside > 0) == (pages < 13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layers", [(1, 2), (0, 3)], ids=str)
def test_some_layers_of_any_precision(tiny_decoder, layers, dtype):
    expected = gradients_of(tiny_decoder(dtype=dtype, **SHAPES["mixture"]))
    model, store = tiny_decoder(dtype=dtype, **SHAPES["mixture"]), store_of(0)
    attach(model, store, layers)
    assert same(gradients_of(model), expected)
    assert store.tier.bytes_read > 0


def test_layers_that_recompute_and_layers_that_offload_stand_side_by_side(tiny_decoder):
    expected = gradients_of(tiny_decoder(**SHAPES["mixture"]))
    model = tiny_decoder(recompute=Recompute("full", 2), **SHAPES["mixture"])  # layers 1 and 3
    store = store_of(0)
    attach(model, store, (0, 2))
    assert same(gradients_of(model), expected)
    with pytest.raises(TenfoldError, match=r'layer 1 has training.recompute = "full", and its activations .* to disk'):
        store.attach(model.layers[1], "layer 1")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first in, first out", "last in, first out"])
@pytest.mark.parametrize("pages", [0, 13, 40])
def test_graphs_of_two_micro_batches_at_once(tiny_decoder, pages, order):
    def gradients(model):
        losses = [model(tokens)[0].square().sum() for tokens in (TOKENS, TOKENS + 5)]
        for index in order:
            losses[index].backward()
        return {name: p.grad for name, p in model.named_parameters()}

    expected = gradients(tiny_decoder("all"))
    model, store = tiny_decoder("all"), store_of(pages << 12)
    attach(model, store)
    assert same(gradients(model), expected)
    assert all_given_back(store)


@pytest.mark.parametrize("pages", [0, 13, 1 << 10])
def test_a_graph_that_is_retained_goes_back_twice(tiny_decoder, pages):
    model, store = tiny_decoder(**SHAPES["llama"]), store_of(pages << 12)
    attach(model, store)
    loss = model(TOKENS)[0].square().sum()
    weight = model.layers[0].attention.wq.weight
    first, second = (torch.autograd.grad(loss, weight, retain_graph=True) for _ in "12")
    assert torch.equal(*first, *second)
    del loss
    assert all_given_back(store)


def test_gradients_of_gradients():
    """Tensors made of the slab live on in the graph of the backward pass, and keep their blocks."""

    def twice(store):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 9), nn.Sigmoid()) for _ in range(3)]
        if store is not None:
            for layer in layers:
                store.attach(layer)
        model = nn.Sequential(*layers)
        x = torch.randn(5, 9, requires_grad=True)
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return {"x": x.grad} | {name: p.grad for name, p in model.named_parameters()}

    for pages in (0, 3, 100):
        store = store_of(pages << 12)
        assert same(twice(store), twice(None))
        assert all_given_back(store)


def test_without_gradients_nothing_happens(tiny_decoder):
    model, store = tiny_decoder(), store_of()
    attach(model, store)
    with torch.no_grad():
        model(TOKENS)
    assert store.slab.taken == 0
    assert store.tier.calls == []


def test_what_a_removed_hook_saved_comes_back_and_nothing_is_saved_after(tiny_decoder):
    expected = gradients_of(tiny_decoder())
    model, store = tiny_decoder(), store_of(0)
    attached = attach(model, store)
    loss = model(TOKENS)[0]
    for each in attached:
        each.remove()
    writes = store.tier.count("write")
    assert same(gradients_of(model), expected)
    assert store.tier.count("write") == writes > 0
    loss.sum().backward()
    assert store.tier.count("read") > 0


@pytest.mark.parametrize("pages", [0, 13])
def test_a_backward_pass_that_never_comes_leaves_nothing(tiny_decoder, pages):
    model, store = tiny_decoder(), store_of(pages << 12, delay=7)
    attach(model, store)
    for _ in range(3):
        loss = model(TOKENS)[0].sum()
        assert store.tier.held > 0
        del loss
        assert all_given_back(store)


class Failing(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.inner, self.fails_forward, self.on = nn.Linear(8, 8), forward, True

    def forward(self, x):
        x = self.inner(x).tanh()
        if self.on and self.fails_forward:
            raise ArithmeticError("in forward")
        if self.on:
            x.register_hook(self.fail)
        return x.exp()

    def fail(self, gradient):
        raise ArithmeticError("in backward")


@pytest.mark.parametrize("forward", [True, False])
def test_an_error_in_a_layer_leaves_nothing(forward):
    bad = Failing(forward)
    model, store = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), bad), store_of(2 << 12)
    for layer in model:
        store.attach(layer)
    x = torch.randn(3, 8)
    with pytest.raises(ArithmeticError):
        model(x).sum().backward()
    assert all_given_back(store)
    (x.requires_grad_() * 2).square().sum().backward()  # nobody's hooks are on
    assert store.slab.taken == 0
    bad.on = False
    model.zero_grad()
    model(x).sum().backward()
    assert all_given_back(store)


def test_a_layer_in_a_layer_and_a_layer_that_calls_itself():
    class Outer(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.deeper = inner, True

        def forward(self, x):
            x = self.inner(x.exp()).sigmoid()
            if self.deeper:
                self.deeper = False
                x = self(x)
                self.deeper = True
            return self.inner(x).tanh()

    def gradients(store):
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        outer = Outer(inner)
        for each in [] if store is None else [outer, inner]:
            store.attach(each)
        x = torch.linspace(-1, 1, 24).view(3, 8).requires_grad_()
        outer(x).sum().backward()
        return {"x": x.grad} | {name: p.grad for name, p in outer.named_parameters()}

    for pages in (0, 4):
        store = store_of(pages << 12)
        assert same(gradients(store), gradients(None))
        assert all_given_back(store)


@pytest.mark.parametrize("transfer", [1, 5, 20, 30, 40])
def test_a_transfer_that_fails_is_one_clear_error_and_leaves_nothing(tiny_decoder, transfer):
    expected = gradients_of(tiny_decoder())
    model, store = tiny_decoder(), store_of(13 << 12, delay=4)
    attach(model, store)
    store.tier.fail_next(transfer)
    with pytest.raises(TenfoldError, match=f"failed, transfer {transfer}"):
        gradients_of(model)
    assert all_given_back(store)
    assert same(gradients_of(model), expected)
    assert all_given_back(store)


def test_a_tier_that_is_full_says_so(tiny_decoder):
    model, store = tiny_decoder(), store_of(13 << 12, room=20 << 12)
    attach(model, store)
    with pytest.raises(TenfoldError, match=r"activations: 4,096 bytes to offload to disk: .* asked for, 0 free"):
        gradients_of(model)
    assert all_given_back(store)


def test_nothing_grows_from_step_to_step(tiny_decoder):
    model, store = tiny_decoder(**SHAPES["mixture"]), store_of(24 << 12, delay=5)
    attach(model, store)
    counts = []
    for _ in range(6):
        gradients_of(model)
        store.settle()
        gc.collect()
        counts.append((len(gc.get_objects()), store.slab.taken, store.tier.held, len(store._known)))
    assert len({count[1:] for count in counts}) == 1
    assert counts[-1][0] - counts[1][0] < 50
