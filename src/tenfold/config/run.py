"""The run file: everything a training run needs to know, section by section."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from tenfold.config.base import Section
from tenfold.config.depth import is_chosen
from tenfold.config.model import ModelConfig
from tenfold.config.offload import OffloadConfig, check_looking, check_stages
from tenfold.config.parallel import ParallelConfig
from tenfold.config.stage import StageConfig
from tenfold.config.units import Count, OptionalCount, Recompute, Share


class PrepareConfig(Section):
    """How text becomes token shards."""

    tokenizer: str | None = Field(None, description="A tokenizer.json to use; unset trains a byte-level BPE.")
    vocab_size: Count = Field(
        8192, ge=1, le=10**7, description="Entries of the BPE that is trained when none is given; 257 or more."
    )
    text_field: str = Field("text", description="The JSONL field or the Parquet or Arrow column that holds the text.")
    dedup: bool = Field(False, description="Drop documents whose text is equal to an earlier one's.")
    validation_fraction: Share = Field(0.01, description="Share of documents held out for validation.")
    workers: int = Field(0, ge=0, description="Threads that tokenize; 0 is one for each core.")


class SourceConfig(Section):
    """One source of a mixture, in place of `data.path`; docs/data.md tells how they are mixed."""

    name: str = Field(
        min_length=1, pattern=r"^[\w.-]+$", description="What the source is called in weights and metrics."
    )
    path: str = Field(min_length=1, description="Text or tokens, as `data.path`.")
    weight: float = Field(
        1.0, ge=0, description="Its share of the tokens, over the sum of all weights; 0: a later stage brings it in."
    )


class DataConfig(PrepareConfig):
    """What to train on."""

    path: str = Field(
        "python-stdlib",
        min_length=1,
        description="Text or tokens, a file or a folder (every format: docs/data.md), python-stdlib, or recipe:NAME.",
    )
    cache: str = Field("data", description="Folder where shards made from raw text are kept.")
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64", "uint64"] | None = Field(
        None, description="Of token files that do not say it (nanoGPT .bin, OLMo .npy); unset: uint16."
    )
    end_of_text: int | None = Field(
        None,
        ge=0,
        description="Id that ends documents in token files made elsewhere; unset: the tokenizer's.",
    )
    sequence_length: int = Field(1024, gt=0, description="Tokens in one training sequence.")
    document_mask: bool = Field(
        False, description="Attention does not cross documents, and positions restart at each; else it sees them all."
    )
    mixture: list[SourceConfig] = Field([], description="Several sources instead of `path`.")

    @model_validator(mode="after")
    def _check_mixture(self) -> DataConfig:
        names = [source.name for source in self.mixture]
        if len(set(names)) < len(names):
            raise ValueError(f"mixture: sources need different names; these are {', '.join(names)}")
        if names and self.path != DataConfig.model_fields["path"].default:
            raise ValueError(f"path = {self.path!r} and mixture exclude each other: make it a source of the mixture")
        if names and not any(source.weight for source in self.mixture):
            raise ValueError("mixture: all weights are 0; give one source more")
        return self


class TrainingConfig(Section):
    """How long and in what arithmetic."""

    tokens: OptionalCount = Field(None, gt=0, description="Tokens of the whole run (or give steps).")
    steps: int | None = Field(None, gt=0, description="Optimizer steps of the whole run (or give tokens).")
    batch_size: int = Field(64, gt=0, description="Sequences in one optimizer step, over all ranks.")
    micro_batch_size: int = Field(0, ge=0, description="Sequences in one forward pass; 0 is the whole batch.")
    seed: int = Field(1, ge=0, lt=2**63, description="Fixes initial weights and the order of the data.")
    precision: Literal["auto", "bf16", "fp32"] = Field(
        "auto",
        description="Arithmetic of the layers (masters are fp32); auto: bf16 where the machine multiplies it faster.",
    )
    compile: bool = Field(False, description="torch.compile every layer: slow first step, faster ones after.")
    recompute: Recompute = Field(
        "none",
        description="What a layer makes again in the backward pass instead of keeping it: none; selective (all but the "
        "results of matrix products); or full (all but its input). true is full.",
    )
    recompute_layers: int | None = Field(
        None, gt=0, description="How many of the layers recompute, spread evenly over the depth; unset: all."
    )
    loss_chunk: int = Field(512, gt=0, description="Tokens whose logits exist at once in the loss.")
    log_every: int = Field(10, gt=0, description="Steps between lines of metrics.")
    validate_every: int = Field(0, ge=0, description="Steps between validations; 0 is at stage ends only.")
    validation_sequences: int = Field(64, gt=0, description="Held-out sequences read at a validation, at most.")
    device: str = Field("auto", description="auto, cpu, or cuda.")

    @model_validator(mode="after")
    def _check(self) -> TrainingConfig:
        if (self.tokens is None) == (self.steps is None):
            raise ValueError("give either training.tokens or training.steps, one of the two")
        if self.micro_batch_size and self.batch_size % self.micro_batch_size:
            raise ValueError(
                f"batch_size = {self.batch_size} is not a multiple of micro_batch_size = {self.micro_batch_size}"
            )
        return self


class OptimConfig(Section):
    """Optimizer and learning-rate schedule."""

    name: Literal["adamw", "adafactor", "muon"] = Field(
        "adamw",
        description="adamw (fused), adafactor (factored second moment), or muon (matrices of layers; adamw the rest).",
    )
    lr: float = Field(3e-4, gt=0, description="Peak learning rate.")
    divide_shared: bool = Field(
        True,
        description="Divide the rate of a parameter that q layers share by q: shared, it moves all of them at once.",
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of AdamW's first moment.")
    beta2: float = Field(0.95, ge=0, lt=1, description="Decay of AdamW's second moment.")
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon.")
    momentum: float = Field(0.95, ge=0, lt=1, description="Muon's momentum.")
    state: Literal["fp32", "bf16", "int8"] = Field(
        "fp32",
        description="How AdamW's and Muon's moments are kept between steps: fp32; bf16 (half the bytes, rounded "
        "stochastically); or int8 (in blocks with a scale each, about a quarter). Arithmetic is fp32, and so are "
        "checkpoints, from which a run with another state may start; less than fp32 changes results.",
    )
    weight_decay: float = Field(0.1, ge=0, description="Decoupled decay of matrices; norms, biases, embeddings: none.")
    clip: float = Field(1.0, ge=0, description="Largest global norm of the gradient; 0 is no clipping.")
    norm: Literal["l2", "inf"] = Field("l2", description="Which norm of the gradient is told, and clipped.")
    schedule: Literal["cosine", "linear", "wsd", "constant"] = Field("cosine", description="Decay after the warm-up.")
    warmup: Share = Field(0.02, description="Share of the run's tokens over which the rate rises from 0.")
    decay: Share = Field(0.2, description="Share of the run's tokens over which wsd falls at the end.")
    final: Share = Field(0.1, description="Share of the peak rate that is left at the end.")

    @model_validator(mode="after")
    def _check(self) -> OptimConfig:
        if self.name == "adafactor" and self.state != "fp32":
            raise ValueError(
                f'state = "{self.state}" is for moments of every weight, and name = "adafactor" keeps sums over rows '
                "and columns, which are next to nothing: leave state out"
            )
        return self


class StartConfig(Section):
    """What a run begins from, if not from initial weights."""

    checkpoint: str | None = Field(
        None,
        min_length=1,
        description="A run directory (its newest checkpoint), or a checkpoint in it, of the same model, whose layers "
        "share as in the first stage or more; unset: initial weights.",
    )
    optimizer: bool = Field(
        True, description="Take its optimizer state too; that of freed layers as the first stage's `moments` says."
    )


class CheckpointConfig(Section):
    """When the run is saved."""

    every: int = Field(500, ge=0, description="Steps between checkpoints; 0 is only at stage ends and when stopped.")
    keep: int = Field(2, gt=0, description="Newest checkpoints kept; the last of each stage stays besides.")


class EnergyConfig(Section):
    """What the run's energy is counted by: meters of the machine where there are any, else an estimate from `watts`."""

    watts: float | None = Field(
        None,
        gt=0,
        description="Power of the machine in use, for an estimate where it has no meter; unset: none is made.",
    )
    carbon_intensity: float | None = Field(
        None, ge=0, description="Grams of CO2 for a kWh of the grid; unset: that of `country`, or no CO2 is claimed."
    )
    country: str | None = Field(
        None,
        min_length=3,
        max_length=3,
        description="ISO code (DEU) whose mean carbon intensity codecarbon knows (no network; extra `carbon`).",
    )
    pue: float = Field(1.0, ge=1, description="Energy of the site over that of its machines; multiplies CO2 alone.")


class EvaluationOptions(Section):
    """What is asked about a text, and how it is read."""

    task: Literal["loss", "strided", "cloze"] = Field(
        "loss",
        description="loss (windows end to end, as in training), strided (windows overlap: more context for each "
        "token) or cloze (the last word of each passage: LAMBADA).",
    )
    limit: OptionalCount = Field(None, gt=0, description="Tokens, or passages of cloze, at most; unset: all.")
    stride: int = Field(0, ge=0, description="Tokens each window of strided moves on; 0 is half the window.")
    text_field: str = Field("text", description="The field of a JSONL record, or the column, that holds the text.")
    joined: bool = Field(
        False,
        description="The documents are one text, as lines in rows are (WikiText's Parquet form); a single plain file "
        "always is one.",
    )
    split: Literal["validation", "train"] = Field("validation", description="The split of prepared shards to read.")
    passages: Literal["auto", "documents", "lines", "paragraphs"] = Field(
        "auto",
        description="Passages of cloze; auto: documents (records and rows), or of plain text its paragraphs where it "
        "has blank lines, else its lines.",
    )
    min_words: int = Field(2, ge=2, description="Passages of fewer words are left out of cloze.")


class EvaluationConfig(EvaluationOptions):
    """Text that the model is asked about while it trains, besides the held-out split; see docs/evaluation.md."""

    name: str = Field(min_length=1, description="What it is called in metrics and plots.")
    data: str = Field(min_length=1, description="Text or prepared shards, as for data.path.")
    every: int = Field(0, ge=0, description="Steps between evaluations; 0 is at stage ends only.")


class RunConfig(Section):
    """One training run."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    start: StartConfig = StartConfig()
    training: TrainingConfig = TrainingConfig(steps=1000)
    optim: OptimConfig = OptimConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    parallel: ParallelConfig = ParallelConfig()
    offload: OffloadConfig = OffloadConfig()
    energy: EnergyConfig = EnergyConfig()
    stages: list[StageConfig] = Field([StageConfig()], min_length=1, description="Stages in order.")
    evaluations: list[EvaluationConfig] = Field([], description="What the model is asked besides.")

    @model_validator(mode="after")
    def _check(self) -> RunConfig:
        for number, stage in enumerate(self.stages[:-1]):
            if stage.until is None:
                raise ValueError(f"stages.{number} ({stage.name}) needs `until`: only the last stage may leave it out")
        if self.stages[-1].until is not None:
            raise ValueError(
                f"stages.{len(self.stages) - 1} ({self.stages[-1].name}) is the last stage and runs to the end of "
                "training: leave `until` out"
            )
        for number, stage in enumerate(self.stages):
            if stage.moments == "measure" and self.optim.norm == "inf" and self.optim.clip:
                raise ValueError(
                    f'stages.{number}.moments = "measure" foresees clipping by the l2 norm, and optim.norm = "inf": '
                    "take other moments, or optim.clip = 0"
                )
            if stage.moments == "measure" and self.optim.state != "fp32":
                raise ValueError(
                    f'stages.{number}.moments = "measure" adds up squares of gradients in the moments themselves, and '
                    f'optim.state = "{self.optim.state}" keeps these in fewer bits: take rescale, or state = "fp32"'
                )
            if (stage.until or {}).get("auto") == "returns" and (stage.batch_size or self.training.batch_size) < 2:
                raise ValueError(
                    f"stages.{number}.until: auto = returns tells signal from noise by two halves of a batch, and the "
                    "batch_size is 1; raise it"
                )
        self._check_recompute()
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise ValueError(f"stages need different names; these are {', '.join(names)}")
        asked = [(evaluation.name, evaluation.task) for evaluation in self.evaluations]
        if len(set(asked)) < len(asked):
            raise ValueError(
                "evaluations of one task need different names; these are "
                + ", ".join(f"{name} ({task})" for name, task in asked)
            )
        for number, evaluation in enumerate(self.evaluations):
            if self.model.objective == "masked" and evaluation.task != "loss":
                raise ValueError(
                    f"evaluations.{number}.task = {evaluation.task!r} asks what comes next, and model.objective = "
                    '"masked" trains an encoder: it can be asked for "loss" alone'
                )
            if evaluation.stride > self.data.sequence_length:
                raise ValueError(
                    f"evaluations.{number}.stride = {evaluation.stride} is more than the window, "
                    f"data.sequence_length = {self.data.sequence_length}: tokens between would not count"
                )
        for number, stage in enumerate(self.stages):
            if stage.experts != "free" and not self.model.moe.experts:
                raise ValueError(
                    f'stages.{number}.experts = "{stage.experts}" needs a mixture of experts, and this model is dense: '
                    "set model.moe.experts, or leave it out"
                )
            size, micro = stage.batch_size or self.training.batch_size, self.of_stage(stage).training.micro_batch_size
            if micro and size % micro:
                whole = "training.batch_size" if stage.batch_size is None else f"stages.{number}.batch_size"
                part = "training" if stage.micro_batch_size is None else f"stages.{number}"
                raise ValueError(f"{whole} = {size} is not a multiple of {part}.micro_batch_size = {micro}")
        self._check_offload()
        names = [source.name for source in self.data.mixture]
        for number, stage in enumerate(self.stages):
            for name in stage.mixture or {}:
                if name not in names:
                    there = f"there are {', '.join(names)}" if names else "there is no data.mixture"
                    raise ValueError(f"stages.{number}.mixture names {name}, which is no source: {there}")
        if self.model.document_end is not None and not self.data.document_mask:
            raise ValueError(
                "model.document_end follows from the data: leave it out, and set data.document_mask = true"
            )
        if self.model.positions == "learned" and self.data.sequence_length > (self.model.max_positions or 10**12):
            raise ValueError(
                f"data.sequence_length = {self.data.sequence_length} is more than "
                f"model.max_positions = {self.model.max_positions}"
            )
        return self

    def of_stage(self, stage: StageConfig) -> RunConfig:
        """The run as one of its stages has it: with the stage's own micro-batches, recompute and layout."""
        own: dict[str, Any] = {}
        if stage.micro_batch_size is not None:
            own["micro_batch_size"] = stage.micro_batch_size
        if stage.recompute is not None:
            own["recompute"] = stage.recompute
        if stage.recompute is not None or stage.recompute_layers is not None:
            own["recompute_layers"] = stage.recompute_layers
        return self.model_copy(
            update={
                "training": self.training.model_copy(update=own),
                "parallel": self.parallel.of_stage(stage.parallel),
            }
        )

    def _check_recompute(self) -> None:
        tables = [("training", self.training.recompute_layers, self.training.recompute)]
        for number, stage in enumerate(self.stages):
            mode = self.of_stage(stage).training.recompute
            tables.append((f"stages.{number}", stage.recompute_layers, mode))
        for table, layers, mode in tables:
            if layers is not None and mode == "none":
                raise ValueError(
                    f'{table}.recompute_layers = {layers} needs recompute = "selective" or "full", and it is "none"'
                )
            if (layers or 0) > self.model.layers:
                raise ValueError(
                    f"{table}.recompute_layers = {layers} is more than model.layers = {self.model.layers}; leave it "
                    "out to recompute all of them"
                )

    def _check_offload(self) -> None:
        depth = self.model.layers

        def recomputed(training: TrainingConfig) -> list[int]:
            count = 0 if training.recompute == "none" else training.recompute_layers or depth
            return [layer for layer in range(depth) if is_chosen(layer, count, depth)]

        check_stages(
            self.offload,
            [stage.offload for stage in self.stages],
            depth,
            [recomputed(self.of_stage(stage).training) for stage in self.stages],
            self.optim.clip,
            self.model.moe.experts,
            self.optim.name,
        )
        check_looking(
            [self.offload.of_stage(stage.offload).on for stage in self.stages],
            [bool(stage.until and "auto" in stage.until) for stage in self.stages],
            [stage.moments == "measure" for stage in self.stages],
        )
