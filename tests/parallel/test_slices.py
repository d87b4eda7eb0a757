"""Pipeline ranks that go through sequences slice by slice train as one process does, and send what theory says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distributed.layouts import DENSE, MIXTURE, run_file
from distributed.test_layouts import assert_equal, wanted
from ranks import on_ranks
from tenfold.config.model import ModelConfig
from tenfold.config.parallel import ParallelConfig
from tenfold.errors import TenfoldError
from tenfold.nn.decoder import Decoder
from tenfold.nn.init import initialize
from tenfold.nn.objective import backward, loss_sum, next_token_example
from tenfold.nn.recompute import Recompute
from tenfold.nn.slices import SliceCache
from tenfold.parallel.mesh import Degrees, check


def run(stages: str, passes: int, slices: int, degrees: dict[str, int], **changed: dict[str, Any]) -> dict[str, Any]:
    """A run file of the proof, with another layout."""
    raw = run_file("pipeline", "dense", stages, 1)
    samples = 8 // degrees.get("data_shard", 1)
    raw["training"] = {**raw["training"], "micro_batch_size": samples // passes}
    sliced = {"data_replicate": 1, "data_shard": 1, "pipeline_schedule": "terapipe", "pipeline_slices": slices}
    raw["parallel"] = sliced | degrees
    for section, values in changed.items():
        raw[section] = {**raw[section], **values}
    return raw


TWO_RANKS = [
    run("real", 1, 2, {"pipeline": 2}),
    run("delinked", 2, 2, {"pipeline": 2}),
    run("pseudo", 2, 4, {"pipeline": 2}, model={"positions": "rotary", "heads": 4, "kv_heads": 2}),
    run("real", 1, 16, {"pipeline": 2}, model={"heads": 4, "kv_heads": 2}),
    run("real", 2, 4, {"pipeline": 2}, training={"recompute": "full"}),
    run("pseudo", 1, 4, {"pipeline": 2}, training={"recompute": "selective"}),
    run("delinked", 2, 4, {"pipeline": 2}, data={"document_mask": True, "end_of_text": 3}),
]
FOUR_RANKS = [
    run("delinked", 1, 4, {"pipeline": 4}),
    run("real", 2, 2, {"pipeline": 4}),
    run("delinked", 2, 4, {"pipeline": 2, "data_shard": 2}),
    run("real", 2, 4, {"pipeline": 2, "tensor": 2}),
]


@pytest.mark.parametrize(("ranks", "raws"), [(2, TWO_RANKS), pytest.param(4, FOUR_RANKS, marks=pytest.mark.slow)])
def test_slices_train_as_one_process_does(ranks: int, raws: list[dict[str, Any]]) -> None:
    found = on_ranks(ranks, "distributed.cases:many", raws)
    for number, raw in enumerate(raws):
        assert_equal([rank[number] for rank in found], wanted(raw), str(raw))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("document_end", [None, 3])
def test_gradients_of_slices_are_those_of_the_whole(recompute: Any, document_end: int | None) -> None:
    grouped = {"heads": 4, "kv_heads": 2, "document_end": document_end}
    config = ModelConfig(**{**DENSE, **grouped, "positions": "rotary", "qk_norm": True})
    model = Decoder(config, 24, torch.float64, Recompute(recompute)).double()
    initialize(model, 0)
    example = next_token_example(torch.randint(0, 8, (3, 25), generator=torch.Generator().manual_seed(1)))
    loss, _ = backward(model, example, torch.tensor(72), 16)
    want = {name: parameter.grad for name, parameter in model.named_parameters()}
    for slices in (2, 4, 24):
        model.zero_grad(set_to_none=True)
        cache, losses, length = SliceCache(example.inputs, 4, document_end), [], 24 // slices
        for first in range(0, 24, length):
            own = slice(first, first + length)
            part = example._replace(inputs=example.inputs[:, own], targets=example.targets[:, own])
            losses.append(loss_sum(model, model(part.inputs, cache)[0], part, 16) / 72)
        for each in reversed(losses):
            each.backward()
        torch.testing.assert_close(sum(losses).detach() * 72, loss, rtol=1e-12, atol=0)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, want[name], atol=1e-12, rtol=1e-10, msg=f"{slices}: {name}")


def test_a_step_sends_hidden_states_and_their_gradients_once_a_slice() -> None:
    for passes, slices in ((1, 4), (2, 8)):
        raw = run("pseudo", passes, slices, {"pipeline": 2})
        for rank in on_ranks(2, "parallel.cases_pipeline:sent", raw):
            assert rank["send"] == rank["recv_"] == passes * slices
            # The block and the embedding, which both hold, at once; then how many tokens count, the loss, the norm.
            assert rank["allreduce_"] == 1 + 3


@pytest.mark.parametrize(
    ("model", "degrees", "length", "said"),
    [
        (DENSE | {"objective": "masked"}, {}, 16, "is for decoders.* a position sees those behind it: .*1f1b"),
        (MIXTURE, {}, 16, "is for dense models.* model.moe.experts = 8"),
        (DENSE, {"context": 2}, 16, "does not go with context = 2: set it to 1"),
        (DENSE, {}, 18, "slices = 4 does not fit: sequences of 18 tokens do not divide into 4 slices"),
        (DENSE, {"tensor": 2}, 20, "do not divide into 4 slices of 2 tensor ranks' runs"),
    ],
)
def test_what_slices_cannot_do_is_refused(model: dict[str, Any], degrees: Any, length: int, said: str) -> None:
    config = ParallelConfig(pipeline_schedule="terapipe", pipeline=2)
    with pytest.raises(TenfoldError, match=said):
        check(Degrees(pipeline=2, **degrees), ModelConfig(**model), 8, 1, [length], config)
