"""PyTorch's optimizers over our parameter groups, their state made at the start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from tenfold.checkpoint.tensors import Stored
from tenfold.config.run import OptimConfig
from tenfold.errors import TenfoldError
from tenfold.nn.decoder import Decoder
from tenfold.nn.init import Memory
from tenfold.parallel.layout import Layout
from tenfold.parallel.pieces import local_of
from tenfold.parallel.rank import ALONE, Rank
from tenfold.planning.refusals import check_optimizer
from tenfold.sharing.rates import divide_by
from tenfold.training.adafactor import Adafactor


def build_optimizers(model: Decoder, config: OptimConfig, rank: Rank = ALONE, state: bool = True) -> list[Optimizer]:
    """The optimizers of a model, with their `state`: one, or with Muon two (its matrices, and AdamW for the rest).

    Weight decay is on the matrices of layers and the output matrix, not on embeddings, norms and biases. Muon takes
    the two-dimensional matrices of layers; the stacked experts are three-dimensional and stay with AdamW, as does
    the router. Muon's update is scaled to the size of AdamW's, so one learning rate serves both. The two halves of a
    low-rank difference are trained as their matrix is, by the same rules. The updates of what several layers share are
    divided by their number (`sharing.rates`), unless `divide_shared` is off.
    """
    check_optimizer(config, rank.tensor)
    matrices, decayed, plain = [], [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name.startswith("layers.") and parameter.dim() == 2 and ".router." not in name:
            matrices.append(parameter)
        elif parameter.dim() >= 2 and not name.startswith(("embedding", "positions")):
            decayed.append(parameter)
        else:
            plain.append(parameter)
    if config.name != "muon":
        decayed = matrices + decayed
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    optimizers: list[Optimizer] = []
    if config.name == "adafactor":
        optimizers.append(Adafactor(groups, config.lr, rank.sums(model)))
    else:
        groups = [part for group in groups for part in _by_mesh(group)]
        optimizers.append(AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True))
    if config.name == "muon":
        optimizers.append(
            Muon(
                matrices,
                lr=config.lr,
                weight_decay=config.weight_decay,
                momentum=config.momentum,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    if state:
        materialize(optimizers)
    if config.divide_shared:
        divide_by(lambda: {each: len(layers) for each, layers in rank.users(model).items()}, optimizers)
    return optimizers


def _by_mesh(group: dict[str, Any]) -> list[dict[str, Any]]:
    """A group as several, of parameters that are split over the same ranks: an optimizer takes a group's at once."""
    meshes: dict[Any, list[nn.Parameter]] = {}
    for parameter in group["params"]:
        meshes.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [{**group, "params": parameters} for parameters in meshes.values()]


def materialize(optimizers: Sequence[Optimizer]) -> None:
    """Make the optimizer state that is not there yet, so that the first step needs no more memory than any other.

    A step with zero gradients at rate zero makes it; then the counts of steps go back to zero.
    """
    for optimizer in optimizers:
        rates = [group["lr"] for group in optimizer.param_groups]
        new = [p for group in optimizer.param_groups for p in group["params"] if p not in optimizer.state]
        if not new:
            continue
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        for parameter in new:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for parameter in new:
            for value in optimizer.state[parameter].values():
                value.zero_()


def set_learning_rate(optimizers: Sequence[Optimizer], rate: float) -> None:
    """Set the rate of every group."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate


def state_tensors(
    model: Decoder, optimizers: Sequence[Optimizer], layout: Layout | None = None
) -> dict[str, torch.Tensor]:
    """The optimizers' state under canonical names: `layers.0.attention.wq.weight/exp_avg`."""
    named = dict(model.named_parameters()) if layout is None else layout.named(model)
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in named.items()}
    return {
        f"{names[parameter]}/{key}": value
        for optimizer in optimizers
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


def load_state_tensors(
    model: Decoder,
    optimizers: Sequence[Optimizer],
    saved: Mapping[str, torch.Tensor | Stored],
    layout: Layout | None = None,
    memory: Memory | None = None,
) -> None:
    """Fill the optimizers' state from `saved`; raises TenfoldError when a tensor is missing, left over or misshapen."""
    fill_tensors(state_tensors(model, optimizers, layout), saved, "optimizer state", layout, memory)


@torch.no_grad()
def fill_tensors(
    targets: dict[str, torch.Tensor],
    saved: Mapping[str, torch.Tensor | Stored],
    what: str,
    layout: Layout | None = None,
    memory: Memory | None = None,
) -> None:
    """Copy saved tensors into their namesakes, strictly: every name must be on both sides, with the same shape.

    Of many ranks each copies its own pieces; all go through all of `saved`, whose pieces may come from other ranks.
    `memory` is that of targets which have none of their own.
    """
    shapes = {name: tuple(target.shape) for name, target in targets.items()}
    if layout is not None:
        shapes = layout.whole_shapes(targets)
    for name in sorted(shapes.keys() ^ saved.keys()):
        side = "lacks" if name in shapes else "has, and this run does not use,"
        raise TenfoldError(f"the checkpoint's {what} {side} {name}: it is of another model or optimizer")
    for name in sorted(shapes):
        stored, shape, target = Stored.of(saved[name]), shapes[name], targets.get(name)
        if shape != stored.shape:
            raise TenfoldError(f"the checkpoint's {what} {name} has shape {stored.shape}, this run's {shape}")
        own = nullcontext(target) if target is None or memory is None else memory(name, target)
        with own as place:
            _copy(name, stored, shape, place, layout)
            del place  # before there is memory for the next


def _copy(
    name: str, stored: Stored, shape: tuple[int, ...], target: torch.Tensor | None, layout: Layout | None
) -> None:
    split = layout is not None and not layout.alone and shape != ()
    whole = target if not split else None if target is None else torch.empty(shape, dtype=stored.dtype)
    begin = 0
    for piece in stored.pieces():
        if whole is not None:
            whole.view(-1)[begin : begin + len(piece)].copy_(piece)
        begin += len(piece)
    if split and whole is not None and target is not None:
        assert layout is not None
        local_of(target).copy_(layout.piece(name, shape).take(whole))
