"""Measured moments: freed layers start from gradients of their own, taken while the weights are held.

n steps are gone through forward and backward, each in k equal micro-batches, whose gradients h add up to the step's
(sum of the k). With M = (sum of all h) / n and S = sum of all h^2, coordinate by coordinate:

    m = M                                                                the mean gradient of a step
    v = (1 - a) M^2 + a (k / n) S,   a = (n - 1) / (n k - 1)             the mean square of a step's gradient

v is unbiased when micro-batches are independent and of equal size: the variance of a step's gradient is k times that of
one h, which S tells from n k of them, and M^2 exceeds the square of the true mean by an n-th of that variance. It is
never negative; for k = 1 it is the plain mean square of n gradients.

Clipping: training clips a step's gradient to a global norm c. That norm is estimated by the same formula, summed over
all trained parameters, and m and v are multiplied by f and f^2, f = min(1, c / norm): one factor for all n steps, where
training has one for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

_SQUARES = ("exp_avg_sq", "row_var", "col_var", "variance", "exp_avg_sq_row", "exp_avg_sq_col")


class Measurement:
    """While open, every backward pass is a micro-batch that is measured; `finish` then writes the moments.

    `freed` are the parameters that get moments, as `delink(..., moments="measure")` returns them: their state is all
    zeros and collects squares. `uses` is how many layers use each parameter (`tying.uses`) where training divides by it
    after the backward pass; leave it out after `tenfold.share`, where the backward pass divides. Memory beyond weights
    and state: one gradient of each parameter, in which micro-batches add up, and that of the one whose turn it is.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        freed: Iterable[nn.Parameter],
        uses: Mapping[nn.Parameter, int] | None = None,
        micro_batches: int = 1,
    ) -> None:
        self._groups = {
            parameter: (optimizer, group)
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        self._freed, self._uses, self._k = set(freed), uses or {}, micro_batches
        self._hooks: list[RemovableHandle] = []
        self._squares: dict[nn.Parameter, Tensor] = {}

    def __enter__(self) -> Measurement:
        for parameter in self._groups:
            assert parameter.grad is None, "clear gradients before measuring"
            if parameter.requires_grad:
                self._squares[parameter] = torch.zeros((), dtype=torch.float64, device=parameter.device)
                self._hooks.append(parameter.register_hook(self._taker(parameter)))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _taker(self, parameter: nn.Parameter) -> Any:
        uses, state = self._uses.get(parameter, 1), self._state(parameter) if parameter in self._freed else {}

        @torch.no_grad()
        def take(gradient: Tensor) -> None:
            square = (gradient / uses).square_()
            self._squares[parameter] += square.sum(dtype=torch.float64)
            for key, value in state.items():
                if key in _SQUARES:
                    value += _shaped(square, key)

        return take

    def _state(self, parameter: nn.Parameter) -> dict[str, Any]:
        optimizer, _ = self._groups[parameter]
        state: dict[str, Any] = optimizer.state.get(parameter, {})
        return state

    @torch.no_grad()
    def finish(self, steps: int, clip: float = 0.0) -> float:
        """Write the moments of the freed parameters after `steps` steps, clear all gradients; the norm of a step's.

        `clip` is the norm to which training clips (0: it does not). A norm that is not finite is for the caller to
        tell: the moments are worth nothing then.
        """
        k, share = self._k, 1.0 if steps * self._k == 1 else (steps - 1) / (steps * self._k - 1)
        total = torch.zeros((), dtype=torch.float64)
        for parameter, squares in self._squares.items():
            if parameter.grad is not None:
                parameter.grad /= self._uses.get(parameter, 1) * steps
                mean_square = parameter.grad.square().sum(dtype=torch.float64)
                total += ((1 - share) * mean_square + share * k / steps * squares).cpu()
        norm = float(total.sqrt())
        factor = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        for parameter in self._freed & self._squares.keys():
            if parameter.grad is not None:
                self._write(parameter, parameter.grad, steps, share, factor)
        for parameter in self._squares:
            parameter.grad = None
        return norm

    def _write(self, parameter: nn.Parameter, mean: Tensor, steps: int, share: float, factor: float) -> None:
        """The optimizer's state of one parameter from the mean of its gradients and the squares that it holds.

        AdamW, Adafactor: as a new optimizer has it that has seen `steps` steps; so `step` is set, and AdamW's averages
        are short of m and v by its own correction. Muon's buffer averages towards the gradient, SGD's adds up to
        (1 - dampening) / (1 - momentum) times it: they get what they would settle at. A decay that is added to the
        gradient (SGD, Adam) is added here.
        """
        _, group = self._groups[parameter]
        state = self._state(parameter)
        coupled = "dampening" in group or group.get("decoupled_weight_decay") is False
        decay = parameter * group["weight_decay"] if coupled and group["weight_decay"] else None
        for key, value in state.items():
            if key in _SQUARES:
                value.mul_(share * self._k / steps).add_(_shaped(mean.square(), key), alpha=1 - share)
                value.mul_(factor**2)
        mean.mul_(-factor if group.get("maximize") else factor)
        towards = mean if decay is None else mean + decay
        for key, value in state.items():
            if key == "step":
                state[key] = value.fill_(steps) if isinstance(value, Tensor) else steps
            elif key == "exp_avg" and "betas" in group:
                value.copy_(towards).mul_(1 - group["betas"][0] ** steps)
            elif key == "exp_avg_sq" and "betas" in group:
                if decay is not None:
                    value.add_((2 * mean + decay) * decay)
                value.clamp_(min=0).mul_(1 - group["betas"][1] ** steps)
            elif key == "momentum_buffer" and value is not None:
                settled = (1 - group["dampening"]) / (1 - group["momentum"]) if "dampening" in group else 1.0
                value.copy_(towards).mul_(settled)
        if "max_exp_avg_sq" in state:
            state["max_exp_avg_sq"].copy_(state["exp_avg_sq"])


def _shaped(square: Tensor, key: str) -> Tensor:
    """Squares as the state `key` keeps them: Adafactor's (torch's, transformers') are means over rows and columns."""
    if key in ("row_var", "exp_avg_sq_row"):
        return square.mean(dim=-1, keepdim=key == "row_var")
    if key in ("col_var", "exp_avg_sq_col"):
        return square.mean(dim=-2, keepdim=key == "col_var")
    return square
