"""What a rank of a real run exchanges in a step."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from distributed.cases import batch_of, begin, layout_alone
from tenfold.config.load import build
from tenfold.config.run import RunConfig
from tenfold.parallel.traffic import Collectives
from tenfold.planning.stages import plan_stages
from tenfold.training.step import train_step

KINDS = {
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "send": "send",
}


class _Seen(Collectives):
    """Of every kind the calls, and the bytes of the largest tensor of each: of all_to_all of what is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: dict[str, list[float]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if func.namespace in ("c10d", "_c10d_functional") and name in KINDS:
            tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
            if name == "alltoall_base_":  # result, then input
                tensors = tensors[1:2]
            size = max(each.numel() * each.element_size() for each in tensors)
            if name == "all_gather_into_tensor":  # given its input alone
                size *= next(each for each in args[1:] if isinstance(each, int))
            entry = self.kinds.setdefault(KINDS[name], [0, 0.0])
            entry[0] += 1
            entry[1] += size
        elif func.namespace in ("c10d", "_c10d_functional") and name not in ("wait_tensor", "recv_"):
            raise AssertionError(name)
        return super().__torch_dispatch__(func, types, args, kwargs)


def exchanged(raws: list[dict[str, Any]]) -> list[dict[str, list[float]]]:
    """Calls and bytes of this rank by kind, in the second step of each of several runs of one stage."""
    found = []
    for raw in raws:
        config = build(RunConfig, raw, "run.toml")
        layout = layout_alone(config, torch.distributed.get_world_size())
        (stage,) = plan_stages(config)
        begun = begin(config, stage, layout)
        mine = config.training.batch_size // layout.data
        for step in range(2):
            first = layout.mesh.data_index * mine
            batch = batch_of(config, step, first, mine)
            with _Seen() as seen:
                train_step(begun.model, begun.optimizers, batch, step + 1, 1e-3, config, first, 1, layout, None)
        found.append(seen.kinds)
    return found
