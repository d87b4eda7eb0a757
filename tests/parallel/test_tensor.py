"""A model split over tensor ranks against the same model on one."""

from __future__ import annotations

import pytest

from parallel.cases_tensor import SHAPES
from ranks import on_ranks


@pytest.mark.parametrize("world", [2, 3, 4])
def test_loss_and_every_gradient_are_those_of_one_rank(world):
    names = [name for name, shape in SHAPES.items() if world in shape.get("worlds", (2, 3, 4))]
    assert len(names) >= 13
    on_ranks(world, "parallel.cases_tensor:equal_to_one_rank", names)
