"""Training through pipeline stages slice by slice of a sequence (TeraPipe, Li et al. 2021, arXiv 2102.07988).

A position sees none behind it, so a stage may work on a slice of every sequence while the next works on the slice
before. Slices go forward in order, with the keys and values of those before (`nn.slices`), and backward in the opposite
order. Forward and backward passes take turns as in 1F1B, a whole micro-batch of slices later: the last stage must have
all of a sequence before it goes back, and of p stages and n slices a stage keeps at most n + p - 1 slices.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tenfold.nn.decoder import Decoder
from tenfold.nn.objective import Example, loss_sum
from tenfold.nn.slices import SliceCache
from tenfold.parallel.pipeline import StageRanks


class SlicedPasses:
    """The forward and backward passes of a step's micro-batches of a dense decoder, each in `slices` slices, between
    whose stages hidden states of `shape` travel."""

    def __init__(
        self, model: Decoder, ranks: StageRanks, slices: int, shape: tuple[int, ...], device: torch.device
    ) -> None:
        self._model, self._group, self._slices, self._device = model, ranks.group, slices, device
        (self._stage,), self._stages = ranks.mine, len(ranks.holders)
        self._shape = shape
        self._sent: dict[int, list[tuple[dist.Work, list[dist.P2POp]]]] = {}

    def run(self, micro_batches: Sequence[Example], valid_tokens: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
        """This rank's part of the summed loss and of statistics, as `Rank.run_passes` gives them."""
        self._micro_batches, self._valid_tokens, self._chunk = micro_batches, valid_tokens, chunk
        self._caches: dict[int, SliceCache] = {}
        self._passed: dict[int, tuple[Tensor | None, Tensor]] = {}
        self._loss = self._statistics_LS = torch.zeros((), device=valid_tokens.device)
        number, count = self._stage.number, len(micro_batches) * self._slices
        before, after = None if self._stage.first else number - 1, None if self._stage.last else number + 1

        # A backward pass comes so many turns behind the forward pass of the same number. One stage's exchange with the
        # next is that one's with it in the turn before, so each message has its place in one order of all of them.
        behind = self._slices - 1 + self._stages - 1 - number
        x_BSD = self._exchange(before, None, receive=True)
        for turn in range(count + behind):
            out = self._forward(turn, x_BSD) if turn < count else None
            grad = self._exchange(after, out, receive=turn >= behind)
            grad = self._backward(turn - behind, grad) if turn >= behind else None
            x_BSD = self._exchange(before, grad, receive=turn + 1 < count)
        for peer in tuple(self._sent):
            self._wait(peer)
        return self._loss, self._statistics_LS

    def _forward(self, number: int, x_BSD: Tensor | None) -> Tensor:
        """Slice `number` of all, through this stage: hidden states, or their share of the step's mean loss."""
        place, index = divmod(number, self._slices)
        model, stage, part = self._model, self._stage, self._micro_batches[place]
        if index == 0:
            self._caches[place] = SliceCache(part.inputs, len(stage.layers), model.config.document_end)
        length = part.inputs.shape[1] // self._slices
        own = slice(index * length, (index + 1) * length)
        piece = Example(part.inputs[:, own], part.targets[:, own])
        if x_BSD is not None:
            x_BSD.requires_grad_()
        out, statistics_LS = model(piece.inputs, self._caches[place], stage, x_BSD)
        self._statistics_LS = self._statistics_LS + statistics_LS.detach()
        if stage.last:
            loss = loss_sum(model, out, piece, self._chunk)
            self._loss = self._loss + loss.detach()
            out = loss / self._valid_tokens
        self._passed[number] = x_BSD, out
        return out

    def _backward(self, number: int, grad: Tensor | None) -> Tensor | None:
        """Backward pass `number` of all, of a sequence's last slice first: the gradient of what the stage was given."""
        place, index = divmod(number, self._slices)
        x_BSD, out = self._passed.pop(place * self._slices + self._slices - 1 - index)
        if index == self._slices - 1:
            del self._caches[place]
        torch.autograd.backward(out, grad)
        return None if x_BSD is None else x_BSD.grad

    def _exchange(self, peer: int | None, given: Tensor | None, receive: bool) -> Tensor | None:
        """Send `given`, if there is any, to the stage `peer`, and receive from it if so told; None is no stage."""
        if peer is None:
            return None
        self._wait(peer)
        operations, got = [], None
        if receive:
            got = torch.empty(self._shape, dtype=self._model.dtype, device=self._device)
            operations.append(dist.P2POp(dist.irecv, got, group=self._group, group_peer=peer))
        if given is not None:
            sent = given.detach().contiguous()
            operations.append(dist.P2POp(dist.isend, sent, group=self._group, group_peer=peer))
        works = dist.batch_isend_irecv(operations) if operations else []
        if receive:  # of a backend that takes all as one, the only one
            works.pop(0).wait()
        self._sent[peer] = [(work, operations) for work in works]
        return got

    def _wait(self, peer: int) -> None:
        """Until what was last sent to a stage is on its way, and its memory free."""
        for work, _ in self._sent.pop(peer, []):
            work.wait()
