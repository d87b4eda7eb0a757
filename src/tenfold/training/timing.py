"""What a step of a stage takes on this machine: real steps of the model as a run would build it, on random tokens."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from tenfold.config.run import RunConfig
from tenfold.hardware.energy import open_meter
from tenfold.planning.stages import Stage
from tenfold.training.optimizers import build_optimizers
from tenfold.training.setup import build_model, compile_layers
from tenfold.training.step import train_step

WARM_UP = 2
LEAST = 4
MOST = 200


@dataclass(frozen=True)
class Timing:
    """Steps of one stage. Seconds of each timed step; how much of them the optimizer took; joules of all of them."""

    tokens_per_step: int
    step_seconds: tuple[float, ...]
    optimizer_share: float
    joules: float | None
    energy_source: str | None

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """Seconds of a step: a quarter of the steps took less than the first, half less than the second."""
        first, second, third = statistics.quantiles(self.step_seconds, n=4, method="inclusive")
        return first, second, third

    @property
    def seconds_per_token(self) -> float:
        return self.quartiles[1] / self.tokens_per_step

    @property
    def joules_per_token(self) -> float | None:
        return None if self.joules is None else self.joules / (self.tokens_per_step * len(self.step_seconds))


def time_stage(
    config: RunConfig, stage: Stage, device: torch.device, seconds: float, note: Callable[[str], None]
) -> Timing:
    """Time steps of `stage` of a resolved run for about `seconds` (at least `LEAST` steps), after a warm-up.

    The model and its optimizers are gone again when it returns. Where sequences grow, they are as long as they get.
    `note` is told of steps that take long.
    """
    try:
        return _time(config, stage, device, seconds, note)
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _time(config: RunConfig, stage: Stage, device: torch.device, seconds: float, note: Callable[[str], None]) -> Timing:
    config = config.of_stage(stage.config)
    model = build_model(config, stage.sharing, device)
    optimizers = build_optimizers(model, config.optim)
    if config.training.compile:
        compile_layers(model.layers)
    spent = _OptimizerClock(optimizers, device)
    generator = torch.Generator().manual_seed(config.training.seed)
    shape = (stage.batch_size, stage.sequence_length + 1)
    vocabulary = config.model.vocab_size
    assert vocabulary is not None
    pieces = stage.sequence_length // stage.lengths[-1]
    rate = config.optim.lr * 1e-3  # random tokens teach nothing, and must not blow up either

    def step(number: int) -> float:
        batch = torch.randint(vocabulary, shape, generator=generator).to(device)
        _wait(device)
        began = time.perf_counter()
        train_step(model, optimizers, batch, number, rate, config, 0, pieces)
        _wait(device)
        return time.perf_counter() - began

    meter = None
    try:
        for number in range(WARM_UP):
            took = step(number + 1)
            if took > 5:
                note(f"  warm-up step {number + 1} of {WARM_UP}: {took:.1f} s")
        spent.seconds = 0.0
        meter = open_meter(device, config.energy.watts, note)
        before = meter.joules() if meter is not None else 0.0
        taken: list[float] = []
        while len(taken) < LEAST or (sum(taken) < seconds and len(taken) < MOST):
            taken.append(step(WARM_UP + len(taken) + 1))
            if taken[-1] > 5:
                note(f"  step {len(taken)}: {taken[-1]:.1f} s")
        joules = None if meter is None else meter.joules() - before
    finally:
        if meter is not None:
            meter.close()
        spent.close()
    tokens = stage.batch_size * stage.sequence_length
    source = None if meter is None else meter.source
    return Timing(tokens, tuple(taken), spent.seconds / sum(taken), joules, source)


class _OptimizerClock:
    """Adds up the seconds that optimizers take for their steps."""

    def __init__(self, optimizers: Sequence[Optimizer], device: torch.device) -> None:
        self.seconds, self._began, self._device = 0.0, 0.0, device
        self._hooks = [
            hook
            for optimizer in optimizers
            for hook in (
                optimizer.register_step_pre_hook(self._begin),
                optimizer.register_step_post_hook(self._end),
            )
        ]

    def _begin(self, *_: Any) -> None:
        _wait(self._device)
        self._began = time.perf_counter()

    def _end(self, *_: Any) -> None:
        _wait(self._device)
        self.seconds += time.perf_counter() - self._began

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
