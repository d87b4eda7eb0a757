"""A model's weights and optimizer state as they are, or as delinking would leave them: had tensor by tensor, piece by
piece, never whole. They lie in a checkpoint on disk, or are what one rank of a run has of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tenfold.checkpoint.store import OPTIMIZER, WEIGHTS, read_manifest
from tenfold.checkpoint.tensors import Stored, open_tensors
from tenfold.checkpoint.upcycled import Sets, carried_pieces, each_set, upcycled
from tenfold.config.load import build
from tenfold.config.model import ModelConfig
from tenfold.errors import TenfoldError
from tenfold.nn.decoder import Decoder
from tenfold.nn.low_rank import LEFT, RIGHT
from tenfold.sharing.delinking import Moments, check_known
from tenfold.sharing.lineage import Lineage
from tenfold.sharing.tying import Sharing, sets_of, tie


class Saved:
    """Tensors of a `model`, which may be on the meta device, whose layers share as `sharing` says, by canonical name;
    `betas` are AdamW's.

    They may be the same part of each, of a difference that which belongs to the part of its matrix: then `sets` says
    where in it the sets of experts stand that become experts. `where` is what messages call them.
    """

    def __init__(
        self,
        model: Decoder,
        sharing: Sharing,
        weights: dict[str, Stored],
        optimizer: dict[str, Stored],
        betas: Sequence[float] | None,
        where: str,
        sets: Sets = each_set,
    ) -> None:
        self.config, self.sharing, self.weights, self.optimizer = model.config, sharing, weights, optimizer
        self._model, self._given_betas, self._where, self._sets = model, betas, where, sets

    def delinked(self, after: Sharing, moments: Moments) -> tuple[dict[str, Stored], dict[str, Stored]]:
        """Weights and optimizer state as `sharing.delinking.delink` would leave them, to the last bit.

        Layer i has what the block that it used has; low-rank differences are folded in to rounding, and those that
        begin (`begun`) are left out. Raises TenfoldError when `after` does not refine what is shared in the file, or
        when the state cannot be carried.
        """
        after.check_refines(self.sharing, f"delinking {self._where}")
        if self.sharing.rank and after.rank > self.sharing.rank:
            raise TenfoldError(
                f"{self._where} has differences of rank {self.sharing.rank}, which grow in a run alone, from stage to "
                f"stage: begin with rank = {self.sharing.rank}"
            )
        lineage = Lineage(self._model, self.sharing, after)
        states: dict[str, list[str]] = {}
        for name in self.optimizer:
            parameter, _, key = name.rpartition("/")
            states.setdefault(parameter, []).append(key)
        if moments != "copy":
            in_layers = (keys for parameter, keys in states.items() if parameter.startswith("layers."))
            check_known((key for keys in in_layers for key in keys), moments)
        weights, optimizer = {}, {}
        for name, (source, q) in lineage.origins.items():
            weights[name] = self.weights[source]
            for key in states.get(source, ()):
                stored = self.optimizer[f"{source}/{key}"]
                if q != 1:
                    if moments == "rescale" and key.endswith("exp_avg_sq"):
                        self._betas()  # told now, not when all before it has been written
                    pieces = partial(carried_pieces, self.optimizer, source, key, moments, q, 1.0, self._betas)
                    stored = Stored(stored.dtype, stored.shape, pieces)
                optimizer[f"{name}/{key}"] = stored
        for name in lineage.folded:
            matrix = weights[name]
            weights[name] = Stored(matrix.dtype, matrix.shape, partial(self._folded, matrix, name))
        if after.experts == self.sharing.experts:
            return weights, optimizer
        if moments == "rescale" and any(name.endswith("exp_avg_sq") for name in optimizer):
            self._betas()
        sets = sets_of(self.config.moe, self.sharing.experts)
        return upcycled(weights, optimizer, self.config.moe, after, moments, self._betas, sets, self._sets)

    def begun(self, after: Sharing) -> set[str]:
        """The parameters of low-rank differences that the file has not, and a model that shares as `after` has."""
        return Lineage(self._model, self.sharing, after).begun

    def freed(self, after: Sharing) -> set[str]:
        """The parameters that delinking frees, new routers among them."""
        freed = {name for name, (_, q) in Lineage(self._model, self.sharing, after).origins.items() if q != 1}
        if after.experts != self.sharing.experts:
            weights, _ = self.delinked(after, "copy")
            freed |= {name for name in weights if ".experts." in name or name.endswith(".router.weight")}
        return freed

    def _folded(self, matrix: Stored, name: str) -> Iterator[Tensor]:
        """The pieces of a matrix, or stack of matrices, with the difference of the weight `name` added."""
        if not matrix.elements:
            yield from matrix.pieces()
            return
        left, right = (
            torch.cat(list(stored.pieces())).view(-1, *stored.shape[-2:]).double()
            for stored in (self.weights[name + LEFT], self.weights[name + RIGHT])
        )
        rows, columns, begin = left.shape[1], right.shape[2], 0
        for piece in matrix.pieces():
            first, last = begin // columns, -(-(begin + len(piece)) // columns)  # rows of the stack, end to end
            parts = []
            for index in range(first // rows, -(-last // rows)):
                inside = slice(max(first - index * rows, 0), min(last - index * rows, rows))
                parts.append(left[index, inside].to(piece.device) @ right[index].to(piece.device))
            difference = torch.cat(parts).flatten()[begin - first * columns :][: len(piece)]
            yield (piece.double() + difference).to(piece.dtype)
            begin += len(piece)

    def _betas(self) -> Any:
        if self._given_betas is None:
            raise TenfoldError(
                f"{self._where} was written before checkpoints held AdamW's betas, which rescaling needs: save it anew "
                "by resuming its run, or take moments copy or reset"
            )
        return self._given_betas


class SavedCheckpoint(Saved):
    """The checkpoint in the folder `path`, its files checked; raises TenfoldError that names what is damaged."""

    def __init__(self, path: Path) -> None:
        self.path, self.manifest = path, read_manifest(path)
        config = build(ModelConfig, self.manifest["model"], str(path / "manifest.json"))
        sharing = Sharing.load(self.manifest).of_model(config)
        with torch.device("meta"):
            model = Decoder(config, self.manifest["sequence_length"])
        tie(model.layers, sharing)
        optimizer, betas = open_tensors(path / OPTIMIZER), self.manifest.get("betas")
        super().__init__(model, sharing, open_tensors(path / WEIGHTS), optimizer, betas, str(path))
        told = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        found = {name: stored.shape for name, stored in self.weights.items()}
        for name in sorted(told.keys() | found.keys()):
            if told.get(name) != found.get(name):
                raise TenfoldError(
                    f"{path} is of a model that this Tenfold builds otherwise: {name} has shape {found.get(name)} in "
                    f"the file, and would have {told.get(name)}"
                )
