"""What ranks exchange, and have in memory besides the two models, while a stage is laid out anew."""

from __future__ import annotations

from collections.abc import Container
from typing import Any
from unittest import mock

import torch.distributed as dist

from distributed.cases import CPU, batch_of, begin, close_tiers, fetched, mesh_of, tiers
from tenfold.checkpoint import tensors as files
from tenfold.config.load import build
from tenfold.config.run import RunConfig
from tenfold.parallel import relay
from tenfold.parallel.layout import Layout
from tenfold.parallel.pieces import local_of
from tenfold.parallel.traffic import Collectives
from tenfold.planning.stages import plan_stages
from tenfold.training.offloading import Begun
from tenfold.training.optimizers import state_tensors
from tenfold.training.relayout import lay_out_anew
from tenfold.training.setup import degrees_of_stages, layout_of
from tenfold.training.step import train_step
from tenfold.training.tally import Tally

WINDOW = 128
"""Elements that are worked on, or sent, at once."""


class Memory(Tally):
    """What is in memory; exchanges are counted by `Collectives`, words between ranks too."""

    def _exchange(self, func: Any, args: Any) -> None:
        pass


def delinked(raws: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`one` of each of several runs."""
    with mock.patch.object(files, "PIECE", WINDOW), mock.patch.object(relay, "PART", WINDOW):
        found = [one(raw) for raw in raws]
    close_tiers()
    return found


def one(raw: dict[str, Any]) -> dict[str, Any]:
    """Of a run's first delinking: calls between ranks and bytes sent, the most bytes besides both models, and those of
    the largest tensor: whole, and as this rank has it before or after."""
    config, tally, both = build(RunConfig, raw, "run.toml"), Memory(), 0
    before, after = plan_stages(config)[:2]
    degrees = degrees_of_stages(config, [before, after], dist.get_world_size())
    had, layout = (
        layout_of(config.of_stage(stage.config), stage.sharing, mesh_of(each), CPU)
        for stage, each in zip((before, after), degrees, strict=True)
    )
    with tally.watching():
        former = begin(config, before, had)
        mine = before.batch_size // had.data
        batch = batch_of(config, 0, had.mesh.data_index * mine, mine)
        own = config.of_stage(before.config)
        train_step(former.model, former.optimizers, batch, 1, 1e-3, own, 0, 1, had, former.offload)
        if former.offload is not None:
            former.offload.put_all_away(tiers(True).by_name["disk"])

        def anew(to_lie: Layout, only: Container[str]) -> Begun:
            nonlocal both
            made = begin(config, after, to_lie, only)
            both = tally.alive
            tally.begin("carrying")
            return made

        with Collectives() as seen:
            made = lay_out_anew(
                former.model, former.optimizers, had, layout, config, after.config.moments, anew, fetched(former)
            )
        held = {
            lying: [*model.parameters(), *state_tensors(model, optimizers, lying).values()]
            for lying, model, optimizers in (
                (had, former.model, former.optimizers),
                (layout, made.model, made.optimizers),
            )
        }
    pieces = [local_of(each).nbytes for tensors in held.values() for each in tensors]
    if former.offload is not None:
        former.offload.close()
    if made.offload is not None:
        made.offload.close()
    return {
        "calls": dict(seen.counts),
        "sent": seen.bytes,
        "extra": tally.peaks["carrying"] - both,
        "piece": max(pieces),
        "whole": max(each.nbytes for each in had.whole.parameters()),
    }
