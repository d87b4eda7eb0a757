"""The update of a parameter that q layers use is divided by q, in anyone's loop and in ours."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tenfold
from tenfold.config.run import OptimConfig
from tenfold.nn.decoder import Decoder
from tenfold.training.optimizers import build_optimizers

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter], float], torch.optim.Optimizer]] = {
    "adamw": lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, weight_decay=0.1),
    "fused": lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, weight_decay=0.1, fused=True),
    "muon": lambda parameters, lr: torch.optim.Muon(parameters, lr=lr, weight_decay=0.1),
}


def layers_of(count: int = 6) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(5, 5, bias=False) for _ in range(count))


def backward(layers: nn.ModuleList, seed: int) -> None:
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(seed))
    for layer in layers:
        x = x + layer(x).tanh()
    x.square().mean().backward()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_is_the_learning_rate_divided_by_the_layers_that_share(name: str) -> None:
    """Against the same optimizer at rate lr / q, set by hand: two blocks of three layers, then six free layers."""
    mine = layers_of()
    tenfold.share(mine, {"groups": 2})
    theirs = copy.deepcopy(mine)
    optimizer, by_hand = (OPTIMIZERS[name](list(layers.parameters()), 0.1) for layers in (mine, theirs))
    tenfold.divide_updates(mine, optimizer)
    for q in (3, 1):
        for group in by_hand.param_groups:
            group["lr"] = 0.1 / q
        for step in range(3):
            for layers, each in ((mine, optimizer), (theirs, by_hand)):
                backward(layers, step)
                each.step()
                each.zero_grad()
            for left, right in zip(mine.parameters(), theirs.parameters(), strict=True):
                torch.testing.assert_close(left, right, rtol=0, atol=1e-6)
        assert len(list(mine.parameters())) == 6 // q
        if q == 3:
            tenfold.delink(mine, optimizer)
            tenfold.delink(theirs, by_hand)


def test_what_is_not_shared_or_has_no_gradient_keeps_every_bit() -> None:
    mine = layers_of()
    tenfold.share(mine, [0, 0, 1, 2, 3, 3])
    plain, start = copy.deepcopy(mine), copy.deepcopy(mine)
    for layers in (mine, plain):
        optimizer = torch.optim.AdamW(layers.parameters(), lr=0.1)
        if layers is mine:
            tenfold.divide_updates(layers, optimizer)
        backward(layers, 0)
        layers[4].weight.grad = None
        optimizer.step()
    as_plain = [torch.equal(left.weight, right.weight) for left, right in zip(mine, plain, strict=True)]
    assert as_plain == [False, False, True, True, True, True]
    assert torch.equal(mine[4].weight, start[4].weight)


def test_several_optimizers_and_an_end() -> None:
    layers = layers_of(4)
    tenfold.share(layers, {"groups": 2})
    first, second = layers.parameters()
    optimizers = [torch.optim.SGD([first], lr=1.0), torch.optim.SGD([second], lr=1.0)]
    handles = tenfold.divide_updates(layers, optimizers)

    def moved() -> list[Tensor]:
        before = [parameter.detach().clone() for parameter in (first, second)]
        for parameter in (first, second):
            parameter.grad = torch.full_like(parameter, 0.5)
        for optimizer in optimizers:
            optimizer.step()
        return [old - parameter.detach() for old, parameter in zip(before, (first, second), strict=True)]

    for change in moved():
        torch.testing.assert_close(change, torch.full((5, 5), 0.25))
    for handle in handles:
        handle.remove()
    for change in moved():
        torch.testing.assert_close(change, torch.full((5, 5), 0.5))


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon"])
@pytest.mark.parametrize("divide", [True, False])
def test_our_optimizers_divide_unless_told_otherwise(
    tiny_decoder: Callable[..., Decoder], name: Any, divide: bool
) -> None:
    """One step from the same gradients: a half of the way for two layers that share, the same for all else."""

    def after(divide_shared: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model = tiny_decoder({"groups": 2}, dtype=torch.float64)
        optimizers = build_optimizers(model, OptimConfig(name=name, lr=0.01, divide_shared=divide_shared))
        before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
        for number, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(number)
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        for optimizer in optimizers:
            optimizer.step()
        return before, {key: parameter.detach() for key, parameter in model.named_parameters()}

    before, whole = after(False)
    _, found = after(divide)
    shares = [name for name in before if name.startswith("layers.")]
    assert shares
    for key, start in before.items():
        part = 0.5 if divide and key in shares else 1.0
        torch.testing.assert_close(found[key] - start, (whole[key] - start) * part, rtol=1e-9, atol=1e-12)
