"""Adafactor over pieces of parameters: PyTorch's where there is one piece."""

from __future__ import annotations

import torch
from torch import nn

from tenfold.parallel import sums
from tenfold.training.adafactor import Adafactor

# Matrices, stacks, vectors, and what has one row or one column.
SHAPES = [(7, 5), (3, 11, 6), (9,), (1, 5), (5, 1), (130, 257), (2, 1, 3), (4,)]


def test_on_one_rank_it_is_pytorchs_to_the_last_bit() -> None:
    torch.manual_seed(0)
    mine = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    theirs = [nn.Parameter(each.detach().clone()) for each in mine]
    groups = [
        [{"params": each[::2], "weight_decay": 0.1}, {"params": each[1::2], "weight_decay": 0.0}]
        for each in (mine, theirs)
    ]
    ours, pytorchs = Adafactor(groups[0], 0.05), torch.optim.Adafactor(groups[1], 0.05)
    for step in range(12):
        for one, other in zip(mine, theirs, strict=True):
            one.grad = torch.randn_like(one) * 10.0 ** -(step % 5)
            other.grad = one.grad.clone()
        mine[3].grad = theirs[3].grad = None if step % 3 == 1 else torch.zeros_like(mine[3])
        ours.step()
        pytorchs.step()
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one, other), tuple(one.shape)
        state, same = ours.state[one], pytorchs.state[other]
        assert state.keys() == same.keys()
        assert all(torch.equal(state[key], same[key]) for key in state)


def test_runs_of_parameters_hold_no_more_than_they_may_but_for_a_large_one() -> None:
    limit = sums.TOGETHER
    sizes = [limit // 2, limit // 2, 1, 3 * limit, 1, 1]
    assert [sizes[run] for run in sums.summed_together(sizes)] == [sizes[:2], [1], [3 * limit], [1, 1]]
    assert list(sums.summed_together([])) == []
