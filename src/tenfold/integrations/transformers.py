"""Pseudo-to-Real under the Trainer of transformers: one callback.

    Trainer(model, args, ..., callbacks=[SharingCallback("model.layers", [("20%", "all"), ("100%", "none")])])

The model shares from the moment that the Trainer is made, so that the optimizer, which comes later, has each shared
parameter once. At the end of a stage, after the optimizer's step, layers are delinked and the state follows.

A checkpoint's weights are written once for all layers that share them, and so the names in it tell which stage it is
of. When such weights are loaded into the model, it shares as they do before they go in. The Trainer loads them before
it makes its optimizer, which therefore has the parameters of the checkpoint's stage, in the same order.

`save_pretrained` writes the experts of several models under names that the Trainer, which loads a state dict as it is,
does not read back: it would go on with random experts. While it trains, weights keep the model's own names in files.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from tenfold.errors import TenfoldError
from tenfold.integrations.stages import DELINKS_ALONE, Stages, StageSpec, Where, find_layers
from tenfold.sharing.delinking import Moments
from tenfold.sharing.rates import divide_updates
from tenfold.sharing.tying import Layers, tables

try:
    from transformers import TrainerCallback
except ImportError as error:  # pragma: no cover - the package is there in tests
    raise TenfoldError(
        "tenfold.integrations.transformers needs transformers: pip install 'tenfold[transformers]'"
    ) from error

_log = logging.getLogger(__name__)
_RENAMING = "_weight_conversions"  # of a model of transformers: what save_pretrained undoes; [] is nothing


class SharingCallback(TrainerCallback):
    """Shares layers at the start of training and delinks them at the ends of stages; for the Trainer's `callbacks`.

    `layers`: where the model has its layers, such as "model.layers" or a function of the model. `stages`: for each
    stage its end and its pattern (and parts), such as [("20%", "all"), ("100%", "none")]. `moments`: what optimizer
    state freed layers start from. `divide_shared`: whether updates of what q layers share are divided by q, as
    `tenfold.divide_updates` does.

    Several processes may share but not delink, and FSDP and DeepSpeed are refused: TenfoldError from the Trainer.
    """

    def __init__(
        self,
        layers: Where,
        stages: Sequence[StageSpec],
        moments: Moments = "rescale",
        divide_shared: bool = True,
    ) -> None:
        self._where, self._stages, self._divides = layers, Stages(stages, moments), divide_shared
        self._division: list[RemovableHandle] = []
        self._model: weakref.ref[nn.Module] | None = None
        self._optimizers: list[Optimizer] = []
        self._number = 0

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if getattr(args, "fsdp", None) or getattr(args, "deepspeed", None):
            raise TenfoldError("SharingCallback does not work with FSDP or DeepSpeed, which shard parameters")
        if args.world_size > 1 and len(self._stages) > 1:
            raise TenfoldError(DELINKS_ALONE)
        self._attach(model)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        self._optimizers = [optimizer]
        self._renaming = vars(model).get(_RENAMING)
        setattr(model, _RENAMING, [])
        self._attach(model)  # a model that `model_init` made, or a Trainer that was made without this callback
        number, now = self._stages.at(state.global_step, state.max_steps), self._stages.of(self._layers(model))
        if now is not None and now > number:
            _log.warning(
                "at step %d stage %d would train, but the model is of stage %d already and stays so",
                state.global_step,
                number,
                now,
            )
        else:
            self._enter(model, number, state.global_step)
        for handle in self._division:  # of a training that was broken off
            handle.remove()
        if self._divides:
            self._division = divide_updates(self._layers(model), optimizer)

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        self._optimizers = [optimizer]
        number = self._stages.at(state.global_step, state.max_steps)
        if number > self._number:
            self._enter(model, number, state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        setattr(model, _RENAMING, self._renaming)
        for handle in self._division:
            handle.remove()

    def _attach(self, model: nn.Module) -> None:
        """Bring a model that is new here to the first stage, and be there when it is given weights."""
        if self._model is None or self._model() is not model:
            self._model, self._number = weakref.ref(model), 0
            self._stages.enter(model, self._layers(model), 0, self._optimizers)
            model.register_load_state_dict_pre_hook(_ShareAsLoaded(self))

    def _enter(self, model: nn.Module, number: int, step: int) -> None:
        if self._stages.enter(model, self._layers(model), number, self._optimizers):
            _log.info("step %d: stage %d of %d begins", step, number + 1, len(self._stages))
        self._number = number

    def _layers(self, model: nn.Module) -> Layers:
        return find_layers(model, self._where)

    def share_as(self, model: nn.Module, weights: dict[str, Tensor]) -> None:
        """Make `model` share as `weights` do, by their names, and give them the names of all layers."""
        layers = self._layers(model)
        paths = {module: path for path, module in model.named_modules()}
        names = {name: [f"{paths[layer]}.{name}" for layer in layers] for name in tables(layers)}
        self._check_names(model, names, weights)
        written = {name: {layer for layer, full in enumerate(names[name]) if full in weights} for name in names}
        written = {name: there for name, there in written.items() if there}
        if not written:
            return
        number, whole = self._stage_of(layers, written)
        now = self._stages.of(layers)
        if now is None or number > now or (number < now and whole):  # one file of several tells only of finer stages
            self._stages.enter(model, layers, number, self._optimizers)
            self._number = number
        for name, pattern in self._stages.patterns(layers, number).items():
            for block, full in zip(pattern.blocks, names[name], strict=True):
                if (first := names[name][pattern.first_layer(block)]) in weights:
                    weights.setdefault(full, weights[first])

    def _check_names(self, model: nn.Module, names: dict[str, list[str]], weights: dict[str, Tensor]) -> None:
        """Raise TenfoldError for weights that are a layer's by their name and that the model does not have."""
        own = {*model.state_dict(), *(full for column in names.values() for full in column)}
        paths = tuple({full.removesuffix(name) for name, column in names.items() for full in column})
        for key in weights:
            if key.startswith(paths) and key not in own:
                raise TenfoldError(
                    f"the checkpoint has {key}, and the model no such parameter: the Trainer does not read weights "
                    "under the names of from_pretrained. Make the model by from_pretrained from it, and begin there"
                )

    def _stage_of(self, layers: Layers, written: dict[str, set[int]]) -> tuple[int, bool]:
        """The first stage that may have written a parameter of these layers, and whether they are all it writes."""
        for number in range(len(self._stages)):
            patterns = self._stages.patterns(layers, number)
            stored = {name: {patterns[name].first_layer(block) for block in patterns[name].blocks} for name in written}
            if all(written[name] <= stored[name] for name in written):
                return number, written == stored
        raise TenfoldError(
            "the weights have more layers of their own than this run's last stage; load them before making the Trainer"
        )


class _ShareAsLoaded:
    """The hook on a model that is called before weights are loaded into it. A copy of the model has none."""

    def __init__(self, callback: SharingCallback | None = None) -> None:
        self._callback = (lambda: None) if callback is None else weakref.ref(callback)

    def __call__(self, model: nn.Module, weights: dict[str, Tensor], *_: Any) -> None:
        if callback := self._callback():
            callback.share_as(model, weights)

    def __reduce__(self) -> Any:
        return (_Nothing, ())


class _Nothing:
    """What a copy or a pickle has in place of the hook."""

    def __call__(self, *_: Any) -> None: ...
