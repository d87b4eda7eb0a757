"""Shared parameters train on the mean gradient of their layers, whoever's training loop it is.

A hook on each shared parameter divides the gradient that a backward pass brings it by the number of layers that use
it. PyTorch calls such a hook on the sum over all uses, before it reaches `.grad`: accumulation over micro-batches,
clipping and DistributedDataParallel see the mean. Under reentrant checkpointing it is called once for each piece of the
sum, with the same outcome.

Copies and pickles of a parameter lose its hooks. Those of a module keep theirs, so every layer has a hook too, which
puts missing ones back on the parameters before the layer's next forward pass.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, compiler, nn

from tenfold.sharing.tying import Holder, Layers, holders, uses


class _Divide:
    """The hook on a parameter that `count` layers use."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(self, grad: Tensor) -> Tensor:
        return grad / self.count


class _Renew:
    """The hook on a layer: its shared parameters have their hooks, in this copy of the model too."""

    def __init__(self, counts: dict[Holder, int]) -> None:
        self.counts = list(counts.items())

    def __call__(self, *_: object) -> None:
        if compiler.is_compiling():
            return
        for holder, count in self.counts:
            parameter = holder.module._parameters.get(holder.attribute)
            # Not what stands in for it for the length of a call (torch.func.functional_call).
            if isinstance(parameter, nn.Parameter) and parameter.requires_grad and not _has_hook(parameter):
                parameter.register_hook(_Divide(count))


def average_gradients(layers: Layers) -> None:
    """From now on what `layers` share gets the mean of their gradients, and what they do not share its own."""
    counts = uses(layers)
    for parameter in counts:
        for key in [key for key, hook in _hooks(parameter).items() if isinstance(hook, _Divide)]:
            del _hooks(parameter)[key]
    for layer in layers:
        for key in [key for key, hook in layer._forward_pre_hooks.items() if isinstance(hook, _Renew)]:
            del layer._forward_pre_hooks[key]
        shared = {holder: counts[holder.parameter] for holder in holders(layer).values()}
        shared = {holder: count for holder, count in shared.items() if count > 1}
        if shared:
            renew = _Renew(shared)
            renew()
            layer.register_forward_pre_hook(renew)


def averages_gradients(layers: Layers) -> bool:
    """Whether `average_gradients` was asked for these layers, and they share something still."""
    return any(isinstance(hook, _Renew) for layer in layers for hook in layer._forward_pre_hooks.values())


def _hooks(parameter: nn.Parameter) -> dict[int, Any]:
    return parameter._backward_hooks or {}


def _has_hook(parameter: nn.Parameter) -> bool:
    return any(isinstance(hook, _Divide) for hook in _hooks(parameter).values())
