"""What a run measures and looks at on its way, told as events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tenfold.config.run import EvaluationConfig
from tenfold.evaluation.sets import evaluate
from tenfold.hardware.memory import memory_used_bytes
from tenfold.nn.counting import count
from tenfold.parallel.watch import doing
from tenfold.planning.stages import Stage
from tenfold.training.observing import similarity, write_sample
from tenfold.training.outlook import Outlook, foreseen_by
from tenfold.training.run_state import RunState
from tenfold.training.sources import mixture_metrics
from tenfold.training.step import StepResult, routing_metrics


class RunEvents(RunState):
    """A run that tells of itself. All ranks go through what it tells, and rank 0 alone has someone to tell."""

    _outlook: Outlook | None = None

    def _look_ahead(self, stage: Stage) -> None:
        """Where state lies from now on, and what that will cost; what the stage's steps are held against."""
        if self._placed is not None:
            self.emit({"event": "placement", "step": self.place.step, "stage": stage.name, **self._placed})
        foreseen = foreseen_by(self.foreseen.get(stage.name), self._placed)
        self._outlook = None if foreseen is None else Outlook(foreseen)

    def _look_back(self, stage: Stage, last: bool = False) -> None:
        """What was foreseen beside what was measured, when that is due; `last`: the stage is done."""
        if self._outlook is None or not self._outlook.is_due(last):
            return
        mine = -1 if (most := self._memory.most) is None else most
        most = int(self.layout.largest(torch.tensor(mine)))
        more = self._meter.outcome() if last and self._meter is not None else None
        told = self._outlook.told(None if most < 0 else most, last, more)
        self.emit({"event": "measured", "step": self.place.step, "stage": stage.name, **told})

    _window_steps, _window_seconds = 0, 0.0  # since the last line of metrics

    def _log(self, stage: Stage, result: StepResult, rate: float) -> None:
        tokens_per_second = self._window_steps * stage.tokens_per_step / self._window_seconds
        offload = {} if self._meter is None else {"offload": self._meter.window()}
        self._window_steps, self._window_seconds = 0, 0.0
        length = stage.length_at(self.place.step - 1)
        flops = count(self.layout.whole, length).flops_per_token * tokens_per_second
        memory = int(self.layout.largest(torch.tensor(memory_used_bytes(self.device))))  # of the rank that uses most
        self.emit(
            {
                "event": "step",
                **self._where(stage),
                "loss": result.loss,
                "lr": rate,
                "grad_norm": result.grad_norm,
                "tokens_per_second": tokens_per_second,
                "flops_share": flops / (self.rate * self.world.size),
                "memory_bytes": memory,
                "sequence_length": length,
                **mixture_metrics(self.train, stage, self.place.step),
                **self.energy.window(self.place, stage.tokens_at(self.place.step)),
                **routing_metrics(result, self.config),
                **offload,
            }
        )
        if self.place.step < stage.last_step:
            self._look_back(stage)

    def _validate(self, stage: Stage) -> float | None:
        if self.validation is None:
            return None
        doing("validation")
        batch = self._of_stage(stage).training.micro_batch_size or stage.batch_size
        told = self.validation.evaluate(self.model, batch)
        self.emit({"event": "validation", **self._where(stage), **told})
        loss: float = told["validation_loss"]
        return loss

    def _ask(self, stage: Stage, due: Callable[[EvaluationConfig], bool]) -> None:
        """The evaluations of the run file that are due."""
        training = self._of_stage(stage).training
        for asked, subject in self.asked:
            if due(asked):
                doing(f"evaluation {asked.name}")
                values = evaluate(
                    self.model, subject, training.micro_batch_size or stage.batch_size, training.loss_chunk
                )
                where = {"event": "evaluation", **self._where(stage)}
                self.emit({**where, "name": asked.name, "task": asked.task, "values": values})

    def _observe(self, stage: Stage) -> None:
        """What a report shows besides the loss: how alike the layers are, and what the model writes."""
        doing("a look at the layers, and a sample")
        self._emit_similarity(stage)
        self._written = self._write()
        if self._written is not None:
            self.emit({"event": "sample", **self._where(stage), "text": self._written})

    _written: str | None = None  # what the model wrote when it was last looked at

    def _emit_similarity(self, stage: Stage) -> None:
        if self.offload is not None and self.offload.weights.homes:  # that would take all of them through memory
            return
        self._complete_step()
        if (told := similarity(self.model, self.layout)) is not None:
            self.emit({"event": "similarity", **self._where(stage), **told})

    def _write(self) -> str | None:
        if self.offload is not None and self.offload.weights.homes:  # every token would take all of them through memory
            return None
        return write_sample(self.model, self.data, self._some_text, self.config.training.seed)

    def _close(self) -> None:
        """The run's closing numbers, beside those of the models that only count."""
        event: dict[str, Any] = {
            "event": "end",
            **self._where(self.stages[-1]),
            **self.energy.closing(self.place, self.stages[-1].tokens_at(self.place.step)),
            "stages": self.place.finished,
            **mixture_metrics(self.train, self.stages[-1], self.place.step),
            "epochs": self.train.epochs(self.stages[-1].sample_at(self.place.step)),
            "unigram_loss": None,
            "bigram_loss": None,
            "sample": self._written or self._write(),
        }
        if self.validation is not None:
            last = self.stages[-1]
            event |= self.validation.baselines(self.model, self.train, last.sample_at(last.last_step))
        self.emit(event)
