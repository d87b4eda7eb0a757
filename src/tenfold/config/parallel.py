"""How a run is laid over many processes, as a run file states it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from tenfold.config.base import Section
from tenfold.config.units import AXES, Degree, flag, pairs_of, show_pairs, without_brackets

Schedule = Literal["gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv", "terapipe"]


class ParallelConfig(Section):
    """How many ranks split a run along each axis: see docs/parallel.md. `parallel = "auto"` leaves them all open."""

    data_replicate: Degree = Field("auto", description="Copies of the model, each with other samples; 1 is off.")
    data_shard: Degree = Field(
        "auto", description="Ranks that split weights and optimizer state, each with other samples (FSDP2); 1 is off."
    )
    tensor: Degree = Field(1, description="Ranks that split every layer: heads, inner widths, the vocabulary.")
    tensor_grid: bool = Field(
        False,
        description="Tensor ranks as a square grid, of which rows split hidden widths and sequences of a micro-batch "
        "(2D tensor parallelism): less traffic where a pass has more than two or three tokens per hidden element. "
        "Dense models, without pipeline.",
    )
    context: Degree = Field(1, description="Ranks that split every sequence.")
    pipeline: Degree = Field(1, description="Ranks that split the layers by depth.")
    expert: Degree = Field(1, description="Ranks that split the experts of a layer; divides data_shard x context.")
    pipeline_schedule: Schedule = Field(
        "1f1b",
        description="In what order pipeline ranks go through micro-batches: gpipe (all forward passes, then all "
        "backward); 1f1b (one of each in turn: less memory); interleaved-1f1b (several stages a rank: less waiting, "
        "more messages); interleaved-zero-bubble and zbv (gradients of weights are put off, to fill the waiting, but "
        "in stages that recompute, or whose layers share weights; zbv goes up the ranks and down again); terapipe "
        "(every sequence in slices, one behind the other: for few, long ones; dense decoders).",
    )
    pipeline_chunks: int = Field(2, gt=1, description="Stages of a rank, where the schedule interleaves them.")
    pipeline_slices: int = Field(
        4, gt=1, description="Slices of every sequence, equally long, where the schedule is terapipe."
    )
    reshard: Literal["forward", "backward", "step"] = Field(
        "forward",
        description="After what data_shard ranks let go of each other's weights: every forward pass of a segment "
        "(ZeRO-3), every backward pass (ZeRO-2), or the step (ZeRO-1: most memory, fewest gathers). Where degrees are "
        "chosen and this is not set, it is, too.",
    )
    gather: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="How data_shard ranks send each other weights. bf16: half the traffic and memory of gathered "
        "weights, in which layers that share then add up gradients, too; fp32 is what one process computes.",
    )

    @property
    def stages_per_rank(self) -> int:
        """Of a pipeline rank."""
        if self.pipeline_schedule == "zbv":
            return 2
        return self.pipeline_chunks if self.pipeline_schedule.startswith("interleaved") else 1

    @property
    def slices(self) -> int:
        """Of every sequence, that a pipeline rank works on one by one."""
        return self.pipeline_slices if self.pipeline_schedule == "terapipe" else 1

    cluster: str | None = Field(
        None,
        min_length=1,
        description='What the ranks are, for what is "auto": a file of tenfold doctor --save ("here.toml"), or '
        'accelerators ("64x8:v100-32gb"), as for tenfold plan --cluster; unset: as the GPU is named, or a CPU.',
    )
    timeout: float = Field(
        600.0, gt=0, description="Seconds after which a rank that waits for the others gives up and names them."
    )

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, given: Any) -> Any:
        return dict.fromkeys(AXES, "auto") if given == "auto" else given

    def of_stage(self, override: dict[str, Any] | None) -> ParallelConfig:
        """This with what a stage has otherwise."""
        return self.model_copy(update=override or {})


_RUN_WIDE = ("timeout", "cluster")


def parse_override(value: Any) -> dict[str, Any]:
    """Keys of [parallel] that a stage has otherwise, {tensor = 2, reshard = "step"}, or "auto": every degree is open.

    On the command line tensor=2,reshard=step.
    """
    if isinstance(value, str) and value != "auto":
        words = {"true": True, "false": False}
        given = pairs_of(without_brackets(value))
        value = {key: int(text) if text.isdecimal() else words.get(text, text) for key, text in given.items()}
    if value != "auto" and (not isinstance(value, dict) or not value):
        raise ValueError("expected keys of [parallel], for example {tensor = 2, data_shard = 4}")
    for key in _RUN_WIDE:
        if key in value:
            raise ValueError(f"{key} holds for all stages of a run: set parallel.{key}")
    try:
        return ParallelConfig.model_validate(value).model_dump(exclude_unset=True)
    except ValidationError as error:
        fault = error.errors()[0]
        path = ".".join(str(part) for part in fault["loc"])
        if fault["type"] == "extra_forbidden":
            keys = ", ".join(key for key in ParallelConfig.model_fields if key not in _RUN_WIDE)
            raise ValueError(f"there is no key {path!r}; the keys are {keys}") from None
        raise ValueError(f"{path} = {fault['input']!r}: {fault['msg'].removeprefix('Value error, ')}") from None


Override = Annotated[
    dict[str, Any] | None,
    BeforeValidator(lambda value: None if value is None else parse_override(value)),
    flag(lambda text: None if text == "None" else parse_override(text), "tensor=2,reshard=step", show_pairs),
]
