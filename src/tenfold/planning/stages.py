"""The run's timetable: which steps, tokens and samples each stage has, and the learning rate of every step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from tenfold.config.run import OptimConfig, RunConfig
from tenfold.config.stage import StageConfig
from tenfold.errors import TenfoldError
from tenfold.sharing.patterns import Pattern
from tenfold.sharing.tying import PARTS, Sharing


@dataclass(frozen=True)
class Stage:
    """A stage with its place in the run. Steps, tokens and samples count from the run's start, `last_*` exclusive.

    A sample is `sequence_length` tokens long; a stage may cut it into shorter sequences (`length_at`).
    """

    config: StageConfig
    sharing: Sharing
    batch_size: int
    first_step: int
    last_step: int
    first_sample: int
    sequence_length: int
    weights: tuple[float, ...] = (1.0,)
    """Of the sources of the data, in their order."""

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def rule(self) -> dict[str, Any] | None:
        """The rule that may end the stage before `last_step`, with its keys (`units.parse_auto`)."""
        until = self.config.until
        return until if until is not None and "auto" in until else None

    @property
    def steps(self) -> int:
        return self.last_step - self.first_step

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.sequence_length

    @property
    def tokens(self) -> int:
        return self.steps * self.tokens_per_step

    def length_at(self, step: int) -> int:
        """Tokens in one sequence at `step`: the whole sample, or a divisor of it that the stage asks for.

        One that grows from a to b over n steps is the largest divisor up to a + (b - a) (steps done / n)^(1 / root).
        """
        asked = self.config.sequence_length
        if asked is None or isinstance(asked, int):
            return asked or self.sequence_length
        first, last = int(asked["from"]), int(asked.get("to", self.sequence_length))
        over = asked["over"] if isinstance(asked["over"], int) else asked["over"] * self.steps
        progress = min(1.0, (step - self.first_step) / over)
        reached = first + (last - first) * progress ** (1 / asked["root"])
        return max(length for length in self.lengths if length <= reached + 1e-9)

    @property
    def lengths(self) -> list[int]:
        """Every sequence length that the stage may have, from the shortest on."""
        asked = self.config.sequence_length
        if not isinstance(asked, dict):
            return [asked or self.sequence_length]
        low, high = int(asked["from"]), int(asked.get("to", self.sequence_length))
        return [length for length in range(low, high + 1) if self.sequence_length % length == 0]

    def sample_at(self, step: int) -> int:
        """The first sample of `step`."""
        return self.first_sample + (step - self.first_step) * self.batch_size

    def tokens_at(self, step: int) -> int:
        """Tokens the run has seen when `step` begins."""
        return self.sample_at(step) * self.sequence_length


def plan_stages(config: RunConfig, ends: Mapping[str, int] | None = None) -> list[Stage]:
    """The stages of a run. `until` is a place in the run; a stage ends with the first step that reaches it.

    One whose end is decided while it runs is planned to its latest end, or, once it is in `ends` (by name), to the step
    there. Raises TenfoldError for patterns that do not fit the model or do not refine one another, for empty stages,
    and for rules that have nothing to look at.
    """
    length, training = config.data.sequence_length, config.training
    names = [source.name for source in config.data.mixture]
    weights = tuple(source.weight for source in config.data.mixture) or (1.0,)
    stages: list[Stage] = []
    step = sample = 0
    for number, stage in enumerate(config.stages):
        where = f"stages.{number} ({stage.name})"
        try:
            pattern = Pattern.parse(stage.sharing, config.model.layers)
            sharing = Sharing(pattern, tuple(stage.parts), stage.rank, stage.experts).of_model(config.model)
        except TenfoldError as error:
            raise TenfoldError(f"{where}: {error}") from None
        if stages:
            sharing.check_refines(stages[-1].sharing, where)
        if stage.mixture is not None:
            weights = tuple(stage.mixture.get(name, 0.0) for name in names)
        _check_lengths(stage, length, where)
        batch = stage.batch_size or training.batch_size
        end: dict[str, Any] = stage.until or {"share": 1.0}
        latest = " (at_most)" if "at_most" in end else ""
        end = end.get("at_most", end)
        if stage.name in (ends or {}):
            end = {"steps": (ends or {})[stage.name]}
        elif "share" in end and training.steps is not None:
            end = {"steps": round(end["share"] * training.steps)}
        elif "share" in end:
            assert training.tokens is not None
            end = {"tokens": round(end["share"] * training.tokens)}
        if "steps" in end:
            last = int(end["steps"])
        else:
            last = step + math.ceil((end["tokens"] - sample * length) / (batch * length))
        if last <= step:
            raise TenfoldError(
                f"{where} would have no steps: it ends at {_amount(end)}{latest}, and when it begins the run has "
                f"reached {step} steps, {sample * length} tokens"
            )
        stages.append(Stage(stage, sharing, batch, step, last, sample, length, weights))
        sample += (last - step) * batch
        step = last
    for number, (planned, following) in enumerate(pairwise(stages)):
        if planned.rule is not None:
            where = f"stages.{number} ({planned.name})"
            _check_rule(planned, following, where)
            if planned.name not in (ends or {}):
                _check_time(planned, planned.rule, where)
    return stages


def watched_pairs(stage: Stage, following: Stage) -> list[tuple[int, int]]:
    """Neighbouring layers that share a block in `stage`, and do not share all of it in the stage after it."""
    now, after = stage.sharing, following.sharing
    apart = [(now.of(part).blocks, after.of(part).blocks) for part in PARTS]
    return [
        (one, other)
        for one, other in now.pattern.neighbours()
        if any(mine[one] == mine[other] and theirs[one] != theirs[other] for mine, theirs in apart)
    ]


def _check_rule(stage: Stage, following: Stage, where: str) -> None:
    """A rule that is to end `stage` has something to look at."""
    pairs = watched_pairs(stage, following)
    if not pairs:
        raise TenfoldError(
            f"{where}: until = auto watches layers that share until the next stage frees them, and {following.name} "
            f'({following.sharing}) frees none of {stage.sharing}: give a place such as until = "20%"'
        )
    assert stage.rule is not None
    if stage.rule.get("split"):
        cut = replace(stage.sharing, pattern=stage.sharing.pattern.cut(pairs))
        try:
            following.sharing.check_refines(cut, where)
        except TenfoldError:
            raise TenfoldError(
                f"{where}: split = true frees runs of layers one by one, and {following.name} ({following.sharing}) "
                f"cannot be come to from {stage.sharing} by that: leave split out, or let the next stage share runs of "
                "layers ({groups = N}) or none"
            ) from None


def _check_time(stage: Stage, rule: dict[str, Any], where: str) -> None:
    """There are as many checks in `stage` as the rule asks for before it decides; none comes after the last step."""
    every, checks = int(rule["every"]), int(rule["checks"])
    if every * checks < stage.steps:
        return
    most = (stage.steps - 1) // checks
    remedy = f"set every to {most} or less" if most else "let it last longer (at_most) or set fewer checks"
    raise TenfoldError(
        f"{where}: until = auto could never decide: it looks every {every} steps and decides after {checks} checks in "
        f"a row, and the stage has at most {stage.steps} steps; {remedy}"
    )


def _check_lengths(stage: StageConfig, length: int, where: str) -> None:
    asked = stage.sequence_length
    if asked is None:
        return
    ends = {"": asked} if isinstance(asked, int) else {f".{key}": int(asked.get(key, length)) for key in ("from", "to")}
    for key, value in ends.items():
        if length % value:
            near = [divisor for divisor in range(1, length + 1) if length % divisor == 0]
            raise TenfoldError(
                f"{where}: sequence_length{key} = {value} does not divide data.sequence_length = {length}; "
                f"{', '.join(map(str, near[-8:]))} do"
            )
    if not isinstance(asked, int) and ends[".from"] > ends[".to"]:
        raise TenfoldError(f"{where}: sequence_length grows from {ends['.from']} to {ends['.to']}, which is less")


def _amount(end: dict[str, Any]) -> str:
    ((kind, amount),) = end.items()
    return f"{amount} {kind}"


def learning_rate(optim: OptimConfig, stages: list[Stage], stage: Stage, step: int) -> float:
    """The learning rate of `step`: warm-up and decay over the run's tokens, times the stage's own factors."""
    total = stages[-1].tokens_at(stages[-1].last_step)
    # Half a step in: the first rate is not 0 and the last is not below the final one.
    progress = (stage.tokens_at(step) + stage.tokens_per_step / 2) / total
    rate = optim.lr * stage.config.lr_scale * _shape(optim, progress)
    return rate * min(1.0, (step - stage.first_step + 1) / (stage.config.rewarm + 1))


def _shape(optim: OptimConfig, progress: float) -> float:
    if progress < optim.warmup:
        return progress / optim.warmup
    if optim.schedule == "constant":
        return 1.0
    if optim.schedule == "wsd":
        done = max(0.0, (progress - (1 - optim.decay)) / optim.decay) if optim.decay else 0.0
    else:
        done = (progress - optim.warmup) / (1 - optim.warmup) if optim.warmup < 1 else 0.0
    fallen = (1 - math.cos(math.pi * done)) / 2 if optim.schedule == "cosine" else done
    return 1 - (1 - optim.final) * fallen
