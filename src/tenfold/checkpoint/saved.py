"""A model's weights and optimizer state as they are, or as delinking would leave them: had tensor by tensor, piece by
piece, never whole. They lie in a checkpoint on disk, or with the ranks of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tenfold.checkpoint.store import OPTIMIZER, WEIGHTS, read_manifest
from tenfold.checkpoint.tensors import Stored, open_tensors
from tenfold.checkpoint.upcycled import carried_pieces, upcycled
from tenfold.config.load import build
from tenfold.config.model import ModelConfig
from tenfold.errors import TenfoldError
from tenfold.nn.decoder import Decoder
from tenfold.nn.low_rank import LEFT, RIGHT
from tenfold.sharing.delinking import Moments, check_known
from tenfold.sharing.patterns import Pattern
from tenfold.sharing.tying import Sharing, patterns, ranks, tables, tie

_LAYER = "layers.{}.{}"


class Saved:
    """Tensors of a model of `config` whose layers share as `sharing` says, by canonical name; `betas` are AdamW's.

    `where` is what messages call them.
    """

    def __init__(
        self,
        config: ModelConfig,
        sharing: Sharing,
        positions: int,
        weights: dict[str, Stored],
        optimizer: dict[str, Stored],
        betas: Sequence[float] | None,
        where: str,
    ) -> None:
        self.config, self.sharing, self.weights, self.optimizer = config, sharing, weights, optimizer
        self._given_betas, self._where = betas, where
        with torch.device("meta"):
            model = Decoder(config, positions)
        tie(model.layers, self.sharing)
        self._layers, self._places = model.layers, tables(model.layers)
        told = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        found = {name: stored.shape for name, stored in self.weights.items()}
        for name in sorted(told.keys() | found.keys()):
            if told.get(name) != found.get(name):
                raise TenfoldError(
                    f"{where} is of a model that this Tenfold builds otherwise: {name} has shape {found.get(name)} in "
                    f"the file, and would have {told.get(name)}"
                )

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
        origins = self._origins(after)
        states: dict[str, list[str]] = {}
        for name in self.optimizer:
            parameter, _, key = name.rpartition("/")
            states.setdefault(parameter, []).append(key)
        if moments != "copy":
            in_layers = (keys for parameter, keys in states.items() if parameter.startswith("layers."))
            check_known((key for keys in in_layers for key in keys), moments)
        weights, optimizer = {}, {}
        for name, (source, q) in origins.items():
            weights[name] = self.weights[source]
            for key in states.get(source, ()):
                stored = self.optimizer[f"{source}/{key}"]
                if q != 1:
                    if moments == "rescale" and key.endswith("exp_avg_sq"):
                        self._betas()  # told now, not when all before it has been written
                    pieces = partial(carried_pieces, self.optimizer, source, key, moments, q, 1.0, self._betas)
                    stored = Stored(stored.dtype, stored.shape, pieces)
                optimizer[f"{name}/{key}"] = stored
        for name, had, rank in self._differences(after):
            if had and not rank:
                matrix = weights[name]
                weights[name] = Stored(matrix.dtype, matrix.shape, partial(self._folded, matrix, name))
        if after.experts == self.sharing.experts:
            return weights, optimizer
        if moments == "rescale" and any(name.endswith("exp_avg_sq") for name in optimizer):
            self._betas()
        return upcycled(weights, optimizer, self.config.moe, after, moments, self._betas)

    def begun(self, after: Sharing) -> set[str]:
        """The parameters of low-rank differences that the file has not, and a model that shares as `after` has."""
        names = [name for name, had, rank in self._differences(after) if rank and not had]
        return {name + side for name in names for side in (LEFT, RIGHT)}

    def freed(self, after: Sharing) -> set[str]:
        """The parameters that delinking frees, new routers among them."""
        freed = {name for name, (_, q) in self._origins(after).items() if q != 1}
        if after.experts != self.sharing.experts:
            weights, _ = self.delinked(after, "copy")
            freed |= {name for name in weights if ".experts." in name or name.endswith(".router.weight")}
        return freed

    def _origins(self, after: Sharing) -> dict[str, tuple[str, float]]:
        """For each parameter after delinking: the one in the file that it comes from, and how many shared it then for
        each that shares it now."""
        origins = {name: (name, 1.0) for name in self.weights if not name.startswith("layers.")}
        before_after = self._patterns(self.sharing), self._patterns(after)
        for name in self._places:
            before, pattern = (patterns[name] for patterns in before_after)
            for block in range(pattern.stored_blocks):
                layer = pattern.first_layer(block)
                parent = before.blocks[layer]
                source = _LAYER.format(before.first_layer(parent), name)
                origins[_LAYER.format(layer, name)] = (source, before.uses(parent) / pattern.uses(block))
        for name, had, rank in self._differences(after):
            if had and rank:
                origins |= {name + side: (name + side, 1.0) for side in (LEFT, RIGHT)}
        return origins

    def _patterns(self, sharing: Sharing) -> dict[str, Pattern]:
        return patterns(self._layers, self._places, sharing)

    def _differences(self, after: Sharing) -> Iterator[tuple[str, int, int]]:
        """Each weight of a layer with the rank of its difference in the file, and after delinking."""
        before_after = [(sharing, self._patterns(sharing)) for sharing in (self.sharing, after)]
        for name, column in self._places.items():
            had, now = (ranks(patterns[name], sharing, column) for sharing, patterns in before_after)
            for layer in range(len(column)):
                yield _LAYER.format(layer, name), had[layer], now[layer]

    def _folded(self, matrix: Stored, name: str) -> Iterator[Tensor]:
        """The pieces of a matrix, or stack of matrices, with the difference of the weight `name` added."""
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
                parts.append(left[index, inside] @ right[index])
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
        super().__init__(
            config,
            Sharing.load(self.manifest).of_model(config),
            self.manifest["sequence_length"],
            open_tensors(path / WEIGHTS),
            open_tensors(path / OPTIMIZER),
            self.manifest.get("betas"),
            str(path),
        )
