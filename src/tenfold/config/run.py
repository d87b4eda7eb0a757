"""The run file: everything a training run needs to know, section by section."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field, model_validator

from tenfold.config.base import Section
from tenfold.config.model import ModelConfig
from tenfold.config.parallel import ParallelConfig
from tenfold.config.units import Count, Degrees, Lengths, OptionalCount, Recompute, Share, Sharing, Until, Weights

Part = Literal["attention", "ffn", "experts", "router", "norms"]


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
        if self.recompute_layers and self.recompute == "none":
            raise ValueError(
                f'recompute_layers = {self.recompute_layers} needs recompute = "selective" or "full", and it is "none"'
            )
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
    weight_decay: float = Field(0.1, ge=0, description="Decoupled decay of matrices; norms, biases, embeddings: none.")
    clip: float = Field(1.0, ge=0, description="Largest global norm of the gradient; 0 is no clipping.")
    norm: Literal["l2", "inf"] = Field("l2", description="Which norm of the gradient is told, and clipped.")
    schedule: Literal["cosine", "linear", "wsd", "constant"] = Field("cosine", description="Decay after the warm-up.")
    warmup: Share = Field(0.02, description="Share of the run's tokens over which the rate rises from 0.")
    decay: Share = Field(0.2, description="Share of the run's tokens over which wsd falls at the end.")
    final: Share = Field(0.1, description="Share of the peak rate that is left at the end.")


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


class StageConfig(Section):
    """A stretch of training with one sharing pattern. Each pattern refines the one before it."""

    name: str = Field("real", min_length=1, description="What the stage is called in logs and plots.")
    sharing: Sharing = Field("none", description="Which layers share one set of weights.")
    parts: list[Part] = Field(
        list(get_args(Part)), min_length=1, description="What of a layer is shared; the rest is each layer's own."
    )
    rank: int = Field(
        0, ge=0, description="Rank of a difference of each layer's own to the matrices it shares; 0: none."
    )
    experts: Literal["free", "prototype", "layer"] = Field(
        "free",
        description="Which routed experts share one set of weights, as a dense feed-forward without a router: none, "
        "those of each prototype, or all of a layer.",
    )
    until: Until = Field(
        None,
        description='Where in the run the stage ends ("20%", {tokens = "2B"}, {steps = 500}); the last stage: unset. '
        '"auto": when the gradients of its layers part; {auto = "returns"}: when the next stage is predicted to bring '
        "more a second; their keys: docs/sharing.md.",
    )
    moments: Literal["copy", "rescale", "reset", "measure"] = Field(
        "rescale",
        description="What optimizer state freed layers start from when this stage begins; formulas: docs/sharing.md.",
    )
    moments_steps: int = Field(
        8,
        gt=0,
        description="Steps whose gradients `measure` takes, weights held, from the samples that this stage trains on "
        "next (at most its length).",
    )
    batch_size: int | None = Field(None, gt=0, description="Sequences in one step of this stage; unset: the run's.")
    mixture: Weights = Field(
        None, description="Weights of the sources from this stage on, by name; unset: the former. Not named: 0."
    )
    sequence_length: Lengths = Field(
        None,
        description="Tokens in a sequence of this stage, into which samples of data.sequence_length are cut: a number, "
        'or {from = 64, to = 1024, over = "50%"} (of the stage; or steps), which grows. Unset: they stay whole.',
    )
    parallel: Degrees = Field(
        None, description="Degrees of [parallel] that differ in this stage, {tensor = 2, data_shard = 4}; unset: none."
    )
    lr_scale: float = Field(1.0, gt=0, description="Multiplies the learning rate in this stage.")
    rewarm: int = Field(0, ge=0, description="Steps over which the rate rises again when this stage begins.")


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
            if (stage.until or {}).get("auto") == "returns" and (stage.batch_size or self.training.batch_size) < 2:
                raise ValueError(
                    f"stages.{number}.until: auto = returns tells signal from noise by two halves of a batch, and the "
                    "batch_size is 1; raise it"
                )
        if (self.training.recompute_layers or 0) > self.model.layers:
            raise ValueError(
                f"training.recompute_layers = {self.training.recompute_layers} is more than model.layers = "
                f"{self.model.layers}; leave it out to recompute all of them"
            )
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
            size, micro = stage.batch_size or self.training.batch_size, self.training.micro_batch_size
            if micro and size % micro:
                raise ValueError(
                    f"stages.{number}.batch_size = {size} is not a multiple of training.micro_batch_size = {micro}"
                )
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
