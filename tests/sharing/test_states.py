"""Optimizer state of other kinds than our own training has: what each choice of moments makes of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adadelta, AdamW, NAdam

import tenfold
from tenfold.errors import TenfoldError

LAYERS, WIDTH = 4, 64  # 64 x 64: large enough for torchao to quantize


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def train(model, optimizer, steps=3):
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, WIDTH, generator=generator)
        (model(x) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def shared(make, steps=3):
    model = Model()
    tenfold.share(model.layers)
    optimizer = make(model.parameters())
    train(model, optimizer, steps)
    return model, optimizer


def snapshot(optimizer, parameter):
    return {
        key: value.clone() if torch.is_tensor(value) else value for key, value in optimizer.state[parameter].items()
    }


def freed(model, optimizer, moments, pattern="none"):
    """The state before, and after that of every layer, of the weight and of the bias."""
    before = [snapshot(optimizer, parameter) for parameter in model.layers[0].parameters()]
    tenfold.delink(model.layers, optimizer, pattern, moments=moments)
    after = [[optimizer.state[parameter] for parameter in layer.parameters()] for layer in model.layers]
    return [(old, [layer[which] for layer in after]) for which, old in enumerate(before)]


def test_the_largest_second_moment_of_amsgrad_grows_by_as_much_as_the_second_moment():
    model, optimizer = shared(lambda p: AdamW(p, amsgrad=True, betas=(0.9, 0.99)))
    for old, layers in freed(model, optimizer, "rescale", {"groups": 2}):
        for new in layers:
            v, m = old["exp_avg_sq"] / (1 - 0.99**3), old["exp_avg"] / (1 - 0.9**3)
            growth = (2 - 1) * (v - m**2).clamp(min=0) * (1 - 0.99**3)
            torch.testing.assert_close(new["exp_avg_sq"], old["exp_avg_sq"] + growth)
            torch.testing.assert_close(new["max_exp_avg_sq"], old["max_exp_avg_sq"] + growth)
            assert (new["max_exp_avg_sq"] >= new["exp_avg_sq"] * 0.9999).all()
            assert torch.equal(new["exp_avg"], old["exp_avg"])


@pytest.mark.parametrize("moments", ["copy", "rescale", "reset"])
def test_momentum_that_is_not_there_yet_stays_so(moments):
    model, optimizer = shared(lambda p: SGD(p, 0.1, momentum=0.9), steps=0)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = None  # as SGD has it after a step without momentum
    for old, layers in freed(model, optimizer, moments):
        assert old["momentum_buffer"] is None
        assert all(new == {"momentum_buffer": None} for new in layers)
    train(model, optimizer)


@pytest.mark.parametrize("moments", ["copy", "rescale", "reset"])
def test_momentum_of_sgd_stays_or_is_reset(moments):
    model, optimizer = shared(lambda p: SGD(p, 0.1, momentum=0.9, nesterov=True))
    for old, layers in freed(model, optimizer, moments):
        wanted = torch.zeros_like(old["momentum_buffer"]) if moments == "reset" else old["momentum_buffer"]
        assert all(torch.equal(new["momentum_buffer"], wanted) for new in layers)
    train(model, optimizer)


def test_no_state_yet_is_no_state_afterwards():
    model, optimizer = shared(AdamW, steps=0)
    tenfold.delink(model.layers, optimizer)
    assert not optimizer.state
    train(model, optimizer)


@pytest.mark.parametrize("first_moment", [None, 0.9])
def test_adafactor_of_transformers(first_moment):
    optimization = pytest.importorskip("transformers.optimization")
    model, optimizer = shared(
        lambda p: optimization.Adafactor(p, lr=0.01, relative_step=False, scale_parameter=False, beta1=first_moment)
    )
    seen = set()
    for old, layers in freed(model, optimizer, "rescale"):
        for new in layers:
            assert new.keys() == old.keys()
            assert new["step"] == old["step"] == 3
            for key in old.keys() & {"exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq"}:
                torch.testing.assert_close(new[key], LAYERS * old[key])
                seen.add(key)
            for key in old.keys() & {"exp_avg", "RMS"}:
                assert torch.equal(torch.as_tensor(new[key]), torch.as_tensor(old[key]))
                seen.add(key)
    assert seen >= {"exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq", "RMS"}
    assert ("exp_avg" in seen) == (first_moment is not None)
    train(model, optimizer)


@pytest.mark.parametrize("make", [Adadelta, NAdam])
def test_state_of_an_unknown_kind_is_copied_or_begun_anew_and_not_rescaled(make):
    model, optimizer = shared(make)
    with pytest.raises(TenfoldError, match=r"cannot rescale the optimizer state .*; use moments = copy or reset"):
        tenfold.delink(model.layers, optimizer)
    for old, layers in freed(model, optimizer, "copy", {"groups": 2}):
        for new in layers:
            assert all(torch.equal(new[key], old[key]) for key in old)
    tenfold.delink(model.layers, optimizer, moments="reset")
    twin = Model()
    twin.load_state_dict(model.state_dict())
    theirs = make(twin.parameters())
    train(model, optimizer)
    train(twin, theirs)
    assert all(torch.equal(mine, other) for mine, other in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.fixture
def eight_bit():
    """AdamW of torchao, its step not compiled."""
    optim = pytest.importorskip("torchao.optim")
    torch.compiler.set_stance("force_eager")
    yield lambda p: optim.AdamW8bit(p, lr=0.01, betas=(0.9, 0.99))
    torch.compiler.set_stance("default")


def numbers(value):
    return value.dequantize() if hasattr(value, "codes") else value


@pytest.mark.parametrize("moments", ["copy", "rescale", "reset"])
def test_moments_in_eight_bits(eight_bit, moments):
    model, optimizer = shared(eight_bit)
    weight = model.layers[0].weight
    old = {key: numbers(value).clone() for key, value in optimizer.state[weight].items()}
    tenfold.delink(model.layers, optimizer, moments=moments)
    v, m = old["exp_avg_sq"] / (1 - 0.99**3), old["exp_avg"] / (1 - 0.9**3)
    wanted = {
        "copy": old,
        "rescale": {**old, "exp_avg_sq": old["exp_avg_sq"] + 3 * (v - m**2).clamp(min=0) * (1 - 0.99**3)},
        "reset": {key: torch.zeros_like(value) for key, value in old.items()},
    }[moments]
    places = set()
    for layer in model.layers:
        state = optimizer.state[layer.weight]
        assert hasattr(state["exp_avg_sq"], "codes")  # quantized still
        places |= {state[key].codes.data_ptr() for key in ("exp_avg", "exp_avg_sq")}
        for key in ("exp_avg", "exp_avg_sq", "step"):
            found = numbers(state[key])
            if key == "exp_avg_sq" and moments == "rescale":  # rounded once more: within a few percent, by blocks
                largest = wanted[key].view(-1, 256).amax(1, keepdim=True)
                assert ((found - wanted[key]).view(-1, 256).abs() <= 0.02 * largest).all()
                assert found.mean().item() == pytest.approx(wanted[key].mean().item(), rel=0.02)
            else:
                assert torch.equal(found, wanted[key]), key
    assert len(places) == 2 * LAYERS
    train(model, optimizer)
    assert len({layer.weight.sum().item() for layer in model.layers}) == LAYERS
