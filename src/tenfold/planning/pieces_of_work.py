"""The pieces that layers' work is made of: products, norms, exchanges with tensor ranks, each forward and backward."""

from __future__ import annotations

from collections.abc import Sequence

from tenfold.planning.local import FP32, Local
from tenfold.planning.passes import Builder, Conveyor, Item
from tenfold.planning.terms import Axis, Collective, CollectiveKind, Operation, Way


def memory(name: str, elements: float, *bytes_each: float) -> Operation:
    """As many passes over `elements` as there are numbers of bytes, read and written, for each of them."""
    return Operation(name, "memory", bytes=elements * sum(bytes_each) / len(bytes_each), count=len(bytes_each))


def matrix(name: str, rows: int, inner: int, columns: int, way: Way = "forward", wide: bool = False) -> Operation:
    """A product of [rows, inner] and [inner, columns], or one of its two gradients, told by the shapes of that."""
    if way == "input":
        inner, columns = columns, inner
    elif way == "weight":
        rows, inner, columns = columns, rows, inner
    return Operation(
        name, "matrix", flops=2.0 * rows * inner * columns, rows=rows, inner=inner, columns=columns, way=way, wide=wide
    )


class Making:
    """Makes the passes of one rank. `adds`: of a weight's gradients the share that is added to one that is there."""

    def __init__(self, local: Local, adds: float = 0.0) -> None:
        self.local, self.adds = local, adds
        self.item = local.itemsize
        self.axis: Axis = "row" if local.degrees.grid else "tensor"
        self.split = local.degrees.columns > 1

    def cast(self, build: Builder, name: str, elements: int) -> None:
        """Of a weight to the dtype of activations; back again of its gradient, which is then added up."""
        backward: list[Item] = []
        forward: list[Item] = []
        if self.item < FP32 and not self.local.gathered_bf16:
            forward.append(memory(f"{name} cast", elements, FP32 + self.item))
            backward.append(memory(f"{name} gradient cast", elements, FP32 + self.item))
        if self.adds:
            backward.append(memory(f"{name} gradient added", elements * self.adds, 3 * FP32))
        build.step(forward, (), backward)

    def product(
        self,
        build: Builder,
        name: str,
        rows: int,
        inner: int,
        columns: int,
        *,
        bias: bool = False,
        again: bool = True,
        adds_input: bool = False,
        wide: bool = False,
    ) -> None:
        """A linear layer. `again`: whether something behind it in the layer needs what it makes; `adds_input`: its
        input has another use, whose gradient this one's is added to."""
        if not wide:
            self.cast(build, name, inner * columns)
        backward: list[Item] = [matrix(name, rows, inner, columns, "input", wide)]
        item = FP32 if wide else self.item
        if adds_input:
            backward.append(memory(f"{name} input gradient added", rows * inner, 3 * item))
        weights: list[Item] = [matrix(name, rows, inner, columns, "weight", wide)]
        if bias:
            weights.append(memory(f"{name} bias gradient", rows * columns, item))
        build.step([matrix(name, rows, inner, columns, "forward", wide)], backward, weights, kept=True, needed=again)

    def block_product(self, build: Builder, name: str, inner: int, columns: int, widening: bool) -> None:
        """The same by a grid of tensor ranks: the blocks of a column come one after another (`parallel.grid`).

        "full" makes it again wherever it stands: an operator of our own is gone through before it says what it keeps.
        """
        local, side = self.local, self.local.degrees.rows
        rows, item = local.tokens, self.item
        block = inner * columns // side
        shape = (inner // side, columns) if widening else (inner, columns // side)
        comes = Collective(f"{name} block", "broadcast", "column", block * item)
        joins = memory(f"{name} joined", rows * columns, 3 * item if widening else 2 * item)
        split_joins = memory(f"{name} joined", rows * inner, 2 * item if widening else 3 * item)
        forward = Conveyor(side, (comes,), (matrix(name, rows, *shape),))
        backward: list[Item] = [
            Conveyor(side, (comes,), (matrix(name, rows, *shape, "input"),)),
            split_joins,
            Operation(**{**vars(matrix(name, rows, *shape, "weight")), "count": side}),
            memory(f"{name} gradient cast", block * side, item + FP32, 2 * FP32),
            Collective(f"{name} gradient", "reduce_scatter", "column", block * side * FP32),
        ]
        if self.adds:
            backward.append(memory(f"{name} gradient added", block * self.adds, 3 * FP32))
        casts: list[Item] = [memory(f"{name} cast", block, FP32 + item)] if item < FP32 else []
        build.step([*casts, forward, joins], [*casts, *backward], kept=True)

    def linear(
        self,
        build: Builder,
        name: str,
        inner: int,
        columns: int,
        *,
        widening: bool,
        again: bool = True,
        adds: bool = False,
    ) -> None:
        """One of a layer's, of all tokens of a row of tensor ranks: to a split width, or from one."""
        if self.local.degrees.grid:
            self.block_product(build, name, inner, columns, widening)
        else:
            bias = self.local.model.bias
            self.product(build, name, self.local.tokens, inner, columns, bias=bias, again=again, adds_input=adds)

    def norm(self, build: Builder, name: str, elements: int, kind: str | None = None, *, again: bool = True) -> None:
        """LayerNorm or RMSNorm of so many elements."""
        item = self.item
        if self.local.fused or (kind or self.local.model.norm) == "layernorm":
            forward, backward = [2 * item], [3 * item, 2 * item]
        else:
            forward, backward = [4, 8, 8], [8, 12, 4, 8, 8, 12, 8]  # `nn.layers._RMSNorm`
            if item < FP32:
                ends = FP32 + item
                forward, backward = [ends, *forward, ends], [ends, ends, *backward, ends]
        build.step([memory(name, elements, *forward)], [memory(name, elements, *backward)], needed=again)

    def gather(self, build: Builder, name: str, width: int, rows: int | None = None, item: int | None = None) -> None:
        """All tokens of a row of tensor ranks, from each one's own."""
        if self.split:
            there, back = self._exchanges(name, width, rows, item)
            build.step(there, back)

    def sum(
        self,
        build: Builder,
        name: str,
        width: int,
        *,
        item: int | None = None,
        again: bool = True,
    ) -> None:
        """Own tokens of the sum of what tensor ranks have of all."""
        if self.split:
            there, back = self._exchanges(name, width, None, item)
            build.step(back, there, kept=True, needed=again)

    def _exchanges(
        self, name: str, width: int, rows: int | None, item: int | None
    ) -> tuple[Sequence[Item], Sequence[Item]]:
        item = item or self.item
        elements = (self.local.tokens if rows is None else rows) * width
        made: list[list[Item]] = []
        kinds: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter")
        for kind in kinds:
            exchange = Collective(name, kind, self.axis, elements * item)
            # Of several sequences the ranks' parts do not lie as they come.
            copy = [memory(f"{name} in order", elements, 2 * item)] if self.local.rows > 1 else []
            made.append([exchange, *copy] if kind == "all_gather" else [*copy, exchange])
        return made[0], made[1]
