"""Moments in fewer bits where ranks have shards of them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from distributed.cases import many, steps
from distributed.layouts import below, run_file
from ranks import on_ranks
from tenfold.offload import codec


def coded(raws: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`cases.many` with a limit under which the parameters of these models are large."""
    with mock.patch.object(codec, "SMALL", 64):
        return many(raws)


def alone(raw: dict[str, Any]) -> dict[str, Any]:
    with mock.patch.object(codec, "SMALL", 64):
        return steps({key: value for key, value in raw.items() if key not in ("parallel", "offload")}, 1)


@pytest.mark.parametrize("axis", ["shard", "tensor"])
def test_shards_are_coded_as_the_whole_is(axis: str) -> None:
    """In bf16 a number of a shard has the noise that it has in the whole; blocks of 8 bits are of what a rank has, and
    so is the noise where tensor ranks split a matrix: there other numbers come of it, as near to the exact ones."""
    plain = run_file(axis, "dense", "delinked", 1) | {"stages": [{"name": "real", "sharing": "none"}]}
    raws = []
    for form in ("bf16", "int8"):
        raw = plain | {"optim": {**plain["optim"], "state": form}}
        raws += [raw, raw | {"offload": below("all", "weights", "moments")}]
    exact, wanted = alone(plain), [alone(raws[0]), alone(raws[2])]
    found = on_ranks(2, "distributed.test_state:coded", raws)
    for here, there, want in ((0, 1, wanted[0]), (2, 3, wanted[1])):
        for rank in found:
            assert rank[here]["losses"] == rank[there]["losses"]
            assert rank[here]["losses"] == pytest.approx(want["losses"], abs=2e-4)
            assert rank[here]["losses"] != exact["losses"]
        tolerance = 1e-6 if (axis, here) == ("shard", 0) else 3e-3
        for name, weight in found[0][here]["weights"].items():
            assert (weight - want["weights"][name]).abs().max().item() < tolerance, name
