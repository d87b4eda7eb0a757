"""What the process of one fake rank does (`fake_ranks`): real code on tensors without memory, and what was counted."""

from __future__ import annotations

import functools
import gc
import math
import time
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from tenfold.checkpoint import tensors
from tenfold.config.run import RunConfig
from tenfold.nn import products
from tenfold.nn.decoder import Decoder
from tenfold.nn.grouped import Rows
from tenfold.nn.objective import Example
from tenfold.nn.ranks import Ranks
from tenfold.offload.experts import Lots, by_rows
from tenfold.offload.moments import Inventory
from tenfold.offload.parts import parts_of
from tenfold.offload.placement import Part
from tenfold.parallel.data import groups_of
from tenfold.parallel.exchange import Plan, plans_of
from tenfold.parallel.expert import ExpertGroup
from tenfold.parallel.layout import Layout
from tenfold.parallel.mesh import Mesh
from tenfold.parallel.rank import Borrow, T
from tenfold.parallel.splits import in_a_layer, state_shape
from tenfold.planning.parts import lots_of
from tenfold.planning.stages import Stage
from tenfold.sharing.delinking import delink
from tenfold.training.entries import ends, entries
from tenfold.training.fake_ranks import Counted, Task, as_run
from tenfold.training.offloading import Begun
from tenfold.training.optimizers import build_optimizers, materialize
from tenfold.training.relayout import lay_out_anew
from tenfold.training.setup import layout_of
from tenfold.training.step import train_step
from tenfold.training.tally import Exchange, Tally

CPU = torch.device("cpu")


def run(task: Task) -> list[Counted]:
    """Go through the stages of a task. This process is of no other use afterwards."""
    torch.set_num_threads(1)
    if task.device == "cuda":
        products._cpu_widens = lambda: False
    ranks = task.candidates[0].degrees.ranks
    if ranks > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=task.rank, world_size=ranks)
    fakes, tally = FakeTensorMode(allow_non_fake_inputs=True), FakeTally(task.config.model.mask_share)
    found: list[Counted] = []
    had: tuple[_FakeLayout, Begun] | None = None
    for number, (stage, candidate) in enumerate(zip(task.stages, task.candidates, strict=True)):
        began, config = time.monotonic(), as_run(task.config, candidate)
        layout = layout_of(config, stage.sharing, Mesh(candidate.degrees, "cpu"), CPU, _FakeLayout)
        assert isinstance(layout, _FakeLayout)
        layout.tally, layout.before_pass = tally, tally.begin_pass
        shaped = layout.shaped()  # here: FSDP2 cannot split what is fake
        with fakes, tally.watching():
            tally.forget()
            tally.begin("delinking")
            if had is None or not task.delinking:
                begun, delinks = _begin(config, layout, shaped), False
            else:
                begun, delinks = _delink(had, layout, config, stage, shaped), True
            had = layout, begun
            tally.turned_back = lambda: None
            gc.collect()  # the former model: modules that FSDP2 splits are in rings of references
            peaks, delinking = (dict(tally.peaks), dict(tally.exchanges)) if delinks else ({}, {})
            items, exchanges = _count(stage, config, layout, begun, tally)
            lots = by_rows(lots_of(task.config, stage, candidate.degrees))
            parts = _parts(begun, layout, config, lots) if task.parts else []
        found.append(
            Counted(
                number,
                stage.name,
                task.rank,
                layout.mesh.place["pipeline"],
                items,
                {**tally.peaks, **peaks},
                dict(exchanges),
                delinking,
                time.monotonic() - began,
                parts,
            )
        )
    return found


def _begin(config: RunConfig, layout: _FakeLayout, shaped: Decoder) -> Begun:
    layout.give_memory(shaped)
    return Begun(shaped, build_optimizers(shaped, config.optim, layout))


def _parts(begun: Begun, layout: _FakeLayout, config: RunConfig, lots: Lots) -> list[Part]:
    """As `place_state` finds them."""
    entry_of, _ = entries(begun.model, layout)
    numbers = [int(name) for name, _ in begun.model.layers.named_children()]
    layers, form = list(begun.model.layers), config.optim.state
    inventory = Inventory(begun.model, layers, begun.optimizers, entry_of, numbers, form, config.training.seed, lots)
    return parts_of(inventory, ends)


def _delink(
    had: tuple[_FakeLayout, Begun], layout: _FakeLayout, config: RunConfig, stage: Stage, shaped: Decoder
) -> Begun:
    """As a run does it (`Run._delink`), without the looks at logits."""
    before, begun = had
    moments = stage.config.moments
    if before.alone and layout.alone:
        delink(begun.model.layers, begun.optimizers, layout.sharing, moments, config.training.seed)
        materialize(begun.optimizers)
        return begun
    # Pieces only bound what is in memory besides a rank's own, of which one of 10^9 elements has 10^3.
    tensors.PIECE = max(tensors.PIECE, max(math.prod(before.piece(name).shape) for name in before.shapes) // 16)

    def begin(_: Layout, __: Container[str]) -> Begun:
        return _begin(config, layout, shaped)

    return lay_out_anew(begun.model, begun.optimizers, before, layout, config, moments, begin, lambda _, tensor: tensor)


def _count(
    stage: Stage, config: RunConfig, layout: _FakeLayout, begun: Begun, tally: FakeTally
) -> tuple[dict[str, int], Counter[Exchange]]:
    """Steps of a stage: bytes by what they are for, with peaks in `tally`; and the exchanges of one."""
    samples = stage.batch_size // layout.data
    micro = min(config.training.micro_batch_size, samples)
    pieces = stage.sequence_length // stage.lengths[-1]
    tally.length = stage.lengths[-1]

    def step(passes: int) -> Counter[Exchange]:
        batch_BS = torch.zeros(passes * micro, stage.sequence_length + 1, dtype=torch.int64)
        tally.forget()
        layout.watch(begun)
        tally.begin("forward")
        train_step(begun.model, begun.optimizers, batch_BS, 1, 1e-3, config, 0, pieces, layout)
        return Counter(tally.exchanges)

    passes = samples // micro
    if layout.degrees.pipeline > 1:
        step(passes)  # in which stages make what they receive into; without them the first step is as any other
    if passes <= 2 or layout.degrees.pipeline > 1:
        exchanges = step(passes)
    else:  # all passes but the last are alike
        one, two = step(1), step(2)
        exchanges = Counter({each: one[each] + (passes - 1) * (two[each] - one[each]) for each in two | one})
    return {**layout.items, "weights": _storages(begun.model.parameters())} | _state(begun.optimizers), exchanges


def _storages(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory that tensors, or this rank's shards of them, lie in."""
    found = {}
    for tensor in tensors:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def _state(optimizers: Sequence[Optimizer]) -> dict[str, int]:
    state = [value for each in optimizers for kept in each.state.values() for value in kept.values()]
    return {"moments": _storages(value for value in state if isinstance(value, Tensor))}


class _FakeLayout(Layout):
    """A rank that nobody answers, and that says when a step comes to what."""

    tally: FakeTally

    @cached_property
    def others(self) -> Ranks:
        """With experts that get equally many tokens."""
        found = super().others
        if isinstance(found.expert, ExpertGroup):
            found = replace(found, expert=_EvenExperts(self.mesh, self.model_config, found.tensor))
        return found

    def of_all(self, value: T) -> list[T]:
        return [value]

    def whole_shapes(self, tensors: Mapping[str, Tensor], everyone: bool = True) -> dict[str, tuple[int, ...]]:
        """Those of other pipeline ranks too: what these hold in layers is as what this one holds in its own, and of
        what is outside of layers the state is AdamW's, or Adafactor's."""
        found = super().whole_shapes(tensors)
        if not everyone:
            return found
        kinds: dict[str, set[str]] = {}
        for key in found:
            name, _, kind = key.partition("/")
            kinds.setdefault(in_a_layer(name), set()).add(kind)

        def usual(factored: bool) -> set[str]:
            return max(kinds.values(), key=lambda each: ("exp_avg" in each, ("row_var" in each) == factored, len(each)))

        for name, shape in self.shapes.items():
            for kind in kinds.get(in_a_layer(name), usual(len(shape) > 1)):
                key = f"{name}/{kind}" if kind else name
                if self._trained[name] or not kind:
                    found[key] = () if kind == "step" else state_shape(key, shape)
        return found

    def dtypes(self, tensors: Mapping[str, Tensor], everyone: bool = True) -> dict[str, torch.dtype]:
        """Weights and their state are fp32."""
        return dict.fromkeys(self.whole_shapes(tensors, everyone), torch.float32)

    @cached_property
    def _trained(self) -> dict[str, bool]:
        return {name: parameter.requires_grad for name, parameter in self.whole.named_parameters()}

    def watch(self, begun: Begun) -> None:
        """Before a step: what is there now is state."""
        self._begun, self._before = begun, self.tally.alive
        self.items = {"gathered": 0, "activations": 0, "gradients": 0}
        self.tally.turned_back = self._turned_back

    def run_passes(
        self, model: Decoder, micro_batches: Sequence[Example], valid_tokens: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        found = super().run_passes(model, micro_batches, valid_tokens, chunk)
        self.tally.begin("step")
        return found

    def add_gradients(self, model: Decoder, borrow: Borrow = nullcontext) -> None:
        super().add_gradients(model, borrow)
        self.items["gradients"] = _storages(self._gradients())

    def _turned_back(self) -> None:
        """A backward pass begins."""
        gathered = _storages(self._gathered())
        kept = self.tally.alive - self._before - gathered - _storages(self._gradients())
        self.items["gathered"] = max(gathered, self.items["gathered"])
        self.items["activations"] = max(kept, self.items["activations"])

    def _gathered(self) -> Iterator[Tensor]:
        for group in groups_of(self._begun.model):
            for each in group.fsdp_params:
                yield from each.all_gather_outputs

    def _gradients(self) -> Iterator[Tensor]:
        for parameter in self._begun.model.parameters():
            if parameter.grad is not None:
                yield parameter.grad
        for group in groups_of(self._begun.model):
            if (shared := getattr(group, "_partial_reduce_output", None)) is not None:
                yield shared  # between passes of a step, where replicas add up at its end
            for each in group.fsdp_params:
                whole = getattr(each, "_unsharded_param", None)
                for gradient in (
                    each.sharded_param.grad,
                    each.unsharded_accumulated_grad,
                    getattr(whole, "grad", None),
                ):
                    if gradient is not None:
                        yield gradient


class _EvenExperts(ExpertGroup):
    """Every expert of a prototype gets as many of its rows as any other, from every rank."""

    _rows = 0

    def _tell_counts(self, rows: Rows, group: dist.ProcessGroup) -> Tensor:
        self._rows = len(rows.choices)
        return super()._tell_counts(rows, group)

    def _plans(self, told: Tensor, tensor: int, device: torch.device) -> list[Plan]:
        plans = _even_plans(tuple(told.shape), self._rows, self.rank, tensor)
        return [
            replace(
                plan,
                order=torch.empty(len(plan.order), dtype=torch.int64),
                per_expert=torch.empty_like(plan.per_expert),
            )
            for plan in plans
        ]


@functools.cache
def _even_plans(shape: tuple[int, ...], rows: int, rank: int, tensor: int) -> list[Plan]:
    """`plans_of` what ranks tell each other of so many rows."""
    with _disable_current_modes():
        tensors, ranks, prototypes, experts = shape[0] - 1, *shape[1:]
        ends = torch.arange(ranks * experts + 1) * (rows // prototypes) // (ranks * experts)
        sent_RP = ends.diff().view(ranks, experts)
        come_RP = sent_RP[rank].expand(ranks, experts)
        told = torch.stack([sent_RP, *[come_RP] * tensors])
        return plans_of(told[:, :, None].expand(shape).contiguous(), tensor, CPU)


class FakeTally(Tally):
    """With answers to what a fake tensor cannot tell."""

    length = 1
    """Tokens of a sequence."""

    def __init__(self, mask_share: float) -> None:
        super().__init__()
        self._mask_share = mask_share
        self._ended: Any = None

    def inside(self, args: Any) -> Any:
        # Ring attention is given where documents begin: every sequence is one.
        return [None if isinstance(each, Tensor) and each.dtype == torch.int32 else each for each in args]

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        aten = torch.ops.aten
        if func is aten._local_scalar_dense.default:
            # A loss, a norm: some number. The first micro-batch; and yes, stages of a pipeline know their shapes, for
            # which PyTorch's vote, in int32.
            return 1.0 if args[0].is_floating_point() else int(args[0].dtype == torch.int32)
        if func is aten.bincount.default:
            return args[0].new_empty(args[2] if len(args) > 2 else kwargs["minlength"])
        if func is aten.nonzero.default:  # where documents begin
            return args[0].new_empty((args[0].numel() // self.length, args[0].dim()), dtype=torch.int64)
        if func is torch.ops.c10d.alltoall_base_.default:  # of which a step has thousands: each ends as it begins
            self._ended = func(*args, **kwargs) if self._ended is None else self._ended
            return self._ended
        if func is aten.index.Tensor:
            args = args[0], [self._chosen(each) for each in args[1]]
        return func(*args, **kwargs)

    def _chosen(self, index: Any) -> Any:
        """Where a mask is true: of rows everywhere, none being dropped; of positions where an encoder predicts."""
        if index is None or index.dtype != torch.bool:
            return index
        count = index.numel() if index.dim() == 1 else round(index.numel() * self._mask_share)
        return index.new_empty(count, dtype=torch.int64)
