"""Tensors that real ranks send each other from one layout to another."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from parallel.test_relay import MODEL, TENSORS
from tenfold.config.load import build
from tenfold.config.model import ModelConfig
from tenfold.parallel import relay
from tenfold.parallel.mesh import Degrees
from tenfold.parallel.pieces import piece_by_rank
from tenfold.parallel.regions import all_of, taken
from tenfold.parallel.traffic import Collectives

FOUR = [
    Degrees(data_shard=4),
    Degrees(data_shard=2, tensor=2),
    Degrees(data_replicate=4),
    Degrees(data_shard=4, expert=2),
    Degrees(tensor=4),
    Degrees(data_shard=2, pipeline=2),
    Degrees(data_shard=2, expert=2, tensor=2),
    Degrees(data_shard=4),
]


def carried() -> dict[str, Any]:
    """Which tensors are not what they should be; how much a rank sends at once, and how often."""
    rank, config, cpu = dist.get_rank(), build(ModelConfig, MODEL, "model"), torch.device("cpu")
    wrong, largest, sends = [], 0, 0
    for before, after in pairwise(FOUR):
        for name, shape in TENSORS.items():
            whole = torch.randn(shape, generator=torch.Generator().manual_seed(7))
            has, wants = ([each.region for each in piece_by_rank(name, shape, config, one)] for one in (before, after))
            mine = relay.route(has, wants, rank)
            local = taken(whole, all_of(shape), has[rank])
            with Collectives() as seen, mock.patch.object(relay, "PART", 100):
                found = mine.carry(local if mine.needs else None, whole.dtype, cpu)
            assert found is not None
            if not torch.equal(found, taken(whole, all_of(shape), wants[rank])):
                wrong.append((before, after, name))
            largest = max([largest, *(size for _, size in seen.calls)])
            sends += seen.counts["send"]
    # A number, which has no dimensions.
    has, wants = [() if each == 3 else None for each in range(4)], [() if each < 2 else None for each in range(4)]
    mine = relay.route(has, wants, rank)
    found = mine.carry(torch.tensor(5.0) if mine.needs else None, torch.float32, cpu)
    if (found is None) != (rank > 1) or (found is not None and found.item() != 5.0):
        wrong.append("a number")
    return {"wrong": wrong, "largest": largest, "sends": sends}
