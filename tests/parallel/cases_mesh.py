"""What ranks find in a mesh. Run by `test_mesh.py`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tenfold.parallel.mesh import Degrees, Mesh


def members(group: dist.ProcessGroup | None) -> list[int] | None:
    return None if group is None else dist.get_process_group_ranks(group)


def places(degrees: dict[str, int], parts: list[tuple[str, tuple[int, ...]]]) -> dict[str, Any]:
    """Of this rank: its place, the ranks of each axis with it, of FSDP2's meshes, and of parts of an axis."""
    mesh = Mesh(Degrees(**degrees), "cpu")
    axes = ["data_replicate", "data_shard", "context", "tensor", "pipeline", *["expert"] * (mesh.degrees.expert > 1)]
    fsdp, expert_fsdp = mesh.fsdp, mesh.expert_fsdp
    return {
        "place": mesh.place,
        "data_index": mesh.data_index,
        "groups": {axis: members(mesh.group(axis)) for axis in axes},
        "fsdp": None if fsdp is None else fsdp.mesh.tolist(),
        "expert_fsdp": None if expert_fsdp is None else expert_fsdp.mesh.tolist(),
        "parts": [members(mesh.part(axis, places)) for axis, places in parts],
        "again": [mesh.part(axis, places) is mesh.part(axis, places) for axis, places in parts],
    }


def parts_of_their_own() -> list[int]:
    """The sums of rank numbers over parts which those ask for that have one, each its own, again and again."""
    mesh = Mesh(Degrees(tensor=4), "cpu")
    sums = []
    for of_rank in ({0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}, {1: (1, 2, 3), 2: (1, 2, 3), 3: (1, 2, 3)}) * 2:
        number = torch.tensor(mesh.rank)
        if mesh.rank in of_rank:
            dist.all_reduce(number, group=mesh.part("tensor", of_rank[mesh.rank]))
        sums.append(int(number))
    return sums
