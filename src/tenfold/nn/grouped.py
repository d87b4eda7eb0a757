"""The experts' feed-forwards on rows sorted by expert, forward and backward, and the passes to rows and back.

How the products are made, by device:

* CUDA, bf16, from compute capability 8 on, rows of 16 bytes: PyTorch's grouped product, without a word to the host.
* everywhere else: one product for each expert that has rows, written in place into the result. The experts are taken
  in blocks of at most `PIECE_ROWS` rows, and everything that is done to a block is done while it is in the cache:
  the products up, the activation, the product down. On a CPU of several threads the blocks are done side by side, each
  by one (`nn.workers`). PyTorch's own grouped product for the CPU is the same loop with all threads on one product, and
  can neither add to a result nor be cut into blocks.

Shapes: N tokens, C choices of a token, R rows, D hidden, F expert width, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tenfold.nn.products import product_dtype
from tenfold.nn.workers import work_off, workers_of

PIECE_ROWS = 1024
TASKS = 4  # for each worker, that the last to be done be small


class Rows(NamedTuple):
    """Which rows there are, and where the choices of each token stand among them."""

    choices: Tensor
    """[R] For each row the choice that it serves: token * C + choice."""
    tokens: Tensor
    """[R] For each row its token."""
    by_token: Tensor
    """[R] The rows in the order of the tokens: those of token 0, those of token 1, and so on."""
    starts: Tensor
    """[N] Where in `by_token` each token's rows begin."""
    per_expert: Tensor
    """[E] How many rows each expert has; they stand by expert, from expert 0 on."""


def sort_rows(choice_NC: Tensor, experts: int) -> Rows:
    """Every choice becomes a row. The sort is stable: within an expert rows keep the order of the text."""
    tokens, choices = choice_NC.shape
    choice_R = choice_NC.to(torch.int32).flatten().argsort(stable=True)
    row_R = torch.empty_like(choice_R).scatter_(0, choice_R, torch.arange(len(choice_R), device=choice_R.device))
    start_N = torch.arange(0, tokens * choices, choices, device=choice_R.device)
    rows_E = torch.bincount(choice_NC.flatten(), minlength=experts)
    return Rows(choice_R, choice_R // choices, row_R, start_N, rows_E)


def keep_rows(rows: Rows, kept_R: Tensor, choice_NC: Tensor) -> Rows:
    """Those of the rows that `kept_R` (bool) names."""
    choice_R = rows.choices[kept_R]
    kept_by_choice = torch.zeros_like(kept_R).scatter_(0, rows.choices, kept_R)
    # A kept row moves up by the dropped ones before it.
    row_R = (kept_R.cumsum(0) - 1)[rows.by_token[kept_by_choice]]
    count_N = kept_by_choice.view_as(choice_NC).sum(1)
    rows_E = torch.bincount(choice_NC.flatten()[choice_R], minlength=len(rows.per_expert))
    return Rows(choice_R, rows.tokens[kept_R], row_R, count_N.cumsum(0) - count_N, rows_E)


def sum_of_rows(x_RD: Tensor, row_R: Tensor, start_N: Tensor) -> Tensor:
    """For each token the sum of its rows, in one pass; tokens may have none."""
    return F.embedding_bag(row_R, x_RD, start_N, mode="sum")


class _Dispatch(torch.autograd.Function):
    """Copy each token, and each gate, to its rows. Dispatch and combine are each other's gradient, and both are plain
    look-ups: exact and deterministic on any number of threads, where the gradient of an index would scatter."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, gates_NC: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(rows.choices, rows.by_token, rows.starts)
        ctx.gates_shape = gates_NC.shape
        return x_ND.index_select(0, rows.tokens), gates_NC.flatten().index_select(0, rows.choices)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor, grad_gates_R: Tensor) -> tuple[Tensor, Tensor, None]:
        choice_R, row_R, start_N = ctx.saved_tensors
        grad_gates = grad_gates_R.new_zeros(ctx.gates_shape.numel()).scatter_(0, choice_R, grad_gates_R)
        return sum_of_rows(grad_RD, row_R, start_N), grad_gates.view(ctx.gates_shape), None


class _Combine(torch.autograd.Function):
    """Sum the rows of each token."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, rows: Rows) -> Tensor:
        ctx.save_for_backward(rows.tokens)
        return sum_of_rows(x_RD, rows.by_token, rows.starts)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None]:
        (token_R,) = ctx.saved_tensors
        return grad_ND.index_select(0, token_R), None


def dispatch(x_ND: Tensor, gates_NC: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """The tokens and their gates, row by row: [R, D] and [R]."""
    out: tuple[Tensor, Tensor] = _Dispatch.apply(x_ND, gates_NC, rows)
    return out


def combine(x_RD: Tensor, rows: Rows) -> Tensor:
    """The sum of the rows of each token, [N, D]."""
    out: Tensor = _Combine.apply(x_RD, rows)
    return out


def feed_forward_rows(
    x_RD: Tensor, gates_R: Tensor, gate_EDF: Tensor | None, up_EDF: Tensor, down_EFD: Tensor, rows_E: Tensor
) -> Tensor:
    """Each row through the feed-forward of its expert (SwiGLU, or GELU without `gate_EDF`), times its gate.

    `rows_E` (int64) tells how many of the rows, from the first, belong to expert 0, to expert 1, and so on; experts
    may have none. Result [R, D] in the dtype of x. Of what is computed on the way only the products up are kept for
    the backward pass. On a CPU without a bf16 unit bf16 rows are multiplied by the fp32 weights as they are: to round
    those first, as a unit would, is a pass over every expert's.
    """
    dtype = product_dtype(x_RD)
    gate, up, down = (None if each is None else each.to(dtype) for each in (gate_EDF, up_EDF, down_EFD))
    out: Tensor = _FeedForwardRows.apply(x_RD.to(dtype), gates_R, gate, up, down, rows_E)
    return out.to(x_RD.dtype)


class _FeedForwardRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_RD: Tensor, gates_R: Tensor, gate: Tensor | None, up: Tensor, down: Tensor, rows_E: Tensor
    ) -> Tensor:
        y_RD, a_RF, b_RF = _forward(x_RD, gates_R, gate, up, down, rows_E)
        ctx.save_for_backward(x_RD, gates_R, gate, up, down, rows_E, a_RF, b_RF)
        return y_RD

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        x_RD, gates_R, gate, up, down, rows_E, a_RF, b_RF = ctx.saved_tensors
        grads = _backward(grad_RD.contiguous(), x_RD, gates_R, gate, up, down, rows_E, a_RF, b_RF)
        return *grads[:2], None if gate is None else grads[2], *grads[3:], None


# Operators of our own, so that torch.compile and fake tensors see one call and no counts.
@torch.library.custom_op("tenfold::experts", mutates_args=())
def _forward(
    x_RD: Tensor, gates_R: Tensor, gate: Tensor | None, up: Tensor, down: Tensor, rows_E: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and the products that the backward pass needs: a = x gate (empty for GELU) and b = x up."""
    rows, width = len(x_RD), up.shape[2]
    b_RF = x_RD.new_empty(rows, width)
    a_RF = x_RD.new_empty(0 if gate is None else rows, width)
    y_RD = torch.empty_like(x_RD)
    gates_R1 = gates_R.to(x_RD.dtype)[:, None]
    if _kernel_takes(x_RD, up):
        ends = rows_E.cumsum(0).to(torch.int32)
        b_RF = F.grouped_mm(x_RD, up, offs=ends)
        a_RF = a_RF if gate is None else F.grouped_mm(x_RD, gate, offs=ends)
        inner_RF = torch.empty_like(b_RF)
        _activate(None if gate is None else a_RF, b_RF, gates_R1, inner_RF)
        return F.grouped_mm(inner_RF, down, offs=ends), a_RF, b_RF
    gates, ups, downs = (None if gate is None else gate.unbind()), up.unbind(), down.unbind()

    def work(block: Block) -> None:
        here = slice(block[0].start, block[-1].end)
        inner_RF = x_RD.new_empty(here.stop - here.start, width)
        for piece in block:
            x, part = x_RD[piece.start : piece.end], slice(piece.start, piece.end)
            torch.mm(x, ups[piece.expert], out=b_RF[part])
            if gates is not None:
                torch.mm(x, gates[piece.expert], out=a_RF[part])
        _activate(None if gates is None else a_RF[here], b_RF[here], gates_R1[here], inner_RF)
        for piece, inner in zip(block, inner_RF.split([piece.end - piece.start for piece in block]), strict=True):
            torch.mm(inner, downs[piece.expert], out=y_RD[piece.start : piece.end])

    _work_off(rows_E.tolist(), work, x_RD.device)
    return y_RD, a_RF, b_RF


@torch.library.custom_op("tenfold::experts_backward", mutates_args=())
def _backward(
    grad_RD: Tensor,
    x_RD: Tensor,
    gates_R: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    rows_E: Tensor,
    a_RF: Tensor,
    b_RF: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the rows, their gates, and the matrices gate (empty for GELU), up and down."""
    grad_x, grad_gates = torch.empty_like(x_RD), torch.empty_like(gates_R)
    gates_R1 = gates_R.to(x_RD.dtype)[:, None]
    if _kernel_takes(x_RD, up):
        ends = rows_E.cumsum(0).to(torch.int32)
        grad_RF = F.grouped_mm(grad_RD, down.transpose(1, 2), offs=ends)
        inner, grad_a, grad_b = _activate_backward(grad_RF, None if gate is None else a_RF, b_RF, gates_R1, grad_gates)
        grad_x = F.grouped_mm(grad_b, up.transpose(1, 2), offs=ends)
        grad_gate = x_RD.new_empty(0)
        if gate is not None and grad_a is not None:
            grad_x += F.grouped_mm(grad_a, gate.transpose(1, 2), offs=ends)
            grad_gate = F.grouped_mm(x_RD.t(), grad_a, offs=ends)
        grad_up = F.grouped_mm(x_RD.t(), grad_b, offs=ends)
        return grad_x, grad_gates, grad_gate, grad_up, F.grouped_mm(inner.t(), grad_RD, offs=ends)

    grad_gate = x_RD.new_empty(0) if gate is None else torch.empty_like(gate, memory_format=torch.contiguous_format)
    grad_up, grad_down = (torch.empty_like(each, memory_format=torch.contiguous_format) for each in (up, down))
    gates_t = None if gate is None else gate.transpose(1, 2).unbind()
    ups_t, downs_t = up.transpose(1, 2).unbind(), down.transpose(1, 2).unbind()
    grad_gate_E, grad_up_E, grad_down_E = grad_gate.unbind(), grad_up.unbind(), grad_down.unbind()
    counts = rows_E.tolist()

    def work(block: Block) -> None:
        here = slice(block[0].start, block[-1].end)
        sizes = [piece.end - piece.start for piece in block]
        grad_RF = b_RF.new_empty(here.stop - here.start, b_RF.shape[1])
        for piece, out in zip(block, grad_RF.split(sizes), strict=True):
            torch.mm(grad_RD[piece.start : piece.end], downs_t[piece.expert], out=out)
        inner_RF, grad_a_RF, grad_b_RF = _activate_backward(
            grad_RF, None if gate is None else a_RF[here], b_RF[here], gates_R1[here], grad_gates[here]
        )
        inners, grad_bs = inner_RF.split(sizes), grad_b_RF.split(sizes)
        grad_as = None if grad_a_RF is None else grad_a_RF.split(sizes)
        for index, piece in enumerate(block):
            expert, part = piece.expert, slice(piece.start, piece.end)
            x_t = x_RD[part].t()
            out = grad_x[part]
            torch.mm(grad_bs[index], ups_t[expert], out=out)
            _outer(x_t, grad_bs[index], grad_up_E[expert], piece.first)
            if gates_t is not None and grad_as is not None:
                out.addmm_(grad_as[index], gates_t[expert])
                _outer(x_t, grad_as[index], grad_gate_E[expert], piece.first)
            _outer(inners[index].t(), grad_RD[part], grad_down_E[expert], piece.first)

    _work_off(counts, work, x_RD.device)
    for expert, count in enumerate(counts):
        if count == 0:
            for grad in (grad_up_E, grad_down_E) if gate is None else (grad_gate_E, grad_up_E, grad_down_E):
                grad[expert].zero_()
    return grad_x, grad_gates, grad_gate, grad_up, grad_down


EXPERTS = torch.ops.tenfold.experts.default


@_forward.register_fake
def _(
    x_RD: Tensor, gates_R: Tensor, gate: Tensor | None, up: Tensor, down: Tensor, rows_E: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    rows, width = x_RD.shape[0], up.shape[2]
    a_RF = x_RD.new_empty(0 if gate is None else rows, width)
    return torch.empty_like(x_RD), a_RF, x_RD.new_empty(rows, width)


@_backward.register_fake
def _(
    grad_RD: Tensor,
    x_RD: Tensor,
    gates_R: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    rows_E: Tensor,
    a_RF: Tensor,
    b_RF: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    grads = [each.new_empty(each.shape) for each in (up, down)]
    grad_gate = x_RD.new_empty(0) if gate is None else gate.new_empty(gate.shape)
    return torch.empty_like(x_RD), torch.empty_like(gates_R), grad_gate, grads[0], grads[1]


class _Piece(NamedTuple):
    """Rows start to end, all of one expert; `first` of that expert's pieces."""

    expert: int
    start: int
    end: int
    first: bool


Block = list[_Piece]  # neighbours, worked on while they are in the cache


def _work_off(counts: Sequence[int], work: Callable[[Block], None], device: torch.device) -> None:
    """`work` on every block: tasks side by side, the largest first; on a task beyond a worker's share all together."""
    workers = workers_of(device)
    share = -(-sum(counts) // workers)
    most = PIECE_ROWS if workers == 1 else min(PIECE_ROWS, -(-share // TASKS))
    tasks = sorted(_cut(counts, most), key=_rows, reverse=True)

    def work_on(task: list[Block]) -> None:
        for block in task:
            work(block)

    work_off([task for task in tasks if _rows(task) > share], work_on, 1)
    work_off([task for task in tasks if _rows(task) <= share], work_on, workers)


def _cut(counts: Sequence[int], most: int) -> list[list[Block]]:
    """The rows as tasks that touch nothing of each other's, each a list of blocks.

    Experts of at most `most` rows make one block, up to so many rows together; a larger expert is a task by itself, in
    blocks of at most `PIECE_ROWS` rows.
    """
    tasks: list[list[Block]] = []
    size, start = most, 0
    for expert, rows in enumerate(counts):
        end = start + rows
        if rows > most:
            begins = range(start, end, PIECE_ROWS)
            tasks.append([[_Piece(expert, at, min(at + PIECE_ROWS, end), at == start)] for at in begins])
            size = most
        elif rows:
            if size + rows > most:
                tasks.append([[]])
                size = 0
            tasks[-1][0].append(_Piece(expert, start, end, True))
            size += rows
        start = end
    return tasks


def _rows(task: list[Block]) -> int:
    return task[-1][-1].end - task[0][0].start


def _outer(x_DR: Tensor, grad_RF: Tensor, out_DF: Tensor, first: bool) -> None:
    if first:
        torch.mm(x_DR, grad_RF, out=out_DF)
    else:
        out_DF.addmm_(x_DR, grad_RF)


def _activate(a_RF: Tensor | None, b_RF: Tensor, gates_R1: Tensor, out_RF: Tensor) -> None:
    """SwiGLU(a, b) or GELU(b), times the gate of the row."""
    if a_RF is None:
        torch.ops.aten.gelu.out(b_RF, out=out_RF)
    else:
        torch.ops.aten.silu.out(a_RF, out=out_RF)
        out_RF.mul_(b_RF)
    out_RF.mul_(gates_R1)


def _activate_backward(
    grad_RF: Tensor, a_RF: Tensor | None, b_RF: Tensor, gates_R1: Tensor, grad_gates_R: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The activation times its gate once more, and the gradients of a and b; that of the gates is written.

    `grad_RF`, the gradient of the activation times its gate, is used up.
    """
    inner = torch.empty_like(b_RF)
    if a_RF is None:
        torch.ops.aten.gelu.out(b_RF, out=inner)
    else:
        silu = torch.empty_like(b_RF)
        torch.ops.aten.silu.out(a_RF, out=silu)
        torch.mul(silu, b_RF, out=inner)
    torch.sum(grad_RF * inner, dim=1, dtype=grad_gates_R.dtype, out=grad_gates_R)
    inner.mul_(gates_R1)
    grad_RF.mul_(gates_R1)
    if a_RF is None:
        return inner, None, torch.ops.aten.gelu_backward(grad_RF, b_RF)
    grad_b = silu.mul_(grad_RF)
    grad_a = torch.ops.aten.silu_backward(grad_RF.mul_(b_RF), a_RF)
    return inner, grad_a, grad_b


def _kernel_takes(x_RD: Tensor, up_EDF: Tensor) -> bool:
    """Whether PyTorch's grouped product is used: on CUDA for bf16, from compute capability 8 on, rows of 16 bytes."""
    if x_RD.device.type != "cuda" or x_RD.dtype != torch.bfloat16:
        return False
    aligned = all(size * x_RD.element_size() % 16 == 0 for size in up_EDF.shape[1:])
    return aligned and torch.cuda.get_device_capability(x_RD.device) >= (8, 0)
