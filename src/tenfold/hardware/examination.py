"""All that can be found out about this machine, as plain data; what one look cannot find out spoils no other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tenfold.hardware.accelerators import describe_accelerators, describe_torch, measure_products
from tenfold.hardware.cgroup import ROOT
from tenfold.hardware.disk import describe_disk
from tenfold.hardware.host import describe_limits, describe_load, describe_memory, describe_processor

Facts = dict[str, Any]


def examine(disks: Sequence[Path], quick: bool = False, root: Path = ROOT) -> Facts:
    """The sections processor, load, memory, limits, disks, accelerators, torch and products; `quick` measures nothing.

    A look that fails is `{"unknown": why}`.
    """
    looks: dict[str, Callable[[], Any]] = {
        "processor": partial(describe_processor, root),
        "load": partial(describe_load, root, 0.0 if quick else 0.5),  # before we load the cores ourselves
        "memory": partial(describe_memory, root),
        "limits": describe_limits,
        "accelerators": partial(describe_accelerators, root),
        "torch": describe_torch,
    }
    if not quick:
        looks["products"] = measure_products
    facts = {name: _softly(look) for name, look in looks.items()}
    facts["disks"] = [{"folder": str(disk), **_softly(partial(describe_disk, disk, not quick, root))} for disk in disks]
    return facts


def _softly(look: Callable[[], Any]) -> Any:
    try:
        return look()
    except Exception as error:  # whatever it is: the other looks are still worth having
        return {"unknown": f"{type(error).__name__}: {error}"}
