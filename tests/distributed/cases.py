"""What a rank does in the proof: a run's steps on given tokens, through all of its stages, and what came of them."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from tenfold.config.load import build
from tenfold.config.run import RunConfig
from tenfold.errors import TenfoldError
from tenfold.parallel.layout import Layout
from tenfold.parallel.mesh import Degrees, Mesh
from tenfold.parallel.traffic import Collectives
from tenfold.sharing.delinking import delink
from tenfold.training.optimizers import build_optimizers, materialize
from tenfold.training.relayout import lay_out_anew
from tenfold.training.setup import degrees_of_stages, layout_of
from tenfold.training.stages import learning_rate, plan_stages
from tenfold.training.step import train_step

CPU = torch.device("cpu")


@functools.cache
def mesh_of(degrees: Degrees) -> Mesh:
    """The mesh of this rank's process; opening its groups takes longer than a run."""
    return Mesh(degrees, "cpu")


def batch_of(config: RunConfig, step: int, first: int, count: int) -> torch.Tensor:
    """Samples `first` to `first + count` of a step: random tokens."""
    generator = torch.Generator().manual_seed(100 + step)
    length, rows = config.data.sequence_length, config.model.vocab_size
    return torch.randint(0, rows, (config.training.batch_size, length + 1), generator=generator)[first : first + count]


def steps(raw: dict[str, Any], world: int) -> dict[str, Any]:
    """Losses, gradient norms and statistics of a run's steps, and on rank 0 the weights after them."""
    config = build(RunConfig, raw, "run.toml")
    if config.data.document_mask:  # as `setup.resolve` does once it knows the data
        ended = config.model.model_copy(update={"document_end": config.data.end_of_text})
        config = config.model_copy(update={"model": ended})
    stages = plan_stages(config)
    degrees = degrees_of_stages(config, stages, world)
    found: dict[str, Any] = {"losses": [], "norms": [], "statistics": []}
    layout: Layout | None = None
    for stage, each in zip(stages, degrees, strict=True):
        following = layout_of(config, stage.sharing, mesh_of(each), CPU)
        if layout is None:
            model = following.build(config.training.seed)
            optimizers = build_optimizers(model, config.optim, following)
        elif world == 1:  # the other way: in place
            delink(model.layers, optimizers, stage.sharing, stage.config.moments, config.training.seed)
            materialize(optimizers)
        else:
            model, optimizers = lay_out_anew(model, optimizers, layout, following, config, stage.config.moments)
        layout = following
        mine = stage.batch_size // layout.data
        for step in range(stage.first_step, stage.last_step):
            first = layout.mesh.data_index * mine
            batch, rate = batch_of(config, step, first, mine), learning_rate(config.optim, stages, stage, step)
            sample, pieces = stage.sample_at(step) + first, stage.sequence_length // stage.length_at(step)
            result = train_step(model, optimizers, batch, step + 1, rate, config, sample, pieces, layout)
            found["losses"].append(result.loss)
            found["norms"].append(result.grad_norm)
            found["statistics"].append(result.statistics)
    assert layout is not None
    return found | {"weights": weights_of(layout, model)}


def weights_of(layout: Layout, model: Any) -> dict[str, torch.Tensor]:
    """All weights by canonical name, on rank 0."""
    layout.let_go(model)
    named, weights = layout.named(model), {}
    for name, shape in layout.shapes.items():
        whole = layout.collect(name, named.get(name), shape, torch.float32, to=0)
        if whole is not None:
            weights[name] = whole.detach().clone()
    return weights


def many(raws: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`steps` of each of several runs, or the words by which one is `refused`."""
    found = []
    for raw in raws:
        try:
            found.append(steps(raw, dist.get_world_size()))
        except TenfoldError as error:
            found.append({"refused": str(error)})
    return found


def counted(raw: dict[str, Any], world: int) -> dict[str, int]:
    """How often each kind of collective is called in the second step of a run."""
    config = build(RunConfig, raw, "run.toml")
    (stage,) = stages = plan_stages(config)
    (degrees,) = degrees_of_stages(config, stages, world)
    layout = layout_of(config, stage.sharing, mesh_of(degrees), CPU)
    model = layout.build(config.training.seed)
    optimizers = build_optimizers(model, config.optim, layout)
    mine = stage.batch_size // layout.data
    for step in range(2):
        with Collectives() as seen:
            first = layout.mesh.data_index * mine
            batch = batch_of(config, step, first, mine)
            train_step(model, optimizers, batch, step + 1, 1e-3, config, first, 1, layout)
    return dict(seen.counts)


def count_many(raws: list[dict[str, Any]]) -> list[dict[str, int]]:
    """`counted` of each of several runs."""
    return [counted(raw, dist.get_world_size()) for raw in raws]
