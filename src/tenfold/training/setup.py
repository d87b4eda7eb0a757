"""From a run file to what training needs: data, model, optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tenfold.checkpoint.store import latest_checkpoint, list_checkpoints, load_checkpoint
from tenfold.config.load import build
from tenfold.config.model import ModelConfig
from tenfold.config.run import OptimConfig, RunConfig, TrainingConfig
from tenfold.data.mixture import TrainingData
from tenfold.errors import TenfoldError
from tenfold.hardware.compiler import missing_for_compile
from tenfold.hardware.device import matrix_rate
from tenfold.hardware.memory import memory_limit_bytes
from tenfold.nn.counting import count
from tenfold.nn.decoder import Decoder
from tenfold.nn.recompute import Recompute
from tenfold.offload.codec import bytes_of
from tenfold.parallel.layout import Layout
from tenfold.parallel.mesh import Degrees, Mesh, degrees_of
from tenfold.planning.refusals import check_trained
from tenfold.planning.stages import Stage
from tenfold.reporting.format import format_bytes
from tenfold.sharing.tying import PARTS, Sharing, materialize, tie
from tenfold.training.optimizers import fill_tensors

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def resolve(
    config: RunConfig,
    vocab_size: int,
    device: torch.device,
    tokenizer_mask: int | None = None,
    end_of_text: int | None = None,
) -> RunConfig:
    """The configuration with everything decided that was left open: vocabulary, mask, positions, precision, paths.

    `vocab_size`, `tokenizer_mask` (the id of its mask token, if it has one) and `end_of_text` (needed where documents
    are masked) are the tokenizer's. Raises TenfoldError when the tokens do not fit the model's vocabulary.
    """
    model, data = with_vocabulary(config.model, vocab_size, tokenizer_mask), config.data
    paths: dict[str, Any] = {
        "cache": str(Path(data.cache).absolute()),
        "path": _absolute(data.path),
        "mixture": [source.model_copy(update={"path": _absolute(source.path)}) for source in data.mixture],
    }
    if data.tokenizer is not None:
        paths["tokenizer"] = str(Path(data.tokenizer).absolute())
    if end_of_text is None and data.document_mask:
        raise TenfoldError(
            "data.document_mask = true needs to know which id ends a document: set data.end_of_text, or data.tokenizer"
        )
    if data.document_mask and model.document_end not in (None, end_of_text):
        raise TenfoldError(
            f"model.document_end = {model.document_end}, but documents end in token {end_of_text}: leave it out, or "
            "name that token as data.end_of_text"
        )
    start = config.start
    if start.checkpoint is not None:
        start = start.model_copy(update={"checkpoint": _absolute(start.checkpoint)})
    evaluations = [asked.model_copy(update={"data": _absolute(asked.data)}) for asked in config.evaluations]
    precision = config.training.precision
    if precision == "auto":
        faster = matrix_rate(device, torch.bfloat16) > matrix_rate(device, torch.float32)
        precision = "bf16" if faster else "fp32"
    return config.model_copy(
        update={
            "model": model.model_copy(
                update={
                    "max_positions": model.max_positions or data.sequence_length,
                    "document_end": end_of_text if data.document_mask else None,
                }
            ),
            "data": data.model_copy(update=paths),
            "start": start,
            "evaluations": evaluations,
            "training": config.training.model_copy(update={"precision": precision}),
        }
    )


def _absolute(path: str) -> str:
    return path if path == "python-stdlib" or path.startswith("recipe:") else str(Path(path).expanduser().absolute())


def with_vocabulary(model: ModelConfig, vocab_size: int, tokenizer_mask: int | None) -> ModelConfig:
    """The model with its vocabulary, and for an encoder its mask token, decided; see `resolve`."""
    if model.vocab_size is not None and vocab_size > model.vocab_size:
        raise TenfoldError(
            f"model.vocab_size = {model.vocab_size} is smaller than the tokenizer's {vocab_size}: its token ids would "
            "have no row in the embedding; raise it, or leave it out to take the tokenizer's"
        )
    if model.objective != "masked":
        return model.model_copy(update={"vocab_size": model.vocab_size or vocab_size})
    mask = model.mask_token
    if mask is None:  # without one in the tokenizer, the first id that it does not use
        mask = vocab_size if tokenizer_mask is None else tokenizer_mask
    rows = model.vocab_size or max(vocab_size, mask + 1)
    if mask >= rows:
        raise TenfoldError(
            f"model.vocab_size = {rows} leaves no row for the mask token {mask}, which the tokenizer does not have; "
            f"raise it to {mask + 1}, or leave it out"
        )
    return model.model_copy(update={"vocab_size": rows, "mask_token": mask})


def check_tokens(data: TrainingData, vocab_size: int) -> None:
    """Every token id of the data has a row in the embedding, or a TenfoldError before the first step."""
    for part in data.parts.values():
        for name, shards in part.index.splits.items():
            for shard in shards:
                if shard.max_token >= vocab_size:
                    raise TenfoldError(
                        f"{part.path / shard.file} ({name}) holds token id {shard.max_token}, "
                        f"but the model's vocabulary has {vocab_size} rows"
                    )


def build_model(config: RunConfig, sharing: Sharing, device: torch.device) -> Decoder:
    """The model of a resolved configuration with initial weights on `device`, on one rank."""
    return layout_of(config, sharing, Mesh(Degrees(), device.type), device).build(config.training.seed)


def recompute_of(training: TrainingConfig) -> Recompute:
    """How layers recompute in a run, or in one of its stages (`RunConfig.of_stage`)."""
    return Recompute(training.recompute, training.recompute_layers)


def layout_of(
    config: RunConfig, sharing: Sharing, mesh: Mesh, device: torch.device, kind: type[Layout] = Layout
) -> Layout:
    """How the model of a resolved configuration (of a stage: `RunConfig.of_stage`) lies on the ranks of `mesh`."""
    training = config.training
    return kind(
        mesh,
        config.parallel,
        config.model,
        sharing,
        config.data.sequence_length,
        device,
        DTYPES[training.precision],
        recompute_of(training),
    )


def degrees_of_stages(config: RunConfig, stages: list[Stage], world: int) -> list[Degrees]:
    """The degrees of every stage on `world` ranks, of a run in which none is left to choose (`training.deciding`).

    Raises TenfoldError where they do not fit the model, the batch or the sequences, and for what training refuses.
    """
    found = []
    for number, stage in enumerate(stages):
        own = config.of_stage(stage.config)
        try:
            degrees = degrees_of(own.parallel, world, config.model)
            assert degrees is not None, own.parallel
            check_trained(own, stage, degrees)
        except TenfoldError as error:
            raise TenfoldError(f"stages.{number} ({stage.name}): {error}") from None
        found.append(degrees)
    return found


def shape_of(config: RunConfig, sharing: Sharing) -> Decoder:
    """The model of a resolved configuration on the meta device."""
    training = config.training
    with torch.device("meta"):
        model = Decoder(
            config.model,
            config.data.sequence_length,
            DTYPES[training.precision],
            recompute_of(training),
        )
    tie(model.layers, sharing)
    return model


def check_compiler(device: torch.device) -> None:
    """What torch.compile needs on a CPU is there, or a TenfoldError before the first step."""
    if device.type != "cpu":
        return
    if missing := missing_for_compile():
        raise TenfoldError(f"training.compile = true needs {' and '.join(missing)}; install it, or set it to false")


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """torch.compile each layer in place; layers of one shape share the compiled code."""
    for layer in layers:
        layer.compile()


def describe_stages(config: RunConfig, stages: list[Stage]) -> list[dict[str, Any]]:
    """What each stage weighs and costs, counted on the model itself, built on the meta device."""
    described = []
    for number, stage in enumerate(stages):
        try:
            counts = count(shape_of(config, stage.sharing), stage.lengths[-1])
        except TenfoldError as error:
            raise TenfoldError(f"stages.{number} ({stage.name}): {error}") from None
        described.append(
            {
                "name": stage.name,
                "sharing": stage.config.sharing,
                **({} if stage.sharing.parts == PARTS else {"parts": stage.sharing.parts}),
                **({"rank": stage.sharing.rank} if stage.sharing.rank else {}),
                **({} if stage.sharing.experts == "free" else {"experts": stage.sharing.experts}),
                "total_parameters": counts.total,
                "stored_parameters": counts.stored,
                "active_parameters": counts.active,
                "expert_parameters": counts.expert,
                "flops_per_token": counts.flops_per_token,
                "steps": stage.steps,
                "tokens": stage.tokens,
                **({"sequence_lengths": stage.lengths} if stage.config.sequence_length else {}),
                **({"ends_by": stage.rule["auto"]} if stage.rule is not None else {}),
            }
        )
    return described


def state_bytes(stored_parameters: int, optim: OptimConfig) -> int:
    """Of weights, gradients and optimizer state of so many parameters."""
    # fp32 weight and gradient, and AdamW's two moments; Muon keeps one, Adafactor next to none.
    moments = {"adamw": 2, "muon": 1, "adafactor": 0}[optim.name]
    return int(stored_parameters * (8 + moments * bytes_of(optim.state)))


def memory_for_state(device: torch.device) -> int:
    """Bytes that weights, gradients and optimizer state may take at most."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else memory_limit_bytes()


def check_memory(
    described: list[dict[str, Any]],
    optim: OptimConfig,
    device: torch.device,
    degrees: Sequence[Degrees],
    kept: Sequence[bool],
) -> None:
    """Weights, gradients and moments of the stages that are `kept` on the device fit the memory there is, or a
    TenfoldError with the bytes."""
    limit = memory_for_state(device)
    for stage, ranks, here in zip(described, degrees, kept, strict=True):
        if not here:
            continue
        split = ranks.shard * ranks.tensor * ranks.pipeline
        needed = state_bytes(stage["stored_parameters"], optim) // split
        if needed > limit:
            raise TenfoldError(
                f"stage {stage['name']}: weights, gradients and optimizer state alone need {format_bytes(needed)} "
                f"({state_bytes(1, optim)} bytes for each of {stage['stored_parameters']:,} stored parameters"
                f"{f', over {split} ranks' if split > 1 else ''}), and this machine has {format_bytes(limit)}. Take a "
                "smaller model, let state leave the device ([offload], docs/offload.md), or see the shape only with "
                "--dry-run"
            )


def find_checkpoint(run: Path, step: int | None) -> Path:
    """The checkpoint of `step` in a run directory (None: the newest whole one), or a TenfoldError that tells which
    there are."""
    folder = run / "checkpoints"
    if not folder.is_dir():
        raise TenfoldError(f"{run} holds no checkpoints: it is no run directory, or the run was not saved yet")
    path = folder / f"step-{step:08d}" if step is not None else latest_checkpoint(folder, print)
    if path is None or not path.is_dir():
        steps = ", ".join(str(int(path.name.removeprefix("step-"))) for path in list_checkpoints(folder))
        if step is None and steps:
            raise TenfoldError(f"every checkpoint in {folder} ({steps}) is damaged: put one back, or train again")
        raise TenfoldError(
            f"{folder} holds no whole checkpoint{'' if step is None else f' of step {step}'}: "
            f"there are {steps or 'none'}"
        )
    return path


def checkpoint_at(place: Path) -> Path:
    """The checkpoint that `place` is, or the newest whole one where it is a run directory."""
    if not place.exists():
        raise TenfoldError(f"there is no {place}; give a run directory, or a checkpoint in it (step-...)")
    return place if (place / "manifest.json").is_file() else find_checkpoint(place, None)


def run_of(checkpoint: Path) -> Path | None:
    """The run directory that a checkpoint lies in, if it lies in one."""
    folder = checkpoint.absolute().parent
    return folder.parent if folder.name == "checkpoints" else None


def load_model(run: Path, step: int | None, device: torch.device) -> Decoder:
    """The model of a run directory's checkpoint (`find_checkpoint`), as it was trained."""
    path = find_checkpoint(run, step)
    manifest, weights, _ = load_checkpoint(path)
    config = build(ModelConfig, manifest["model"], str(path / "manifest.json"))
    with torch.device("meta"):
        model = Decoder(config, manifest["sequence_length"], DTYPES[manifest["precision"]])
    tie(model.layers, Sharing.load(manifest))
    materialize(model, device)
    fill_tensors({name: parameter.data for name, parameter in model.named_parameters()}, weights, "weights")
    return model
