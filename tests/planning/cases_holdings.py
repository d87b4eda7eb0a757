"""What ranks hold of models that they really build. Run by `test_holdings.py`."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from distributed.cases import close_tiers, layout_alone
from tenfold.config.load import build
from tenfold.config.run import RunConfig
from tenfold.parallel.data import groups_of, shards_of
from tenfold.parallel.pieces import local_of


def held(raws: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of this rank, for each of several runs: its place, for each parameter the shape of what it has and the elements
    of that memory, and for each group of FSDP2 its parameters and its elements, whole."""
    found = []
    for raw in raws:
        config = build(RunConfig, raw, "run.toml")
        layout = layout_alone(config, dist.get_world_size())
        model = layout.build(config.training.seed)
        names = {parameter: name for name, parameter in layout.named(model).items()}
        groups = [] if layout.alone else groups_of(model)
        memory = {parameter: flat.numel() for group in groups for parameter, flat in shards_of(group).items()}
        found.append(
            {
                "place": layout.mesh.place,
                "held": [
                    (name, tuple(local_of(each).shape), memory.get(each, each.numel())) for each, name in names.items()
                ],
                "groups": sorted(_group(group, names) for group in groups),
            }
        )
    close_tiers()
    return found


def _group(group: Any, names: dict[Any, str]) -> tuple[list[str], int]:
    members = [names[each.sharded_param] for each in group.fsdp_params]
    shards = group._all_gather_process_group.size()
    return sorted(members), sum(each._sharded_param_data.numel() * shards for each in group.fsdp_params)
