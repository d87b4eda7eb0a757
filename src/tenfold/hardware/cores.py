"""How many cores this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

from tenfold.hardware.cgroup import ROOT, cpu_limit


def usable_cores(root: Path = ROOT) -> int:
    """Cores this process may run on: its affinity, and the control group's quota where that is smaller."""
    affine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_limit(root)
    return affine if quota is None else max(1, min(affine, math.ceil(quota)))
