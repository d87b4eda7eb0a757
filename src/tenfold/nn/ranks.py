"""What a model asks of the ranks that hold the rest of it. Alone it asks nothing: these classes are that.

Four kinds of ranks may split a forward pass (`tenfold.parallel` has their classes):

- **tensor** ranks split heads, inner widths and the vocabulary, and between these the sequence: what is done to tokens
  one by one (norms, sums, routing) each rank does to its own run of positions (arXiv 2205.05198);
- **context** ranks split every sequence, attention too;
- **expert** ranks split the experts of a layer, and send tokens to them;
- **pipeline** ranks split the layers by depth, and pass hidden states on.

All that a rank computes while it trains is a part of a sum: of the loss, of the statistics, of the gradient of each
parameter that it holds. The sum over all ranks is what one rank alone would have. Without gradients (evaluation,
generation) sequences are not split, so that any length will do: then each rank has all of the result.

Shapes: B sequences, T positions (of one context rank), S those of them that a tensor rank has to itself, D hidden,
N = B * S tokens, C choices of a token, U runs of positions, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from tenfold.nn.attend import Context, attend
from tenfold.nn.grouped import Rows, combine, dispatch

if TYPE_CHECKING:
    from tenfold.config.model import ModelConfig
    from tenfold.nn.layers import Linear
    from tenfold.nn.moe import Experts


class TensorRanks:
    """One rank holds every head, width and row of the vocabulary."""

    size, rank = 1, 0
    first_row = 0
    """The first row of the embedding and the output matrix that this rank holds."""

    def sequences(self, x_BT: Tensor) -> Tensor:
        """Those of a batch's sequences (dimension 0) that this rank has positions of."""
        return x_BT

    def gather(self, x_BSD: Tensor) -> Tensor:
        """All T positions, from each rank's own."""
        return x_BSD

    def own(self, x_BT: Tensor) -> Tensor:
        """This rank's positions (dimension 1) of what every rank has all of."""
        return x_BT

    def mine(self, x_BT: Tensor) -> Tensor:
        """Which of the positions are this rank's, bool [B, T]."""
        return torch.ones_like(x_BT, dtype=torch.bool)

    def expand(self, linear: Linear, x_BTD: Tensor) -> Tensor:
        """`linear` to an inner dimension that the ranks split: this rank's part of it, [B, T, I]."""
        out: Tensor = linear(x_BTD)
        return out

    def project(self, linear: Linear, x_BTI: Tensor) -> Tensor:
        """`linear` of an inner dimension that the ranks split; of the sum, this rank's positions [B, S, D]."""
        out: Tensor = linear(x_BTI)
        return out

    def sum(self, y_BTD: Tensor) -> Tensor:
        """This rank's positions of the sum of all ranks' results, [B, S, D]."""
        return y_BTD

    def embed(self, tokens_BT: Tensor, weight_VD: Tensor) -> Tensor:
        """Rows of the embedding for this rank's positions, [B, S, D]."""
        return F.embedding(tokens_BT, weight_VD)

    def columns(self, weight_VD: Tensor) -> Tensor:
        """All columns of this rank's rows of the output matrix."""
        return weight_VD

    def add(self, x: Tensor) -> Tensor:
        """The sum over the ranks. For statistics and inside of operators: no gradient passes."""
        return x

    def maximum(self, x: Tensor) -> Tensor:
        """The maximum over the ranks, likewise."""
        return x

    def gather_vocabulary(self, logits_BTV: Tensor) -> Tensor:
        """The logits of all rows, from each rank's own. Not for training: no gradient passes."""
        return logits_BTV

    def key_heads(self, config: ModelConfig) -> int:
        """How many key heads this rank has in each layer."""
        return config.key_heads


class ContextRanks:
    """One rank holds whole sequences."""

    size, rank = 1, 0

    def own(self, x_BT: Tensor) -> Tensor:
        """This rank's positions (dimension 1) of whole sequences."""
        return x_BT

    def attend(self, q_BHTW: Tensor, k_BKTW: Tensor, v_BKTW: Tensor, context: Context) -> Tensor:
        """`attention.attend` of this rank's queries to the keys of whole sequences, [B, H, T, W]."""
        return attend(q_BHTW, k_BKTW, v_BKTW, context)


class ExpertRanks:
    """One rank holds every expert."""

    size, rank = 1, 0

    @property
    def runs(self) -> int:
        """Into how many runs, of equal length and none with a gap, the positions of this rank fall."""
        return 1

    def loads(self, loads_BE: Tensor) -> Tensor:
        """Choices of each expert in each whole sequence, from those of this rank's positions."""
        return loads_BE

    def before(self, loads_BUE: Tensor) -> Tensor:
        """Choices of each expert that come earlier in the sequence than each of the `runs` [B, U, E], from theirs."""
        return torch.zeros_like(loads_BUE)

    def tell(self, choice_NC: Tensor, rows: Rows) -> Tensor:
        """What ranks let each other know of their rows before they send them."""
        return rows.per_expert

    def apply(
        self,
        experts: Experts,
        x_ND: Tensor,
        gates_NC: Tensor,
        rows: Rows,
        told: Tensor,
        shared: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """What the chosen experts make of each token, and `shared` of all of them, [N, D]."""
        x_RD, gates_R = dispatch(x_ND, gates_NC, rows)
        y_ND = combine(experts(x_RD, gates_R, rows.per_expert), rows)
        return y_ND if shared is None else y_ND + shared()


@dataclass(frozen=True)
class Stage:
    """Layers that follow one another: one of the parts into which pipeline ranks cut a model by depth."""

    number: int
    layers: range
    last: bool
    """Whether it ends the model, with the norm and the output matrix."""

    @property
    def first(self) -> bool:
        """Whether it begins the model, with the embedding."""
        return self.number == 0


class PipelineRanks:
    """One rank holds every layer."""

    def stages(self, layers: int) -> Sequence[Stage]:
        """This rank's, from the embedding on, of a model of which it holds `layers` layers."""
        return (Stage(0, range(layers), True),)

    def receive(self, stage: Stage, x_BTD: Tensor | None, like: tuple[tuple[int, ...], torch.dtype]) -> Tensor:
        """What the stage before `stage`, not the first, made: `x_BTD` where that is this rank's own."""
        raise NotImplementedError

    def send(self, stage: Stage, x_BTD: Tensor) -> None:
        """Hand on what `stage` made, to the rank of the next."""

    def from_last(self, make: Callable[[], Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """On every rank, of `shape` and `dtype`, what `make` comes to on that of the last stage. Not for training."""
        return make()


_EVERY_LAYER = PipelineRanks()


@dataclass(frozen=True)
class Ranks:
    """The ranks that a model is split over, its sequences or its weights."""

    tensor: TensorRanks
    context: ContextRanks
    expert: ExpertRanks
    pipeline: PipelineRanks = _EVERY_LAYER

    @property
    def split(self) -> bool:
        """Whether a forward pass, made now, gives each rank positions of its own."""
        return torch.is_grad_enabled() and self.tensor.size * self.context.size > 1


ALONE = Ranks(TensorRanks(), ContextRanks(), ExpertRanks())
"""A model that is on one rank."""
