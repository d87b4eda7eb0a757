"""The order in which pipeline ranks work, against PyTorch's own schedules and a recording of ours."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.testing._internal.distributed.fake_pg import FakeStore

from tenfold.parallel.schedule import SCHEDULES
from tenfold.parallel.slices import SlicedPasses
from tenfold.planning.orders import Action, order_of

NAMES: dict[str, Any] = {"F": "forward", "B": "backward", "I": "input", "W": "weight"}


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "interleaved-zero-bubble", "zbv"])
@pytest.mark.parametrize(("ranks", "micro_batches", "chunks"), [(2, 4, 2), (4, 8, 2), (3, 6, 3), (4, 4, 2)])
def test_interleaved_orders_are_those_of_pytorchs_objects(
    schedule: Any, ranks: int, micro_batches: int, chunks: int
) -> None:
    chunks = 2 if schedule == "zbv" else chunks
    count = ranks * chunks
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        numbers = (0, count - 1) if schedule == "zbv" else range(0, count, ranks)
        like = torch.empty(1, device="meta")
        stages = [
            PipelineStage(
                torch.nn.Identity(), number, count, torch.device("cpu"), input_args=(like,), output_args=(like,)
            )
            for number in numbers
        ]
        made = SCHEDULES[schedule](stages, micro_batches, loss_fn=lambda loss, _: loss, scale_grads=False)
    finally:
        dist.destroy_process_group()
    for rank, actions in made.pipeline_order_with_comms.items():
        theirs = [
            Action(NAMES[action.computation_type.value], action.stage_index, action.microbatch_index)
            for action in actions
            if action.computation_type.value in NAMES
        ]
        assert list(order_of(schedule, rank, ranks, micro_batches, chunks)) == theirs
    assert len(made.pipeline_order_with_comms) == ranks


class _Recording:
    """A stage that notes what it is told to do."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.stage_index, self.num_stages, self.submod = rank, ranks, torch.nn.Identity()
        self.is_first, self.is_last, self.has_backward = rank == 0, rank == ranks - 1, True
        self.group_size, self.group_rank, self.noted = ranks, rank, []
        self.chunks = None

    def forward_one_chunk(self, number: int, *_: Any, **__: Any) -> None:
        self.noted.append(Action("forward", self.stage_index, number))

    def backward_one_chunk(self, number: int, **_: Any) -> None:
        self.noted.append(Action("backward", self.stage_index, number))

    def __getattr__(self, name: str) -> Any:  # all messages are none
        return lambda *_, **__: []


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (2, 5), (4, 4), (4, 9)])
def test_orders_of_one_stage_a_rank_are_what_pytorchs_schedules_do(
    schedule: Any, ranks: int, micro_batches: int
) -> None:
    for rank in range(ranks):
        stage = _Recording(rank, ranks)
        kind = SCHEDULES[schedule]
        made = kind.__new__(kind)
        made.__dict__ |= {"_stage": stage, "_n_microbatches": micro_batches, "_num_stages": ranks, "scale_grads": False}
        nothing = dict.fromkeys(
            ("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses"), mock.Mock()
        )
        with mock.patch.multiple(kind, **nothing):
            made._step_microbatches([()] * micro_batches, [{}] * micro_batches)
        assert stage.noted == list(order_of(schedule, rank, ranks, micro_batches))


class _Noting(SlicedPasses):
    """Our own passes slice by slice, of which only the order is left."""

    def __init__(self, rank: int, ranks: int, slices: int) -> None:
        self._slices, self._stages = slices, ranks
        self._stage: Any = SimpleNamespace(number=rank, first=rank == 0, last=rank == ranks - 1)
        self._sent, self.noted = {}, list[Action]()

    def _forward(self, number: int, x_BSD: Any) -> Any:
        self.noted.append(Action("forward", self._stage.number, *divmod(number, self._slices)))

    def _backward(self, number: int, grad: Any) -> Any:
        place, index = divmod(number, self._slices)
        self.noted.append(Action("backward", self._stage.number, place, self._slices - 1 - index))

    def _exchange(self, peer: Any, given: Any, receive: bool) -> Any:
        return None


@pytest.mark.parametrize(("ranks", "micro_batches", "slices"), [(2, 1, 2), (2, 3, 4), (4, 2, 4)])
def test_slices_go_in_the_order_of_our_own_passes(ranks: int, micro_batches: int, slices: int) -> None:
    for rank in range(ranks):
        passes = _Noting(rank, ranks, slices)
        passes.run([cast("Any", ())] * micro_batches, torch.zeros(()), 1)
        assert passes.noted == list(order_of("terapipe", rank, ranks, micro_batches, slices=slices))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv"])
def test_every_pass_of_every_stage_is_made_once(schedule: Any) -> None:
    found = [action for rank in range(4) for action in order_of(schedule, rank, 4, 8)]
    stages = 4 if schedule in ("gpipe", "1f1b") else 8
    assert len(set(found)) == len(found)
    assert len([action for action in found if action.kind == "forward"]) == stages * 8
    assert len([action for action in found if action.kind in ("backward", "input")]) == stages * 8
