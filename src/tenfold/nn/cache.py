"""Keys and values of positions already seen, so that going on costs only what is new.

Shapes: B sequences, T new positions, S positions held so far, K key heads, W width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tenfold.config.model import ModelConfig


class LayerCache(NamedTuple):
    """What one layer keeps, and where the positions of this forward pass go. Made by `KeyValueCache.begin`."""

    keys: Tensor
    values: Tensor
    first: int | None
    """The place of the first new position where all sequences are equally long."""
    places: Tensor
    """Of the new positions, int64 [B, T]."""
    positions: Tensor
    """The same, counted from the beginning of each one's document where documents are masked."""
    end: int
    """How long the longest sequence is with its new positions."""
    visible: Tensor | None
    """Bool [B, 1, T, S], true where a new position sees one that is held; None: causal, as far as there is a choice."""

    def extend(self, k_BKTW: Tensor, v_BKTW: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the keys and values of the new positions; all that are held now, [B, K, S, W] each."""
        for held, new in ((self.keys, k_BKTW), (self.values, v_BKTW)):
            if self.first is not None:
                held[:, :, self.first : self.end] = new
            else:
                held.scatter_(2, self.places[:, None, :, None].expand_as(new), new)
        return self.keys[:, :, : self.end], self.values[:, :, : self.end]


class KeyValueCache:
    """Room for `positions` positions of `sequences` sequences in `layers` layers, allocated once (`Decoder.new_cache`).

    Sequences may be of unequal length: position t of each stands at place t, and what a sequence does not hold is
    hidden from it. Entries are by layer, not by block: layers that share weights see different hidden states.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: int,
        key_heads: int,
        sequences: int,
        positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (sequences, key_heads, positions, config.head_width)
        # Zeros: a hidden place has weight 0, and 0 times what uninitialized memory may hold can be NaN.
        self._keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self._values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self._document_end = config.document_end
        self._ended = torch.zeros(sequences, positions, dtype=torch.bool, device=device)  # places of ends of documents
        self.positions = positions
        self.lengths = [0] * sequences
        """Positions that each sequence holds."""

    def begin(self, tokens_BT: Tensor) -> tuple[LayerCache, ...]:
        """For every layer, where these tokens of each sequence go; they count as held from now on."""
        new = tokens_BT.shape[1]
        end = max(self.lengths) + new
        if end > self.positions:
            raise ValueError(f"the cache has room for {self.positions} positions, not {end}")
        device = self._keys[0].device
        places_BT = torch.tensor(self.lengths, device=device)[:, None] + torch.arange(new, device=device)
        equal = min(self.lengths) == max(self.lengths)
        visible = None
        if not (equal and (new == 1 or self.lengths[0] == 0)):
            visible = (torch.arange(end, device=device) <= places_BT[:, :, None])[:, None]
        positions_BT = places_BT
        if self._document_end is not None:
            began_BT = self._document_starts(places_BT, tokens_BT == self._document_end)
            positions_BT = places_BT - began_BT
            place_S = torch.arange(end, device=device)
            visible = ((place_S >= began_BT[:, :, None]) & (place_S <= places_BT[:, :, None]))[:, None]
        first = self.lengths[0] if equal else None
        self.lengths = [length + new for length in self.lengths]
        return tuple(
            LayerCache(keys, values, first, places_BT, positions_BT, end, visible)
            for keys, values in zip(self._keys, self._values, strict=True)
        )

    def _document_starts(self, places_BT: Tensor, ended_BT: Tensor) -> Tensor:
        """The place at which the document of each new position began; keeps which of them end one."""
        self._ended.scatter_(1, places_BT, ended_BT)
        after_BP = torch.arange(1, self.positions + 1, device=places_BT.device) * self._ended
        began_BP = F.pad(after_BP, (1, 0)).cummax(1).values  # a document begins after the end of the one before
        return began_BP.gather(1, places_BT)

    def cut(self, lengths: Sequence[int]) -> None:
        """Forget what each sequence holds from place `lengths` on: the padding of prompts of unequal length."""
        assert all(length <= held for length, held in zip(lengths, self.lengths, strict=True))
        self.lengths = list(lengths)

    def keep(self, sequences: Sequence[int]) -> None:
        """Go on with these sequences alone, in this order."""
        index = torch.tensor(sequences, device=self._keys[0].device)
        for held in (self._keys, self._values):
            held[:] = [layer[index] for layer in held]
        self._ended = self._ended[index]
        self.lengths = [self.lengths[sequence] for sequence in sequences]
