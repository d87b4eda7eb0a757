"""What ranks hold of each parameter: together all of it, each number as often as is told."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from parallel.cases_tensor import BIASED, SHARED
from parallel.split_models import configured, on_meta, whole_model
from tenfold.config.model import ModelConfig
from tenfold.nn.init import initialize
from tenfold.parallel.mesh import Degrees
from tenfold.parallel.pieces import Piece, pieces
from tenfold.parallel.regions import all_of, put
from tenfold.parallel.splits import cut, experts_of, heads_of, share_of, splits_of
from tenfold.sharing.tying import materialize

ROUTED = {**SHARED, "bias_rate": 0.1}
SHAPES = {
    "uneven, biased": {**BIASED, "tie_embeddings": False, "qk_norm": True},
    "grouped": {"heads": 12, "kv_heads": 2, "bias": True},
    "experts": {"moe": ROUTED},
    "experts, tied and relaxed": {"layers": 3, "pattern": "all", "rank": 2, "moe": ROUTED},
    "encoder": {"objective": "masked", "mask_token": 3, "embedding_width": 6, "positions": "learned"},
}
LAYOUTS = [
    Degrees(tensor=2),
    Degrees(tensor=4),
    Degrees(tensor=4, grid=True),
    Degrees(data_shard=3, expert=3, tensor=2),
]
CASES = [
    pytest.param(shape, degrees, id=f"{name}, {degrees}")
    for (name, shape), degrees in product(SHAPES.items(), LAYOUTS)
    if degrees.expert == 1 or "moe" in shape
]


def places(degrees):
    return list(product(range(degrees.tensor), range(degrees.expert)))


def part_of(shape, degrees, tensor, expert):
    """A rank's part of the model, uninitialized, and all of it as pieces that no data ranks split further."""
    model = on_meta(shape)
    splits = splits_of(model, configured(shape), degrees, tensor, expert)
    cut(model, splits)
    materialize(model, torch.device("cpu"))
    return model, {name: Piece(split, range(split.local_shape[0])) for name, split in splits.items()}


@pytest.mark.parametrize(("shape", "degrees"), CASES)
def test_every_number_is_held_by_as_many_ranks_as_is_told(shape, degrees):
    whole = on_meta(shape)
    held = {place: splits_of(whole, configured(shape), degrees, *place) for place in places(degrees)}
    split = set()
    for name, parameter in whole.named_parameters():
        count = torch.zeros(parameter.shape)
        expected = torch.zeros(parameter.shape)
        for (tensor, expert), splits in held.items():
            mine = splits[name]
            ones = torch.zeros(parameter.shape)
            put(ones, all_of(mine.shape), torch.ones(mine.local_shape), mine.held)
            count += ones
            copies = len(mine.tensor_copies) * (1 if mine.by_expert else degrees.expert)
            assert tensor in mine.tensor_copies
            expected = expected.where(ones == 0, copies)
            for other in mine.tensor_copies:
                assert held[other, expert][name].held == mine.held
            if not mine.whole:
                split.add(name.split(".")[-1] if "experts" in name else name.removesuffix(".weight").split(".")[-1])
        assert torch.equal(count, expected), name
    assert {"wq", "wk", "wv", "wo", "embedding"} <= split
    assert not {name for name in split if "norm" in name or name in ("router", "positions", "transform")}


@pytest.mark.parametrize(("shape", "degrees"), CASES)
def test_what_a_rank_takes_is_what_it_puts_back(shape, degrees):
    whole = whole_model(shape)
    splits = splits_of(whole, configured(shape), degrees, degrees.tensor - 1, degrees.expert - 1)
    for name, parameter in whole.named_parameters():
        part = splits[name].take(parameter.data)
        assert part.shape == splits[name].local_shape
        back = torch.full_like(parameter.data, torch.nan)
        put(back, all_of(splits[name].shape), part, splits[name].held)
        held = ~back.isnan()
        assert torch.equal(back[held], parameter.data[held])
        assert held.sum() == part.numel()


@pytest.mark.parametrize(("shape", "degrees"), CASES)
def test_pieces_of_all_data_ranks_make_the_whole(shape, degrees):
    degrees = replace(degrees, data_shard=6)
    for name, parameter in whole_model(shape).named_parameters():
        back = torch.full_like(parameter.data, torch.nan)
        for _, piece in pieces(name, tuple(parameter.shape), configured(shape), degrees, 0):
            mine = piece.take(parameter.data)
            assert mine.shape == piece.shape
            piece.put(back, mine)
        assert torch.equal(back, parameter.data), name


@pytest.mark.parametrize(("shape", "degrees"), CASES)
def test_initial_weights_are_those_of_one_rank_bit_for_bit(shape, degrees):
    shape = {**shape, "dtype": torch.float32}
    whole = on_meta(shape)
    materialize(whole, torch.device("cpu"))
    initialize(whole, 7)
    parameters = dict(whole.named_parameters())
    for tensor, expert in places(degrees):
        model, held = part_of(shape, degrees, tensor, expert)
        initialize(model, 7, held.__getitem__)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, held[name].take(parameters[name])), name


def test_a_rank_draws_only_the_experts_that_it_holds(monkeypatch):
    from tenfold.nn import init

    model, held = part_of({"moe": ROUTED}, Degrees(data_shard=3, expert=3), 0, 1)
    drawn, draw = [], init.draw
    monkeypatch.setattr(init, "draw", lambda shape, key: (drawn.append(key), draw(shape, key))[1])
    initialize(model, 0, held.__getitem__)
    assert [key for key in drawn if key.startswith("0/layers.0.ffn.experts.up/")] == [
        "0/layers.0.ffn.experts.up/1",
        "0/layers.0.ffn.experts.up/4",
    ]


def test_cutting_keeps_ties_and_what_is_held_as_a_whole():
    shape = {"layers": 4, "pattern": {"cycle": 2}}
    model = on_meta(shape)
    norm = model.layers[0].attention_norm.weight
    cut(model, splits_of(model, configured(shape), Degrees(tensor=2), 1, 0))
    layers = model.layers
    assert layers[0].attention.wq.weight is layers[2].attention.wq.weight
    assert layers[0].attention.wq.weight is not layers[1].attention.wq.weight
    assert layers[0].attention.wq.weight.shape == (3 * 4, 20)
    assert layers[0].attention_norm.weight is norm is layers[2].attention_norm.weight
    assert all(type(parameter) is torch.nn.Parameter for parameter in model.parameters())


@pytest.mark.parametrize(
    ("heads", "key_heads", "ranks", "expected"),
    [
        (5, 5, 2, [((0, 2), (0, 2)), ((2, 5), (2, 5))]),
        (6, 3, 2, [((0, 2), (0, 1)), ((2, 6), (1, 3))]),
        (8, 2, 4, [((0, 2), (0, 1)), ((2, 4), (0, 1)), ((4, 6), (1, 2)), ((6, 8), (1, 2))]),
        (6, 1, 3, [((0, 2), (0, 1)), ((2, 4), (0, 1)), ((4, 6), (0, 1))]),
    ],
)
def test_query_heads_go_with_their_key_heads(heads, key_heads, ranks, expected):
    config = ModelConfig(heads=heads, kv_heads=key_heads, head_dim=4)
    found = [heads_of(config, ranks, rank) for rank in range(ranks)]
    assert found == [(range(*queries), range(*keys)) for queries, keys in expected]


def test_shares_are_even_to_one_and_experts_of_every_prototype():
    assert [list(share_of(5, 3, part)) for part in range(3)] == [[0], [1, 2], [3, 4]]
    config = ModelConfig(moe={"experts": 12, "prototypes": 3})
    assert experts_of(config, 2, 1) == (range(2, 4), range(6, 8), range(10, 12))
