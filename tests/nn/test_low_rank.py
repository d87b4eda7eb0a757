"""A matrix plus a low-rank difference: read as one weight, trained as three parameters, folded into one."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tenfold.nn.low_rank import (
    add_difference,
    differing,
    fold_difference,
    held,
    low_rank_sum,
    matrices_inside,
    rank_of,
    useful_rank,
)


class Stack(nn.Module):
    """Three matrices as one parameter, as experts are, and one that has no difference."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 5, 7))
        self.scale = nn.Parameter(torch.randn(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("nd,edf->enf", x, self.up) * self.scale


def trained(module: nn.Module, name: str, rank: int) -> tuple[nn.Parameter, nn.Parameter]:
    """A difference that is not zero."""
    left, right = add_difference(module, name, rank, "key")
    with torch.no_grad():
        left.normal_(generator=torch.Generator().manual_seed(1))
    return left, right


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("module", "name"), [(nn.Linear(5, 6), "weight"), (Stack(), "up")], ids=["matrix", "stack"])
def test_a_difference_begins_without_changing_a_bit_and_is_folded_without_changing_one(module, name, dtype):
    module = copy.deepcopy(module).to(dtype)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = module(x)
    left, right = add_difference(module, name, 2, "key")
    assert torch.equal(module(x), before)
    assert not left.any()
    assert right.any()
    with torch.no_grad():
        left.normal_(generator=torch.Generator().manual_seed(1))
    apart = module(x)
    assert not torch.equal(apart, before)
    fold_difference(module, name)
    assert torch.equal(module(x), apart)
    assert not differing(module)


def test_a_folded_module_is_as_if_it_had_never_had_a_difference():
    module = nn.Linear(5, 6)
    names, kind = list(dict(module.named_parameters())), type(module)
    trained(module, "weight", 2)
    assert isinstance(module, nn.Linear)
    assert rank_of(module, "weight") == 2
    assert list(dict(module.named_parameters())) == [*names, "weight_left", "weight_right"]
    assert [name for name, _ in held(module)] == names
    fold_difference(module, "weight")
    assert rank_of(module, "weight") == 0
    assert type(module) is kind
    assert list(dict(module.named_parameters())) == names


def test_value_and_gradients_are_those_of_the_sum_written_out():
    module = Stack().double()
    left, right = trained(module, "up", 2)
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    plain = [p.detach().clone().requires_grad_() for p in (module._parameters["up"], left, right, module.scale)]
    up, a, b, scale = plain
    total = torch.stack([up[e] + a[e] @ b[e] for e in range(3)])
    torch.testing.assert_close(module.up, total, rtol=0, atol=1e-12)
    expected = torch.stack([x @ total[e] for e in range(3)]) * scale
    torch.testing.assert_close(module(x), expected, rtol=0, atol=1e-12)
    expected.square().sum().backward()
    module(x).square().sum().backward()
    for mine, theirs in zip((module._parameters["up"], left, right, module.scale), plain, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12)


def test_a_difference_that_grows_keeps_what_it_is():
    module = Stack().double()
    trained(module, "up", 2)
    before = module.up.detach().clone()
    left, right = add_difference(module, "up", 4, "key")
    assert (left.shape, right.shape) == ((3, 5, 4), (3, 4, 7))
    torch.testing.assert_close(module.up, before, rtol=0, atol=1e-14)
    assert right[:, 2:].all()


def test_at_the_useful_rank_a_difference_is_any_matrix():
    module = Stack().double()
    assert useful_rank(module.up) == 5
    assert useful_rank(module.scale) == 0
    left, right = add_difference(module, "up", 5, "key")
    wanted = torch.randn(3, 5, 7, dtype=torch.float64)
    u, s, v = torch.linalg.svd(wanted - module.up.detach(), full_matrices=False)
    with torch.no_grad():
        left.copy_(u * s[:, None])
        right.copy_(v)
    torch.testing.assert_close(module.up, wanted, rtol=0, atol=1e-12)


def test_the_start_is_a_function_of_the_key_and_has_a_deviation_of_one_over_the_root_of_the_rank():
    one, same, other = (add_difference(nn.Linear(400, 90), "weight", 16, key)[1] for key in ("a", "a", "b"))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert one.std().item() == pytest.approx(0.25, rel=0.05)


def test_inside_autocast_the_sum_is_made_in_full_precision():
    module = nn.Linear(5, 6)
    left, right = trained(module, "weight", 2)
    plain = module._parameters["weight"].detach() + left @ right
    x = torch.randn(4, 5)
    with torch.autocast("cpu", torch.bfloat16):
        assert module.weight.dtype == torch.float32
        torch.testing.assert_close(module.weight, plain)
        assert torch.equal(module(x), F.linear(x, module.weight, module.bias))


def test_copies_state_and_casts_go_with_a_module_as_ever():
    module = nn.Linear(5, 6)
    trained(module, "weight", 2)
    twin = copy.deepcopy(module)
    assert twin.weight_left is not module.weight_left
    with torch.no_grad():
        twin.weight_left.zero_()
    twin.load_state_dict(module.state_dict())
    assert torch.equal(twin.weight, module.weight)
    assert twin.double().weight.dtype == torch.float64
    assert type(twin) is type(module)  # one class for all, so that compiled code serves all


def test_what_a_module_computes_with_is_told_matrix_by_matrix():
    module = nn.Sequential(nn.Linear(5, 6), Stack())
    shapes = [each.shape for each in matrices_inside(module)]
    trained(module[1], "up", 2)
    found = list(matrices_inside(module))
    assert [tuple(each.shape) for each in found] == [(6, 5), (6,), *[(5, 7)] * 3, (7,)]
    assert [each.shape for each in found] == shapes
    torch.testing.assert_close(torch.stack(found[2:5]), module[1].up)


def test_more_than_three_dimensions_are_stacks_of_matrices():
    matrix, left, right = (torch.randn(2, 3, *shape) for shape in ((4, 5), (4, 2), (2, 5)))
    torch.testing.assert_close(low_rank_sum(matrix, left, right), matrix + left @ right)
