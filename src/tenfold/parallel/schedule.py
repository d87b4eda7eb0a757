"""Training through pipeline stages: PyTorch's schedules (`torch.distributed.pipelining`) over the stages of a model.

Every rank of a pipeline has the same micro-batches, and makes positions, document starts and targets from them itself.
Between stages travel hidden states [B, S, D] and their gradients, in the dtype of activations, and nothing else: what
routing adds to the loss enters the gradient at each stage (`_AddLoss`), for its share of the mean is known to all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from tenfold.nn.decoder import Decoder
from tenfold.nn.objective import Example, balance_loss, loss_sum
from tenfold.nn.ranks import Stage
from tenfold.parallel.pipeline import StageRanks

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


class Passes:
    """The forward and backward passes of a step's micro-batches: `count` of them, between whose stages hidden states of
    `shape` travel."""

    def __init__(
        self,
        model: Decoder,
        ranks: StageRanks,
        schedule: str,
        count: int,
        shape: tuple[int, ...],
        device: torch.device,
    ) -> None:
        self._parts = [_Part(model, stage) for stage in ranks.mine]
        hidden = torch.empty(shape, dtype=model.dtype, device="meta", requires_grad=True)
        stages = [
            PipelineStage(
                part,
                part.stage.number,
                len(ranks.holders),
                device,
                input_args=() if part.stage.first else (hidden,),
                output_args=(torch.empty((), device="meta") if part.stage.last else hidden,),
                group=ranks.group,
                dw_builder=None if part.splits else _nothing_put_off,
            )
            for part in self._parts
        ]
        kind, self._count = SCHEDULES[schedule], count
        single = schedule in ("gpipe", "1f1b")
        self._schedule = kind(stages[0] if single else stages, count, loss_fn=lambda loss, _: loss, scale_grads=False)

    def run(self, micro_batches: Sequence[Example], valid_tokens: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
        """This rank's part of the summed loss and of statistics, as `Rank.run_passes` gives them."""
        for part in self._parts:
            part.begin(micro_batches, valid_tokens, chunk)
        numbers = torch.arange(self._count)
        # The last stage's output is its loss already, to be had by a schedule that is given some target.
        self._schedule.step(number=numbers, target=numbers, return_outputs=False)
        losses, statistics_LS = zip(*((part.loss, part.statistics_LS) for part in self._parts), strict=True)
        return sum(losses, start=losses[0].new_zeros(())), sum(statistics_LS[1:], start=statistics_LS[0])


def _nothing_put_off() -> Callable[[], None]:
    return lambda: None


class _Part(nn.Module):
    """One stage of `model`, as a schedule calls it: with the number of a micro-batch and, but for the first, the hidden
    states of the stage before. The last gives the loss, as a share of the step's mean."""

    def __init__(self, model: Decoder, stage: Stage) -> None:
        super().__init__()
        self._model, self.stage = (model,), stage  # no module of this one: schedules leave FSDP to `parallel.data`
        self.loss, self.statistics_LS = torch.zeros(()), torch.zeros(())

    @property
    def splits(self) -> bool:
        """Whether gradients of weights can be had after those of hidden states, where a schedule puts them off.

        PyTorch finds the one apart from the other in graphs where a weight is used once; what is recomputed would be
        so twice. Else both are made together.
        """
        layers = [self._model[0].layers.get_submodule(str(layer)) for layer in self.stage.layers]
        used = [parameter for layer in layers for parameter in layer.parameters()]
        return len(set(used)) == len(used) and all(getattr(layer, "recompute", "none") == "none" for layer in layers)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The model's. Those that the stage does not use do not disturb a schedule."""
        return self._model[0].parameters(recurse)

    def begin(self, micro_batches: Sequence[Example], valid_tokens: Tensor, chunk: int) -> None:
        """Before a step."""
        self._micro_batches, self._valid_tokens, self._chunk = micro_batches, valid_tokens, chunk
        self.loss = self.statistics_LS = torch.zeros((), device=valid_tokens.device)

    def forward(self, x_BSD: Tensor | None = None, *, number: Tensor) -> Tensor:
        (model,), part = self._model, self._micro_batches[int(number)]
        if x_BSD is not None:
            x_BSD = _Received.apply(x_BSD)
        x_BSD, statistics_LS = model(part.inputs, stage=self.stage, x_BTD=x_BSD)
        assert x_BSD is not None
        self.statistics_LS = self.statistics_LS + statistics_LS.detach()
        routing = balance_loss(model, statistics_LS)
        if self.stage.last:
            loss = loss_sum(model, x_BSD, part, self._chunk)
            self.loss = self.loss + loss.detach()
            return (loss if routing is None else loss + routing) / self._valid_tokens
        if routing is not None and routing.requires_grad:
            x_BSD = _AddLoss.apply(x_BSD, routing / self._valid_tokens)
        # What is sent lies in order, and may be cut off from its graph in place.
        sent: Tensor = x_BSD.contiguous()
        return sent.clone() if sent._is_view() else sent


class _Received(torch.autograd.Function):
    """Hidden states of the stage before; their gradient, which is sent back to it, lies in order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()


class _AddLoss(torch.autograd.Function):
    """`x`, with `loss` as a part of what its gradient is of: the gradient of the loss is one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype = loss.dtype
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones((), dtype=ctx.dtype, device=grad.device)
