"""A run that begins from another run's checkpoint, of layers that share as in its first stage or more.

Nothing is converted first: layer i of the model reads the block that it used in the file, piece by piece.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from tenfold.checkpoint.saved import SavedCheckpoint
from tenfold.config.load import leaves
from tenfold.config.model import ModelConfig
from tenfold.config.run import RunConfig
from tenfold.errors import TenfoldError
from tenfold.nn.decoder import Decoder
from tenfold.nn.init import Memory
from tenfold.parallel.layout import Layout
from tenfold.planning.stages import Stage
from tenfold.training.optimizers import fill_tensors, state_tensors
from tenfold.training.setup import checkpoint_at, run_of

# What may differ: how a model is initialised, what its training asks of it, and where documents end.
_FREE = {"preset", "init_std", "document_end", "mask_share"}
_FREE |= {f"moe.{key}" for key in ("capacity", "capacity_factor", "balance_loss", "z_loss")}


class Start:
    """The checkpoint that `config` (resolved) begins from, checked against its first stage.

    `tokenizer_file` is that of the data, if it is known. Raises TenfoldError, naming key and file, when the checkpoint
    is damaged, is of another model, vocabulary or optimizer, or shares less than the stage.
    """

    def __init__(self, config: RunConfig, stage: Stage, tokenizer_file: Path | None) -> None:
        assert config.start.checkpoint is not None
        self._stage, self._optimizer = stage, config.start.optimizer
        where = f"start.checkpoint = {config.start.checkpoint}"
        try:
            self._saved = SavedCheckpoint(checkpoint_at(Path(config.start.checkpoint)))
        except TenfoldError as error:
            raise TenfoldError(f"{where}: {error}") from None
        saved = self._saved
        self._step = saved.manifest["step"]
        mine, theirs = _decisive(config.model), _decisive(saved.config)
        for key in sorted(mine.keys() | theirs.keys()):
            if mine.get(key) != theirs.get(key):
                hint = "a run begins from a model of its own shape"
                if key == "vocab_size":
                    hint = f"prepare the data with the tokenizer of that run ({_remedy(saved.path)})"
                raise TenfoldError(
                    f"{where}: model.{key} is {theirs.get(key)!r} in {saved.path}, and {mine.get(key)!r} in this run; "
                    + hint
                )
        self._check_tokenizer(where, tokenizer_file)
        stage.sharing.check_refines(saved.sharing, f"stages.0 ({stage.name}) begins from {saved.path}")
        used = saved.manifest["optimizer"]
        if self._optimizer and used != config.optim.name:
            raise TenfoldError(
                f"{where}: {saved.path} has the optimizer state of {used}, and optim.name = {config.optim.name!r}; set "
                "start.optimizer = false to begin with its weights alone"
            )
        moments = stage.config.moments if self._optimizer else "copy"
        self._weights, self._state = saved.delinked(stage.sharing, moments)

    def fill(
        self, model: Decoder, optimizers: Sequence[Optimizer], layout: Layout, memory: Memory | None = None
    ) -> list[nn.Parameter]:
        """Read the checkpoint into a model of the first stage and its optimizers, the steps that these count included.

        Gives the parameters that share less than they did in the file, if their state was taken.
        """
        named = layout.named(model)
        begun = self._saved.begun(self._stage.sharing)  # these stay as they were initialised
        weights = {name: parameter.data for name, parameter in named.items() if name not in begun}
        fill_tensors(weights, self._weights, "weights", layout, memory)
        if not self._optimizer:
            return []
        state = state_tensors(model, optimizers, layout)
        state = {name: value for name, value in state.items() if name.rpartition("/")[0] not in begun}
        fill_tensors(state, self._state, "optimizer state", layout, memory)
        freed = self._saved.freed(self._stage.sharing)
        return [parameter for name, parameter in named.items() if name in freed]

    def describe(self) -> dict[str, Any]:
        """For the `start` event."""
        return {
            "checkpoint": str(self._saved.path),
            "step": self._step,
            "pattern": str(self._saved.sharing),
            "moments": self._stage.config.moments if self._optimizer else None,
        }

    def __str__(self) -> str:
        state = f"moments {self._stage.config.moments}" if self._optimizer else "without its optimizer state"
        patterns = f"{self._saved.sharing} -> {self._stage.sharing}"
        return f"begins from {self._saved.path} (step {self._step}): {patterns}, {state}"

    def _check_tokenizer(self, where: str, mine: Path | None) -> None:
        """The same ids must mean the same text, as far as both tokenizers are known."""
        run = run_of(self._saved.path)
        theirs = None if run is None else run / "tokenizer.json"
        if mine is None or theirs is None or not theirs.is_file():
            return
        if mine.read_bytes() != theirs.read_bytes() and _vocabulary(mine) != _vocabulary(theirs):
            raise TenfoldError(
                f"{where}: {mine}, which the data was made with, is another tokenizer than {theirs}, so that the same "
                f"ids would mean other text; prepare the data with that one ({_remedy(self._saved.path)})"
            )


def _decisive(model: ModelConfig) -> dict[str, Any]:
    """What two models must agree in for the weights of one to be those of the other."""
    found = {key: value for key, value in leaves(model) if key not in _FREE}
    found["moe.bias_rate"] = model.moe.bias_rate > 0
    if model.positions == "rotary":
        found.pop("max_positions")
    return found


def _vocabulary(tokenizer: Path) -> Any:
    told = json.loads(tokenizer.read_text(encoding="utf-8"))
    return told.get("model"), told.get("added_tokens")


def _remedy(checkpoint: Path) -> str:
    run = run_of(checkpoint)
    return f"data.tokenizer = {str((run or checkpoint.parent) / 'tokenizer.json')!r}"
