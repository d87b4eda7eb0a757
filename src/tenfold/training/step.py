"""One optimizer step, from a batch of tokens to changed weights, in the order in which it happens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from tenfold.config.run import RunConfig
from tenfold.errors import TenfoldError
from tenfold.nn.decoder import Decoder
from tenfold.nn.loss import IGNORE
from tenfold.nn.moe import BALANCE, DROPPED, LOADS, Z_LOSS, update_balance_bias
from tenfold.nn.objective import Example, cut_sequences, make_example
from tenfold.offload.engine import Offload
from tenfold.parallel.pieces import local_of
from tenfold.parallel.rank import ALONE, Rank, clip_gradients, gradient_norm
from tenfold.parallel.watch import doing
from tenfold.training.optimizers import set_learning_rate


@dataclass(frozen=True)
class StepResult:
    """What a step measured. `statistics` [L, columns of `nn.moe`] are sums over the step's tokens."""

    loss: float  # nats per predicted token
    grad_norm: float  # before clipping
    statistics: Tensor
    tokens: int


def train_step(
    model: Decoder,
    optimizers: Sequence[Optimizer],
    batch_BS: Tensor,
    step: int,
    rate: float,
    config: RunConfig,
    first_sample: int = 0,
    pieces: int = 1,
    rank: Rank = ALONE,
    offload: Offload | None = None,
) -> StepResult:
    """Train on `batch_BS` [samples, sequence_length + 1] (int64) and return what was measured.

    `first_sample` is the index, in the run, of the batch's first sample: masks hang on it. Each sample is cut into
    `pieces` sequences of equal length. Of many ranks each is given its own samples. The loss is the sum over predicted
    tokens divided by their count in the whole batch, however that is cut into micro-batches and over ranks. `offload`
    has what of the state is not on the device. Raises TenfoldError, with weights and optimizer untouched, when loss or
    gradient is not finite.
    """
    moe = config.model.moe
    micro_batches, valid_tokens = micro_batches_of(batch_BS, config, first_sample, pieces, rank)

    if offload is not None:
        offload.begin_step(step)
    set_learning_rate(optimizers, rate)  # before the passes, in which an offloaded run may step

    # Forward and backward, micro-batch by micro-batch; gradients add up.
    doing("forward and backward", step)
    chunk = config.training.loss_chunk
    loss_parts, statistics_parts_LS = rank.run_passes(model, micro_batches, valid_tokens, chunk)
    doing("gradients")
    rank.add_gradients(model, nullcontext if offload is None else offload.gradients.borrow)
    total_loss, total_statistics_LS = rank.total(loss_parts, statistics_parts_LS)

    # What has left has its norm, and has been through what comes next already.
    away = {} if offload is None else offload.gradient_norms()

    # A parameter that several layers use has the sum of their gradients; it trains on the mean.
    for parameter, layers in rank.users(model).items():
        if len(layers) > 1 and parameter.grad is not None:
            parameter.grad /= len(layers)

    # One norm over all stored parameters, each once; then nothing that is not finite reaches the weights.
    norm = gradient_norm(model, rank, math.inf if config.optim.norm == "inf" else 2.0, away)
    mean_loss, grad_norm = (total_loss / valid_tokens).item(), norm.item()
    if not (math.isfinite(mean_loss) and math.isfinite(grad_norm)):
        message = _describe_not_finite(model, step, mean_loss, rank, away)
        clear_gradients(optimizers)
        raise TenfoldError(message)
    if config.optim.clip:
        factor = clip_gradients(list(model.parameters()), config.optim.clip, norm)
        if offload is not None:
            offload.scale_gradients(factor)

    doing("optimizer step")
    for optimizer in optimizers:
        optimizer.step()
    clear_gradients(optimizers)
    if moe.bias_rate:
        update_balance_bias(model, rank.users(model), total_statistics_LS[:, LOADS:], moe)
    tokens = sum(part.inputs.numel() for part in micro_batches) * rank.data
    return StepResult(mean_loss, grad_norm, total_statistics_LS, tokens)


def micro_batches_of(
    batch_BS: Tensor, config: RunConfig, first_sample: int, pieces: int, rank: Rank = ALONE
) -> tuple[list[Example], Tensor]:
    """A rank's part of a batch in micro-batches, and the count of predicted tokens of all of it; see `train_step`."""
    training = config.training
    if pieces > 1:
        batch_BS = cut_sequences(batch_BS, (batch_BS.shape[1] - 1) // pieces)
    example = make_example(batch_BS, config.model, training.seed, first_sample * pieces)
    micro = training.micro_batch_size * pieces or len(batch_BS)
    (valid_tokens,) = rank.total((example.targets != IGNORE).sum())
    if not rank.alone:  # ranks that are no data ranks of their own have the same samples
        valid_tokens = valid_tokens * rank.data // rank.ranks
    return list(example.split(micro)), valid_tokens


def clear_gradients(optimizers: Sequence[Optimizer]) -> None:
    """Free all gradients."""
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)


def routing_metrics(result: StepResult, config: RunConfig) -> dict[str, object]:
    """What the metrics say of a step's routing; empty where nothing is routed (a dense model, experts that share).

    `balance_loss` and `z_loss` per token, mean over layers, before their weights; `dropped_share` of all choices;
    `expert_load`: for each layer the share of its tokens' choices that fell on each expert.
    """
    moe = config.model.moe
    if not moe.experts:
        return {}
    statistics_LS, layers = result.statistics, len(result.statistics)
    loads_LE = statistics_LS[:, LOADS:]
    if not loads_LE.any():
        return {}
    choices = result.tokens * moe.prototypes * moe.top_k
    metrics: dict[str, object] = {
        "balance_loss": statistics_LS[:, BALANCE].sum().item() / (result.tokens * layers),
        "z_loss": statistics_LS[:, Z_LOSS].sum().item() / (result.tokens * layers),
        "expert_load": [[round(share, 5) for share in row] for row in (loads_LE / choices).tolist()],
    }
    if moe.capacity != "dropless":
        metrics["dropped_share"] = statistics_LS[:, DROPPED].sum().item() / (choices * layers)
    return metrics


def _describe_not_finite(
    model: Decoder, step: int, loss: float, rank: Rank, away: Mapping[nn.Parameter, Tensor]
) -> str:
    def finite(parameter: nn.Parameter) -> bool:
        seen = away.get(parameter) if parameter.grad is None else local_of(parameter.grad)
        return seen is None or bool(seen.isfinite().all())

    names = [
        name if rank.alone else f"{name} (rank {rank.number})"
        for name, parameter in model.named_parameters()
        if not finite(parameter)
    ]
    names = [name for found in rank.of_all(names) for name in found]
    where = f"; gradients that are not finite: {', '.join(names[:3])}" if names else ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"step {step}: loss {loss} or its gradient is not finite{where}{more}. The weights are as before this step. "
        "Try a lower optim.lr, a longer optim.warmup, or training.precision = fp32, from the last checkpoint"
    )
