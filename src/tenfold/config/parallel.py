"""How a run is laid over many processes, as a run file states it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from tenfold.config.base import Section
from tenfold.config.units import AXES, Degree

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
        "(ZeRO-3), every backward pass (ZeRO-2), or the step (ZeRO-1: most memory, fewest gathers).",
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

    timeout: float = Field(
        600.0, gt=0, description="Seconds after which a rank that waits for the others gives up and names them."
    )

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, given: Any) -> Any:
        return dict.fromkeys(AXES, "auto") if given == "auto" else given
