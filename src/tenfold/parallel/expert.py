"""Expert ranks: each has an equal part of the experts of every prototype, and tokens travel to them (`exchange`).

Tensor ranks split every expert inside. Without expert ranks they gather the tokens, as for any feed-forward, and the
partial sums are scattered by token; with them rows are sent first and gathered where they arrive. Either way each
token is routed by one rank, and its gates' gradient, summed over the parts of the experts, comes back to that one.

Shapes: B sequences, N tokens of this rank, C choices of a token, U runs of positions, E experts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from tenfold.config.model import ModelConfig
from tenfold.nn.grouped import Rows, keep_rows, sort_rows
from tenfold.nn.moe import Experts
from tenfold.nn.ranks import ExpertRanks, TensorRanks
from tenfold.parallel.collectives import all_gather, all_reduce
from tenfold.parallel.exchange import Exchange, Plan, plans_of, send_rows
from tenfold.parallel.mesh import Mesh
from tenfold.parallel.zigzag import order_of_runs


class ExpertGroup(ExpertRanks):
    """This rank's experts and the others of `mesh`, whose tensor ranks are `tensor`."""

    exchange = Exchange
    """How rows travel."""

    def __init__(self, mesh: Mesh, config: ModelConfig, tensor: TensorRanks) -> None:
        degrees = mesh.degrees
        self.size, self.rank = degrees.expert, mesh.place["expert"]
        self._config, self._tensor = config.moe, tensor
        self._group = mesh.group("expert") if degrees.expert > 1 else None
        self._tensor_group = mesh.group("tensor") if degrees.tensor > 1 else None
        self._context_group = mesh.group("context") if degrees.context > 1 else None
        self._runs = order_of_runs(degrees.context, degrees.tensor)
        self._place = (mesh.place["context"], mesh.place["tensor"])

    @property
    def runs(self) -> int:
        return self._runs.shape[2] if torch.is_grad_enabled() else 1

    def loads(self, loads_BE: Tensor) -> Tensor:
        if torch.is_grad_enabled():  # else this rank has whole sequences
            for group in self._sequence_groups():
                loads_BE = all_reduce(loads_BE, group)
        return loads_BE

    def before(self, loads_BUE: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().before(loads_BUE)
        every = loads_BUE
        for group in self._sequence_groups():
            every = all_gather(every, group)
        batch, runs, experts = loads_BUE.shape
        loads_OBE = every.view(-1, batch, runs, experts).transpose(1, 2).flatten(0, 1)  # as `order_of_runs` counts
        order = self._runs.flatten().to(loads_BUE.device)
        inverse = order.argsort()
        in_order = loads_OBE[inverse]
        before = (in_order.cumsum(0) - in_order)[order].view(*self._runs.shape, batch, experts)
        return before[self._place].transpose(0, 1)

    def _sequence_groups(self) -> list[dist.ProcessGroup]:
        return [group for group in (self._tensor_group, self._context_group) if group is not None]

    def tell(self, choice_NC: Tensor, rows: Rows) -> Tensor:
        if self._group is not None:
            return self._tell_counts(rows, self._group)
        if self._tensor_group is None or not torch.is_grad_enabled():
            return super().tell(choice_NC, rows)
        if self._config.capacity != "dropless":  # what was dropped is no expert's
            served = choice_NC.flatten()[rows.choices]
            choice_NC = torch.full_like(choice_NC, -1).flatten().scatter_(0, rows.choices, served).view_as(choice_NC)
        return all_gather(choice_NC, self._tensor_group).flatten(0, 1)

    def apply(
        self,
        experts: Experts,
        x_ND: Tensor,
        gates_NC: Tensor,
        rows: Rows,
        told: Tensor,
        shared: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        if self._group is not None:
            return self._exchange(experts, x_ND, gates_NC, rows, told, shared, self._group)
        if self._tensor_group is None:
            return super().apply(experts, x_ND, gates_NC, rows, told, shared)
        if torch.is_grad_enabled():
            rows = sort_rows(told.clamp(min=0), self._config.experts)
            if self._config.capacity != "dropless":
                rows = keep_rows(rows, (told >= 0).flatten()[rows.choices], told)
        x_ND, gates_NC = (self._tensor.gather(each[None])[0] for each in (x_ND, gates_NC))
        y_ND = self._sum(super().apply(experts, x_ND, gates_NC, rows, told))
        return y_ND if shared is None else y_ND + shared()

    # How large what comes is depends on the data: nothing for the compiler.
    @torch.compiler.disable
    def _tell_counts(self, rows: Rows, group: dist.ProcessGroup) -> Tensor:
        """As `plans_of` wants it, on the CPU; there for a second run of the forward pass too."""
        sent = rows.per_expert.view(self._config.prototypes, self.size, -1).transpose(0, 1).contiguous()
        come = torch.empty_like(sent)
        dist.all_to_all_single(come, sent, group=group)
        over_tensor = self._over_tensor()
        every = come[None] if over_tensor is None else all_gather(come, over_tensor)
        return torch.cat((sent[None], every)).cpu()

    @torch.compiler.disable
    def _exchange(
        self,
        experts: Experts,
        x_ND: Tensor,
        gates_NC: Tensor,
        rows: Rows,
        told: Tensor,
        shared: Callable[[], Tensor] | None,
        group: dist.ProcessGroup,
    ) -> Tensor:
        over_tensor = self._over_tensor()
        plans = self._plans(told, 0 if over_tensor is None else self._tensor.rank, x_ND.device)
        exchange = self.exchange(group, over_tensor, plans, rows, gates_NC.dtype)
        tickets = send_rows(x_ND, gates_NC, exchange)
        shared_ND = None if shared is None else shared()  # while rows are on their way
        y_ND: Tensor = experts(*tickets, through=exchange.compute)
        # Without gradients all tensor ranks have the same tokens, and sums over their own parts of the experts.
        if self._tensor_group is not None and not torch.is_grad_enabled():
            y_ND = self._sum(y_ND)
        return y_ND if shared_ND is None else y_ND + shared_ND

    def _plans(self, told: Tensor, tensor: int, device: torch.device) -> list[Plan]:
        return plans_of(told, tensor, device)

    def _over_tensor(self) -> dist.ProcessGroup | None:
        """The tensor ranks where these have tokens of their own."""
        return self._tensor_group if torch.is_grad_enabled() else None

    def _sum(self, y_ND: Tensor) -> Tensor:
        """This rank's tokens of the sum over the tensor ranks."""
        return self._tensor.sum(y_ND[None])[0]
