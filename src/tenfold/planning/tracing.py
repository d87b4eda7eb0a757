"""Bytes alive at every moment of a micro-batch, layer by layer: a few layers of a rank's model run forward and backward
on the meta device.

What is run is the model itself, with `stand_ins` for other ranks. A deep model is put together of what layers of its
kinds add, take at most, and give back (`planning.activations`). In the number of sequences every moment is a straight
line, so that two runs tell all, but for the loss, which goes through them by chunks and is run by itself.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tenfold.config.model import ModelConfig, MoEConfig
from tenfold.nn.decoder import Decoder
from tenfold.nn.grouped import PIECE_ROWS
from tenfold.nn.objective import Example, balance_loss, loss_sum
from tenfold.nn.products import foreseeing
from tenfold.nn.recompute import Mode, Recompute
from tenfold.parallel.mesh import Degrees
from tenfold.parallel.splits import cut, splits_of
from tenfold.planning.stand_ins import stand_ins
from tenfold.sharing.patterns import Pattern
from tenfold.sharing.tying import Sharing, tie

FEW = (4, 6)
"""Prototypes of a traced model that has more: what each of them brings is the same, so that these two tell of all. With
fewer the highest moment may be another."""


@dataclass(frozen=True)
class Traced:
    """What is traced: how a model's layers are, where it lies, and in what it computes."""

    model: ModelConfig
    positions: int
    parts: tuple[str, ...]
    """What all layers share; nothing: no two do."""
    rank: int
    experts: str
    degrees: Degrees
    """Those that split a layer: tensor, context, expert."""
    mode: Mode
    dtype: torch.dtype
    """Of activations."""
    gathered: torch.dtype
    """Of the weights that a pass sees, but for experts that no other data rank has."""
    length: int
    chunk: int
    accumulates: bool
    """Whether gradients are there already, to be added to; else they begin in this backward pass, and are counted."""
    bf16_unit: bool
    """Of the device that is meant."""
    cuda: bool
    tensor_rank: int = 0
    """Heads, inner widths and rows need not be even: which of these ranks it is."""

    @property
    def layers(self) -> int:
        """Of the traced model: of layers that share the first, those between, and the last differ."""
        return 3 if self.parts else 1


class Phase(NamedTuple):
    """Bytes above those alive when it began: at its end, and at most."""

    left: int
    most: int


@dataclass(frozen=True)
class Trace:
    """The phases of a micro-batch through a model of `Traced.layers` layers."""

    before: Phase
    """The embedding."""
    forward: tuple[Phase, ...]
    """By layer."""
    loss: Phase
    """The last norm and the loss, with its gradients of hidden states and output matrix."""
    back: Phase
    """Backward to the last layer's output."""
    backward: tuple[Phase, ...]
    """By layer, from the first of the model on."""
    after: Phase
    """Backward through the embedding, and what goes when the graph does."""


class Piece(NamedTuple):
    """A phase, operation by operation."""

    alive: tuple[int, ...]
    """Bytes when it begins, and behind every operation."""
    rows: tuple[int, ...]
    """Those that an operator takes by turns, if it does."""
    each: tuple[int, ...]
    """Bytes that it takes for each of the rows of a turn."""


@lru_cache(maxsize=4096)
def trace(what: Traced, sequences: int) -> Trace:
    """The phases of a micro-batch of so many sequences."""
    few, some = FEW
    if (count := what.model.moe.prototypes) <= some:
        return _named(what, _pieces(what, sequences))
    one, two = (_pieces(_with_prototypes(what, each), sequences) for each in FEW)
    return _named(what, [_onwards(a, b, few, some, count) for a, b in zip(one, two, strict=True)])


def _onwards(a: Piece, b: Piece, few: int, some: int, count: int) -> Piece:
    """The piece for a number `count`, from those for `few` and `some`: the same operations with more in each, or else
    more of them, that come and go as they did."""
    if len(a.alive) != len(b.alive):
        a, b = _brief(_phase(a)), _brief(_phase(b))

    def line(xs: tuple[int, ...], ys: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(x + (count - few) * (y - x) // (some - few) for x, y in zip(xs, ys, strict=True))

    return Piece(line(a.alive, b.alive), line(a.rows, b.rows), b.each)


def _with_prototypes(what: Traced, count: int) -> Traced:
    """The same with so many prototypes, as large as they are."""
    moe = what.model.moe
    fewer = moe.model_copy(update={"prototypes": count, "experts": moe.experts // moe.prototypes * count})
    return replace(what, model=what.model.model_copy(update={"moe": fewer}))


def _pieces(what: Traced, sequences: int) -> list[Piece]:
    """The phases, operation by operation."""
    rows = what.degrees.rows  # of a grid, which split sequences
    first, second = 2 * rows, 3 * rows  # of one sequence views stand for copies
    if sequences <= second:
        return _direct(what, sequences)
    found, at_loss = [], 1 + what.layers
    for number, (a, b) in enumerate(zip(_direct(what, first), _direct(what, second), strict=True)):
        if number == at_loss:
            mine, few, more = _phase(a), _loss(what, first), _loss(what, sequences)
            found.append(_brief(Phase(mine.left + more.left - few.left, mine.most + more.most - few.most)))
        elif len(a.alive) != len(b.alive):
            return _direct(what, sequences)
        else:
            found.append(_onwards(a, b, first, second, sequences))
    return found


def _loss(what: Traced, sequences: int) -> Phase:
    """The loss of so many sequences, of a model that has hardly any layer."""
    model = what.model.model_copy(update={"moe": MoEConfig(), "ffn": 8 * what.degrees.tensor})
    degrees = replace(what.degrees, expert=1)
    what = replace(what, model=model, degrees=degrees, mode="none", parts=(), rank=0, experts="free")
    # It is a straight line from two chunks on, in steps that leave as much for the last chunk.
    period = degrees.rows * what.chunk // math.gcd(what.chunk, what.length // degrees.context)
    few = sequences % period + period * -(-2 * what.chunk * degrees.context * degrees.rows // (period * what.length))
    at_loss = 1 + what.layers
    if what.model.objective == "masked" or few + period >= sequences:
        return _phase(_direct(what, sequences)[at_loss])
    one, two = (_brief(_phase(_direct(what, each)[at_loss])) for each in (few, few + period))
    return _phase(_onwards(one, two, few, few + period, sequences))


def _direct(what: Traced, sequences: int) -> list[Piece]:
    """Of a run of just so many sequences."""
    marks, *lists = _timeline(what, sequences)
    alive = lists[0]
    found = []
    for begin, end in zip(marks, [*marks[1:], len(alive)], strict=True):
        _, rows, each = (values[begin:end] for values in lists)
        before = alive[begin - 1] if begin else 0
        found.append(Piece((before, *alive[begin:end]), (0, *rows), (0, *each)))
    return found


def _phase(piece: Piece) -> Phase:
    base, *alive = piece.alive
    inside = (min(rows, PIECE_ROWS) * each for rows, each in zip(piece.rows[1:], piece.each[1:], strict=True))
    most = max(map(operator.add, alive, inside), default=base)
    return Phase(piece.alive[-1] - base, most - base)


def _brief(phase: Phase) -> Piece:
    """As one that takes most, and leaves what it leaves."""
    return Piece((0, phase.most, phase.left), (0, 0, 0), (0, 0, 0))


def _named(what: Traced, pieces: list[Piece]) -> Trace:
    before, *rest = map(_phase, pieces)
    forward, rest = rest[: what.layers], rest[what.layers :]
    loss, back, *rest = rest
    backward, (after,) = rest[: what.layers], rest[what.layers :]
    return Trace(before, tuple(forward), loss, back, tuple(reversed(backward)), after)


@lru_cache(maxsize=512)
def _timeline(what: Traced, sequences: int) -> tuple[tuple[int, ...], ...]:
    """Where each phase begins, and of all of them what pieces have."""
    model, example = _model(what), _example(what, sequences)
    parameters = list(model.parameters())
    if what.accumulates:
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    _alone()  # not within the recorder
    recorder = _Recorder(what, sequences, [*parameters, *gradients, *(each for each in example if each is not None)])
    with foreseeing(what.bf16_unit):
        run_once(model, example, what.chunk, recorder)
    return tuple(recorder.marks), tuple(recorder.alive), tuple(recorder.rows), tuple(recorder.each)


def _model(what: Traced) -> Decoder:
    small = what.model.model_copy(update={"layers": what.layers})
    with torch.device("meta"):
        model = Decoder(
            small, what.positions, what.dtype, Recompute(what.mode), stand_ins(what.degrees, small, what.tensor_rank)
        )
    pattern = Pattern([0] * what.layers)
    tie(model.layers, Sharing(pattern, what.parts or ("attention",), what.rank, what.experts))
    splits = splits_of(model, small, what.degrees, what.tensor_rank, 0)
    cut(model, splits)
    if what.gathered != torch.float32:
        model.to(what.gathered)
    return model.eval()  # the same but for capacities: no row is dropped


def _example(what: Traced, sequences: int) -> Example:
    tokens_BS = torch.zeros(sequences, what.length + 1, dtype=torch.int64, device="meta")
    if what.model.objective != "masked":
        return Example(tokens_BS[:, :-1], tokens_BS[:, 1:])
    places_BP = torch.zeros(
        sequences, max(1, round(what.model.mask_share * what.length)), dtype=torch.int64, device="meta"
    )
    return Example(tokens_BS[:, :-1], places_BP, places_BP.clone())


def run_once(model: Decoder, example: Example, chunk: int, recorder: _Recorder) -> None:
    """A micro-batch forward and backward, as `nn.objective.backward` does it, with a mark where each phase begins."""
    hooks = []
    for layer in model.layers:
        hooks.append(layer.register_forward_pre_hook(lambda _, inputs: recorder.begin_layer(inputs[0])))
    hooks.append(model.layers[-1].register_forward_hook(lambda _, __, outputs: recorder.begin_layer(outputs[0])))
    try:
        with torch.enable_grad(), recorder:
            recorder.mark()
            hidden, statistics_LS = model(example.inputs)
            objective = loss_sum(model, hidden, example, chunk)
            if (routing := balance_loss(model, statistics_LS)) is not None:
                objective = objective + routing
            objective = objective / 2.0
            recorder.mark()
            objective.backward()
            del hidden, statistics_LS, objective, routing
            recorder.end()
    finally:
        for hook in hooks:
            hook.remove()


class _Recorder(TorchDispatchMode):
    """Notes what is alive behind every operation, but for tensors that are `given`."""

    def __init__(self, what: Traced, sequences: int, given: Iterable[Tensor]) -> None:
        super().__init__()
        self._what, self._sequences, self._now = what, sequences, 0
        self._given = [tensor.untyped_storage() for tensor in given]
        self._known: dict[int, Any] = {storage._cdata: storage for storage in self._given}
        self.alive: list[int] = []
        self.rows: list[int] = []
        self.each: list[int] = []
        self.marks: list[int] = []

    def _tell(self, inside: int = 0, rows: int = 0, each: int = 0) -> None:
        self.alive.append(self._now + inside)
        self.rows.append(rows)
        self.each.append(each)

    def mark(self) -> None:
        """A phase begins."""
        self._tell()
        self.marks.append(len(self.alive))

    def begin_layer(self, x: Tensor) -> None:
        """Of the forward pass; its backward pass ends, and that of the layer before begins, with the gradient of x."""
        self.mark()
        x.register_hook(lambda _: self.mark())

    def end(self) -> None:
        """Note what is alive when all is over."""
        self._tell()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = self._run(func, args, kwargs or {})
        before = self._now
        for each in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(each, Tensor):
                self._note(each)
        inside = _inside(self._what, func, args)
        if self._now > before or any(inside):
            self._tell(*inside)
        return out

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def gone(_: Any) -> None:
            del self._known[key]
            self._now -= size

        self._known[key] = weakref.ref(storage, gone)
        self._now += size

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operation; those whose results have a shape that depends on data know no such data here."""
        if func is _aten.add.Tensor and _could_be_in_place(args):
            return args[0].add_(args[1])
        if func is _aten.bincount.default:
            return args[0].new_empty(args[2] if len(args) > 2 else kwargs["minlength"])
        if func is _aten.nonzero.default:  # where documents begin
            return args[0].new_empty((self._sequences, args[0].dim()), dtype=torch.int64)
        if (
            func is _aten.index.Tensor and args[1][0] is not None and args[1][0].dtype == torch.bool
        ):  # what is predicted of this rank's positions
            what = self._what
            places = max(1, round(what.model.mask_share * what.length)) * self._sequences
            count = -(-places // (what.degrees.context * what.degrees.rows))
            return args[0].new_empty(count, *args[0].shape[args[1][0].dim() :])
        return func(*args, **kwargs)


_aten = torch.ops.aten


def _could_be_in_place(args: Any) -> bool:
    """Whether this is autograd adding up gradients that are nobody else's: it does so in their memory, unless some mode
    looks on as ours does."""
    if (
        torch._C._current_graph_task_id() == -1
        or torch.is_grad_enabled()
        or not all(isinstance(each, Tensor) for each in args)
    ):
        return False
    return args[0].shape == args[1].shape and _references(args[0]) <= _alone()


def _references(x: Tensor) -> tuple[int, int]:
    count: int = torch._C._storage_Use_Count(x.untyped_storage()._cdata)
    return x._use_count(), count  # type: ignore[attr-defined]


@lru_cache(maxsize=1)
def _alone() -> tuple[int, int]:
    """How many references there are to a gradient that nobody else has, as a mode sees it."""
    seen: list[tuple[int, int]] = []

    class Looking(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is _aten.add.Tensor:
                seen.append(_references(args[0]))
            return func(*args, **(kwargs or {}))

    x = torch.zeros(2, device="meta", requires_grad=True)
    with torch.enable_grad():
        y = x * 2
        total = y.sin() + y.cos()
        with Looking():
            total.backward(torch.zeros(2, device="meta"))
    (found,) = seen
    return found


def _inside(what: Traced, func: Any, args: Any) -> tuple[int, int, int]:
    """Bytes that one of our own operators takes for itself, and that are not in what it returns: so many, and rows
    that it takes by turns, with what each of them takes."""
    name = func._schema.name
    if not name.startswith("tenfold::"):
        return 0, 0, 0
    if name in ("tenfold::experts", "tenfold::experts_backward"):
        x, width = args[0], args[3 if name == "tenfold::experts" else 4].shape[2]
        each = width * x.element_size()
        if name == "tenfold::experts_backward":
            each *= 4 if what.model.activation == "swiglu" else 3
        if what.cuda and x.dtype == torch.bfloat16:
            return len(x) * each + (x.nbytes if name == "tenfold::experts_backward" else 0), 0, 0
        return 0, len(x), each
    return _inside_of_others(what, name, args), 0, 0


def _inside_of_others(what: Traced, name: str, args: Any) -> int:
    if name == "tenfold::ring_attention":
        q, k = args[:2]
        return 4 * k.nbytes + q.nbytes + 2 * 4 * q.numel()
    if name == "tenfold::ring_attention_backward":
        q, k = args[1:3]
        return 4 * k.nbytes + 4 * (2 * q.numel() + 8 * k.numel())
    if name == "tenfold::block_product":
        x, block = args[:2]
        return 3 * block.numel() * x.element_size() + x.nbytes
    if name == "tenfold::block_product_backward":
        x, block = args[1:3]
        return 3 * block.numel() * x.element_size() + (what.degrees.rows + 1) * block.nbytes + x.nbytes
    return 0
