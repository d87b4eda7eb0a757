"""What each choice of moments gives a freed layer, on quadratics whose right answer is known in closed form.

Layer l has the loss sum(H (w - w*_l)^2) / 2 and sees its gradient g_l = H (w - w*_l) with noise of variance s^2 a step,
independent of the others'. Weights are held (lr = 0), so that a layer that was always free would have E[m] = g_l and
E[v] = g_l^2 + s^2, and the shared block E[m] = mean of g_l and E[v] = (mean of g_l)^2 + s^2 / layers.
"""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Muon

import tenfold
from tenfold.sharing.delinking import delink
from tenfold.sharing.measuring import Measurement
from tenfold.sharing.patterns import Pattern
from tenfold.sharing.tying import Sharing, tie, uses

LAYERS, ROWS, COLUMNS, NOISE = 4, 60, 50, 2.0
NONE, PAIRS = Sharing(Pattern.parse("none", LAYERS)), Sharing(Pattern.parse({"groups": 2}, LAYERS))
BUILD = {
    "adamw": lambda p: AdamW(p, lr=0.0, betas=(0.9, 0.95), weight_decay=0.1),
    "adafactor": lambda p: Adafactor(p, lr=0.0),
    "muon": lambda p: Muon(p, lr=0.0, momentum=0.9),
    "sgd": lambda p: SGD(p, lr=0.0, momentum=0.9, dampening=0.2, weight_decay=0.3),
}


class Quadratic(nn.Module):
    """Layers whose gradients are known."""

    def __init__(self, noise=NOISE, seed=0):
        super().__init__()
        self.random = torch.Generator().manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(COLUMNS, ROWS, bias=False) for _ in range(LAYERS))
        tie(self.layers, Sharing(Pattern.parse("all", LAYERS)))
        draw = torch.randn(LAYERS + 1, ROWS, COLUMNS, generator=self.random)
        self.curvature, self.optimum, self.noise = 0.5 + draw[0].abs(), draw[1:], noise

    def gradient(self, layer):
        return self.curvature * (self.layers[layer].weight.detach() - self.optimum[layer])

    def backward(self, micro_batches=1):
        """One micro-batch: the step's loss is the sum of `micro_batches`, and its noise has variance `noise`^2."""
        loss = 0.0
        for layer, optimum in zip(self.layers, self.optimum, strict=True):
            noise = torch.randn(ROWS, COLUMNS, generator=self.random) * self.noise / micro_batches**0.5
            square = self.curvature * (layer.weight - optimum) ** 2 / 2
            loss = loss + (square / micro_batches + noise * layer.weight).sum()
        loss.backward()

    def step(self, optimizer):
        self.backward()
        for parameter, count in uses(self.layers).items():
            parameter.grad /= count
        optimizer.step()
        optimizer.zero_grad()


def shared(name, steps=150):
    model = Quadratic()
    optimizer = BUILD[name](list(model.parameters()))
    for _ in range(steps):
        model.step(optimizer)
    return model, optimizer


def measure(model, optimizer, freed, steps, micro_batches=1, clip=0.0):
    with Measurement([optimizer], freed, uses(model.layers), micro_batches) as measured:
        for _ in range(steps * micro_batches):
            model.backward(micro_batches)
    return measured.finish(steps, clip)


def moments(model, optimizer, layer):
    """m and v of a layer, corrected for their start, as AdamW uses them."""
    state, (beta1, beta2) = optimizer.state[model.layers[layer].weight], optimizer.param_groups[0]["betas"]
    step = float(state["step"])
    return state["exp_avg"] / (1 - beta1**step), state["exp_avg_sq"] / (1 - beta2**step)


def near(found, expected, rel=0.1):
    assert found.mean().item() == pytest.approx(expected.mean().item(), rel=rel)


def test_each_choice_gives_adamw_what_its_formula_promises():
    for choice in ("copy", "rescale", "reset", "measure"):
        model, optimizer = shared("adamw")
        freed = delink(model.layers, [optimizer], NONE, choice)
        assert len(freed) == LAYERS
        if choice == "measure":
            norm = measure(model, optimizer, freed, 20)
            true = sum((model.gradient(layer) ** 2 + NOISE**2).sum() for layer in range(LAYERS)).sqrt().item()
            assert norm == pytest.approx(true, rel=0.02)
        mean = sum(model.gradient(layer) for layer in range(LAYERS)) / LAYERS
        for layer in range(LAYERS):
            mine = model.gradient(layer)
            if choice == "reset":
                assert not any(value.any() for value in optimizer.state[model.layers[layer].weight].values())
                continue
            m, v = moments(model, optimizer, layer)
            if choice == "measure":
                near((m - mine).square(), torch.tensor(NOISE**2 / 20))  # the variance of a mean of 20
                assert (m - mine).mean().abs() < 4 * NOISE / (20 * ROWS * COLUMNS) ** 0.5
                near(v, mine**2 + NOISE**2, rel=0.05)
                far = (mine**2).flatten().topk(300).indices  # where the signal is large, and not only in the mean
                near(v.flatten()[far], (mine**2 + NOISE**2).flatten()[far], rel=0.05)
                continue
            # Of independent gradients an average with decay b has (1 - b) / (1 + b) of the variance: 1/19 for 0.9.
            near((m - mean).square(), torch.tensor(NOISE**2 / LAYERS / 19))
            assert (m - mine).square().mean() > 0.5 * (mean - mine).square().mean()  # not its own mean
            near(v, mean**2 + NOISE**2 / (LAYERS if choice == "copy" else 1))


@pytest.mark.parametrize("micro_batches", [1, 3, 8])
def test_measured_squares_are_those_of_whole_steps_however_many_micro_batches_a_step_has(micro_batches):
    model, optimizer = shared("adamw", 1)
    freed = delink(model.layers, [optimizer], NONE, "measure")
    measure(model, optimizer, freed, 12, micro_batches)
    for layer in range(LAYERS):
        m, v = moments(model, optimizer, layer)
        near((m - model.gradient(layer)).square(), torch.tensor(NOISE**2 / 12))
        near(v, model.gradient(layer) ** 2 + NOISE**2, rel=0.05)
        assert (v >= m**2 * 0.999).all()


def test_more_micro_batches_tell_the_noise_better():
    spread = []
    for micro_batches in (1, 8):
        model, optimizer = shared("adamw", 1)
        measure(model, optimizer, delink(model.layers, [optimizer], NONE, "measure"), 4, micro_batches)
        _, v = moments(model, optimizer, 0)
        spread.append((v - model.gradient(0) ** 2 - NOISE**2).square().mean().item())
    assert spread[1] < spread[0]


def test_layers_that_go_on_sharing_are_measured_by_their_mean():
    model, optimizer = shared("adamw", 1)
    freed = delink(model.layers, [optimizer], PAIRS, "measure")
    assert len(freed) == 2
    measure(model, optimizer, freed, 20, 2)
    for first in (0, 2):
        mean = (model.gradient(first) + model.gradient(first + 1)) / 2
        m, v = moments(model, optimizer, first)
        near((m - mean).square(), torch.tensor(NOISE**2 / 2 / 20))
        near(v, mean**2 + NOISE**2 / 2, rel=0.05)


def test_each_choice_gives_adafactor_what_its_formula_promises():
    for choice in ("copy", "rescale", "measure"):
        model, optimizer = shared("adafactor")
        freed = delink(model.layers, [optimizer], NONE, choice)
        if choice == "measure":
            measure(model, optimizer, freed, 20, 2)
        mean = sum(model.gradient(layer) for layer in range(LAYERS)) / LAYERS
        for layer in range(LAYERS):
            expected = {
                "copy": mean**2 + NOISE**2 / LAYERS,
                "rescale": LAYERS * mean**2 + NOISE**2,  # too large by what is signal
                "measure": model.gradient(layer) ** 2 + NOISE**2,
            }[choice]
            state = optimizer.state[model.layers[layer].weight]
            for key, dim in (("row_var", 1), ("col_var", 0)):
                found, right = state[key].flatten(), expected.mean(dim)
                near(found, right, rel=0.05)
                assert torch.corrcoef(torch.stack([found, right]))[0, 1] > 0.9  # row by row, not only in the mean
            assert state["step"] == (20 if choice == "measure" else 150)


@pytest.mark.parametrize("name", ["muon", "sgd"])
def test_each_choice_gives_momentum_what_its_formula_promises(name):
    for choice in ("copy", "rescale", "reset", "measure"):
        model, optimizer = shared(name)
        freed = delink(model.layers, [optimizer], NONE, choice)
        if choice == "measure":
            measure(model, optimizer, freed, 20, 2)
        mean = sum(model.gradient(layer) for layer in range(LAYERS)) / LAYERS
        for layer in range(LAYERS):
            weight = model.layers[layer].weight
            buffer, scale = optimizer.state[weight]["momentum_buffer"], 0.8 / 0.1 if name == "sgd" else 1.0
            decay = 0.3 * weight.detach() if name == "sgd" else 0.0
            if choice == "reset":
                assert not buffer.any()
            elif choice == "measure":
                error = buffer / scale - model.gradient(layer) - decay
                near(error.square(), torch.tensor(NOISE**2 / 20))
            else:
                error = buffer / scale - mean - decay
                near(error.square(), torch.tensor(NOISE**2 / LAYERS / 19))


def test_a_decay_that_adam_adds_to_the_gradient_is_in_its_measured_moments():
    model = Quadratic(noise=0.0)
    optimizer = Adam(model.parameters(), lr=0.0, weight_decay=0.5)
    model.step(optimizer)
    measure(model, optimizer, delink(model.layers, [optimizer], NONE, "measure"), 3)
    for layer in range(LAYERS):
        m, _ = moments(model, optimizer, layer)
        right = model.gradient(layer) + 0.5 * model.layers[layer].weight.detach()
        torch.testing.assert_close(m, right)
        state = optimizer.state[model.layers[layer].weight]
        torch.testing.assert_close(state["exp_avg_sq"] / (1 - 0.999**3), right**2)


@pytest.mark.parametrize("clip", [1.0, 1e9])
def test_the_measured_moments_are_those_of_clipped_gradients(clip):
    model, optimizer = shared("adamw", 1)
    measure(model, optimizer, delink(model.layers, [optimizer], NONE, "measure"), 30, 2, clip)
    found = torch.stack([torch.stack(moments(model, optimizer, layer)) for layer in range(LAYERS)])
    again = Quadratic(seed=1)  # other noise, the same optimum; each step clipped as training does it
    again.curvature, again.optimum = model.curvature, model.optimum
    tie(again.layers, NONE)
    for layer, theirs in zip(again.layers, model.layers, strict=True):
        layer.weight = nn.Parameter(theirs.weight.detach().clone())
    sums = torch.zeros(LAYERS, 2, ROWS, COLUMNS)
    for _ in range(30):
        again.backward()
        nn.utils.clip_grad_norm_(again.parameters(), clip)
        for layer, parameter in enumerate(again.parameters()):
            sums[layer] += torch.stack([parameter.grad, parameter.grad**2]) / 30
            parameter.grad = None
    for layer in range(LAYERS):
        assert found[layer, 0].norm() == pytest.approx(sums[layer, 0].norm().item(), rel=0.05)
        near(found[layer, 1], sums[layer, 1], rel=0.05)


def test_the_step_after_measuring_is_corrected_as_if_these_steps_had_been_taken():
    """Without noise m is g and v is g^2 at any step, so AdamW moves every weight by its rate."""
    model = Quadratic(noise=0.0)
    optimizer = AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(50):
        model.step(optimizer)
    measure(model, optimizer, delink(model.layers, [optimizer], NONE, "measure"), 4, 2)
    before = [layer.weight.detach().clone() for layer in model.layers]
    gradients = [model.gradient(layer) for layer in range(LAYERS)]
    optimizer.param_groups[0]["lr"] = 1e-3
    model.step(optimizer)
    for layer, old, gradient in zip(model.layers, before, gradients, strict=True):
        big = gradient.abs() > 1e-2
        moved = (layer.weight.detach() - old)[big]
        torch.testing.assert_close(moved, -1e-3 * gradient[big].sign(), rtol=1e-2, atol=1e-6)


def test_only_freed_parameters_are_measured_and_nobodys_weights_move():
    model = Quadratic()
    tie(model.layers, Sharing(Pattern([0, 1, 1, 1])))
    model.layers[0].weight = nn.Parameter(model.layers[0].weight.detach().clone())
    optimizer = BUILD["adamw"](list(model.parameters()))
    for _ in range(5):
        model.step(optimizer)
    alone = {key: value.clone() for key, value in optimizer.state[model.layers[0].weight].items()}
    weight = model.layers[1].weight.detach().clone()
    freed = delink(model.layers, [optimizer], NONE, "measure")
    assert len(freed) == 3
    measure(model, optimizer, freed, 2, 2)
    for key, value in optimizer.state[model.layers[0].weight].items():
        assert torch.equal(value, alone[key])
    assert all(torch.equal(layer.weight, weight) for layer in model.layers[1:])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_measuring_holds_one_gradient_of_each_parameter_beside_the_moments():
    model, optimizer = shared("adamw", 1)
    freed = delink(model.layers, [optimizer], NONE, "measure")

    def held():
        gc.collect()
        _ = [parameter.grad for parameter in model.parameters()]  # gradients are Python's from when they are looked at
        found = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, nn.Parameter)]
        return sum(1 for tensor in found if tensor.shape == (ROWS, COLUMNS))

    before = held()
    with Measurement([optimizer], freed, uses(model.layers), 2) as measured:
        for _ in range(4):
            model.backward(2)
            assert held() == before + LAYERS
    measured.finish(2)
    assert held() == before


@pytest.mark.parametrize("build", [lambda p: AdamW(p, lr=0.0, amsgrad=True), lambda p: SGD(p, lr=0.0, momentum=0.5)])
def test_a_program_of_ones_own_measures_what_share_averages(build):
    """`tenfold.share` divides gradients in the backward pass; layers 0 and 1 go on sharing."""
    model = Quadratic(noise=0.0)
    tenfold.share(model.layers)
    optimizer = build(list(model.parameters()))
    model.backward()
    optimizer.step()
    optimizer.zero_grad()
    freed = tenfold.delink(model.layers, optimizer, [0, 0, 1, 2], moments="measure")
    with tenfold.Measurement([optimizer], freed) as measured:
        for _ in range(2):
            model.backward()
    measured.finish(2)
    for layer, right in ((0, (model.gradient(0) + model.gradient(1)) / 2), (3, model.gradient(3))):
        state = optimizer.state[model.layers[layer].weight]
        if "momentum_buffer" in state:
            torch.testing.assert_close(state["momentum_buffer"], right / 0.5)
        else:
            torch.testing.assert_close(state["exp_avg"] / (1 - 0.9**2), right)
            torch.testing.assert_close(state["max_exp_avg_sq"] / (1 - 0.999**2), right**2, rtol=1e-4, atol=1e-6)
