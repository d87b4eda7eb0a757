"""Rows sorted by expert, and the experts' feed-forwards on them, against plain loops in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from tenfold.nn import grouped
from tenfold.nn.grouped import combine, dispatch, feed_forward_rows, keep_rows, sort_rows

counts = st.lists(st.one_of(st.just(0), st.integers(0, 12)), min_size=1, max_size=7)


def random(seed, *shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def inputs(rows, hidden, width, swiglu, dtype=torch.float64):
    """Rows, gates, and the matrices gate (or None), up and down."""
    total, experts = sum(rows), len(rows)
    gate = random(2, experts, hidden, width, dtype=dtype) if swiglu else None
    up, down = random(3, experts, hidden, width, dtype=dtype), random(4, experts, width, hidden, dtype=dtype)
    return random(0, total, hidden, dtype=dtype), random(1, total, dtype=dtype), gate, up, down


def loop(x, gates, gate, up, down, rows):
    """Row by row, in float64."""
    x, gates, up, down = x.double(), gates.double(), up.double(), down.double()
    out, row = [], 0
    for expert, count in enumerate(rows):
        for _ in range(count):
            inner = x[row] @ up[expert]
            if gate is None:
                inner = inner * (1 + torch.erf(inner / 2**0.5)) / 2
            else:
                a = x[row] @ gate.double()[expert]
                inner = a / (1 + torch.exp(-a)) * inner
            out.append(gates[row] * (inner @ down[expert]))
            row += 1
    return torch.stack(out) if out else x


def check(rows, hidden, width, swiglu, dtype, tolerance):
    given = inputs(rows, hidden, width, swiglu, dtype)
    trained = [each for each in given if each is not None]
    y = feed_forward_rows(*given, torch.tensor(rows))
    expected = loop(*given, rows)
    factor = random(5, *y.shape).detach()
    found = torch.autograd.grad((y.double() * factor).sum(), trained)
    wanted = torch.autograd.grad((expected * factor).sum(), trained, allow_unused=True, materialize_grads=True)
    assert y.dtype == dtype
    for mine, theirs in ((y, expected), *zip(found, wanted, strict=True)):
        largest = max(1.0, theirs.abs().max().item()) if theirs.numel() else 1.0  # sums of rows cancel
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=tolerance, atol=tolerance * largest)


@settings(deadline=None, max_examples=40)
@given(rows=counts, hidden=st.integers(1, 9), width=st.integers(1, 9), swiglu=st.booleans(), piece=st.integers(1, 15))
@example(rows=[0, 0], hidden=2, width=3, swiglu=True, piece=4)
@example(rows=[0, 9, 0, 0, 8, 0], hidden=4, width=4, swiglu=True, piece=3)
@example(rows=[5], hidden=3, width=2, swiglu=False, piece=5)
def test_output_and_gradients_equal_a_loop_over_rows_however_they_are_cut(rows, hidden, width, swiglu, piece):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped, "PIECE_ROWS", piece)
        check(rows, hidden, width, swiglu, torch.float64, 1e-9)


@pytest.mark.parametrize("rows", [[3, 0, 2, 4], [0, 5, 4, 0], [0, 0, 9, 0], [9, 0, 0, 0]])
@pytest.mark.parametrize("swiglu", [True, False])
def test_the_kernel_of_cuda_does_the_same_as_a_loop_over_rows(monkeypatch, rows, swiglu):
    # PyTorch has the kernel for the CPU as well, where it is not used; so what is around it can be tested here.
    monkeypatch.setattr(grouped, "_kernel_takes", lambda x, up: True)
    calls, real = [], torch.nn.functional.grouped_mm
    monkeypatch.setattr(
        torch.nn.functional, "grouped_mm", lambda *args, **named: calls.append(1) or real(*args, **named)
    )
    check(rows, 8, 12, swiglu, torch.float32, 1e-4)
    assert len(calls) == (9 if swiglu else 6)


def test_the_gradient_of_a_plain_sum_is_right():
    """Its gradient comes expanded, with strides of zero."""
    given = inputs([2, 0, 3], 4, 4, True)
    found = torch.autograd.grad(feed_forward_rows(*given, torch.tensor([2, 0, 3])).sum(), given)
    torch.testing.assert_close(found, torch.autograd.grad(loop(*given, [2, 0, 3]).sum(), given))


def test_tasks_share_no_expert_and_cover_every_row_in_order_by_blocks_within_the_limit(monkeypatch):
    monkeypatch.setattr(grouped, "PIECE_ROWS", 4)
    tasks = grouped._cut([2, 0, 2, 1, 9, 0, 3], most=4)
    assert [[[(piece.expert, piece.start, piece.end) for piece in block] for block in task] for task in tasks] == [
        [[(0, 0, 2), (2, 2, 4)]], [[(3, 4, 5)]], [[(4, 5, 9)], [(4, 9, 13)], [(4, 13, 14)]], [[(6, 14, 17)]]
    ]  # fmt: skip
    pieces = [piece for task in tasks for block in task for piece in block]
    assert [piece.expert for piece in pieces if piece.first] == [0, 2, 3, 4, 6]
    assert len(grouped._cut([2, 0, 2, 1, 3], most=2)) == 4


uneven = [[40, 0, 1, 7, 0, 12, 90, 3], [0, 0, 60, 0], [1] * 9, [0, 5], [3, 5, 2, 6, 4, 4, 3, 5]]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("swiglu", [True, False])
@pytest.mark.parametrize("rows", uneven)
def test_several_threads_give_what_a_loop_over_rows_gives(monkeypatch, threads, rows, swiglu, dtype, tolerance):
    monkeypatch.setattr(grouped, "PIECE_ROWS", 16)
    threads(3)
    check(rows, 8, 6, swiglu, dtype, tolerance)


@pytest.mark.parametrize("rows", uneven)
def test_several_threads_give_the_same_bits_every_time(threads, rows):
    threads(2)
    given = inputs(rows, 32, 24, True, torch.float32)

    def step():
        y = feed_forward_rows(*given, torch.tensor(rows))
        return [y, *torch.autograd.grad(y.square().sum(), given)]

    first = step()
    assert all(torch.equal(one, other) for _ in range(10) for one, other in zip(first, step(), strict=True))


def test_an_expert_beyond_a_workers_share_is_left_to_all_threads_and_the_others_are_spread(monkeypatch, threads):
    threads(2)
    calls = []
    monkeypatch.setattr(grouped, "work_off", lambda tasks, work, workers: calls.append((tasks, workers)))
    grouped._work_off([10, 70, 0, 20], lambda block: None, torch.device("cpu"))
    experts = [([piece.expert for task in tasks for block in task for piece in block], n) for tasks, n in calls]
    assert experts == [([1], 1), ([3, 0], 2)]
    calls.clear()
    grouped._work_off([10, 70, 0, 20], lambda block: None, torch.device("cuda"))
    assert [workers for _, workers in calls] == [1, 1]


def test_several_threads_serve_inference_too(threads):
    threads(2)
    rows = [3, 0, 2, 4]
    given = inputs(rows, 4, 6, True)
    with torch.inference_mode():
        y = feed_forward_rows(*given, torch.tensor(rows))
    torch.testing.assert_close(y, loop(*given, rows).detach())


@pytest.mark.parametrize("swiglu", [True, False])
def test_shapes_are_known_without_numbers(swiglu):
    plain = inputs([2, 0, 3], 4, 6, swiglu, torch.float32)
    real = feed_forward_rows(*plain, torch.tensor([2, 0, 3]))
    detached = [None if each is None else each.detach() for each in plain]
    with FakeTensorMode() as mode:
        fake = [None if each is None else mode.from_tensor(each) for each in detached]
        for each in fake:
            if each is not None:
                each.requires_grad_()
        y = feed_forward_rows(*fake, torch.tensor([2, 0, 3]))
        y.sum().backward()
    assert (y.shape, y.dtype) == (real.shape, real.dtype)
    assert all(each is None or each.grad.shape == each.shape for each in fake)


choices = st.integers(1, 4).flatmap(
    lambda width: st.lists(st.lists(st.integers(0, 5), min_size=width, max_size=width), min_size=1, max_size=9)
)


@settings(deadline=None)
@given(choices=choices, data=st.data())
def test_rows_stand_by_expert_then_by_text_and_come_back_to_their_tokens(choices, data):
    choice_NC = torch.tensor(choices)
    tokens, width = choice_NC.shape
    rows = sort_rows(choice_NC, 6)
    taken = [(expert, token * width + c) for token, line in enumerate(choices) for c, expert in enumerate(line)]
    if data.draw(st.booleans(), label="some are dropped"):
        kept = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(taken), max_size=len(taken))))
        taken = [pair for pair, keep in zip(sorted(taken), kept.tolist(), strict=True) if keep]
        rows = keep_rows(rows, kept, choice_NC)
    taken.sort()
    assert rows.choices.tolist() == [choice for _, choice in taken]
    assert rows.tokens.tolist() == [choice // width for _, choice in taken]
    assert rows.per_expert.tolist() == [sum(expert == each for each, _ in taken) for expert in range(6)]

    x, gates = random(0, tokens, 3), random(1, tokens, width)
    x_RD, gates_R = dispatch(x, gates, rows)
    assert torch.equal(x_RD, x[rows.tokens])
    assert torch.equal(gates_R, gates.flatten()[rows.choices])
    factors = random(2, len(taken), 3).detach()
    y = combine(x_RD * factors * gates_R[:, None], rows)
    expected = torch.stack(
        [
            sum(
                (x[t] * factors[r] * gates[t, c % width] for r, (_, c) in enumerate(taken) if c // width == t), x[t] * 0
            )
            for t in range(tokens)
        ]
    )
    torch.testing.assert_close(y, expected)
    found, wanted = (torch.autograd.grad(out.square().sum(), (x, gates), allow_unused=True) for out in (y, expected))
    torch.testing.assert_close(found[0], wanted[0])
    torch.testing.assert_close(found[1], torch.zeros_like(gates) if wanted[1] is None else wanted[1])
