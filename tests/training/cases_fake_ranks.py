"""What real ranks hold, have at once and exchange in a step: what `test_fake_ranks` compares fake ones with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distributed.cases import batch_of, mesh_of
from tenfold.config.load import build
from tenfold.config.run import RunConfig
from tenfold.parallel.layout import Layout
from tenfold.parallel.pieces import local_of
from tenfold.planning.stages import plan_stages
from tenfold.training.offloading import Begun
from tenfold.training.optimizers import build_optimizers
from tenfold.training.relayout import lay_out_anew
from tenfold.training.setup import degrees_of_stages, layout_of
from tenfold.training.step import train_step
from tenfold.training.tally import Tally

# Of an operator's tensors the one that `planning.terms.Collective` counts the bytes of.
TOLD = {
    "_allgather_base_": ("all_gather", 0),
    "all_gather_into_tensor": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "allreduce_": ("all_reduce", 0),
    "all_reduce": ("all_reduce", 0),
    "alltoall_base_": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 0),
    "broadcast": ("broadcast", 0),
    "broadcast_": ("broadcast", 0),
    "send": ("send", 0),
}


class Heard(TorchDispatchMode):
    """Every collective by kind and bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func._schema.name.partition("::")
        name = name.partition(".")[0]
        if space in ("c10d", "_c10d_functional") and name in TOLD:
            kind, index = TOLD[name]
            tensor = [each for each in tree_leaves(args) if isinstance(each, Tensor)][index]
            times = args[1] if name == "all_gather_into_tensor" else 1
            self.calls[kind, tensor.numel() * tensor.element_size() * times] += 1
        if func._schema.name in OPDEFS and not func._schema.name.startswith("tenfold::experts"):
            with self:
                return OPDEFS[func._schema.name]._init_fn(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def real(raws: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`one` of each of several runs of one stage."""
    return [one(raw) for raw in raws]


def one(raw: dict[str, Any]) -> dict[str, Any]:
    """Bytes of numbers by kind, the collectives of a second step, and the least peaks of some steps.

    What is on its way is held as long as gloo's threads take, so that a step of a busy machine has more at once.
    """
    config = build(RunConfig, raw, "run.toml")
    stages = plan_stages(config)
    (degrees,) = degrees_of_stages(config, stages, dist.get_world_size())
    (stage,) = stages
    layout = layout_of(config, stage.sharing, mesh_of(degrees), torch.device("cpu"))
    tally, heard, peaks = Tally(), Heard(), []
    layout.before_pass = tally.begin_pass
    with tally.watching():
        model = layout.build(config.training.seed)
        optimizers = build_optimizers(model, config.optim, layout)
        mine = stage.batch_size // layout.data
        first = layout.mesh.data_index * mine
        for number, listening in enumerate((nullcontext(), heard, *[nullcontext()] * 10)):
            tally.forget()
            tally.begin("forward")
            batch = batch_of(config, number, first, mine)
            with listening:
                train_step(model, optimizers, batch, number + 1, 1e-3, config, first, 1, layout)
            peaks.append(dict(tally.peaks))
    state = [value for each in optimizers for kept in each.state.values() for value in kept.values()]
    return {
        "weights": sum(_bytes(parameter) for parameter in model.parameters()),
        "moments": sum(_bytes(value) for value in state),
        "gradients": sum(_bytes(parameter) for parameter in model.parameters() if parameter.requires_grad),
        "calls": dict(heard.calls),
        "peaks": {moment: min(each[moment] for each in peaks[1:]) for moment in peaks[-1]},
    }


def delinked(raw: dict[str, Any]) -> dict[tuple[str, int], int]:
    """What is sent while the second stage of a run begins, its layers laid out anew."""
    config, heard = build(RunConfig, raw, "run.toml"), Heard()
    before, after = plan_stages(config)
    first, second = degrees_of_stages(config, [before, after], dist.get_world_size())
    had = layout_of(config, before.sharing, mesh_of(first), torch.device("cpu"))
    layout = layout_of(config, after.sharing, mesh_of(second), torch.device("cpu"))
    model = had.build(config.training.seed)
    optimizers = build_optimizers(model, config.optim, had)
    mine = before.batch_size // had.data
    train_step(model, optimizers, batch_of(config, 0, 0, mine), 1, 1e-3, config.of_stage(before.config), 0, 1, had)

    def begin(layout: Layout, only: Container[str]) -> Begun:
        made = layout.build(config.training.seed, None, only)
        return Begun(made, build_optimizers(made, config.optim, layout))

    with heard:
        lay_out_anew(model, optimizers, had, layout, config, after.config.moments, begin, lambda _, tensor: tensor)
    return {call: count for call, count in heard.calls.items() if call[0] == "send"}


def _bytes(tensor: Tensor) -> int:
    local = local_of(tensor)
    return local.numel() * local.element_size()
