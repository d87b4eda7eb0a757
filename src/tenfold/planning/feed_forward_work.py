"""The work of a feed-forward on one rank: dense, or a mixture of experts with its exchanges (`parallel.expert`).

Choices are taken to fall evenly on experts: a rank gets as many rows as it sends.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from tenfold.planning.local import FP32
from tenfold.planning.passes import Builder, Conveyor, Item
from tenfold.planning.pieces_of_work import Making, memory
from tenfold.planning.terms import Collective, Operation, Way

INT64 = 8
Plain = tuple[Operation | Collective, ...]


def feed_forward(make: Making, build: Builder, width: int, *, again: bool = True, gathers: bool = True) -> None:
    """A dense feed-forward of `width`. `again`: whether something behind it in the layer needs what it makes."""
    local, model, item = make.local, make.local.model, make.item
    inner = local.part(width)
    if gathers:
        make.gather(build, "feed-forward input", model.hidden)
    gated = model.activation == "swiglu"
    # `nn.moe.FeedForward` makes up first, then the gate.
    make.linear(build, "up", model.hidden, inner, widening=True, adds=gated)
    if gated:
        make.linear(build, "gate", model.hidden, inner, widening=True)
    forward, backward = ([2 * item, 3 * item], [3 * item, 3 * item, 3 * item]) if gated else ([2 * item], [3 * item])
    elements = local.tokens * inner
    build.step([memory("activation", elements, *forward)], [memory("activation", elements, *backward)])
    make.linear(build, "down", inner, model.hidden, widening=False, again=again)
    make.sum(build, "feed-forward output", model.hidden, again=again)


def mixture(make: Making, build: Builder) -> None:
    """Router, experts, and those that every token passes."""
    local, model = make.local, make.local.model
    shared = model.moe.shared_experts * model.expert_ffn
    if not local.routed:
        experts_that_share(make, build)
        if shared:
            feed_forward(make, build, shared, again=False)
            residual_of(make, build)
        return
    route(make, build)
    if local.degrees.expert > 1:
        exchanged(make, build, shared)
    else:
        together(make, build)
        if shared:
            feed_forward(make, build, shared, again=False)
            residual_of(make, build)


def residual_of(make: Making, build: Builder) -> None:
    """The sum of what routed and shared experts make; both have its gradient, and their input has both of theirs."""
    add = memory("experts added", make.local.own * make.local.model.hidden, 3 * make.item)
    build.step([add], [add], needed=False)


def experts_that_share(make: Making, build: Builder) -> None:
    """One dense feed-forward as wide as the sets of weights together."""
    local, model, item = make.local, make.local.model, make.item
    inner = local.sets * local.part(model.expert_ffn)
    gated = model.activation == "swiglu"
    make.gather(build, "feed-forward input", model.hidden)
    for name in ("up", "gate") if gated else ("up",):
        copied = memory(f"{name} in order", inner * model.hidden, 2 * FP32)
        build.step([copied], [], [copied])
        make.product(build, name, local.tokens, model.hidden, inner, adds_input=gated and name == "up")
    forward, backward = ([2 * item, 3 * item], [3 * item, 3 * item, 3 * item]) if gated else ([2 * item], [3 * item])
    elements = local.tokens * inner
    build.step([memory("activation", elements, *forward)], [memory("activation", elements, *backward)])
    make.product(build, "down", local.tokens, inner, model.hidden, again=False)
    make.sum(build, "feed-forward output", model.hidden, again=False)


def rows_of(make: Making) -> float:
    """Rows that the tokens of this rank are sent in: their choices, but for those that capacity drops."""
    local, moe = make.local, make.local.model.moe
    rows = float(local.own * local.choices)
    if moe.capacity == "dropless":
        return rows
    choices = local.choices if moe.capacity == "k" else 1
    most = math.ceil(choices * local.length / moe.experts * moe.capacity_factor) * moe.experts * local.rows
    return min(rows, most / (local.degrees.columns * local.degrees.context))


def route(make: Making, build: Builder) -> None:
    """Which experts each token goes to, and how much of each it takes; what ranks tell each other of that."""
    local, moe = make.local, make.local.model.moe
    degrees, tokens, experts = local.degrees, local.own, moe.experts
    hidden, choices = local.model.hidden, local.own * local.choices
    if make.item < FP32:
        cast = memory("router input cast", tokens * hidden, FP32 + make.item)
        build.step([cast], [cast])
    make.product(build, "router", tokens, hidden, experts, wide=True)
    told: list[Item] = [memory("choice", tokens * experts, FP32)]
    loads = local.rows * experts * INT64
    told += [Collective("loads", "all_reduce", axis, loads) for axis in sequence_axes(make)]
    if moe.capacity != "dropless":
        runs, every = (1 if degrees.context == 1 else 2), 1
        for axis in sequence_axes(make):
            every *= degrees.tensor if axis == "tensor" else degrees.context
            told.append(Collective("loads before", "all_gather", axis, loads * runs * every))
    if degrees.expert > 1:
        told.append(Collective("rows to come", "all_to_all", "expert", experts * INT64))
        if make.split:
            told.append(Collective("rows to come", "all_gather", "tensor", experts * INT64 * degrees.tensor))
    elif make.split:
        told.append(Collective("choices", "all_gather", "tensor", choices * INT64 * degrees.tensor))
    build.step(
        [
            memory("softmax", tokens * experts, 2 * FP32, FP32, 2 * FP32, 2 * FP32, FP32, FP32),
            memory("rows sorted", choices, *[2 * INT64] * 6),
        ],
        [memory("softmax backward", tokens * experts, 2 * FP32, FP32, 3 * FP32)],
        once=told,
    )


def sequence_axes(make: Making) -> list[Literal["tensor", "context"]]:
    """Those along which ranks have parts of one sequence."""
    axes: list[Literal["tensor", "context"]] = ["tensor", "context"]
    return [axis for axis in axes if getattr(make.local.degrees, axis) > 1]


def grouped(make: Making, rows: float, prototypes: int) -> tuple[list[Operation], list[Operation], list[Operation]]:
    """Of the experts of so many prototypes, which `rows` fall on: the forward pass, and the backward pass of rows and
    of weights (made by one operator)."""
    local, model, item = make.local, make.local.model, make.item
    experts = model.moe.experts // model.moe.prototypes // local.degrees.expert * prototypes
    hidden, inner = model.hidden, local.part(model.expert_ffn)
    gated = model.activation == "swiglu"
    names = ("gate", "up") if gated else ("up",)
    weights = experts * hidden * inner

    def of(name: str, way: Way) -> Operation:
        shape = (inner, hidden) if (name == "down") == (way == "forward") else (hidden, inner)
        return Operation(
            f"experts {name}",
            "grouped",
            flops=2.0 * rows * hidden * inner,
            rows=round(rows),
            inner=shape[0],
            columns=shape[1],
            groups=experts,
            way=way,
        )

    forward, backward, of_weights = [], [], []
    if item < FP32 and not local.gathered_bf16:
        forward.append(memory("experts cast", weights * (len(names) + 1), FP32 + item))
        of_weights.append(memory("experts gradient cast", weights * (len(names) + 1), FP32 + item))
    if make.adds:
        of_weights.append(memory("experts gradient added", weights * (len(names) + 1) * make.adds, 3 * FP32))
    once, again = [2 * item, 3 * item] if gated else [2 * item], [3 * item, 2 * item, 2 * item]
    back = [3 * item, 3 * item, 3 * item] if gated else [3 * item]
    forward += [of(name, "forward") for name in names]
    forward += [memory("activation", rows * inner, *once, 2 * item), of("down", "forward")]
    backward += [of("down", "input"), memory("activation", rows * inner, *once, *again, *back)]
    backward += [of(name, "input") for name in names]
    return forward, backward, [of(name, "weight") for name in ("down", *names)] + of_weights


def together(make: Making, build: Builder) -> None:
    """Experts that are all on this rank: rows go to them, and are summed by token."""
    local, model = make.local, make.local.model
    make.gather(build, "experts input", model.hidden)
    make.gather(build, "gates", local.choices, item=FP32)
    rows = rows_of(make) * (local.degrees.columns if make.split else 1)
    if make.split:
        build.step([memory("rows sorted", local.tokens * local.choices, *[2 * INT64] * 6)])
    copies, sums = copy_of_rows(make, rows, local.tokens)
    build.step([copies], [sums])
    forward, backward, weights = grouped(make, rows, model.moe.prototypes)
    casts = [each for each in forward if each.name == "experts cast"]
    build.step(casts)
    build.step([each for each in forward if each not in casts], backward, weights, kept=True)
    build.step([sums], [copies])
    make.sum(build, "experts output", model.hidden)


def copy_of_rows(make: Making, rows: float, tokens: int) -> tuple[Operation, Operation]:
    """Tokens copied to rows, and rows summed by token."""
    width = make.local.model.hidden
    spread = memory("rows", rows * width, 2 * make.item)
    return spread, memory("rows summed", rows * width, make.item * (1 + tokens / max(rows, 1)))


def exchanged(make: Making, build: Builder, shared: int) -> None:
    """Experts of other ranks: one prototype is computed while the next comes in and the one before goes home."""
    local, model, item = make.local, make.local.model, make.item
    prototypes, tensor = model.moe.prototypes, local.degrees.tensor
    sent = rows_of(make) / prototypes
    wide = model.hidden * item + FP32  # a row and its gate
    narrow = model.hidden * item
    arrived = sent * tensor
    spread, summed = copy_of_rows(make, sent * prototypes, local.own)
    order = memory("rows in order", arrived * model.hidden, 2 * item)

    def a2a(name: str, size: float) -> tuple[Collective, ...]:
        return (Collective(name, "all_to_all", "expert", sent * size),)

    def over_tensor(name: str, kind: Literal["all_gather", "reduce_scatter"], size: float) -> list[Collective]:
        return [Collective(name, kind, "tensor", arrived * size)] if tensor > 1 else []

    forward, backward, weights = grouped(make, arrived, 1)
    beside, beside_backward, beside_weights = beside_experts(make, shared)
    there = Conveyor(
        prototypes,
        a2a("rows", wide),
        (
            *over_tensor("rows", "all_gather", wide),
            order,
            *forward,
            order,
            *over_tensor("results", "reduce_scatter", narrow),
        ),
        a2a("results", narrow),
        before=beside,
    )
    back = Conveyor(
        prototypes,
        a2a("gradients of results", narrow),
        (
            *over_tensor("gradients of results", "all_gather", narrow),
            order,
            *backward,
            *weights,
            order,
            *over_tensor("gradients of rows", "reduce_scatter", narrow),
            *over_tensor("gradients of gates", "reduce_scatter", FP32),
        ),
        a2a("gradients of rows", wide),
        behind=beside_backward,
    )
    # "selective" keeps the experts' products, but rows go round once more.
    fewer = tuple(each for each in there.work if not isinstance(each, Operation) or each.kind != "grouped")
    again = replace(there, work=fewer, before=tuple(each for each in beside if _is_made_again(each)))
    build.step([spread, there, summed], [spread, back, summed], beside_weights, selective=[spread, again, summed])
    if shared:
        residual_of(make, build)


def _is_made_again(item: Operation | Collective) -> bool:
    return item.kind not in ("matrix", "reduce_scatter")


def beside_experts(make: Making, shared: int) -> tuple[Plain, Plain, Plain]:
    """What the feed-forward of `shared` experts does while rows are on their way: forward, backward, weights'."""
    if not shared:
        return (), (), ()
    own = Builder("shared experts")
    feed_forward(make, own, shared)
    done = own.done()
    found = [tuple(item for item in part if not isinstance(item, Conveyor)) for part in (done.forward, done.backward)]
    weights = tuple(item for item in done.weights if not isinstance(item, Conveyor))
    return found[0], found[1], weights
