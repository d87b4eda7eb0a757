"""`moments = "measure"` in a run: which batches freed layers measure their gradients on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from tenfold.config.run import RunConfig
from tenfold.errors import TenfoldError
from tenfold.nn.decoder import Decoder
from tenfold.nn.objective import backward
from tenfold.sharing.measuring import Measurement
from tenfold.sharing.tying import uses
from tenfold.training.step import micro_batches_of


@dataclass(frozen=True)
class Coming:
    """The batch of a step: samples [B, sequence_length + 1], the first one's index in the run, and how many sequences
    each is cut into."""

    batch: Tensor
    first_sample: int
    pieces: int


def measure_moments(
    model: Decoder,
    optimizers: Sequence[Optimizer],
    freed: Sequence[nn.Parameter],
    coming: Sequence[Coming],
    config: RunConfig,
) -> float:
    """Start the moments of `freed` from gradients on the batches of the coming steps; the mean norm of these.

    Weights are held, and training then sees the same batches as usual. Raises TenfoldError when a gradient is not
    finite.
    """
    steps = [micro_batches_of(step.batch, config, step.first_sample, step.pieces) for step in coming]
    with Measurement(optimizers, freed, uses(model.layers), len(steps[0][0])) as measured:
        for parts, valid_tokens in steps:
            for part in parts:
                backward(model, part, valid_tokens, config.training.loss_chunk)
    norm = measured.finish(len(steps), config.optim.clip)
    if not math.isfinite(norm):
        raise TenfoldError(
            "the gradient that moments are to be measured from is not finite, and so would training's be. Try a lower "
            "optim.lr, or training.precision = fp32, from the last checkpoint"
        )
    return norm
