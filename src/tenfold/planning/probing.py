"""What one rank's device really does: rates of the work that training is made of, measured by doing it.

Everything runs through the functions that models run through (`nn`), with operands that no cache holds. What starting
an operation takes is measured by itself, and taken off: `Accelerator.seconds` adds it again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adafactor, AdamW, Muon, Optimizer

from tenfold.config.model import ModelConfig
from tenfold.nn.attend import Context, attend
from tenfold.nn.attention import rotary_table, rotate
from tenfold.nn.grouped import feed_forward_rows
from tenfold.nn.layers import Norm
from tenfold.nn.products import linear
from tenfold.planning.accelerator import Dtype, Grid, Speed
from tenfold.planning.stopwatch import Passes, Stopwatch
from tenfold.planning.terms import Way

DTYPES: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
_EXPERT_BYTES = 32 * 2**20
_POOL_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Sizes:
    """At which sizes rates are measured."""

    rows: Sequence[int] = (32, 128, 512, 2048)
    sides: Sequence[int] = (64, 256, 1024)
    positions: Sequence[int] = (64, 256, 1024)
    widths: Sequence[int] = (32, 64, 128)
    heads: int = 4
    group_rows: Sequence[int] = (4, 16, 64, 256)
    group_sides: Sequence[int] = (128, 512)
    elements: Sequence[int] = (2**14, 2**17, 2**19, 2**21)
    """Of hidden states, in passes over memory."""
    weights: Sequence[int] = (2**18, 2**21, 2**23)
    """That an optimizer updates."""
    muon_sides: Sequence[int] = (64, 128, 256)
    seconds: float = 0.03
    """Of each measurement, at most, but for two that are needed."""

    @classmethod
    def of(cls, device: torch.device) -> Sizes:
        """Such as models on this device have."""
        if device.type == "cpu":
            return cls()
        return cls(
            rows=(128, 1024, 4096, 16384),
            sides=(256, 1024, 4096, 16384),
            positions=(512, 2048, 8192),
            widths=(64, 128),
            heads=16,
            group_rows=(16, 64, 256, 1024, 4096),
            group_sides=(512, 1024, 4096),
            elements=(2**18, 2**21, 2**24, 2**27),
            weights=(2**20, 2**24, 2**28),
            muon_sides=(512, 1024, 4096),
        )


class Probe:
    """Measures one device. `say` is told what is measured, before it is."""

    def __init__(self, device: torch.device, sizes: Sizes, say: Callable[[str], None] = lambda _: None) -> None:
        self.device, self.sizes, self._say = device, sizes, say
        self.watch = Stopwatch(device, sizes.seconds)
        self._pools: dict[torch.dtype, Tensor] = {}
        self._place = 0
        self.launch = self._launch()

    def close(self) -> None:
        """Let go of the operands, of which other processes on the device may want the memory."""
        self._pools.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _launch(self) -> float:
        """Seconds of starting an operation on a few numbers, of which autograd takes note."""
        x = torch.zeros(8, 8, device=self.device, requires_grad=True)
        return self.watch.time(lambda _: x + x)

    def _rate(self, amount: float, seconds: float, starts: float = 1) -> float:
        """Of `amount` in `seconds`, from which the starts of operations are taken, on a CPU, as far as they go."""
        spent = starts * self.launch if self.device.type == "cpu" else 0.0
        return amount / max(seconds - spent, 0.1 * seconds)

    def _random(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Numbers that others, made long before, may share: cut one behind another from a pool that no cache holds."""
        count = math.prod(shape)
        if dtype not in self._pools:
            self._pools[dtype] = torch.randn(_POOL_BYTES // dtype.itemsize, device=self.device).to(dtype)
        pool = self._pools[dtype]
        if count > len(pool):
            return torch.randn(shape, device=self.device).to(dtype)
        begin = self._place if self._place + count <= len(pool) else 0
        self._place = begin + -(-count // 64) * 64
        return pool[begin : begin + count].view(shape)

    def products(self, dtype: Dtype) -> Speed:
        """Of linear layers: forward, and both gradients. Without the cast of the weight, which is work by itself."""
        self._say(f"matrix products, {dtype}")
        kind, sides, rows = DTYPES[dtype], self.sizes.sides, self.sizes.rows
        found: dict[Way, list[float]] = {"forward": [], "input": [], "weight": []}
        for count, inner, columns in itertools.product(rows, sides, sides):
            found["forward"].append(self._product("forward", count, inner, columns, kind))
        for count, inner, columns in itertools.product(rows, sides, sides):  # of a layer from `columns` to `inner`
            found["input"].append(self._product("input", count, columns, inner, kind))
        for out, count, inner in itertools.product(sides, rows, sides):
            found["weight"].append(self._product("weight", count, inner, out, kind))
        axes = {"forward": [rows, sides, sides], "input": [rows, sides, sides], "weight": [sides, rows, sides]}
        return _speed({way: _grid(axes[way], rates) for way, rates in found.items()})

    def _product(self, way: Way, rows: int, inner: int, columns: int, kind: torch.dtype) -> float:
        """FLOP/s of a layer from `inner` to `columns`."""
        size = kind.itemsize * (rows * inner + rows * columns) + 4 * inner * columns

        def make() -> tuple[Tensor, ...]:
            x = self._random(1, rows, inner, dtype=kind).requires_grad_(way == "input")
            weight = self._random(columns, inner, dtype=kind).requires_grad_(way == "weight")
            if way == "forward":
                return x, weight
            return linear(x, weight, None), x if way == "input" else weight, self._random(1, rows, columns, dtype=kind)

        def work(given: tuple[Tensor, ...]) -> None:
            if way == "forward":
                linear(given[0], given[1], None)
            else:
                torch.autograd.grad(given[0], given[1], given[2], retain_graph=True)

        return self._rate(2.0 * rows * inner * columns, self.watch.over(make, work, size))

    def attention(self, dtype: Dtype) -> Speed:
        """Of causal attention, forward and backward, by the model's own way to it."""
        self._say(f"attention, {dtype}")
        kind, heads = DTYPES[dtype], self.sizes.heads
        found: dict[Way, list[float]] = {"forward": [], "input": []}
        most = max(self.sizes.positions)
        for length, width in itertools.product(self.sizes.positions, self.sizes.widths):
            batch = max(1, most // length)
            flops = 4.0 * batch * heads * width * length * (length + 1) / 2
            shape = (batch, length, heads, width)
            size = 8 * batch * length * heads * width * kind.itemsize

            def make(shape: tuple[int, ...] = shape) -> tuple[Tensor, ...]:
                q, k, v = (self._random(*shape, dtype=kind).transpose(1, 2).requires_grad_() for _ in range(3))
                return attend(q, k, v, Context(None)), q, k, v, self._random(*shape, dtype=kind).transpose(1, 2)

            def forward(given: tuple[Tensor, ...]) -> None:
                attend(given[1], given[2], given[3], Context(None))

            def backward(given: tuple[Tensor, ...]) -> None:
                torch.autograd.grad(given[0], given[1:4], given[4], retain_graph=True)

            found["forward"].append(self._rate(flops, self.watch.over(make, forward, size)))
            found["input"].append(self._rate(2 * flops, self.watch.over(make, backward, size)))
        axes = [self.sizes.positions, self.sizes.widths]
        return _speed({way: _grid(axes, rates) for way, rates in found.items()})

    def grouped(self, dtype: Dtype, activation: Speed | None) -> Speed:
        """Of experts' products, by rows of an expert, forward and backward; less what `activation` says of the passes
        over memory between them."""
        self._say(f"experts' products, {dtype}")
        kind = DTYPES[dtype]
        found: dict[Way, list[float]] = {"forward": [], "input": []}
        for each, side in itertools.product(self.sizes.group_rows, self.sizes.group_sides):
            experts = max(2, min(32, _EXPERT_BYTES // (2 * 4 * side * side)))
            rows = each * experts
            rows_E = torch.full((experts,), each, device=self.device, dtype=torch.int64)
            x = self._random(rows, side, dtype=kind).requires_grad_()
            gates = torch.rand(rows, device=self.device).requires_grad_()
            up, down = (self._random(experts, side, side, dtype=kind).requires_grad_() for _ in range(2))
            y = feed_forward_rows(x, gates, None, up, down, rows_E)
            gradient = self._random(rows, side, dtype=kind)

            def forward(_: int, given: tuple[Any, ...] = (x, gates, None, up, down, rows_E)) -> None:
                feed_forward_rows(*given)

            def backward(_: int, given: tuple[Any, ...] = (y, (x, gates, up, down), gradient)) -> None:
                torch.autograd.grad(given[0], given[1], given[2], retain_graph=True)

            flops, moved = 4.0 * rows * side * side, float(rows * side * kind.itemsize)
            for way, work, factor, passes in (("forward", forward, 1, 4), ("input", backward, 2, 12)):
                seconds, starts = self.watch.time(work), 2 * factor
                if activation is not None:
                    beside = moved * passes / activation.at("forward", 2 * moved)
                    seconds = max(seconds - beside, 0.3 * seconds)
                found[way].append(self._rate(factor * flops, seconds, starts))  # type: ignore[index]
        axes = [self.sizes.group_rows, self.sizes.group_sides]
        return _speed({way: _grid(axes, rates) for way, rates in found.items()})

    def memory(self, dtype: Dtype) -> dict[str, Speed]:
        """Of passes over memory, each kind by what of the model makes it, by the bytes of a pass."""
        self._say(f"passes over memory, {dtype}")
        found: dict[str, list[tuple[float, float]]] = {}
        for elements in self.sizes.elements:
            for name, make, work, size in self._passes(elements, DTYPES[dtype]):
                counter = Passes(elements)
                given = make()
                with counter:
                    work(given)
                seconds = self.watch.over(make, work, size)
                each = counter.bytes / counter.count
                found.setdefault(name, []).append((each, self._rate(counter.bytes, seconds, counter.count)))
        return {name: _speed({"forward": _curve(points)}) for name, points in found.items()}

    def _passes(
        self, elements: int, kind: torch.dtype
    ) -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], Any], float]]:
        """Name, operands, work on them and their bytes."""
        width = min(256, elements)
        rows, size = elements // width, float(elements * kind.itemsize)

        def pair(dtype: torch.dtype = kind) -> tuple[Tensor, Tensor]:
            return self._random(rows, width, dtype=dtype), self._random(rows, width, dtype=dtype)

        def both(function: Callable[..., Tensor]) -> Callable[[tuple[Tensor, ...]], None]:
            def work(given: tuple[Tensor, ...]) -> None:
                *inputs, gradient = given
                inputs = [each.detach().requires_grad_() for each in inputs]
                torch.autograd.grad(function(*inputs), inputs, gradient)

            return work

        norm = Norm(ModelConfig(preset="tiny"), width, "rmsnorm").to(self.device)
        yield "norm", pair, both(norm), 2 * size
        yield "activation", lambda: (*pair(), pair()[0]), both(lambda gate, up: F.silu(gate) * up), 3 * size
        yield "residual", pair, lambda given: given[0] + given[1], 2 * size
        table = rotary_table(rows, 64 if width % 64 == 0 else width, 1e4, self.device)

        def turned() -> tuple[Tensor, Tensor]:
            x, gradient = (each.view(1, rows, -1, 2 * table.shape[-1]).transpose(1, 2) for each in pair())
            return x, gradient

        yield "rotary", turned, both(lambda x: rotate(x, table)), 2 * size
        other = torch.bfloat16 if kind == torch.float32 else torch.float32
        yield "cast", pair, lambda given: given[0].to(other), 2 * size
        yield (
            "gradient",
            lambda: tuple(each.clone() for each in pair(torch.float32)),
            lambda given: given[0].add_(given[1]),
            8.0 * elements,
        )
        order = torch.randperm(rows, device=self.device)
        yield "rows", pair, lambda given: given[0].index_select(0, order), 2 * size
        yield "softmax", lambda: (self._random(rows, width).clone(), self._random(rows, 1)), _softmax, 4.0 * elements

    def updates(self) -> dict[str, Speed]:
        """Bytes of fp32 weights a second by optimizer: those of training, with their settings."""
        found = {}
        for name in ("adamw", "adafactor"):
            self._say(f"updates, {name}")
            points = []
            for weights in self.sizes.weights:
                side = min(512, math.isqrt(weights // 2))
                seconds = self._update(name, [(side, side)] * max(1, weights // side**2))
                points.append((weights * 4.0, weights * 4.0 / seconds))
            found[name] = _speed({"forward": _curve(points)})
        self._say("updates, muon")
        points = []
        for side in self.sizes.muon_sides:
            seconds = self._update("muon", [(side, side)] * 2)
            points.append((float(side), 8.0 * side * side / seconds))
        found["muon"] = _speed({"forward": _curve(points)})
        return found

    def _update(self, name: str, shapes: Sequence[tuple[int, int]]) -> float:
        parameters = [nn.Parameter(self._random(*shape).clone()) for shape in shapes]
        for parameter in parameters:
            parameter.grad = self._random(*parameter.shape)
        optimizer: Optimizer
        if name == "adamw":
            optimizer = AdamW(parameters, lr=1e-6, weight_decay=0.1, fused=True)
        elif name == "adafactor":
            optimizer = Adafactor(parameters, lr=1e-6)
        else:
            optimizer = Muon(parameters, lr=1e-6, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        return self.watch.time(lambda _: optimizer.step())


def _softmax(given: tuple[Tensor, Tensor]) -> None:
    """What the loss does to logits (`nn.loss`)."""
    logits, share = given
    largest = logits.amax(-1, keepdim=True)
    powers = logits.sub_(largest).exp_()
    powers.sum(-1, keepdim=True)
    powers.mul_(share)


def _rounded(rate: float) -> float:
    return float(f"{rate:.4g}")


def _grid(axes: Sequence[Sequence[int]], rates: Sequence[float]) -> Grid:
    return Grid(sizes=[[float(size) for size in axis] for axis in axes], rates=[_rounded(rate) for rate in rates])


def _curve(points: Sequence[tuple[float, float]]) -> Grid:
    """Rates by one size."""
    by_size = dict(sorted(points))
    return Grid(sizes=[[_rounded(size) for size in by_size]], rates=[_rounded(rate) for rate in by_size.values()])


def _speed(grids: dict[Way, Grid]) -> Speed:
    return Speed(peak=max(rate for grid in grids.values() for rate in grid.rates), measured=grids)
