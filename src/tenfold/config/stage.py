"""A stage of a run, as a run file states it."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field

from tenfold.config.base import Section
from tenfold.config.offload import Override as OffloadOverride
from tenfold.config.parallel import Override as ParallelOverride
from tenfold.config.units import Foreseen, Lengths, OptionalRecompute, Sharing, Until, Weights

Part = Literal["attention", "ffn", "experts", "router", "norms"]


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
    micro_batch_size: int | None = Field(
        None, ge=0, description="Sequences in one forward pass of this stage, 0: the whole batch; unset: the run's."
    )
    recompute: OptionalRecompute = Field(
        None, description="What layers recompute in this stage, all or `recompute_layers` of them; unset: the run's."
    )
    recompute_layers: int | None = Field(
        None, gt=0, description="How many layers recompute in this stage; unset: the run's, or with `recompute` all."
    )
    parallel: ParallelOverride = Field(
        None,
        description='Keys of [parallel] that differ in this stage, {tensor = 2, reshard = "step"}, or "auto": every '
        "degree is open; unset: none.",
    )
    offload: OffloadOverride = Field(
        None,
        description='Keys of [offload] that differ in this stage, {device_budget = "20GiB"}, or "off"; a budget takes '
        "the place of the run's rules, and rules that of its budget. Unset: none differ.",
    )
    lr_scale: float = Field(1.0, gt=0, description="Multiplies the learning rate in this stage.")
    rewarm: int = Field(0, ge=0, description="Steps over which the rate rises again when this stage begins.")
    foreseen: Foreseen = Field(
        None,
        description="What `tenfold plan --write` foresaw: seconds of a step, and device_bytes of the rank that holds "
        "most, on ranks as `cluster` says. A run tells it beside what it measures; unset: nothing is told.",
    )
