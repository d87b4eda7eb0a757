"""Runs with Adafactor that go on in another layout, from what a checkpoint has."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from distributed.cases import CPU, batch_of, many, mesh_of
from tenfold.checkpoint.gathered import gathered
from tenfold.config.load import build
from tenfold.config.run import RunConfig
from tenfold.nn.decoder import Decoder
from tenfold.parallel.layout import Layout
from tenfold.planning.stages import learning_rate, plan_stages
from tenfold.training.optimizers import build_optimizers, fill_tensors, load_state_tensors, state_tensors
from tenfold.training.setup import degrees_of_stages, layout_of
from tenfold.training.step import train_step

Whole = dict[str, torch.Tensor]


def all_of(raws: list[dict[str, Any]], moves: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """`cases.many` of runs, and `moved` of others."""
    return {"runs": many(raws), "moved": [moved(each, dist.get_world_size()) for each in moves]}


def moved(raws: list[dict[str, Any]], world: int) -> dict[str, Any]:
    """The losses of the steps of a run of one stage that lies as the first of its files says, and from its third step
    on as the second does; and on rank 0 its weights and optimizer state at the end."""
    saved: tuple[Whole, Whole] | None = None
    losses: list[float] = []
    for raw in raws:
        config = build(RunConfig, raw, "run.toml")
        (stage,) = stages = plan_stages(config)
        (degrees,) = degrees_of_stages(config, stages, world)
        layout = layout_of(config, stage.sharing, mesh_of(degrees), CPU)
        model = layout.build(config.training.seed)
        optimizers = build_optimizers(model, config.optim, layout)
        if saved is not None:
            weights, state = saved
            fill_tensors(dict(layout.named(model)), weights, "weights", layout)
            load_state_tensors(model, optimizers, state, layout)
        mine = stage.batch_size // layout.data
        first = layout.mesh.data_index * mine
        last = stage.last_step if raw is raws[-1] else 2
        for step in range(len(losses), last):
            rate = learning_rate(config.optim, stages, stage, step)
            batch = batch_of(config, step, first, mine)
            result = train_step(model, optimizers, batch, step + 1, rate, config, first, 1, layout)
            losses.append(result.loss)
        layout.let_go(model)
        named = {name: parameter.data for name, parameter in layout.named(model).items()}
        saved = whole(layout, model, named), whole(layout, model, state_tensors(model, optimizers, layout))
    assert saved is not None
    return {"losses": losses, "weights": saved[0], "state": saved[1]}


def whole(layout: Layout, model: Decoder, tensors: Whole) -> Whole:
    """Tensors as a checkpoint has them, on every rank."""
    stored = gathered(layout, tensors)
    found = {name: torch.cat([piece.clone() for piece in stored[name].pieces()]) for name in sorted(stored)}
    if layout.alone:
        return {name: tensor.view(stored[name].shape) for name, tensor in found.items()}
    told = [{name: tensor.view(stored[name].shape) for name, tensor in found.items()} if layout.number == 0 else {}]
    dist.broadcast_object_list(told)
    return told[0]
