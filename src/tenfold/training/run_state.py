"""What a run is at any moment: its timetable, its place in it, and the model as it lies; saved, and taken up again."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
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
from tenfold.config.offload import OffloadConfig, key_of
from tenfold.config.run import RunConfig
from tenfold.data.mixing import Order
from tenfold.data.mixture import TrainingData
from tenfold.data.sampling import PackedSequences
from tenfold.errors import TenfoldError
from tenfold.evaluation.held_out import HeldOut
from tenfold.hardware.carbon import grid_of
from tenfold.hardware.device import matrix_rate
from tenfold.nn.decoder import Decoder
from tenfold.offload.engine import Offload
from tenfold.offload.loads import Loads
from tenfold.parallel.launch import ONE, World
from tenfold.parallel.layout import Layout
from tenfold.parallel.mesh import Degrees, Mesh
from tenfold.parallel.watch import doing
from tenfold.planning.foreseen import Foreseen
from tenfold.planning.stages import Stage, plan_stages
from tenfold.sharing.tying import Sharing
from tenfold.training.energy import Ledger
from tenfold.training.measuring import Coming
from tenfold.training.observing import read_evaluations
from tenfold.training.offload_plan import foresee
from tenfold.training.offloading import Begun, Meter, Tiers, begin_stage
from tenfold.training.optimizers import fill_tensors, load_state_tensors, state_tensors
from tenfold.training.outlook import Memory
from tenfold.training.place import Place, check_same_run
from tenfold.training.setup import (
    DTYPES,
    check_compiler,
    check_memory,
    compile_layers,
    degrees_of_stages,
    describe_stages,
    layout_of,
)
from tenfold.training.sources import phases_of, tell_epochs
from tenfold.training.start import Start

Emit = Callable[[dict[str, Any]], None]


def _nothing(_: object) -> None:
    """What ranks tell that are not the first."""


class RunState:
    """A run, as one of the processes of `world` holds it.

    `config` is resolved (`setup.resolve`) and its layout decided (`deciding.decide`), with what is `foreseen` of stages
    by name; events go to `emit`, remarks to `note`, on rank 0 alone.
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
        foreseen: Mapping[str, Foreseen] = MappingProxyType({}),
    ) -> None:
        self.config, self.data, self.folder, self.device, self.world = config, data, folder, device, world
        self.foreseen = foreseen
        self.emit: Emit = emit if world.first else _nothing
        self.note: Callable[[str], None] = note if world.first else _nothing
        self.stages = plan_stages(config)
        self.degrees = degrees_of_stages(config, self.stages, world.size)
        self.described = describe_stages(config, self.stages)
        kept = [not self._offloaded(stage).on for stage in self.stages]
        check_memory(self.described, config.optim, device, self.degrees, kept)
        if config.training.compile:
            check_compiler(device)
        length, seed = config.data.sequence_length, config.training.seed
        self._record: list[dict[str, Any]] | None = []  # what was remarked before the run began; None: it goes on
        self.place = Place()
        phases = phases_of(config, {})
        self.train = data.training(length, seed, phases)
        held_out = data.held_out(length, self.remark)
        self.validation = HeldOut(held_out, config.data, config.training) if held_out else None
        self.asked = (
            world.by_each("reading evaluations", lambda: read_evaluations(config, data)) if config.evaluations else []
        )
        tell_epochs(self.train, phases[-1].last, self.note, self.remark)
        self.rate = matrix_rate(device, DTYPES[config.training.precision])
        self._meshes: dict[Degrees, Mesh] = {}
        self.energy = Ledger(grid_of(config.energy))
        self.stop_reason: str | None = None
        self.model: Decoder
        self.optimizers: list[Optimizer]
        self._clock: float  # when the run would have begun, had it never stopped
        self.offload: Offload | None = None
        self._memory = Memory(device)
        wanted = [self._offloaded(stage) for stage in self.stages]
        self._loads: Loads | None = None
        if config.model.moe.experts and device.type == "cpu" and any(each.device_budget is not None for each in wanted):
            self._loads = Loads(config.model.layers, config.model.moe.experts)  # elsewhere zeros move like all else
        self.tiers = Tiers(wanted, device, world.rank, world.size, self.remark)
        if world.size == 1:
            try:
                foresee(config, self.stages, device, self.tiers.budgets)  # for its faults, of later stages too
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Let go of what lies below the device: the run cannot go on after it."""
        self.tiers.close()

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def remark(self, text: str) -> None:
        """Show `text`, and keep it in the metrics as a `note`: a report tells of what went wrong."""
        self.note(text)
        self.record({"event": "note", "text": text})

    def record(self, event: dict[str, Any]) -> None:
        """Tell an event, at the latest when the run begins."""
        if self._record is None:
            self.emit({**event, "step": self.place.step})
        else:
            self._record.append(event)

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
        if self._loads is not None and self.place.loads:
            self._loads.load(self.place.loads)
        self._build(self.stages[self.place.stage], ())
        doing(f"reading {path.name}")
        memory = None if self.offload is None else self.offload.filling
        fill_tensors(self._weights(), open_tensors(path / WEIGHTS), "weights", self.layout, memory)
        load_state_tensors(self.model, self.optimizers, open_tensors(path / OPTIMIZER), self.layout, memory)
        return self.place.step

    def _latest(self) -> Path | None:
        path = latest_checkpoint(self.checkpoints, self.remark)
        if path is None and list_checkpoints(self.checkpoints):
            raise TenfoldError(
                f"no checkpoint in {self.checkpoints} is whole, and beginning anew would write over them and over "
                "the metrics; put one back, move that folder away to begin anew, or give another --out"
            )
        return path

    def _plan(self, sharing: Sharing) -> None:
        """The timetable with all that was decided; `sharing` is that of the stage that the run is in."""
        number = self.place.stage
        self.stages = plan_stages(self.config, self.place.ends)
        self.stages[number] = replace(self.stages[number], sharing=sharing)
        self.described = describe_stages(self.config, self.stages)
        self.train.order = Order(phases_of(self.config, self.place.ends), self.config.training.seed)

    def _build(self, stage: Stage, only: Container[str] | None = None) -> None:
        doing("building the model")
        self.layout = self._layout(self.stages.index(stage), stage.sharing)
        self._take(self._begin_stage(stage, self.layout, only))

    def _begin_stage(self, stage: Stage, layout: Layout, only: Container[str] | None = None) -> Begun:
        key = key_of(self.stages.index(stage), stage.config.offload)
        return begin_stage(self.config, stage, self._offloaded(stage), key, layout, self.tiers, only, self._loads)

    def _take(self, begun: Begun) -> None:
        self.model, self.optimizers, self.offload = begun.model, begun.optimizers, begun.offload
        self._placed = begun.placed
        self._meter = Meter(begun.offload, self.tiers) if begun.offload and begun.placed else None
        self._compile()

    def _layout(self, number: int, sharing: Sharing) -> Layout:
        """How the model of stage `number` lies on the ranks. Meshes are opened once, for they open groups."""
        degrees = self.degrees[number]
        if degrees not in self._meshes:
            self._meshes[degrees] = Mesh(degrees, self.device.type)
        own = self._of_stage(self.stages[number])
        return layout_of(own, sharing, self._meshes[degrees], self.device)

    def _compile(self) -> None:
        if self.config.training.compile:
            compile_layers(self.model.layers)

    def _of_stage(self, stage: Stage) -> RunConfig:
        return self.config.of_stage(stage.config)

    def _offloaded(self, stage: Stage) -> OffloadConfig:
        return self.config.offload.of_stage(stage.config.offload)

    def _fetched(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.offload is None else self.offload.tensor_of(name, tensor)

    def _weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.data for name, parameter in self.layout.named(self.model).items()}

    def _complete_step(self) -> None:
        """Weights and state are about to be looked at: nothing of the last step may be put off any longer."""
        if self.offload is not None:
            self.offload.complete()

    def _save(self, stage: Stage) -> None:
        doing("saving")
        self._where(stage)
        if self._loads is not None and self._loads.steps:
            self.place.loads = self._loads.dump()
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
        self._complete_step()
        state = state_tensors(self.model, self.optimizers, self.layout)
        contents = [gathered(self.layout, tensors, fetched=self._fetched) for tensors in (self._weights(), state)]
        if not self.world.first:
            for tensors in contents:
                hand_over(tensors)
            return
        save_checkpoint(self.checkpoints, self.place.step, contents[0], contents[1], place)
        ends = {stage.last_step for stage in self.stages}
        retire_checkpoints(self.checkpoints, self.place.step, self.config.checkpoint.keep, ends)

    def _where(self, stage: Stage) -> dict[str, Any]:
        self.place.seconds = time.monotonic() - self._clock
        self.energy.read(self.place)
        step = self.place.step
        where = {"step": step, "stage": stage.name, "tokens": stage.tokens_at(step), "seconds": self.place.seconds}
        return where | self.energy.so_far(self.place)

    def _coming(self, stage: Stage, step: int) -> Coming:
        mine = stage.batch_size // self.layout.data
        first = stage.sample_at(step) + self.layout.mesh.data_index * mine
        batch = torch.from_numpy(self.train.batch(first, mine)).to(self.device)
        return Coming(batch, first, stage.sequence_length // stage.length_at(step))

    @property
    def _some_text(self) -> PackedSequences:
        """Held-out sequences where there are any."""
        return self.validation.first if self.validation else next(iter(self.train.sources.values()))
