"""The most bytes that tensors have in a step of ranks. Run by `test_memory.py` and `test_budgets_of_ranks.py`."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from distributed.cases import begin, close_tiers, kinds_below, mesh_of, weights_of
from tenfold.config.load import build
from tenfold.config.run import RunConfig
from tenfold.parallel.pieces import local_of
from tenfold.planning.memory import memory_of
from tenfold.planning.stages import plan_stages
from tenfold.planning.terms import Candidate
from tenfold.training.optimizers import build_optimizers
from tenfold.training.setup import degrees_of_stages, layout_of
from tenfold.training.step import train_step

CPU = torch.device("cpu")
STEPS = 20


def taken(raws: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Of this rank, for each of several runs: its place along the pipeline, and the bytes, with those of weights and
    optimizer state, in a step behind the first; buffers that the first one made for pipelines are there too.

    Of several steps the one that had least counts: what is on its way is held as long as gloo's threads take, which
    differs from step to step."""
    found = []
    for raw in raws:
        config = build(RunConfig, raw, "run.toml")
        (stage,) = stages = plan_stages(config)
        (degrees,) = degrees_of_stages(config, stages, dist.get_world_size())
        layout = layout_of(config, stage.sharing, mesh_of(degrees), CPU)
        model = layout.build(config.training.seed)
        optimizers = build_optimizers(model, config.optim, layout)
        samples, length = stage.batch_size // degrees.data, config.data.sequence_length
        stays, peaks = 0, list[int]()
        for step in range(STEPS):
            batch = torch.randint(config.model.vocab_size or 0, (samples, length + 1))
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
                train_step(model, optimizers, batch, step + 1, 1e-3, config, 0, 1, layout)
            peak, left = peak_of(seen)
            peaks.append(peak)
            # Buffers of a schedule. What FSDP2 leaves gathered is let go and made anew in the second step.
            stays += left if degrees.pipeline > 1 and not step else 0
        tensors = [value for each in optimizers for state in each.state.values() for value in state.values()]
        held: list[Tensor] = [*model.parameters(), *(each for each in tensors if each.dim())]
        found.append(
            (layout.mesh.place["pipeline"], min(peaks[1:]) + stays + sum(local_of(each).nbytes for each in held))
        )
    close_tiers()
    return found


def within_budgets(raws: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of this rank, for each of several runs: what steps come to with all state on the device, and within a budget
    of what a plan foresees for that.

    Training keeps more room for what passes than a plan does, so that some state has to leave."""
    found = []
    for raw in raws:
        plain = build(RunConfig, raw, "run.toml")
        (stage,) = stages = plan_stages(plain)
        (degrees,) = degrees_of_stages(plain, stages, dist.get_world_size())
        way = Candidate(degrees, plain.training.micro_batch_size, plain.training.recompute)
        budget = max(each.needed for each in memory_of(plain, stage, way, device="cpu"))
        below = {"device_budget": budget, "disk": [tempfile.gettempdir()]}
        here, away = (_steps(each) for each in (plain, build(RunConfig, raw | {"offload": below}, "run.toml")))
        found.append({"here": here, "away": away})
    close_tiers()
    return found


def _steps(config: RunConfig) -> dict[str, Any]:
    (stage,) = stages = plan_stages(config)
    (degrees,) = degrees_of_stages(config, stages, dist.get_world_size())
    layout = layout_of(config, stage.sharing, mesh_of(degrees), CPU)
    samples, said = stage.batch_size // degrees.data, list[tuple[float, float]]()
    begun = begin(config, stage, layout)
    for number in (1, 2, 3):
        generator = torch.Generator().manual_seed(100 * layout.mesh.data_index + number)
        shape = samples, config.data.sequence_length + 1
        batch = torch.randint(config.model.vocab_size or 0, shape, generator=generator)
        done = train_step(begun.model, begun.optimizers, batch, number, 1e-3, config, 0, 1, layout, begun.offload)
        said.append((done.loss, done.grad_norm))
    told = {"said": said, "weights": weights_of(layout, begun), "below": kinds_below(begun)}
    if begun.offload is not None:
        begun.offload.close()
    return told


def peak_of(seen: profile) -> tuple[int, int]:
    """The most bytes at once that a profiled stretch made, and those that are left."""
    events = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most, now
