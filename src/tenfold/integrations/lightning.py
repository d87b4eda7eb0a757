"""Pseudo-to-Real under Lightning: one callback.

    Trainer(callbacks=[SharingCallback("model.layers", [("20%", "all"), ("100%", "none")])]).fit(module, data)

The module shares before its optimizers are made; layers are delinked, optimizer state included, after the batch whose
step ends a stage. A checkpoint says what was shared; on resumption the module shares the same before the optimizers are
made, and its weights are loaded once more.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from tenfold.errors import TenfoldError
from tenfold.integrations.stages import DELINKS_ALONE, Stages, StageSpec, Where, find_layers
from tenfold.sharing.delinking import Moments
from tenfold.sharing.rates import divide_updates
from tenfold.sharing.tying import Layers

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
except ImportError as error:  # pragma: no cover - the package is there in tests
    raise TenfoldError("tenfold.integrations.lightning needs lightning: pip install 'tenfold[lightning]'") from error

_log = logging.getLogger(__name__)


class SharingCallback(Callback):
    """Shares layers at the start of fitting and delinks them at the ends of stages.

    `layers`: where the module has its layers, such as "model.layers" or a function of the module. `stages`: for each
    stage its end and its pattern (and parts), such as [("20%", "all"), ("100%", "none")]; steps are those that
    Lightning counts in `global_step`. `moments`: what optimizer state freed layers start from. `divide_shared`: whether
    updates of what q layers share are divided by q, as `tenfold.divide_updates` does.

    Several processes may share but not delink, and strategies that shard parameters are refused: TenfoldError.
    """

    def __init__(
        self,
        layers: Where,
        stages: Sequence[StageSpec],
        moments: Moments = "rescale",
        divide_shared: bool = True,
    ) -> None:
        self._where, self._stages, self._divides = layers, Stages(stages, moments), divide_shared
        self._number = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
            raise TenfoldError(f"SharingCallback does not work with {type(trainer.strategy).__name__}")
        if trainer.world_size > 1 and len(self._stages) > 1:
            raise TenfoldError(DELINKS_ALONE)
        if trainer.global_step == 0:
            self._stages.enter(pl_module, self._layers(pl_module), 0)
            self._number = 0

    def state_dict(self) -> dict[str, Any]:
        return {"stage": self._number}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint["callbacks"].get(self.state_key)
        if saved is None and trainer.state.fn != "fit":
            return
        if saved is None:
            raise TenfoldError("the checkpoint was made without SharingCallback: it does not say what was shared")
        if self._stages.enter(pl_module, self._layers(pl_module), saved["stage"]):
            pl_module.load_state_dict(checkpoint["state_dict"], strict=pl_module.strict_loading)
        self._number = saved["stage"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._stages.need_length and math.isinf(trainer.estimated_stepping_batches):
            raise TenfoldError("a stage that ends at a share of the run needs max_steps or max_epochs; or give steps")
        self._advance(trainer, pl_module)
        if self._divides:
            divide_updates(self._layers(pl_module), trainer.optimizers)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._advance(trainer, pl_module)

    def _advance(self, trainer: Trainer, pl_module: LightningModule) -> None:
        number = self._stages.at(trainer.global_step, trainer.estimated_stepping_batches)
        if number > self._number:
            for optimizer in trainer.optimizers:  # Lightning clears gradients before the next backward pass only
                optimizer.zero_grad()
            self._stages.enter(pl_module, self._layers(pl_module), number, trainer.optimizers)
            self._number = number
            _log.info("step %d: stage %d of %d begins", trainer.global_step, number + 1, len(self._stages))

    def _layers(self, module: LightningModule) -> Layers:
        return find_layers(module, self._where)
