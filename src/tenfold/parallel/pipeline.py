"""Pipeline ranks: where a model is cut by depth, what each of them holds, and how questions go through all of them.

Stages follow one another: a rank has one, or several where the schedule interleaves them. Cuts make the slowest stage
as fast as can be, by the operations of layers and of the output matrix behind the last of them; of cuts that are about
as good, those at the borders of segments are taken. A block whose layers lie on several stages is held by each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tenfold.config.parallel import ParallelConfig
from tenfold.nn.counting import layer_costs
from tenfold.nn.decoder import Decoder
from tenfold.nn.ranks import PipelineRanks, Stage
from tenfold.sharing.tying import Sharing

SLACK = 1.1
"""How much slower the slowest stage may be for the sake of a cut at the border of segments."""


class StageRanks(PipelineRanks):
    """This rank of those in `group`, which have `stages`: the stage of number n is on the rank `holders[n]`."""

    def __init__(
        self, group: dist.ProcessGroup, stages: Sequence[Stage], holders: Sequence[int], device: torch.device
    ) -> None:
        self.group, self.holders, self._device = group, holders, device
        self.mine = tuple(stage for stage in stages if holders[stage.number] == group.rank())

    def stages(self, layers: int) -> Sequence[Stage]:
        return self.mine

    def receive(self, stage: Stage, x_BTD: Tensor | None, like: tuple[tuple[int, ...], torch.dtype]) -> Tensor:
        source = self.holders[stage.number - 1]
        if source == self.group.rank():
            assert x_BTD is not None
            return x_BTD
        shape, dtype = like
        received = torch.empty(shape, dtype=dtype, device=self._device)
        dist.recv(received, group=self.group, group_src=source)
        return received

    def send(self, stage: Stage, x_BTD: Tensor) -> None:
        if not stage.last and (target := self.holders[stage.number + 1]) != self.group.rank():
            dist.send(x_BTD.contiguous(), group=self.group, group_dst=target)

    def from_last(self, make: Callable[[], Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        source = self.holders[-1]
        mine = source == self.group.rank()
        told = make().contiguous() if mine else torch.empty(tuple(shape), dtype=dtype, device=self._device)
        dist.broadcast(told, group=self.group, group_src=source)
        return told


def holders_of(config: ParallelConfig, ranks: int) -> list[int]:
    """Which of `ranks` holds each stage: in turn, or up and down again where the schedule is a V."""
    up = list(range(ranks))
    if ranks == 1:
        return up
    return [*up, *reversed(up)] if config.pipeline_schedule == "zbv" else up * config.stages_per_rank


def stages_of_model(whole: Decoder, sharing: Sharing, count: int, positions: int) -> list[Stage]:
    """`whole`, on the meta device, cut into `count` stages."""
    borders = {run.start for run in sharing.segments()}
    runs = cut_by_cost(layer_costs(whole, positions), count, borders)
    return [Stage(number, run, number == count - 1) for number, run in enumerate(runs)]


def stages_with(name: str, users: Sequence[int] | None, stages: Sequence[Stage], tied: bool) -> list[Stage]:
    """Which of `stages` need a parameter: `users` are the layers that use it, None of what is outside of layers; `tied`
    says whether the output matrix is the embedding."""
    if users is not None:
        return [stage for stage in stages if not set(stage.layers).isdisjoint(users)]
    if name == "embedding.weight" and tied:
        return list(dict.fromkeys((stages[0], stages[-1])))
    first = name.partition(".")[0] in ("embedding", "positions", "embedding_norm", "projection")
    return list(stages[:1] if first else stages[-1:])


def cut_by_cost(costs: Sequence[float], count: int, borders: set[int]) -> list[range]:
    """Layers of these costs as `count` runs.

    The slowest run is as fast as can be, or at most `SLACK` slower where fewer runs then begin elsewhere than at
    `borders`.
    """
    best, _ = _fewest(costs, count, lambda _: 0, math.inf)
    _, runs = _fewest(costs, count, lambda start: int(start not in borders), best * SLACK)
    return runs


def _fewest(
    costs: Sequence[float], count: int, penalty: Callable[[int], int], limit: float
) -> tuple[float, list[range]]:
    """Of all ways to cut into `count` runs, none slower than `limit`, that with the least sum of the penalties of where
    runs begin, and of these that whose slowest run is fastest: how slow that is, and the runs."""
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    layers = len(costs)
    # found[end]: the best way to cut the layers before `end` into as many runs as were looked at.
    found: dict[int, tuple[int, float, list[range]]] = {0: (0, 0.0, [])}
    for number in range(1, count + 1):
        ends = [layers] if number == count else range(number, layers - count + number + 1)
        longer = {}
        for end in ends:
            ways = []
            for start, (penalties, slowest, runs) in found.items():
                cost = sums[end] - sums[start]
                if start < end and cost <= limit * (1 + 1e-9):
                    ways.append((penalties + penalty(start), max(slowest, cost), [*runs, range(start, end)]))
            if ways:
                longer[end] = min(ways, key=lambda way: way[:2])
        found = longer
    _, slowest, runs = found[layers]
    return slowest, runs


def leave(model: Decoder, stages: Sequence[Stage]) -> None:
    """Take from `model` what none of `stages` needs; what is left keeps its name."""
    kept = {str(layer) for stage in stages for layer in stage.layers}
    for name in list(model.layers._modules):
        if name not in kept:
            del model.layers._modules[name]
    first, last = any(stage.first for stage in stages), any(stage.last for stage in stages)

    def drop(*names: str) -> None:
        for name in names:
            held: dict[str, nn.Module | nn.Parameter | None] = (
                model._parameters if name in model._parameters else model._modules  # type: ignore[assignment]
            )
            held[name] = None

    if not first:
        drop("positions", "embedding_norm", "projection")
    if not first and not (last and model.head is None):
        drop("embedding")
    if not last:
        drop("norm", "transform", "head", "output_bias")
