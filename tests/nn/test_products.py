"""Products of bf16 matrices by way of fp32, against float64 and torch's own products."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from tenfold.nn import products
from tenfold.nn.attend import Context, attend
from tenfold.nn.loss import cross_entropy_sum
from tenfold.nn.products import linear, product_dtype


@pytest.fixture(params=[True, False], ids=["without a bf16 unit", "with one"])
def widens(request, monkeypatch):
    monkeypatch.setattr(products, "_cpu_widens", lambda: request.param)
    return request.param


@pytest.fixture
def without_a_unit(monkeypatch):
    monkeypatch.setattr(products, "_cpu_widens", lambda: True)


def inputs(sample, bias=True):
    """bf16 input and gradient, fp32 parameters whose values are no bf16 numbers."""
    x = sample(2, 5, 24, dtype=torch.float32).bfloat16().requires_grad_()
    weight = sample(16, 24, seed=2, dtype=torch.float32).requires_grad_()
    bias = sample(16, seed=3, dtype=torch.float32).requires_grad_() if bias else None
    return x, weight, bias, sample(2, 5, 16, seed=4, dtype=torch.float32).bfloat16()


def test_only_bf16_on_a_cpu_without_a_unit_is_multiplied_in_another_dtype(widens):
    assert product_dtype(torch.empty(1, dtype=torch.bfloat16)) == (torch.float32 if widens else torch.bfloat16)
    for dtype in (torch.float16, torch.float32, torch.float64):
        assert product_dtype(torch.empty(1, dtype=dtype)) == dtype
    assert product_dtype(torch.empty(1, dtype=torch.bfloat16, device="meta")) == torch.bfloat16


@pytest.mark.parametrize("bias", [True, False])
def test_linear_is_the_exact_product_of_bf16_operands_rounded_once(sample, widens, bias):
    x, weight, bias, _ = inputs(sample, bias)
    exact = F.linear(x.double(), weight.bfloat16().double(), None if bias is None else bias.bfloat16().double())
    y = linear(x, weight, bias)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=1e-5)


def test_gradients_are_the_exact_products_and_those_of_parameters_are_not_rounded(sample, without_a_unit):
    x, weight, bias, grad = inputs(sample)
    linear(x, weight, bias).backward(grad)
    flat, grads = x.detach().double().flatten(0, 1), grad.double().flatten(0, 1)
    torch.testing.assert_close(weight.grad.double(), grads.t() @ flat, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(bias.grad.double(), grads.sum(0), rtol=1e-5, atol=1e-5)
    exact = (grads @ weight.detach().bfloat16().double()).view_as(x)
    assert x.grad.dtype == torch.bfloat16
    torch.testing.assert_close(x.grad.double(), exact, rtol=2**-8, atol=1e-5)


def test_the_backward_pass_keeps_the_bf16_input_and_no_fp32_copy_of_it(sample, without_a_unit):
    x, weight, bias, _ = inputs(sample)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        linear(x, weight, bias)
    assert {t.data_ptr() for t in kept} == {x.data_ptr(), weight.data_ptr(), bias.data_ptr()}


def test_what_needs_no_gradient_gets_none(sample, without_a_unit):
    x, weight, bias, grad = inputs(sample)
    weight.requires_grad_(False)
    bias.requires_grad_(False)
    linear(x, weight, bias).backward(grad)
    assert x.grad is not None
    assert weight.grad is None
    assert bias.grad is None


def test_attention_in_bf16_is_that_of_fp32_rounded(sample, without_a_unit):
    q, k, v = (sample(2, 4, 6, 8, seed=seed, dtype=torch.float32).bfloat16() for seed in (1, 2, 3))
    y = attend(q, k[:, :2], v[:, :2], Context(None))
    assert torch.equal(y, attend(q.float(), k[:, :2].float(), v[:, :2].float(), Context(None)).bfloat16())


def test_the_loss_in_bf16_and_its_gradients_are_near_the_exact_ones(sample, without_a_unit):
    hidden = sample(9, 16, dtype=torch.float32).bfloat16().requires_grad_()
    weight = sample(32, 16, seed=2, dtype=torch.float32).bfloat16().float().requires_grad_()
    targets = torch.arange(9) * 3 % 30
    loss = cross_entropy_sum(hidden, weight, targets, 30, 4)
    exact_hidden, exact_weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    exact = F.cross_entropy((exact_hidden @ exact_weight.t())[:, :30], targets, reduction="sum")
    loss.backward()
    exact.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weight.grad.double(), exact_weight.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(hidden.grad.double(), exact_hidden.grad, rtol=2**-7, atol=1e-3)


def test_it_works_under_fake_tensors(sample, without_a_unit):
    with FakeTensorMode():
        x = torch.empty(2, 3, 8, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(4, 8, requires_grad=True)
        y = linear(x, weight, None)
        y.sum().backward()
    assert (y.shape, y.dtype) == ((2, 3, 4), torch.bfloat16)
    assert (x.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32)
