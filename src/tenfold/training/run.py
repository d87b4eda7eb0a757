"""A training run from its first step to its last: stages, delinking, validation, checkpoints, stopping, going on.

On many ranks every one of them goes through all of it; rank 0 alone writes, and tells.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import Any

import torch

from tenfold.config.stage import StageConfig
from tenfold.hardware.device import describe_machine
from tenfold.nn.counting import count
from tenfold.nn.moe import LOADS
from tenfold.offload.loads import HORIZON
from tenfold.parallel.layout import Layout
from tenfold.parallel.watch import doing
from tenfold.planning.stages import Stage, learning_rate
from tenfold.sharing.delinking import Moments, delink
from tenfold.sharing.tying import Sharing
from tenfold.sharing.upcycling import tolerance
from tenfold.training.measuring import measure_moments
from tenfold.training.observing import logits_in_fp32, logits_of
from tenfold.training.offloading import passes_of
from tenfold.training.optimizers import materialize
from tenfold.training.relayout import lay_out_anew
from tenfold.training.run_events import RunEvents
from tenfold.training.setup import (
    recompute_of,
)
from tenfold.training.signals import Signals
from tenfold.training.step import train_step
from tenfold.training.when import Watch

_IDLE = 0.1
"""The share of passes in which experts see no token from which on it is worth while to place them by that."""


class Run(RunEvents):
    """One run, as one of the processes of its world goes through it."""

    def run(self, former: dict[str, Any] | None = None) -> bool:
        """Train to the end; False when a signal stopped it before (a checkpoint is saved then).

        `former` is what a resumption knows of the process before it, for the `resume` event.
        """
        place, resumed = self.place, hasattr(self, "model")
        started_from = {} if resumed else self._begin()
        machine = describe_machine(self.device) | {"matrix_rate": self.rate}
        model = self.config.model.model_dump(mode="json", exclude_none=True)
        self.emit(
            {
                "event": "start",
                "run": self.folder.name,
                "model": model,
                "stages": self.described,
                "machine": machine,
                **started_from,
            }
        )
        if resumed:
            self.emit({"event": "resume", "step": place.step, "seconds": place.seconds, **(former or {})})
        if self.world.size > 1:
            named = zip(self.stages, self.degrees, strict=True)
            self.remark(
                f"{self.world.size} ranks; " + "; ".join(f"{stage.name}: {degrees}" for stage, degrees in named)
            )
        early, self._record = self._record or [], None
        self._look_ahead(self.stages[place.stage])
        for event in early:
            self.emit({**event, "step": place.step})
        self._clock = time.monotonic() - place.seconds
        with Signals(self._stop), self.energy.open(self.device, self.config.energy.watts, place, self.note):
            try:
                return self._train()
            except Exception as raised:  # told, then raised on
                error = self.world.explained(raised)
                with contextlib.suppress(OSError):  # where the disk is full
                    self.emit({"event": "error", "step": place.step, "text": str(error) or type(error).__name__})
                if error is raised:
                    raise
                raise error from None

    def _train(self) -> bool:
        place = self.place
        for number in range(place.stage, len(self.stages)):
            if number > place.stage:
                self._enter(number)
            while place.step < self.stages[number].last_step:
                self._advance(self.stages[number])
                if self._is_to_stop():
                    self._save(self.stages[number])
                    self.emit({"event": "stop", "step": place.step, "reason": self.stop_reason})
                    return False
            if len(place.finished) == number:
                self._finish(self.stages[number], self.described[number])
        self._close()
        return True

    def _begin(self) -> dict[str, Any]:
        """Make the model, from initial weights or a checkpoint; what the `start` event says of the latter."""
        if self._start is None:
            self.open_start()
        self._build(self.stages[0])
        if self._start is None:
            return {}
        memory = None if self.offload is None else self.offload.filling
        freed = self._start.fill(self.model, self.optimizers, self.layout, memory)
        self.remark(str(self._start))
        return {"started_from": self._start.describe() | self._measure(self.stages[0].config, freed, self.stages[0], 0)}

    def _advance(self, stage: Stage) -> None:
        """One step, and what is due after it: metrics, validation, checkpoint."""
        config, place = self.config, self.place
        began = time.monotonic()
        doing("loading data", place.step + 1)
        coming = self._coming(stage, place.step)
        batch, first, pieces = coming.batch, coming.first_sample, coming.pieces
        rate = learning_rate(config.optim, self.stages, stage, place.step)
        if self._meter is not None:
            self._meter.begin_step()
        own = self._of_stage(stage)
        result = train_step(
            self.model, self.optimizers, batch, place.step + 1, rate, own, first, pieces, self.layout, self.offload
        )
        if self._loads is not None:
            self._loads.saw(result.statistics[:, LOADS:])
        took = time.monotonic() - began
        if self._meter is not None:
            self._meter.end_step(took)
        if self._outlook is not None:
            self._outlook.step(took)
        place.step += 1
        place.stage_seconds += took
        self._window_steps, self._window_seconds = self._window_steps + 1, self._window_seconds + took
        if stage.rule is not None:
            stage = self._consider(stage, result.loss, took)
        if place.step % config.training.log_every == 0 or place.step in (1, stage.last_step):
            self._log(stage, result, rate)
        every, last = config.training.validate_every, place.step == stage.last_step
        if every and place.step % every == 0 and not last:  # a stage's end is validated by `_finish`
            self._validate(stage)
            self._observe(stage)
        self._ask(stage, lambda asked: asked.every > 0 and place.step % asked.every == 0 and not last)
        if config.checkpoint.every and place.step % config.checkpoint.every == 0 and not last:
            self._save(stage)
        self._place_by_load(stage)

    def _finish(self, stage: Stage, described: dict[str, Any]) -> None:
        """The end of a stage: validate, note its closing numbers, save. The next stage begins from this checkpoint."""
        place = self.place
        self._look_back(stage, last=True)
        loss = self._validate(stage)
        self._ask(stage, lambda asked: True)
        self._observe(stage)
        place.finished.append(
            {
                "name": stage.name,
                "stored_parameters": described["stored_parameters"],
                "tokens": stage.tokens,
                "tokens_per_second": stage.tokens / place.stage_seconds,
                "validation_loss": loss,
                "seconds": place.stage_seconds,
                **self.energy.of_stage(place, stage.tokens),
            }
        )
        self._save(stage)

    def _enter(self, number: int) -> None:
        """Delink from the stage before."""
        place, before, after = self.place, self.stages[number - 1], self.stages[number]
        self._memory.begin()
        told = self._delink(before.sharing, after.sharing, after.config, after)
        place.stage, place.stage_seconds, place.joules_before, place.watch = number, 0.0, place.joules, {}
        self._window_steps, self._window_seconds = 0, 0.0
        self.emit({"event": "delink", "step": place.step, "stage_from": before.name, "stage_to": after.name, **told})
        self._emit_similarity(after)
        self._look_ahead(after)

    def _consider(self, stage: Stage, loss: float, seconds: float) -> Stage:
        """What the rule of a stage says after a step: go on, split some of its groups, or end it; the stage since.

        The timetable is made anew then. All that is decided is in the place, and so in the next checkpoint.
        """
        place, following = self.place, self.stages[self.place.stage + 1]
        watch = Watch(stage, following, place.watch)
        watch.saw(place.step, loss, seconds)
        if not watch.due(place.step):
            return stage
        decision = watch.check(self.model, self._coming(stage, place.step), self._of_stage(stage))
        where = self._where(stage)
        self.emit({"event": "check", **where, "pattern": str(stage.sharing), **decision.numbers})
        if decision.cuts:
            sharing = replace(stage.sharing, pattern=stage.sharing.pattern.cut(decision.cuts))
            told = self._delink(stage.sharing, sharing, following.config, stage)
            self._plan(sharing)
            names = {"stage_from": stage.name, "stage_to": stage.name}
            self.emit({"event": "split", **where, **told, **names, "cut": decision.numbers["cut"]})
        if decision.ends:
            place.ends[stage.name] = place.step
            self._plan(stage.sharing)
        return self.stages[place.stage]

    def _delink(self, before: Sharing, after: Sharing, config: StageConfig, coming_of: Stage) -> dict[str, Any]:
        """Delink, and show that the function is the same to the last bit; what is told of it, for events.

        Where experts are freed, or ranks split sums otherwise from now on, it is the same to rounding: that is looked
        at in fp32, and with no token dropped.
        `config` says what moments freed layers start from, `coming_of` is the stage that the coming steps are of.
        """
        doing("delinking")
        self._complete_step()
        began, stored = time.monotonic(), count(self.layout.whole, 1).stored
        probe = torch.from_numpy(self._some_text.batch(0, 1)).to(self.device)[:, :-1]
        start, former = self.place.step, self.layout
        self.layout = self._layout(self.stages.index(coming_of), after)
        wanted = self._offloaded(coming_of)
        in_place = former.alone and self.layout.alone and self.offload is None and not wanted.on
        # Carried over, a layer's low-rank difference is added to what it shares with other roundings than in the model.
        folded = bool(before.rank) and not in_place
        to_rounding = before.experts != after.experts or former.degrees != self.layout.degrees or folded
        look = logits_in_fp32 if to_rounding else logits_of
        logits = look(self.model, probe)
        freed: list[torch.nn.Parameter] = []
        if in_place:
            seed = self.config.training.seed
            freed = delink(self.model.layers, self.optimizers, after, config.moments, seed)
            materialize(self.optimizers)
            self.model.set_recompute(recompute_of(self._of_stage(coming_of).training))
            self._compile()
        else:
            self._make_anew(former, coming_of, config.moments)
        difference = (look(self.model, probe) - logits).abs().max().item()
        measured = self._measure(config, freed, coming_of, start)
        return {
            "pattern_from": str(before),
            "pattern_to": str(after),
            "moments": config.moments,
            **measured,
            "logits_equal": difference == 0.0,
            "max_difference": difference,
            **({"tolerance": tolerance(logits, self.config.model.layers)} if to_rounding else {}),
            "stored_before": stored,
            "stored_after": count(self.layout.whole, 1).stored,
            "seconds": time.monotonic() - began,
        }

    def _make_anew(self, former: Layout, stage: Stage, moments: Moments) -> None:
        """Have the model as it is laid out now, for `stage`, from the one of layout `former`."""
        had = self.offload
        if had is not None and (lowest := self.tiers.lowest) is not None:  # both are never on the device
            had.put_all_away(lowest)
        begun = lay_out_anew(
            self.model,
            self.optimizers,
            former,
            self.layout,
            self.config,
            moments,
            lambda layout, only: self._begin_stage(stage, layout, only),
            self._fetched,
        )
        if had is not None:
            had.close()
        self._take(begun)

    def _place_by_load(self, stage: Stage) -> None:
        """Once it is known what experts see, have a budget place them by that, if many of them are seldom seen."""
        if self._loads is None or self._loads.steps != HORIZON or self._offloaded(stage).device_budget is None:
            return
        left = stage.last_step - self.place.step
        idle = 1 - self._loads.seen(passes_of(self._of_stage(stage), stage, self.layout)[0])
        if self.offload is None or left < HORIZON or idle < _IDLE:
            return
        lacks = self.tiers.free < 2 * self.offload.inventory.bytes_at_rest  # the model is there twice meanwhile
        if self.layout.largest(torch.tensor(int(lacks))):
            self.remark(
                f"experts see no token in {idle:.0%} of passes, and there is no room in the folders of offload.disk to "
                "place them anew by that; a run that is resumed does"
            )
            return
        doing("placing experts anew")
        self._complete_step()
        former, self.layout = self.layout, self._layout(self.place.stage, stage.sharing)
        self._make_anew(former, stage, "copy")
        self.remark(f"experts see no token in {idle:.0%} of passes: placed anew, those together that see few")
        self._look_ahead(stage)

    def _measure(
        self, config: StageConfig, freed: list[torch.nn.Parameter], stage: Stage, start: int
    ) -> dict[str, Any]:
        """Where `config` asks for it, moments for the freed parameters from the gradients of steps `start` and on."""
        if config.moments != "measure" or not freed:
            return {}
        steps = range(start, min(start + config.moments_steps, stage.last_step))
        coming = [self._coming(stage, step) for step in steps]
        norm = measure_moments(self.model, self.optimizers, freed, coming, self._of_stage(stage))
        return {"measured_steps": len(steps), "measured_grad_norm": norm}

    def _stop(self, reason: str) -> None:
        self.stop_reason = reason
        if self.world.size == 1:  # of many, torchrun stops those that are left when one failed: these do not save
            self.note(f"{reason}: saving after this step; once more to stop at once")

    def _is_to_stop(self) -> bool:
        """Whether a signal came to any rank; all then have its name."""
        if not self.layout.alone and self.layout.largest(torch.tensor(int(self.stop_reason is not None))):
            self.stop_reason = next(reason for reason in self.layout.of_all(self.stop_reason) if reason)
            self.note(f"{self.stop_reason}: saving; once more to stop at once")
        return self.stop_reason is not None
