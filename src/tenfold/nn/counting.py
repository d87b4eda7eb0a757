"""What a model weighs and costs, from its shape: parameters and floating-point operations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from tenfold.nn.decoder import Decoder
from tenfold.nn.low_rank import held_inside
from tenfold.nn.moe import MixtureOfExperts


@dataclass(frozen=True)
class Counts:
    """Parameters, and operations per token.

    total: as if every layer and every expert had weights of its own. stored: those that exist (a shared block, or a set
    of weights that experts share, once; low-rank differences to it besides). active: those of `total` that one token's
    forward pass uses: top_k experts of each prototype, or every set that experts share. expert: those of `total` in
    routed experts. flops_per_token: forward and backward (3 x forward), two operations for each multiply-add of a
    matrix product (norms and biases: none), causal attention counted as the half it is, recomputation not counted, nor
    what a layer's difference costs, which goes by forward passes and not by tokens. An encoder's output matrix
    multiplies masked places only, and is counted by their share.
    """

    total: int
    stored: int
    active: int
    expert: int
    flops_per_token: float


def count(model: Decoder, sequence_length: int) -> Counts:
    """Count a model, which may be on the meta device; `sequence_length` (tokens) enters through attention."""
    config = model.config
    outside = _numel(parameter for name, parameter in model.named_parameters() if not name.startswith("layers."))
    layers_total = sum(_numel(held_inside(layer)) for layer in model.layers)
    layers_active, active_experts, expert_total, moe = layers_total, 0, 0, config.moe
    for module in model.layers.modules():  # a layer at a time, whether they share or not
        if isinstance(module, MixtureOfExperts):
            weights = list(held_inside(module.experts))
            stored, sets = _numel(weights), len(weights[0])
            every = stored // sets * moe.experts
            chosen = stored if module.router is None else every // moe.experts * moe.prototypes * moe.top_k
            expert_total, active_experts = expert_total + every, active_experts + chosen
            layers_active += chosen - stored
            layers_total += every - stored
            if module.router is None:
                layers_total += moe.experts * (config.hidden + (moe.bias_rate > 0))

    # Embedding look-ups multiply nothing; the output matrix does, tied or not.
    output = config.padded_vocab() * config.embedding_columns + _matrices(model.transform)
    masked = config.objective == "masked"
    if masked:
        output = round(output * config.mask_share)
    dense = sum(_matrices(block) for block in model.layers) + _matrices(model.projection)
    matrices = dense + active_experts + output
    seen = sequence_length if masked else (sequence_length + 1) / 2
    attention = config.layers * 2 * config.heads * config.head_width * seen
    return Counts(
        total=outside + layers_total,
        stored=_numel(model.parameters()),
        active=outside + layers_active,
        expert=expert_total,
        flops_per_token=3 * 2 * (matrices + attention),
    )


def layer_costs(model: Decoder, sequence_length: int) -> list[float]:
    """Multiply-adds of a token in each layer, forward and backward, counted as `count` does and with recomputation.

    What is multiplied before the layers counts for the first of them, what is behind for the last.
    """
    config, moe, costs = model.config, model.config.moe, []
    masked = config.objective == "masked"
    attention = 2 * config.heads * config.head_width * (sequence_length if masked else (sequence_length + 1) / 2)
    for layer in model.layers:
        cost = _matrices(layer) + attention
        for module in layer.modules():
            if isinstance(module, MixtureOfExperts):
                weights = list(held_inside(module.experts))
                share = 1.0 if module.router is None else moe.prototypes * moe.top_k / moe.experts
                cost += _numel(weights) * share
        costs.append(cost * (4 if getattr(layer, "recompute", "none") == "full" else 3))
    costs[0] += 3 * _matrices(model.projection)
    output = config.padded_vocab() * config.embedding_columns + _matrices(model.transform)
    costs[-1] += 3 * output * (config.mask_share if masked else 1)
    return costs


def _matrices(module: nn.Module | None) -> int:
    return 0 if module is None else _numel(parameter for parameter in held_inside(module) if parameter.dim() == 2)


def _numel(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)
