"""What every system's script of `benchmarks/throughput.py` shares: the job, the model's shape, the data, the clock.

Needs PyTorch alone, since each peer's script runs in an environment of its own.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from shapes import SHAPES, VOCABULARY

__all__ = ["VOCABULARY"]

JOB: dict[str, Any] = json.loads(sys.argv[1])  # size, batch, length, precision, seconds, steps, setting
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

SHAPE = SHAPES[JOB["size"]]
ROWS, LENGTH = JOB["batch"] // WORLD, JOB["length"]  # rows of this process
LEARNING_RATE, BETAS, DECAY, CLIP = 1e-3, (0.9, 0.95), 0.1, 1.0


def batch_of(step: int) -> torch.Tensor:
    """This process's rows of a step's batch, int64 [rows, LENGTH + 1]."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCABULARY, (JOB["batch"], LENGTH + 1), generator=generator).chunk(WORLD)[RANK]


class Clock:
    """Counts steps and says when to stop. The first step is warm-up; every step is told at once on standard output."""

    def __init__(self) -> None:
        self.steps, self.measured, self.began, self.worked = 0, 0.0, 0.0, 0.0

    def begin(self) -> None:
        self.began, self.worked = time.perf_counter(), time.process_time()

    def end(self, loss: float | None = None) -> bool:
        """A step is over; whether it was the last. All processes agree on that."""
        took = time.perf_counter() - self.began
        tell(rank=RANK, step=self.steps, seconds=took, cpu_seconds=time.process_time() - self.worked, loss=loss)
        self.measured += took if self.steps else 0.0
        self.steps += 1
        over = self.steps > JOB["steps"] or (self.steps > 1 and self.measured >= JOB["seconds"])
        if WORLD > 1:
            flag = torch.tensor(float(over))
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
            over = bool(flag.item())
        if over:
            status = Path("/proc/self/status").read_text()
            kib = {
                key: int(number) for key, number in re.findall(r"^(VmHWM|RssFile):\s+(\d+) kB", status, re.MULTILINE)
            }
            tell(rank=RANK, peak=kib["VmHWM"] * 1024, files=kib["RssFile"] * 1024)
        return over


def tell(**facts: Any) -> None:
    """One line of JSON for the benchmark."""
    os.write(1, f"@{json.dumps(facts)}\n".encode())  # one write: lines of two processes do not mix


def check_parameters(model: torch.nn.Module) -> None:
    """All systems train the same number of parameters, or the comparison is none."""
    hidden, ffn, layers = SHAPE["hidden"], SHAPE["ffn"], SHAPE["layers"]
    layer = 4 * hidden**2 + 3 * hidden * ffn + 2 * hidden
    expected = layers * layer + hidden + 2 * VOCABULARY * hidden
    # DeepSpeed's ZeRO leaves a parameter empty where it is partitioned, and notes how large it is.
    found = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())
    assert found == expected, f"the model has {found} parameters, not {expected}"


torch.set_num_threads(JOB["threads"])
