"""Rows on their way to the experts of other ranks and back, one prototype after the other (M6-T, arXiv 2105.15082).

While the rows of one prototype are computed those of the next come in, and those of the one before go home; so too in
the backward pass, which sends everything once more the other way. The autograd functions here come in pairs: the first
starts an exchange, the second waits for it; in the backward pass the second starts, and the first waits. What ties the
two together in autograd's eyes is a tensor without elements, a ticket: rows under way are nobody's to touch.

A row travels with its gate, whose bits are the last columns, so that a prototype costs two exchanges each way and
nothing of the experts' results is kept for the gates' gradient.

With tensor ranks each holds a part F of every expert and has rows of its own tokens: what arrived is gathered over
them, padded to the largest count, and of the partial sums each gets back its rows.

Shapes: N tokens, C choices of a token, R rows that this rank sends, A rows that its experts get, D hidden, X = D and
the columns of the gate, P experts of a prototype on one rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tenfold.nn.grouped import Rows, feed_forward_rows, sum_of_rows
from tenfold.parallel.collectives import all_gather

# PyTorch 2.13 warns of the name that 2.12 and before know it by.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Plan:
    """How the rows of one prototype go."""

    rows: slice
    """Which of the rows of this rank they are."""
    out: list[int]
    """How many go to each expert rank."""
    into: list[int]
    """How many come from each."""
    most: int
    """The most that come to any tensor rank of this expert rank."""
    order: Tensor
    """[A] For each row, sorted by expert, where it stands among those that arrived."""
    per_expert: Tensor
    """[P] How many rows each expert of this rank has of the prototype."""


def plans_of(told: Tensor, tensor: int, device: torch.device) -> list[Plan]:
    """The plans of every prototype. `told` [1 + tensor ranks, expert ranks, Z, P] (on the CPU) has the rows that this
    rank sends to each expert of each rank, then those that come, by the rank and tensor rank that sends them, for each
    of this rank's experts; `tensor` is which of these this rank is."""
    plans, first = [], 0
    for sent_RP, come_TRP in zip(told[0].unbind(1), told[1:].unbind(2), strict=True):
        out, into = sent_RP.sum(1).tolist(), come_TRP[tensor].sum(1).tolist()
        most = int(come_TRP.sum((1, 2)).max())
        # Runs of rows as they arrive, tensor rank by tensor rank: where each starts. Then the same by expert.
        ends = come_TRP.flatten(1).cumsum(1).view_as(come_TRP)
        starts = ends - come_TRP + torch.arange(len(come_TRP))[:, None, None] * most
        starts, sizes = (each.permute(2, 0, 1).flatten() for each in (starts, come_TRP))
        shifts, sizes = (starts - (sizes.cumsum(0) - sizes)).to(device), sizes.to(device)
        count = int(come_TRP.sum())
        order_A = torch.repeat_interleave(shifts, sizes, output_size=count) + torch.arange(count, device=device)
        rows = slice(first, first + sum(out))
        plans.append(Plan(rows, out, into, most, order_A, come_TRP.sum((0, 1)).to(device)))
        first = rows.stop
    return plans


class _Flight:
    """An exchange under way: rows of `x`, `out` to each rank, for rows of `buffer`, `into` from each."""

    def __init__(self, x: Tensor, out: list[int], buffer: Tensor, into: list[int], group: dist.ProcessGroup) -> None:
        self._going, self.coming = x, buffer  # neither may be freed under way
        self._work = dist.all_to_all_single(buffer, x, into, out, group=group, async_op=True)

    def wait(self) -> Tensor:
        """What came."""
        self._work.wait()
        return self.coming


@dataclass
class Exchange:
    """What one forward pass of a layer, and the backward pass of it, have under way."""

    group: dist.ProcessGroup
    """The expert ranks."""
    tensor: dist.ProcessGroup | None
    """Tensor ranks that have other tokens, and other parts of the experts."""
    plans: list[Plan]
    rows: Rows
    gates: torch.dtype
    flights: dict[tuple[str, int], _Flight] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)

    def send(self, name: str, number: int, x: Tensor) -> Tensor:
        """Start rows of a prototype on their way to its experts; a ticket."""
        plan = self.plans[number]
        buffer = x.new_empty(sum(plan.into), x.shape[1])
        self.flights[name, number] = _Flight(x, plan.out, buffer, plan.into, self.group)
        return x.new_empty(0)

    def return_(self, name: str, number: int, x: Tensor) -> Tensor:
        """Start rows of a prototype on their way home, where they stand in one memory with those of the others; a
        ticket."""
        plan = self.plans[number]
        if name not in self.buffers:
            self.buffers[name] = x.new_empty(self.plans[-1].rows.stop, x.shape[1])
        buffer = self.buffers[name][plan.rows]
        self.flights[name, number] = _Flight(x, plan.into, buffer, plan.out, self.group)
        return x.new_empty(0)

    def wait(self, name: str, number: int) -> Tensor:
        """What came of a prototype."""
        return self.flights.pop((name, number)).wait()

    def home(self, name: str) -> Tensor:
        """All rows that came home."""
        for number in range(len(self.plans)):
            self.wait(name, number)
        return self.buffers.pop(name)

    def gather(self, x: Tensor, most: int) -> Tensor:
        """Rows that arrived, those of all tensor ranks."""
        if self.tensor is None:
            return x
        return all_gather(_padded(x, most), self.tensor).flatten(0, 1)

    def scatter(self, x_AD: Tensor, plan: Plan) -> Tensor:
        """Rows sorted by expert as they arrived; with tensor ranks their sum over these, of the rows of this one."""
        if self.tensor is None:
            return torch.empty_like(x_AD).index_copy_(0, plan.order, x_AD)
        padded = x_AD.new_zeros(self.tensor.size() * plan.most, *x_AD.shape[1:]).index_copy_(0, plan.order, x_AD)
        # Not that of `collectives`, whose results selective recompute keeps: no gradient needs what experts return.
        own = x_AD.new_empty(plan.most, *x_AD.shape[1:])
        _reduce_scatter(own, padded, group=self.tensor)
        return own[: sum(plan.into)]

    def compute(self, gate: Tensor | None, up: Tensor, down: Tensor, *tickets: Tensor) -> Tensor:
        """What the experts, whose matrices are given, make of what is on its way, summed by token."""
        prototypes = len(self.plans)
        gates = [None] * prototypes if gate is None else _by_prototype(gate, prototypes)
        ups, downs, home = _by_prototype(up, prototypes), _by_prototype(down, prototypes), []
        for number, plan in enumerate(self.plans):
            x_AD, gates_A = _Arrive.apply(tickets[number], self, number)
            y_AD = feed_forward_rows(x_AD, gates_A, gates[number], ups[number], downs[number], plan.per_expert)
            home.append(_Return.apply(y_AD, self, number))
        out: Tensor = _Combine.apply(self, *home)
        return out


def send_rows(x_ND: Tensor, gates_NC: Tensor, exchange: Exchange) -> tuple[Tensor, ...]:
    """Start the rows of every prototype on their way; the tickets for `Exchange.compute`."""
    out: tuple[Tensor, ...] = _Send.apply(x_ND, gates_NC, exchange)
    return out


class _Send(torch.autograd.Function):
    """Tokens and gates, row by row, on their way to the experts."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, gates_NC: Tensor, exchange: Exchange) -> tuple[Tensor, ...]:
        rows = exchange.rows
        ctx.save_for_backward(rows.choices, rows.by_token, rows.starts)
        ctx.exchange, ctx.gates_shape, ctx.width = exchange, gates_NC.shape, x_ND.shape[1]
        flat, tickets = gates_NC.flatten(), []
        for number, plan in enumerate(exchange.plans):
            row_RX = _with_room(x_ND, plan.rows.stop - plan.rows.start, flat.dtype)
            torch.index_select(x_ND, 0, rows.tokens[plan.rows], out=row_RX[:, : ctx.width])
            row_RX[:, ctx.width :] = _bits(flat.index_select(0, rows.choices[plan.rows]), x_ND.dtype)
            tickets.append(exchange.send("rows", number, row_RX))
        return tuple(tickets)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, Tensor, None]:
        choice_R, row_R, start_N = ctx.saved_tensors
        grad_RX = ctx.exchange.home("gradients of rows")
        grad_gates_R = _from_bits(grad_RX[:, ctx.width :], ctx.exchange.gates)
        grad_gates = grad_gates_R.new_zeros(ctx.gates_shape.numel()).scatter_(0, choice_R, grad_gates_R)
        return sum_of_rows(grad_RX[:, : ctx.width], row_R, start_N), grad_gates.view(ctx.gates_shape), None


class _Arrive(torch.autograd.Function):
    """What arrived of a prototype, sorted by expert: the rows [A, D] and their gates [A]."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, exchange: Exchange, number: int) -> tuple[Tensor, Tensor]:
        plan = exchange.plans[number]
        row_AX = exchange.gather(exchange.wait("rows", number), plan.most).index_select(0, plan.order)
        width = row_AX.shape[1] - _columns(exchange.gates, row_AX.dtype)
        ctx.exchange, ctx.number = exchange, number
        return row_AX[:, :width].contiguous(), _from_bits(row_AX[:, width:], exchange.gates)

    @staticmethod
    def backward(ctx: Any, grad_AD: Tensor, grad_gates_A: Tensor) -> tuple[Tensor, None, None]:
        exchange, plan = ctx.exchange, ctx.exchange.plans[ctx.number]
        # Summed over the tensor ranks apart: bits do not add up.
        grad, grad_gates = exchange.scatter(grad_AD, plan), exchange.scatter(grad_gates_A, plan)
        packed = torch.cat((grad, _bits(grad_gates, grad.dtype)), 1)
        return exchange.return_("gradients of rows", ctx.number, packed), None, None


class _Return(torch.autograd.Function):
    """The experts' results of a prototype on their way home."""

    @staticmethod
    def forward(ctx: Any, y_AD: Tensor, exchange: Exchange, number: int) -> Tensor:
        ctx.exchange, ctx.number = exchange, number
        return exchange.return_("results", number, exchange.scatter(y_AD, exchange.plans[number]))

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None, None]:
        plan = ctx.exchange.plans[ctx.number]
        grad = ctx.exchange.gather(ctx.exchange.wait("gradients of results", ctx.number), plan.most)
        return grad.index_select(0, plan.order), None, None


class _Combine(torch.autograd.Function):
    """The sum of the results of each token, once they are home."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *_: Tensor) -> Tensor:
        # Saved though the exchange has it: so a second run of the forward pass goes on until nothing is under way.
        ctx.save_for_backward(exchange.rows.tokens)
        ctx.exchange = exchange
        return sum_of_rows(exchange.home("results"), exchange.rows.by_token, exchange.rows.starts)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        (token_R,), exchange = ctx.saved_tensors, ctx.exchange
        tickets: list[Tensor | None] = [None] * len(exchange.plans)
        for number, plan in reversed(list(enumerate(exchange.plans))):  # the order in which they are used
            rows = grad_ND.index_select(0, token_R[plan.rows])
            tickets[number] = exchange.send("gradients of results", number, rows)
        return None, *tickets


def _by_prototype(weight: Tensor, prototypes: int) -> tuple[Tensor, ...]:
    # All at once: the gradient of a slice is as large as the whole.
    return (weight,) if prototypes == 1 else weight.unflatten(0, (prototypes, -1)).unbind()


def _columns(gates: torch.dtype, rows: torch.dtype) -> int:
    return gates.itemsize // rows.itemsize


def _with_room(x_ND: Tensor, rows: int, gates: torch.dtype) -> Tensor:
    return x_ND.new_empty(rows, x_ND.shape[1] + _columns(gates, x_ND.dtype))


def _bits(gates_R: Tensor, dtype: torch.dtype) -> Tensor:
    return gates_R.contiguous()[:, None].view(dtype)


def _from_bits(bits: Tensor, dtype: torch.dtype) -> Tensor:
    return bits.contiguous().view(dtype)[:, 0].contiguous()


def _padded(x: Tensor, length: int) -> Tensor:
    out = x.new_zeros(length, *x.shape[1:])
    out[: len(x)] = x
    return out
