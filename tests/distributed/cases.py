"""What a rank does in the proof: five steps of a layout, and what came of them."""

from __future__ import annotations

from typing import Any

import torch

from tenfold.config.load import build
from tenfold.config.run import RunConfig
from tenfold.parallel.layout import Layout
from tenfold.parallel.mesh import Mesh, check, degrees_of
from tenfold.parallel.pieces import local_of
from tenfold.training.optimizers import build_optimizers
from tenfold.training.stages import learning_rate, plan_stages
from tenfold.training.step import train_step


def batch_of(config: RunConfig, step: int, first: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + step)
    length, rows = config.data.sequence_length, config.model.vocab_size
    return torch.randint(0, rows, (config.training.batch_size, length + 1), generator=generator)[first : first + count]


def steps(raw: dict[str, Any], world: int, count: int = 5) -> dict[str, Any]:
    """Losses, gradient norms, and the weights after `count` steps of a run file's first stage."""
    config = build(RunConfig, raw, "run.toml")
    stages = plan_stages(config)
    stage, training = stages[0], config.training
    degrees = degrees_of(config.parallel, world, config.model, training.batch_size)
    check(degrees, config.model, training.batch_size, training.micro_batch_size, [config.data.sequence_length])
    mesh = Mesh(degrees, "cpu")
    layout = Layout(
        mesh, config.parallel, config.model, stage.sharing, config.data.sequence_length, torch.device("cpu")
    )
    model = layout.build(seed=training.seed)
    optimizers = build_optimizers(model, config.optim, layout)
    losses, norms, statistics = [], [], []
    mine = stage.batch_size // degrees.data
    for step in range(count):
        first = mesh.data_index * mine
        batch = batch_of(config, step, first, mine)
        rate = learning_rate(config.optim, stages, stage, step)
        result = train_step(
            model, optimizers, batch, step + 1, rate, config, step * stage.batch_size + first, 1, layout
        )
        losses.append(result.loss)
        norms.append(result.grad_norm)
        statistics.append(result.statistics)
    weights = {}
    named = layout.named(model)
    for name, shape in layout.shapes.items():
        whole = layout.collect(name, named.get(name), shape, torch.float32, to=0)
        if whole is not None:
            weights[name] = local_of(whole).detach().clone()
    return {"losses": losses, "norms": norms, "weights": weights, "statistics": statistics}
