"""What ranks do in the tests of pipeline stages."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import distributed.cases as proof
from distributed.cases import batch_of
from tenfold.config.load import build
from tenfold.config.run import RunConfig
from tenfold.evaluation.generation import generate_batch
from tenfold.evaluation.inference import inference
from tenfold.nn.objective import loss_sum, make_example
from tenfold.parallel.traffic import Collectives
from tenfold.training.optimizers import build_optimizers
from tenfold.training.step import train_step


def _config_of(_kind: Any, raw: dict[str, Any], where: str) -> RunConfig:
    """The configuration of a run file, of which "known" is what a run learns of the model from its data."""
    config = build(RunConfig, {key: value for key, value in raw.items() if key != "known"}, where)
    return config.model_copy(update={"model": config.model.model_copy(update=raw.get("known", {}))})


def many(raws: list[dict[str, Any]], world: int) -> list[dict[str, Any]]:
    """`distributed.cases.steps` of each of several runs."""
    with mock.patch.object(proof, "build", _config_of):
        return [proof.steps(raw, world) for raw in raws]


def _built(raw: dict[str, Any], world: int) -> Any:
    config = _config_of(RunConfig, raw, "run.toml")
    return config, *proof.laid_out(config, world)


def questions(raw: dict[str, Any], world: int) -> dict[str, Any]:
    """The loss, logits and text of a new model, asked on this rank, before and after a step of training."""
    config, layout, model = _built(raw, world)
    optimizers = build_optimizers(model, config.optim, layout)
    found = {}
    for when in ("before", "after"):
        example = make_example(batch_of(config, 7, 0, 3), config.model, 1, 0)
        with inference(model):
            hidden, _ = model(example.inputs)
            found[f"{when} loss"] = loss_sum(model, hidden, example, 5)
            found[f"{when} logits"] = model.logits(hidden[:, -3:])
        prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
        if config.model.objective == "next-token":
            found[f"{when} text"] = torch.tensor(list(generate_batch(model, prompts, 6, temperature=0)))
        if when == "before":
            mine = config.training.batch_size // layout.data
            first = layout.mesh.data_index * mine
            train_step(model, optimizers, batch_of(config, 0, first, mine), 1, 1e-2, config, first, 1, layout)
    return found


def held(raw: dict[str, Any]) -> dict[str, Any]:
    """What this rank holds, and what it says that stages hold."""
    _, layout, model = _built(raw, dist.get_world_size())
    named = layout.named(model)
    return {
        "names": sorted(named),
        "own names": sorted(name for name, _ in model.named_parameters()),
        "stages": {name: layout.stages_of(name) for name in layout.shapes},
        "users": {name: list(layout.users(model).get(parameter, [])) for name, parameter in named.items()},
    }


def sent(raw: dict[str, Any]) -> dict[str, int]:
    """Messages that this rank sends and receives, and other collectives, in the second step."""
    config, layout, model = _built(raw, dist.get_world_size())
    optimizers = build_optimizers(model, config.optim, layout)
    for step in range(2):
        with Collectives() as seen:
            batch = batch_of(config, step, 0, config.training.batch_size)
            train_step(model, optimizers, batch, step + 1, 1e-2, config, 0, 1, layout)
    return dict(seen.counts)
