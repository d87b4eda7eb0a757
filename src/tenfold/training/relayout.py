"""A stage that begins on many ranks: its model is made anew, as it lies on them, from what the stage before had.

Nothing goes through a checkpoint. Parameter by parameter the old model's is collected, carried as delinking carries it
(`checkpoint.saved`), and each rank keeps its own piece of what it becomes. Both models exist meanwhile, each in pieces;
the former, whose layers share, is the smaller one.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from tenfold.checkpoint.gathered import gathered
from tenfold.checkpoint.saved import Saved
from tenfold.config.run import RunConfig
from tenfold.nn.decoder import Decoder
from tenfold.parallel.layout import Layout
from tenfold.sharing.delinking import Moments
from tenfold.training.optimizers import build_optimizers, fill_tensors, state_tensors


def lay_out_anew(
    model: Decoder,
    optimizers: Sequence[Optimizer],
    before: Layout,
    after: Layout,
    config: RunConfig,
    moments: Moments,
) -> tuple[Decoder, list[Optimizer]]:
    """The model and optimizers of layout `after`, from those of layout `before`, delinked where it shares less.

    Every rank must call it, with gradients cleared.
    """
    before.let_go(model)
    weights = {name: parameter.data for name, parameter in before.named(model).items()}
    saved = Saved(
        config.model,
        before.sharing,
        config.data.sequence_length,
        gathered(before, weights, to=None),
        gathered(before, state_tensors(model, optimizers, before), to=None),
        (config.optim.beta1, config.optim.beta2),
        "the stage before",
    )
    new_weights, new_state = saved.delinked(after.sharing, moments)
    begun = saved.begun(after.sharing)  # these stay as they are initialised
    made = after.build(config.training.seed)
    made_optimizers = build_optimizers(made, config.optim, after)
    targets = {name: parameter.data for name, parameter in after.named(made).items() if name not in begun}
    fill_tensors(targets, new_weights, "weights", after)
    state = state_tensors(made, made_optimizers, after)
    state = {name: value for name, value in state.items() if name.partition("/")[0] not in begun}
    fill_tensors(state, new_state, "optimizer state", after)
    return made, made_optimizers
