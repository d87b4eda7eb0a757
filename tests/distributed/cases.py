"""What a rank does in the proof: a run's steps on given tokens, through all of its stages, and what came of them."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Container
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tenfold.checkpoint.gathered import Fetched, gathered
from tenfold.config.load import build
from tenfold.config.offload import OffloadConfig, key_of
from tenfold.config.run import RunConfig
from tenfold.errors import TenfoldError
from tenfold.nn.decoder import Decoder
from tenfold.offload import units
from tenfold.offload.forecast import Rates
from tenfold.parallel.layout import Layout
from tenfold.parallel.mesh import Degrees, Mesh
from tenfold.parallel.traffic import Collectives
from tenfold.planning.stages import Stage, learning_rate, plan_stages
from tenfold.sharing.delinking import delink
from tenfold.training.offloading import Begun, Tiers, begin_stage
from tenfold.training.optimizers import materialize
from tenfold.training.relayout import lay_out_anew
from tenfold.training.setup import degrees_of_stages, layout_of
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


@functools.cache
def tiers(disk: bool) -> Tiers:
    """What is below the device of this rank's process, with a disk, whose rates are not measured."""
    wanted = [OffloadConfig(disk=[tempfile.gettempdir()], device_budget=0)] if disk else []
    found = Tiers(wanted, CPU, dist.get_rank() if disk else 0, 1, print)
    found.rates = Rates({"disk": 1e9}, {"disk": 1e9})
    return found


def close_tiers() -> None:
    """At the end: processes of tests end without what is registered for theirs."""
    tiers(True).close()
    tiers.cache_clear()


def begin(config: RunConfig, stage: Stage, layout: Layout, only: Container[str] | None = None) -> Begun:
    """What a stage trains with, in pieces so small that parameters are cut."""
    with mock.patch.object(units, "PIECE", 1024):
        return begin_stage(config, stage, config.offload, key_of(0, None), layout, tiers(config.offload.on), only)


def steps(raw: dict[str, Any], world: int) -> dict[str, Any]:
    """Losses, gradient norms and statistics of a run's steps, and on rank 0 the weights after them.

    `below`: the kinds of state of which something was below the device on this rank, in any stage.
    """
    config = build(RunConfig, raw, "run.toml")
    if config.data.document_mask:  # as `setup.resolve` does once it knows the data
        ended = config.model.model_copy(update={"document_end": config.data.end_of_text})
        config = config.model_copy(update={"model": ended})
    stages = plan_stages(config)
    degrees = degrees_of_stages(config, stages, world)
    found: dict[str, Any] = {"losses": [], "norms": [], "statistics": [], "below": set()}
    layout: Layout | None = None
    for stage, each in zip(stages, degrees, strict=True):
        own = config.of_stage(stage.config)
        following = layout_of(own, stage.sharing, mesh_of(each), CPU)
        if layout is None:
            begun = begin(config, stage, following)
        elif world == 1:  # the other way: in place
            delink(begun.model.layers, begun.optimizers, stage.sharing, stage.config.moments, config.training.seed)
            materialize(begun.optimizers)
        else:
            had, moments = begun, stage.config.moments
            if had.offload is not None:
                had.offload.put_all_away(tiers(True).by_name["disk"])
            anew = functools.partial(begin, config, stage)
            begun = lay_out_anew(had.model, had.optimizers, layout, following, config, moments, anew, fetched(had))
            if had.offload is not None:
                had.offload.close()
        layout = following
        found["below"] |= kinds_below(begun)
        mine = stage.batch_size // layout.data
        for step in range(stage.first_step, stage.last_step):
            first = layout.mesh.data_index * mine
            batch, rate = batch_of(config, step, first, mine), learning_rate(config.optim, stages, stage, step)
            sample, pieces = stage.sample_at(step) + first, stage.sequence_length // stage.length_at(step)
            result = train_step(
                begun.model, begun.optimizers, batch, step + 1, rate, own, sample, pieces, layout, begun.offload
            )
            found["losses"].append(result.loss)
            found["norms"].append(result.grad_norm)
            found["statistics"].append(result.statistics)
    assert layout is not None
    return found | {"weights": weights_of(layout, begun)}


def fetched(begun: Begun) -> Fetched:
    """Gives what of a model's state is not on the device."""
    return (lambda _, tensor: tensor) if begun.offload is None else begun.offload.tensor_of


def kinds_below(begun: Begun) -> set[str]:
    """Of which kinds of state something of this rank is below the device."""
    offload = begun.offload
    if offload is None:
        return set()
    homes = {"weights": offload.weights, "gradients": offload.gradients, "moments": offload.moments}
    return {kind for kind, each in homes.items() if each.homes} | ({"activations"} if offload.activations else set())


def weights_of(layout: Layout, begun: Begun) -> dict[str, torch.Tensor]:
    """All weights by canonical name, on rank 0."""
    layout.let_go(begun.model)
    tensors = {name: parameter.data for name, parameter in layout.named(begun.model).items()}
    gathered_by = gathered(layout, tensors, fetched(begun))
    whole = {name: torch.cat([piece.clone() for piece in gathered_by[name].pieces()]) for name in sorted(gathered_by)}
    return {name: tensor.view(gathered_by[name].shape) for name, tensor in whole.items() if layout.number == 0}


def many(raws: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`steps` of each of several runs, or the words by which one is `refused`."""
    found = []
    for raw in raws:
        try:
            found.append(steps(raw, dist.get_world_size()))
        except TenfoldError as error:
            found.append({"refused": str(error)})
    close_tiers()
    return found


def layout_alone(config: RunConfig, world: int) -> Layout:
    """How the model of a run of one stage lies."""
    (stage,) = stages = plan_stages(config)
    (degrees,) = degrees_of_stages(config, stages, world)
    return layout_of(config, stage.sharing, mesh_of(degrees), CPU)


def laid_out(config: RunConfig, world: int) -> tuple[Layout, Decoder]:
    """The model of a run of one stage, and how it lies."""
    layout = layout_alone(config, world)
    return layout, layout.build(config.training.seed)


def counted(raws: list[dict[str, Any]], world: int) -> list[dict[str, int]]:
    """How often each kind of collective is called in a step of each of several runs that differ in micro-batches alone.

    They have one model. A step before them, in which FSDP2 sets itself up, is not counted.
    """
    configs = [build(RunConfig, raw, "run.toml") for raw in raws]
    config = configs[0]
    layout = layout_alone(config, world)
    begun = begin(config, plan_stages(config)[0], layout)
    mine = config.training.batch_size // layout.data
    found = []
    for step, each in enumerate([config, *configs]):
        with Collectives() as seen:
            first = layout.mesh.data_index * mine
            batch = batch_of(each, step, first, mine)
            train_step(begun.model, begun.optimizers, batch, step + 1, 1e-3, each, first, 1, layout, begun.offload)
        found.append(dict(seen.counts))
    return found[1:]


def count_many(groups: list[list[dict[str, Any]]]) -> list[list[dict[str, int]]]:
    """`counted` of each of several groups of runs."""
    found = [counted(raws, dist.get_world_size()) for raws in groups]
    close_tiers()
    return found
