"""A training run from its first step to its last: stages, delinking, validation, checkpoints, stopping, going on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tenfold.checkpoint.store import (
    latest_checkpoint,
    list_checkpoints,
    load_checkpoint,
    retire_checkpoints,
    save_checkpoint,
)
from tenfold.config.run import EvaluationConfig, RunConfig
from tenfold.data.mixing import Phase
from tenfold.data.mixture import TrainingData
from tenfold.data.progress import Progress
from tenfold.data.sampling import PackedSequences
from tenfold.errors import TenfoldError
from tenfold.evaluation.generation import generate
from tenfold.evaluation.held_out import HeldOut
from tenfold.evaluation.sets import EvaluationSet, TextTokenizer, evaluate, read_set
from tenfold.hardware.carbon import grid_of
from tenfold.hardware.device import describe_machine, matrix_rate
from tenfold.hardware.memory import memory_used_bytes
from tenfold.nn.counting import count
from tenfold.nn.decoder import Decoder
from tenfold.sharing.delinking import delink
from tenfold.sharing.similarity import layer_similarity, seen_layers
from tenfold.training.energy import Ledger
from tenfold.training.measuring import Coming, measure_moments
from tenfold.training.optimizers import (
    build_optimizers,
    fill_tensors,
    load_state_tensors,
    materialize,
    state_tensors,
)
from tenfold.training.setup import DTYPES, build_model, check_compiler, check_memory, compile_layers, describe_stages
from tenfold.training.signals import Signals
from tenfold.training.sources import mixture_metrics, tell_epochs
from tenfold.training.stages import Stage, learning_rate, plan_stages
from tenfold.training.start import Start
from tenfold.training.step import StepResult, routing_metrics, train_step

Emit = Callable[[dict[str, Any]], None]

SAMPLE_TOKENS = 120


@dataclass
class Place:
    """Where a run is; with weights and optimizer state, all that going on needs."""

    stage: int = 0
    step: int = 0
    seconds: float = 0.0  # of the whole run, over all its processes
    stage_seconds: float = 0.0  # of the steps of this stage alone
    finished: list[dict[str, Any]] = field(default_factory=list)  # closing numbers of stages that are over
    joules: float | None = 0.0  # as `seconds`; None: a part of the run was not metered
    joules_before: float | None = 0.0  # when this stage began
    energy_source: str | None = None


class Run:
    """One run on one process. `config` is resolved (`setup.resolve`); events go to `emit`, remarks to `note`."""

    def __init__(
        self,
        config: RunConfig,
        data: TrainingData,
        folder: Path,
        device: torch.device,
        emit: Emit,
        note: Callable[[str], None],
    ) -> None:
        self.config, self.data, self.folder, self.device = config, data, folder, device
        self.emit, self.note = emit, note
        self.stages = plan_stages(config)
        self.described = describe_stages(config, self.stages)
        check_memory(self.described, config.optim.name, device)
        if config.training.compile:
            check_compiler(device)
        length, seed = config.data.sequence_length, config.training.seed
        self._record: list[dict[str, Any]] | None = []  # what was remarked before the run began; None: it goes on
        self.place = Place()
        phases = [Phase(stage.first_sample, stage.sample_at(stage.last_step), stage.weights) for stage in self.stages]
        self.train = data.training(length, seed, phases)
        held_out = data.held_out(length, self.remark)
        self.validation = HeldOut(held_out, config.data, config.training) if held_out else None
        self.asked = self._read_evaluations()
        tell_epochs(self.train, phases[-1].last, self.note, self.remark)
        self.rate = matrix_rate(device, DTYPES[config.training.precision])
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
        self.note(f"{reason}: saving after this step; once more to stop at once")

    def open_start(self) -> None:
        """Find the checkpoint that a new run begins from, if it does, and check that it fits."""
        if self.config.start.checkpoint is not None:
            self._start = Start(self.config, self.stages[0], self.data.tokenizer_file)

    _start: Start | None = None

    def restore(self) -> int | None:
        """Take up the newest whole checkpoint, if there is one; the step it is of."""
        path = latest_checkpoint(self.checkpoints, self.remark)
        if path is None:
            if list_checkpoints(self.checkpoints):
                raise TenfoldError(
                    f"no checkpoint in {self.checkpoints} is whole, and beginning anew would write over them and over "
                    "the metrics; put one back, move that folder away to begin anew, or give another --out"
                )
            return None
        manifest, weights, optimizer = load_checkpoint(path)
        if "delinked_from" in manifest:
            raise TenfoldError(
                f"{path} was made by `tenfold delink`, and there is no run to go on with: begin one from it, with "
                f"--start.checkpoint {self.folder} and another --out"
            )
        self._check_same_run(path, manifest)
        place = manifest["place"]
        self.place = Place(**({"joules": None} | place))
        self._build(self.stages[self.place.stage])
        fill_tensors({name: tensor.data for name, tensor in self.model.named_parameters()}, weights, "weights")
        load_state_tensors(self.model, self.optimizers, optimizer)
        return self.place.step

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
        early, self._record = self._record or [], None
        for event in early:
            self.emit({**event, "step": place.step})
        self._clock = time.monotonic() - place.seconds
        with Signals(self._stop), self.energy.open(self.device, self.config.energy.watts, place, self.note):
            try:
                return self._train()
            except Exception as error:  # told, then raised on
                with contextlib.suppress(OSError):  # where the disk is full
                    self.emit({"event": "error", "step": place.step, "text": str(error) or type(error).__name__})
                raise

    def _train(self) -> bool:
        place = self.place
        for number in range(place.stage, len(self.stages)):
            stage = self.stages[number]
            if number > place.stage:
                self._enter(number)
            while place.step < stage.last_step:
                self._advance(stage)
                if self.stop_reason:
                    self._save(stage)
                    self.emit({"event": "stop", "step": place.step, "reason": self.stop_reason})
                    return False
            if len(place.finished) == number:
                self._finish(stage, self.described[number])
        self._close()
        return True

    def _begin(self) -> dict[str, Any]:
        """Make the model, from initial weights or a checkpoint; what the `start` event says of the latter."""
        if self._start is None:
            self.open_start()
        self._build(self.stages[0])
        if self._start is None:
            return {}
        freed = self._start.fill(self.model, self.optimizers)
        self.remark(str(self._start))
        return {"started_from": self._start.describe() | self._measure(self.stages[0], freed)}

    def _build(self, stage: Stage) -> None:
        self.model = build_model(self.config, stage.sharing, self.device)
        self.optimizers = build_optimizers(self.model, self.config.optim)
        self._compile()

    def _compile(self) -> None:
        if self.config.training.compile:
            compile_layers(self.model.layers)

    def _advance(self, stage: Stage) -> None:
        """One step, and what is due after it: metrics, validation, checkpoint."""
        config, place = self.config, self.place
        began = time.monotonic()
        coming = self._coming(stage, place.step)
        batch, first, pieces = coming.batch, coming.first_sample, coming.pieces
        rate = learning_rate(config.optim, self.stages, stage, place.step)
        result = train_step(self.model, self.optimizers, batch, place.step + 1, rate, config, first, pieces)
        took = time.monotonic() - began
        place.step += 1
        place.stage_seconds += took
        self._window_steps, self._window_seconds = self._window_steps + 1, self._window_seconds + took
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
        first = stage.sample_at(step)
        batch = torch.from_numpy(self.train.batch(first, stage.batch_size)).to(self.device)
        return Coming(batch, first, stage.sequence_length // stage.length_at(step))

    _window_steps, _window_seconds = 0, 0.0  # since the last line of metrics

    def _log(self, stage: Stage, result: StepResult, rate: float) -> None:
        tokens_per_second = self._window_steps * stage.tokens_per_step / self._window_seconds
        self._window_steps, self._window_seconds = 0, 0.0
        length = stage.length_at(self.place.step - 1)
        flops = count(self.model, length).flops_per_token * tokens_per_second
        self.emit(
            {
                "event": "step",
                **self._where(stage),
                "loss": result.loss,
                "lr": rate,
                "grad_norm": result.grad_norm,
                "tokens_per_second": tokens_per_second,
                "flops_share": flops / self.rate,
                "memory_bytes": memory_used_bytes(self.device),
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
        batch = self.config.training.micro_batch_size or stage.batch_size
        told = self.validation.evaluate(self.model, batch)
        self.emit({"event": "validation", **self._where(stage), **told})
        loss: float = told["validation_loss"]
        return loss

    def _read_evaluations(self) -> list[tuple[EvaluationConfig, EvaluationSet]]:
        config = self.config
        if not config.evaluations:
            return []
        if self.data.tokenizer_file is None:
            raise TenfoldError(
                "evaluations need the tokenizer that the training data was made with, and it is not known: name it as "
                "data.tokenizer"
            )
        tokenizer = TextTokenizer.of(self.data.tokenizer_file)
        recipes, window = Path(config.data.cache) / "recipes", config.data.sequence_length
        found = [
            (asked, read_set(asked.data, asked, tokenizer, window, recipes, Progress(True)))
            for asked in config.evaluations
        ]
        if config.model.objective == "masked":
            for _, subject in found:
                subject.sequences()  # too little text is told before the first step
        return found

    def _ask(self, stage: Stage, due: Callable[[EvaluationConfig], bool]) -> None:
        """The evaluations of the run file that are due."""
        training = self.config.training
        for asked, subject in self.asked:
            if due(asked):
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
        self._emit_similarity(stage)
        self._written = self._sample()
        if self._written is not None:
            self.emit({"event": "sample", **self._where(stage), "text": self._written})

    _written: str | None = None  # what the model wrote when it was last looked at

    def _emit_similarity(self, stage: Stage) -> None:
        layers = self.model.layers
        seen = seen_layers(len(layers))
        if len(seen) > 1:
            kinds = {
                "attention": layer_similarity([layers[layer].get_submodule("attention") for layer in seen]),
                "ffn": layer_similarity([layers[layer].get_submodule("ffn") for layer in seen]),
            }
            self.emit({"event": "similarity", **self._where(stage), "layers": seen, **kinds})

    def _enter(self, number: int) -> None:
        """Delink from the stage before, and show that the model's function is the same to the last bit."""
        place, before, after = self.place, self.stages[number - 1], self.stages[number]
        began = time.monotonic()
        probe = torch.from_numpy(self._some_text.batch(0, 1)).to(self.device)[:, :-1]
        logits = self._logits(probe)
        seed = self.config.training.seed
        freed = delink(self.model.layers, self.optimizers, after.sharing, after.config.moments, seed)
        materialize(self.optimizers)
        self._compile()
        difference = (self._logits(probe) - logits).abs().max().item()
        measured = self._measure(after, freed)
        place.stage, place.stage_seconds, place.joules_before = number, 0.0, place.joules
        self._window_steps, self._window_seconds = 0, 0.0
        self.emit(
            {
                "event": "delink",
                "step": place.step,
                "stage_from": before.name,
                "stage_to": after.name,
                "pattern_from": str(before.sharing),
                "pattern_to": str(after.sharing),
                "moments": after.config.moments,
                **measured,
                "logits_equal": difference == 0.0,
                "max_difference": difference,
                "stored_before": self.described[number - 1]["stored_parameters"],
                "stored_after": self.described[number]["stored_parameters"],
                "seconds": time.monotonic() - began,
            }
        )
        self._emit_similarity(after)

    def _measure(self, stage: Stage, freed: list[torch.nn.Parameter]) -> dict[str, Any]:
        """Where the stage that begins asks for it, moments for the freed parameters from its first steps' gradients."""
        if stage.config.moments != "measure" or not freed:
            return {}
        steps = range(stage.first_step, min(stage.first_step + stage.config.moments_steps, stage.last_step))
        coming = [self._coming(stage, step) for step in steps]
        norm = measure_moments(self.model, self.optimizers, freed, coming, self.config)
        return {"measured_steps": len(steps), "measured_grad_norm": norm}

    @property
    def _some_text(self) -> PackedSequences:
        """Held-out sequences where there are any."""
        return self.validation.first if self.validation else next(iter(self.train.sources.values()))

    @torch.no_grad()
    def _logits(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.model(tokens)
        return self.model.logits(hidden)

    def _save(self, stage: Stage) -> None:
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
        weights = {name: parameter.data for name, parameter in self.model.named_parameters()}
        state = state_tensors(self.model, self.optimizers)
        save_checkpoint(self.checkpoints, self.place.step, weights, state, place)
        ends = {stage.last_step for stage in self.stages}
        retire_checkpoints(self.checkpoints, self.place.step, self.config.checkpoint.keep, ends)

    def _check_same_run(self, path: Path, manifest: dict[str, Any]) -> None:
        if manifest["data_fingerprint"] != self.data.fingerprint:
            raise TenfoldError(
                f"the training data is not what {path} was trained on: the text behind data.path = "
                f"{self.config.data.path} has changed, or it is prepared otherwise. Put it back, or give another --out"
            )
        mine = {
            "model": self.config.model.model_dump(mode="json", exclude_none=True),
            "optimizer": self.config.optim.name,
        }
        for key, value in mine.items():
            if manifest[key] != value:
                raise TenfoldError(f"{path} is a checkpoint of another {key}: it has {manifest[key]}, this run {value}")

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
            "sample": self._written or self._sample(),
        }
        if self.validation is not None:
            last = self.stages[-1]
            event |= self.validation.baselines(self.model, self.train, last.sample_at(last.last_step))
        self.emit(event)

    def _sample(self) -> str | None:
        """What the model writes of its own, from the beginning of a held-out document.

        Nothing from an encoder, and nothing that can be read without a tokenizer.
        """
        if self.config.model.objective == "masked" or self.data.tokenizer_file is None:
            return None
        source = self._some_text
        begin = [] if self.data.end_of_text is None else [self.data.end_of_text]
        prompt = [*begin, *source.split.read(0, min(16, source.split.tokens)).tolist()]
        with torch.compiler.set_stance("force_eager"):  # a text has many lengths, and none is worth compiling for
            written = list(generate(self.model, prompt, SAMPLE_TOKENS, seed=self.config.training.seed))
        return self.data.tokenizer().decode([*prompt[len(begin) :], *written])
