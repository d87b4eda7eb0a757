"""What one rank has of a model and of a micro-batch: the sizes that all its work comes from."""

from __future__ import annotations

from dataclasses import dataclass

from tenfold.config.model import ModelConfig
from tenfold.config.run import RunConfig
from tenfold.parallel.mesh import Degrees
from tenfold.parallel.splits import heads_of, share_of
from tenfold.planning.stages import Stage
from tenfold.planning.terms import Candidate
from tenfold.sharing.tying import sets_of

FP32 = 4


@dataclass(frozen=True)
class Local:
    """Of the rank that has most, where they are not even. Sizes are in elements.

    `sequences` of `length` tokens are a pass's; the rank attends in `rows` of them to `positions` (its context rank's
    part, or a slice of it), of which `own` have its norms, routing and residual stream.
    """

    model: ModelConfig
    degrees: Degrees
    itemsize: int
    """Bytes of an activation."""
    gathered_bf16: bool
    """Whether FSDP2 hands out weights in bf16: then none is cast."""
    fused: bool
    """Whether norms are one kernel each, as on a GPU; on a CPU they are several passes (`nn.layers`)."""
    sequences: int
    length: int
    slices: int
    loss_chunk: int
    sets: int
    """Of weights that the experts of a layer have."""

    @property
    def rows(self) -> int:
        return self.sequences // self.degrees.rows

    @property
    def positions(self) -> int:
        return self.length // (self.degrees.context * self.slices)

    @property
    def own(self) -> int:
        """Tokens."""
        return self.rows * self.positions // self.degrees.columns

    @property
    def tokens(self) -> int:
        """That products are made of: those of all tensor ranks of a row."""
        return self.rows * self.positions

    @property
    def heads(self) -> int:
        columns = self.degrees.columns
        return max(len(heads_of(self.model, columns, each)[0]) for each in range(columns))

    @property
    def key_heads(self) -> int:
        columns = self.degrees.columns
        return max(len(heads_of(self.model, columns, each)[1]) for each in range(columns))

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding and the output matrix."""
        return self.part(self.model.padded_vocab())

    @property
    def routed(self) -> bool:
        """Whether tokens choose experts."""
        return self.model.moe.experts > 0 and self.sets == self.model.moe.experts

    @property
    def choices(self) -> int:
        """Experts of a token."""
        return self.model.moe.prototypes * self.model.moe.top_k

    def part(self, width: int) -> int:
        """Of a width that tensor ranks split (the columns of a grid)."""
        columns = self.degrees.columns
        return max(len(share_of(width, columns, each)) for each in range(columns))

    @classmethod
    def of(cls, config: RunConfig, stage: Stage, candidate: Candidate, fused: bool = True) -> Local:
        """For the longest sequences of a stage."""
        length = stage.lengths[-1]
        moe = config.model.moe
        return cls(
            config.model,
            candidate.degrees,
            FP32 if config.training.precision == "fp32" else 2,
            candidate.gather == "bf16" and candidate.degrees.data_replicate * candidate.degrees.shard > 1,
            fused,
            candidate.micro_batch_size * (stage.sequence_length // length),
            length,
            candidate.slices if candidate.schedule == "terapipe" and candidate.degrees.pipeline > 1 else 1,
            config.training.loss_chunk,
            sets_of(moe, stage.sharing.experts) if moe.experts else 0,
        )
