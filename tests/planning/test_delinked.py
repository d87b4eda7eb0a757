"""What ranks are planned to send each other at a delinking, against every number of every tensor gone through."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tenfold.config.load import build
from tenfold.config.run import RunConfig
from tenfold.nn.decoder import Decoder
from tenfold.parallel.mesh import Degrees
from tenfold.parallel.pieces import piece_at
from tenfold.planning.delinked import received_bytes
from tenfold.planning.stages import plan_stages
from tenfold.planning.terms import Candidate
from tenfold.sharing.tying import tie

DENSE = {"vocab_size": 51, "layers": 4, "hidden": 24, "heads": 3, "ffn": 21, "positions": "learned"}
MIXTURE = {**DENSE, "heads": 4, "moe": {"experts": 8, "prototypes": 2, "ffn": 10, "bias_rate": 0.1}}


def run(model: dict[str, Any], first: dict[str, Any]) -> RunConfig:
    stages = [{"name": "pseudo", "sharing": "all", "until": {"steps": 2}, **first}, {"name": "real", "sharing": "none"}]
    raw = {
        "model": model,
        "data": {"sequence_length": 16},
        "training": {"steps": 4, "batch_size": 8, "precision": "fp32"},
        "stages": stages,
    }
    return build(RunConfig, raw, "run.toml")


def of(config: RunConfig, before: Degrees, after: Degrees) -> int:
    first, second = plan_stages(config)
    return received_bytes(config, first, Candidate(before, 1), second, Candidate(after, 1))


def numbers(config: RunConfig, name: str, shape: tuple[int, ...], degrees: Degrees, rank: int) -> set[int]:
    """Which numbers of a tensor a rank has."""
    shard, tensor = divmod(rank % (degrees.shard * degrees.tensor), degrees.tensor)
    whole = torch.arange(math.prod(shape)).view(shape)
    return set(piece_at(name, shape, config.model, degrees, shard, tensor).take(whole).flatten().tolist())


CHANGES = [
    (DENSE, Degrees(data_shard=4), Degrees(data_shard=2, tensor=2)),
    (DENSE, Degrees(data_replicate=4), Degrees(data_shard=4)),
    (DENSE, Degrees(data_replicate=2, data_shard=2), Degrees(data_replicate=4)),
    (MIXTURE, Degrees(data_shard=4), Degrees(data_shard=4, expert=4)),
    (MIXTURE, Degrees(data_shard=4, expert=2), Degrees(data_shard=2, tensor=2, expert=2)),
]


@pytest.mark.parametrize(("model", "before", "after"), CHANGES)
def test_a_rank_gets_what_it_has_not_of_each_block_once(model: Any, before: Degrees, after: Degrees) -> None:
    config = run(model, {})
    first = plan_stages(config)[0]
    with torch.device("meta"):
        former = Decoder(config.model, 16)
    tie(former.layers, first.sharing)
    lacking = [0, 0]
    for name, parameter in former.named_parameters():  # a block comes once, whatever layers take it
        for place, rank in enumerate((0, 3)):
            had, wanted = (numbers(config, name, tuple(parameter.shape), each, rank) for each in (before, after))
            lacking[place] += len(wanted - had) * 4 * (3 if parameter.requires_grad else 1)
    assert of(config, before, after) == max(lacking)
    assert (max(lacking) == 0) == (before == Degrees(data_replicate=4))


def test_nothing_is_sent_where_degrees_stay_and_each_pipeline_rank_has_the_blocks_of_its_layers() -> None:
    for degrees in (Degrees(data_shard=4), Degrees(tensor=2, pipeline=2), Degrees(data_shard=2, pipeline=2)):
        assert of(run(DENSE, {}), degrees, degrees) == 0


def test_experts_and_differences_are_freed_of_what_data_ranks_have_in_shards() -> None:
    degrees = Degrees(data_shard=4)
    one = MIXTURE["hidden"] * 10 * 4  # type: ignore[operator]  # bytes of a matrix of an expert
    # The set of experts is the first rank's, and each of the others needs all of it: three matrices with their moments.
    assert of(run(MIXTURE, {"experts": "layer"}), degrees, degrees) == 3 * 3 * one
    relaxed = of(run(DENSE, {"rank": 2}), degrees, degrees)
    assert 0 < relaxed < of(run(DENSE, {"rank": 2}), degrees, Degrees(data_shard=2, tensor=2))
