"""Which tensors of a layer are sent to a tier, when, and when their memory is free."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from offload.stores import all_given_back, store_of
from tenfold.offload.activations import working_bytes


class Saves(torch.autograd.Function):
    """The sum of its tensors; saves them, and gives `give` the tensors that it gets back."""

    @staticmethod
    def forward(ctx, give, x, *tensors):
        ctx.save_for_backward(*tensors)
        ctx.give = give
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        saved = ctx.saved_tensors
        ctx.give(saved)
        return None, gradient, *[None for _ in saved]


class Layer(nn.Module):
    """Saves what `make` makes."""

    def __init__(self, make):
        super().__init__()
        self.make, self.got = make, []
        self.weight = nn.Parameter(torch.arange(4096.0).view(64, 64))
        self.register_buffer("table", torch.arange(4096.0))

    def forward(self, x):
        return Saves.apply(self.got.extend, x, *self.make(self))


LARGE = torch.arange(6 * 4096, dtype=torch.float32)  # six times four pages


def written(make, **options):
    """The pages written for a layer that saves what `make` makes, checked when it comes back."""
    layer, store = Layer(make), store_of(0, **options)
    store.attach(layer)
    out = layer(torch.ones(3, requires_grad=True))
    out.sum().backward()
    for got, saved in zip(layer.got, make(layer), strict=True):
        assert torch.equal(got, saved)
        assert got.stride() == saved.stride()
        if got.numel():
            assert got.data_ptr() % 64 == saved.data_ptr() % 64
    del out, got
    layer.got.clear()
    assert all_given_back(store)
    return store.tier.bytes_written >> 12


def chunks(_):
    x = LARGE.clone().view(4096, 6)
    return x.chunk(3, dim=1)


def rows(_):
    x = LARGE.clone().view(6, 4096)
    return x[1], x[2].view(64, 64).t(), x[1], x[5]


def test_one_storage_is_sent_once():
    def twice(_):
        x = LARGE.clone()
        return x, x.view(6, 4096), x.view(2, -1).t(), x[:20480]

    assert written(twice) == 24
    assert written(chunks) == 24


def test_of_a_large_storage_only_what_is_needed_is_sent():
    assert written(lambda _: [LARGE.clone().view(6, 4096)[4]]) == 4
    assert written(lambda _: [LARGE.clone()[70:81]]) == 1
    assert written(rows) == 24  # half of it is as good as all
    assert written(lambda _: rows(_)[:3]) == 8
    assert written(lambda _: [LARGE.clone()[:0], LARGE.clone()[5]]) == 1  # nothing, and a number


def test_a_small_view_does_not_hold_a_large_storage():
    made = []
    layer, store = Layer(lambda _: [made.append(weak(x := LARGE.clone())) or x[70:81]]), store_of(smallest=128)
    store.attach(layer)
    out = layer(torch.ones(3, requires_grad=True))
    assert made[0].expired()
    out.sum().backward()
    assert torch.equal(layer.got[0], LARGE[70:81])
    assert store.slab.taken == 0


def weak(tensor):
    return StorageWeakRef(tensor.untyped_storage())


def test_a_version_of_its_own_is_sent_for_each_version():
    def two_versions(_):
        x = LARGE.clone()
        before = x * 1
        return before, x.add_(1)

    def in_between(layer):
        x = LARGE.clone()
        out = Saves.apply(layer.got.extend, torch.ones(2, requires_grad=True), x)
        x.add_(1)
        return Saves.apply(layer.got.extend, out, x)

    assert written(two_versions) == 48
    layer, store = Layer(None), store_of(0)
    layer.forward = lambda: in_between(layer)
    store.attach(layer)
    layer().sum().backward()
    assert torch.equal(layer.got[0], LARGE + 1)  # the last is the first to come back
    assert torch.equal(layer.got[1], LARGE)


def test_what_others_hold_stays():
    def of_the_layer(layer):
        return layer.weight, layer.weight.t(), layer.weight[3:40], layer.table, layer.table.view(64, 64)[:9]

    assert written(of_the_layer) == 0
    assert written(lambda _: [LARGE]) == 24
    mine = LARGE.data_ptr()
    assert written(lambda _: [LARGE, LARGE[4096:]], stays=lambda x: x.untyped_storage().data_ptr() == mine) == 0
    leaf = LARGE.clone().requires_grad_()
    assert written(lambda _: [leaf]) == 0


def test_small_tensors_stay():
    assert written(lambda _: [LARGE.clone()], smallest=6 << 14) == 24
    assert written(lambda _: [LARGE.clone()], smallest=(6 << 14) + 1) == 0


def test_a_tensor_that_stays_and_is_changed_is_refused_as_without_hooks():
    layer, store = Layer(lambda layer: [layer.table]), store_of()
    store.attach(layer)
    out = layer(torch.ones(3, requires_grad=True))
    layer.table.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.* at version 1; expected version 0"):
        out.sum().backward()


def test_what_two_layers_save_is_sent_once_and_read_once():
    class Next(nn.Module):
        def forward(self, x):
            return x.sigmoid()  # saves its result, as the next does

    class Square(nn.Module):
        def forward(self, x):
            return x.square()

    store, model = store_of(0), nn.Sequential(Next(), Square(), Next())
    for layer in model:
        store.attach(layer)
    x = LARGE[:4096].div(1000).requires_grad_()
    model(x).sum().backward()
    assert store.tier.bytes_written >> 12 == 2 * 4
    assert store.tier.bytes_read >> 12 == 2 * 4
    found, x.grad = x.grad, None
    x.sigmoid().square().sigmoid().sum().backward()
    assert torch.equal(found, x.grad)
    assert all_given_back(store)


def deep(layers=6, width=1024):
    """Layers that save 17 pages each, their input, three results and a small one, and an input for them that stays."""
    torch.manual_seed(0)

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.rand(4, width))

        def forward(self, x):
            return (x * self.scale).tanh().exp().sigmoid() + x.narrow(0, 0, 1).narrow(1, 0, 8).sum().tanh()

    return nn.Sequential(*(Deep() for _ in range(layers))), torch.randn(4, width, requires_grad=True)


def test_memory_of_a_layer_is_free_when_it_is_through():
    made = []

    def make(_):
        x = LARGE.clone()
        made.append(weak(x))
        return [x]

    store, model = store_of(100 << 12), nn.Sequential(*(Layer(make) for _ in range(4)))
    for layer in model:
        store.attach(layer)
    out = model(torch.ones(3, requires_grad=True))
    assert len(made) == 4
    assert all(each.expired() for each in made)
    out.sum().backward()


@pytest.mark.parametrize("delay", [0, 9, None])
def test_the_layer_before_is_asked_for_when_a_backward_pass_begins(delay):
    model, x = deep()
    store = store_of(working_bytes([17 << 12] * 6), delay)
    asked = []  # for each layer whose backward pass is through how much has been asked for
    for layer in model:
        layer.register_full_backward_hook(lambda *_: asked.append(store.tier.count("read")))
        store.attach(layer)
    out = model(x)
    written = store.tier.count("write")
    assert written >= 4 * 4 - 2
    out.sum().backward()
    assert store.late == store.outside == 0
    assert asked == sorted(asked)
    assert asked[-2] == store.tier.count("read")  # the first layer's, before its backward pass began
    assert all_given_back(store)


def test_what_is_in_the_slab_still_is_not_read_and_the_newest_is_not_sent():
    model, x = deep()
    store = store_of(52 << 12, delay=0)
    for layer in model:
        store.attach(layer)
    model(x).sum().backward()
    assert store.tier.bytes_written >> 12 == 6 * 17 - 4 - 26
    assert store.tier.bytes_read >> 12 <= 6 * 17 - 4 - 52 + 4
    assert store.late == 0


def test_the_handler_that_is_first_decides():
    packed, unpacked = [], []

    def pack(tensor):
        if tensor.shape != (4096,):
            return None
        packed.append(tensor.data_ptr())
        return ["mine", tensor.detach()]

    def unpack(made):
        unpacked.append(made[0])
        return made[1]

    layer, store = Layer(lambda _: [LARGE.clone(), LARGE[:4096].clone()]), store_of(0, first=(pack, unpack))
    store.attach(layer)
    layer(torch.ones(3, requires_grad=True)).sum().backward()
    assert torch.equal(layer.got[0], LARGE)
    assert torch.equal(layer.got[1], LARGE[:4096])
    assert (len(packed), unpacked) == (1, ["mine"])
    assert store.tier.bytes_written >> 12 == 24


def test_a_gradient_that_is_a_saved_tensor_keeps_its_memory():
    class Precomputed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x * 2)
            return x.square().sum()

        @staticmethod
        def backward(ctx, gradient):
            return ctx.saved_tensors[0]

    class Squares(nn.Module):
        def forward(self, x):
            return Precomputed.apply(x)

    store, layer = store_of(8 << 12), Squares()
    store.attach(layer)
    inputs = [torch.randn(4096, requires_grad=True) for _ in range(4)]
    for x in inputs:
        layer(x).backward()
    assert all(torch.equal(x.grad, 2 * x) for x in inputs)
    assert store.outside > 0
    del x
    inputs.clear()
    assert all_given_back(store)


def test_room_that_a_slab_needs():
    assert working_bytes([]) == 0
    assert working_bytes([1 << 20]) >= 1 << 20
    assert 5 << 20 <= working_bytes([1 << 20, 2 << 20, 3 << 20, 1 << 20]) < 6 << 20
