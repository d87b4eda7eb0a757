"""What a forward pass leaves in memory for its backward pass, layer by layer: counted without having it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tenfold.nn.decoder import Decoder
from tenfold.nn.objective import Example, loss_sum

_OUTSIDE = -1


class SavedBytes(NamedTuple):
    """Bytes between a forward pass and its backward pass: each storage once, parameters not counted."""

    layers: list[int]
    """By layer: its input, and what was made in it, copies of weights in the dtype of the activations too."""
    outside: int
    """What is of no layer: angles of positions, the last layer's output, the gradients made with the loss."""
    loss: int
    """The most that is there besides while the loss is made: logits of a chunk above all."""


def saved_bytes(model: Decoder, sequences: int, length: int, chunk: int = 512) -> SavedBytes:
    """What a micro-batch of `sequences` times `length` tokens leaves in memory, as the layers of `model` recompute.

    The model, which may be on the meta device, is run forward on tensors without memory, as on a CPU. What depends on
    data is taken at its most: no row is dropped for want of capacity; every sequence is one document. A model that
    ranks are to split is counted whole.
    """
    config, counter = model.config, _Counter(sequences)
    training = model.training
    with FakeTensorMode(), _without_memory(model) as held, counter.of_layers(model.layers):
        tokens_BS = torch.zeros(sequences, length + 1, dtype=torch.int64)
        example = Example(tokens_BS[:, :-1], tokens_BS[:, 1:])
        if config.objective == "masked":
            places_BP = torch.zeros(sequences, max(1, round(config.mask_share * length)), dtype=torch.int64)
            example = Example(tokens_BS[:, :-1], places_BP, places_BP)
        model.eval()  # the same but for capacities
        try:
            with torch.enable_grad(), counter:
                hidden, statistics_LS = model(example.inputs)
                counter.begin_loss()
                loss = loss_sum(model, hidden, example, chunk)
                graph = loss.grad_fn, statistics_LS.grad_fn
                del loss, statistics_LS, hidden
                found = counter.alive([*held, *(each for each in example if each is not None)])
                besides = counter.most_in_loss - counter.alive_in_loss()
                del graph
        finally:
            model.train(training)
    layers = [found.get(layer, 0) for layer in range(len(model.layers))]
    return SavedBytes(layers, found.get(_OUTSIDE, 0), besides)


class _Counter(TorchDispatchMode):
    """Notes of every storage that is made in which layer that was."""

    def __init__(self, sequences: int) -> None:
        super().__init__()
        self._sequences = sequences
        self._layer = _OUTSIDE
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._owner: dict[int, int] = {}
        self._in_loss: list[tuple[StorageWeakRef, int]] | None = None
        self.most_in_loss = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The two whose results have a shape that depends on data, for operations that know no such data.
        if func is torch.ops.aten.bincount.default:
            out = args[0].new_empty(args[2] if len(args) > 2 else (kwargs or {})["minlength"])
        elif func is torch.ops.aten.nonzero.default:  # where documents begin
            out = args[0].new_empty((self._sequences, args[0].dim()), dtype=torch.int64)
        else:
            out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, Tensor):
                self._note(each)
        return out

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._made:  # which no other storage is, as long as it is noted
            return
        made = StorageWeakRef(storage), storage.nbytes()
        self._made[storage._cdata], self._owner[storage._cdata] = made, self._layer
        if self._in_loss is not None:
            self._in_loss.append(made)
            self._in_loss = [each for each in self._in_loss if not each[0].expired()]
            self.most_in_loss = max(self.most_in_loss, self.alive_in_loss())

    @contextmanager
    def of_layers(self, layers: nn.ModuleList) -> Iterator[None]:
        """Know from the layers which of them runs. What one gives to the next is the next one's."""

        def begin(number: int, inputs: tuple[Any, ...]) -> None:
            self._layer = number
            self._give(inputs[0], number)

        def end(outputs: tuple[Tensor, ...]) -> None:
            self._layer = _OUTSIDE
            self._give(outputs[0], _OUTSIDE)

        hooks = []
        for number, layer in enumerate(layers):
            hooks.append(layer.register_forward_pre_hook(lambda _, inputs, number=number: begin(number, inputs)))
            hooks.append(layer.register_forward_hook(lambda _, inputs, outputs: end(outputs)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _give(self, tensor: Tensor, owner: int) -> None:
        self._owner[tensor.untyped_storage()._cdata] = owner

    def begin_loss(self) -> None:
        """From now on note what is there at once."""
        self._in_loss = []

    def alive_in_loss(self) -> int:
        """Bytes made since, that are still there."""
        return sum(size for storage, size in self._in_loss or () if not storage.expired())

    def alive(self, but: list[Tensor]) -> dict[int, int]:
        """Bytes still there, by layer, `but` those of some tensors."""
        found: dict[int, int] = {}
        others = {tensor.untyped_storage()._cdata for tensor in but}
        for key, (storage, size) in self._made.items():
            if key not in others and not storage.expired():
                found[self._owner[key]] = found.get(self._owner[key], 0) + size
        return found


@contextmanager
def _without_memory(model: nn.Module) -> Iterator[list[Tensor]]:
    """Have parameters and buffers of the same shapes, given too, on a CPU that is none; within a `FakeTensorMode`."""
    fakes: dict[Tensor, Tensor] = {}
    places: list[tuple[dict[str, Any], str, Tensor]] = []
    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = module._parameters, module._buffers
        for held in tables:
            places += [(held, name, tensor) for name, tensor in held.items() if tensor is not None]
    for _, _, tensor in places:
        if tensor not in fakes:
            fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            fakes[tensor] = nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
    try:
        for held, name, tensor in places:
            held[name] = fakes[tensor]
        yield list(fakes.values())
    finally:
        for held, name, tensor in places:
            held[name] = tensor
