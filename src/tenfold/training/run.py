"""A training run from its first step to its last: stages, delinking, validation, checkpoints, stopping, going on.

On many ranks every one of them goes through all of it; rank 0 alone writes, and tells.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from tenfold.checkpoint.gathered import gathered, hand_over
from tenfold.checkpoint.store import (
    OPTIMIZER,
    WEIGHTS,
    latest_checkpoint,
    list_checkpoints,
    read_manifest,
    retire_checkpoints,
    save_checkpoint,
)
from tenfold.checkpoint.tensors import open_tensors
from tenfold.config.run import EvaluationConfig, RunConfig, StageConfig
from tenfold.data.mixing import Order
from tenfold.data.mixture import TrainingData
from tenfold.data.sampling import PackedSequences
from tenfold.errors import TenfoldError
from tenfold.evaluation.held_out import HeldOut
from tenfold.evaluation.sets import evaluate
from tenfold.hardware.carbon import grid_of
from tenfold.hardware.device import describe_machine, matrix_rate
from tenfold.hardware.memory import memory_used_bytes
from tenfold.nn.counting import count
from tenfold.nn.decoder import Decoder
from tenfold.parallel.launch import ONE, World
from tenfold.parallel.layout import Layout
from tenfold.parallel.mesh import Degrees, Mesh
from tenfold.parallel.watch import doing
from tenfold.sharing.delinking import delink
from tenfold.sharing.tying import Sharing
from tenfold.sharing.upcycling import tolerance
from tenfold.training.energy import Ledger
from tenfold.training.measuring import Coming, measure_moments
from tenfold.training.observing import logits_in_fp32, logits_of, read_evaluations, similarity, write_sample
from tenfold.training.optimizers import build_optimizers, fill_tensors, load_state_tensors, materialize, state_tensors
from tenfold.training.place import Place, check_same_run
from tenfold.training.relayout import lay_out_anew
from tenfold.training.setup import (
    DTYPES,
    check_compiler,
    check_memory,
    compile_layers,
    degrees_of_stages,
    describe_stages,
    layout_of,
)
from tenfold.training.signals import Signals
from tenfold.training.sources import mixture_metrics, phases_of, tell_epochs
from tenfold.training.stages import Stage, learning_rate, plan_stages
from tenfold.training.start import Start
from tenfold.training.step import StepResult, routing_metrics, train_step
from tenfold.training.when import Watch

Emit = Callable[[dict[str, Any]], None]


def _nothing(_: object) -> None:
    """What ranks tell that are not the first."""


class Run:
    """One run, as one of the processes of `world` goes through it.

    `config` is resolved (`setup.resolve`); events go to `emit`, remarks to `note`, on rank 0 alone.
    """

    def __init__(
        self,
        config: RunConfig,
        data: TrainingData,
        folder: Path,
        device: torch.device,
        emit: Emit,
        note: Callable[[str], None],
        world: World = ONE,
    ) -> None:
        self.config, self.data, self.folder, self.device, self.world = config, data, folder, device, world
        self.emit: Emit = emit if world.first else _nothing
        self.note: Callable[[str], None] = note if world.first else _nothing
        self.stages = plan_stages(config)
        self.degrees = degrees_of_stages(config, self.stages, world.size)
        self.described = describe_stages(config, self.stages)
        check_memory(self.described, config.optim.name, device, self.degrees)
        if config.training.compile:
            check_compiler(device)
        length, seed = config.data.sequence_length, config.training.seed
        self._record: list[dict[str, Any]] | None = []  # what was remarked before the run began; None: it goes on
        self.place = Place()
        phases = phases_of(config, {})
        self.train = data.training(length, seed, phases)
        held_out = data.held_out(length, self.remark)
        self.validation = HeldOut(held_out, config.data, config.training) if held_out else None
        self.asked = read_evaluations(config, data)
        tell_epochs(self.train, phases[-1].last, self.note, self.remark)
        self.rate = matrix_rate(device, DTYPES[config.training.precision])
        self._meshes: dict[Degrees, Mesh] = {}
        self.energy = Ledger(grid_of(config.energy))
        self.stop_reason: str | None = None
        self.model: Decoder
        self.optimizers: list[Optimizer]

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def remark(self, text: str) -> None:
        """Show `text`, and keep it in the metrics as a `note`: a report tells of what went wrong."""
        self.note(text)
        event = {"event": "note", "step": self.place.step, "text": text}
        if self._record is None:
            self.emit(event)
        else:
            self._record.append(event)

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

    def open_start(self) -> None:
        """Find the checkpoint that a new run begins from, if it does, and check that it fits."""
        if self.config.start.checkpoint is not None:
            self._start = Start(self.config, self.stages[0], self.data.tokenizer_file)

    _start: Start | None = None

    def restore(self) -> int | None:
        """Take up the newest whole checkpoint, if there is one; the step it is of."""
        path = self.world.by_first(self._latest)
        if path is None:
            return None
        manifest = self.world.by_first(lambda: read_manifest(path))
        if "delinked_from" in manifest:
            raise TenfoldError(
                f"{path} was made by `tenfold delink`, and there is no run to go on with: begin one from it, with "
                f"--start.checkpoint {self.folder} and another --out"
            )
        check_same_run(path, manifest, self.config, self.data.fingerprint)
        place = manifest["place"]
        self.place = Place(**({"joules": None} | place))
        if self.stages[self.place.stage].rule is not None or self.place.ends:
            self._plan(Sharing.load(manifest))
        self._build(self.stages[self.place.stage])
        doing(f"reading {path.name}")
        fill_tensors(self._weights(), open_tensors(path / WEIGHTS), "weights", self.layout)
        load_state_tensors(self.model, self.optimizers, open_tensors(path / OPTIMIZER), self.layout)
        return self.place.step

    def _latest(self) -> Path | None:
        path = latest_checkpoint(self.checkpoints, self.remark)
        if path is None and list_checkpoints(self.checkpoints):
            raise TenfoldError(
                f"no checkpoint in {self.checkpoints} is whole, and beginning anew would write over them and over "
                "the metrics; put one back, move that folder away to begin anew, or give another --out"
            )
        return path

    def _weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.data for name, parameter in self.layout.named(self.model).items()}

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
        freed = self._start.fill(self.model, self.optimizers, self.layout)
        self.remark(str(self._start))
        return {"started_from": self._start.describe() | self._measure(self.stages[0].config, freed, self.stages[0], 0)}

    def _build(self, stage: Stage) -> None:
        doing("building the model")
        self.layout = self._layout(self.stages.index(stage), stage.sharing)
        self.model = self.layout.build(self.config.training.seed)
        self.optimizers = build_optimizers(self.model, self.config.optim, self.layout)
        self._compile()

    def _layout(self, number: int, sharing: Sharing) -> Layout:
        """How the model of stage `number` lies on the ranks. Meshes are opened once, for they open groups."""
        degrees = self.degrees[number]
        if degrees not in self._meshes:
            self._meshes[degrees] = Mesh(degrees, self.device.type)
        return layout_of(self.config, sharing, self._meshes[degrees], self.device)

    def _compile(self) -> None:
        if self.config.training.compile:
            compile_layers(self.model.layers)

    def _advance(self, stage: Stage) -> None:
        """One step, and what is due after it: metrics, validation, checkpoint."""
        config, place = self.config, self.place
        began = time.monotonic()
        doing("loading data", place.step + 1)
        coming = self._coming(stage, place.step)
        batch, first, pieces = coming.batch, coming.first_sample, coming.pieces
        rate = learning_rate(config.optim, self.stages, stage, place.step)
        result = train_step(
            self.model, self.optimizers, batch, place.step + 1, rate, config, first, pieces, self.layout
        )
        took = time.monotonic() - began
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

    def _coming(self, stage: Stage, step: int) -> Coming:
        mine = stage.batch_size // self.layout.data
        first = stage.sample_at(step) + self.layout.mesh.data_index * mine
        batch = torch.from_numpy(self.train.batch(first, mine)).to(self.device)
        return Coming(batch, first, stage.sequence_length // stage.length_at(step))

    _window_steps, _window_seconds = 0, 0.0  # since the last line of metrics

    def _log(self, stage: Stage, result: StepResult, rate: float) -> None:
        tokens_per_second = self._window_steps * stage.tokens_per_step / self._window_seconds
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
            }
        )

    def _where(self, stage: Stage) -> dict[str, Any]:
        self.place.seconds = time.monotonic() - self._clock
        self.energy.read(self.place)
        step = self.place.step
        where = {"step": step, "stage": stage.name, "tokens": stage.tokens_at(step), "seconds": self.place.seconds}
        return where | self.energy.so_far(self.place)

    def _validate(self, stage: Stage) -> float | None:
        if self.validation is None:
            return None
        doing("validation")
        batch = self.config.training.micro_batch_size or stage.batch_size
        told = self.validation.evaluate(self.model, batch)
        self.emit({"event": "validation", **self._where(stage), **told})
        loss: float = told["validation_loss"]
        return loss

    def _ask(self, stage: Stage, due: Callable[[EvaluationConfig], bool]) -> None:
        """The evaluations of the run file that are due."""
        training = self.config.training
        for asked, subject in self.asked:
            if due(asked):
                doing(f"evaluation {asked.name}")
                values = evaluate(
                    self.model, subject, training.micro_batch_size or stage.batch_size, training.loss_chunk
                )
                where = {"event": "evaluation", **self._where(stage)}
                self.emit({**where, "name": asked.name, "task": asked.task, "values": values})

    def _finish(self, stage: Stage, described: dict[str, Any]) -> None:
        """The end of a stage: validate, note its closing numbers, save. The next stage begins from this checkpoint."""
        place = self.place
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

    def _observe(self, stage: Stage) -> None:
        """What a report shows besides the loss: how alike the layers are, and what the model writes."""
        doing("a look at the layers, and a sample")
        self._emit_similarity(stage)
        self._written = self._write()
        if self._written is not None:
            self.emit({"event": "sample", **self._where(stage), "text": self._written})

    _written: str | None = None  # what the model wrote when it was last looked at

    def _emit_similarity(self, stage: Stage) -> None:
        if (told := similarity(self.model, self.layout)) is not None:
            self.emit({"event": "similarity", **self._where(stage), **told})

    def _write(self) -> str | None:
        return write_sample(self.model, self.data, self._some_text, self.config.training.seed)

    def _enter(self, number: int) -> None:
        """Delink from the stage before."""
        place, before, after = self.place, self.stages[number - 1], self.stages[number]
        told = self._delink(before.sharing, after.sharing, after.config, after)
        place.stage, place.stage_seconds, place.joules_before, place.watch = number, 0.0, place.joules, {}
        self._window_steps, self._window_seconds = 0, 0.0
        self.emit({"event": "delink", "step": place.step, "stage_from": before.name, "stage_to": after.name, **told})
        self._emit_similarity(after)

    def _consider(self, stage: Stage, loss: float, seconds: float) -> Stage:
        """What the rule of a stage says after a step: go on, split some of its groups, or end it; the stage since.

        The timetable is made anew then. All that is decided is in the place, and so in the next checkpoint.
        """
        place, following = self.place, self.stages[self.place.stage + 1]
        watch = Watch(stage, following, place.watch)
        watch.saw(place.step, loss, seconds)
        if not watch.due(place.step):
            return stage
        decision = watch.check(self.model, self._coming(stage, place.step), self.config)
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

    def _plan(self, sharing: Sharing) -> None:
        """The timetable with all that was decided; `sharing` is that of the stage that the run is in."""
        number = self.place.stage
        self.stages = plan_stages(self.config, self.place.ends)
        self.stages[number] = replace(self.stages[number], sharing=sharing)
        self.described = describe_stages(self.config, self.stages)
        self.train.order = Order(phases_of(self.config, self.place.ends), self.config.training.seed)

    def _delink(self, before: Sharing, after: Sharing, config: StageConfig, coming_of: Stage) -> dict[str, Any]:
        """Delink, and show that the function is the same to the last bit; what is told of it, for events.

        Where experts are freed, or ranks split sums otherwise from now on, it is the same to rounding: that is looked
        at in fp32, and with no token dropped.
        `config` says what moments freed layers start from, `coming_of` is the stage that the coming steps are of.
        """
        doing("delinking")
        began, stored = time.monotonic(), count(self.layout.whole, 1).stored
        probe = torch.from_numpy(self._some_text.batch(0, 1)).to(self.device)[:, :-1]
        start, former = self.place.step, self.layout
        self.layout = self._layout(self.stages.index(coming_of), after)
        to_rounding = before.experts != after.experts or former.degrees != self.layout.degrees
        look = logits_in_fp32 if to_rounding else logits_of
        logits = look(self.model, probe)
        freed: list[torch.nn.Parameter] = []
        if former.alone and self.layout.alone:
            seed = self.config.training.seed
            freed = delink(self.model.layers, self.optimizers, after, config.moments, seed)
            materialize(self.optimizers)
        else:
            self.model, self.optimizers = lay_out_anew(
                self.model, self.optimizers, former, self.layout, self.config, config.moments
            )
        self._compile()
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

    def _measure(
        self, config: StageConfig, freed: list[torch.nn.Parameter], stage: Stage, start: int
    ) -> dict[str, Any]:
        """Where `config` asks for it, moments for the freed parameters from the gradients of steps `start` and on."""
        if config.moments != "measure" or not freed:
            return {}
        steps = range(start, min(start + config.moments_steps, stage.last_step))
        coming = [self._coming(stage, step) for step in steps]
        norm = measure_moments(self.model, self.optimizers, freed, coming, self.config)
        return {"measured_steps": len(steps), "measured_grad_norm": norm}

    @property
    def _some_text(self) -> PackedSequences:
        """Held-out sequences where there are any."""
        return self.validation.first if self.validation else next(iter(self.train.sources.values()))

    def _save(self, stage: Stage) -> None:
        doing("saving")
        self._where(stage)
        place = {
            "place": vars(self.place),
            **stage.sharing.dump(),
            "model": self.config.model.model_dump(mode="json", exclude_none=True),
            "sequence_length": self.config.data.sequence_length,
            "precision": self.config.training.precision,
            "optimizer": self.config.optim.name,
            "betas": [self.config.optim.beta1, self.config.optim.beta2],
            "data_fingerprint": self.data.fingerprint,
        }
        self.layout.let_go(self.model)
        state = state_tensors(self.model, self.optimizers, self.layout)
        contents = [gathered(self.layout, tensors) for tensors in (self._weights(), state)]
        if not self.world.first:
            for tensors in contents:
                hand_over(tensors)
            return
        save_checkpoint(self.checkpoints, self.place.step, contents[0], contents[1], place)
        ends = {stage.last_step for stage in self.stages}
        retire_checkpoints(self.checkpoints, self.place.step, self.config.checkpoint.keep, ends)

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
