"""Which tokens sample i of a run holds: a function of (seed, i) alone, in constant memory."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from tenfold.data.shards import TokenSplit
from tenfold.errors import TenfoldError

_ROUNDS = 8


class PackedSequences:
    """A split as training sequences of `sequence_length` inputs and the one token that follows.

    Documents lie end to end; sequence p is tokens p x sequence_length and on, so that in one epoch every token is a
    target once. Sample i of a run belongs to epoch i // len(self), and each epoch has its own order of sequences.
    With `seed` None the order is that of the text: for validation.
    """

    def __init__(self, split: TokenSplit, sequence_length: int, seed: int | None) -> None:
        if split.tokens <= sequence_length:
            raise TenfoldError(
                f"the {split.name} split in {split.path} holds {split.tokens:,} tokens, and one sequence of "
                f"data.sequence_length = {sequence_length:,} needs {sequence_length + 1:,}: "
                + (f"set it to at most {split.tokens - 1:,}, or " if split.tokens > 1 else "")
                + ("hold out more (data.validation_fraction)" if split.name == "validation" else "add text")
            )
        self.split = split
        self.sequence_length = sequence_length
        self.seed = seed

    def __len__(self) -> int:
        """Sequences in one epoch."""
        return (self.split.tokens - 1) // self.sequence_length

    def positions(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """Which sequences of the split samples first .. first + count - 1 are: int64 [count]."""
        epochs, positions = np.divmod(np.arange(first, first + count, dtype=np.int64), len(self))
        if self.seed is not None:
            for epoch in np.unique(epochs):
                here = epochs == epoch
                positions[here] = permute(positions[here], len(self), self.seed, int(epoch))
        return positions

    def batch(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """Samples first .. first + count - 1, counted over the whole run: int64 [count, sequence_length + 1]."""
        rows = np.empty((count, self.sequence_length + 1), dtype=np.int64)
        for row, position in zip(rows, self.positions(first, count).tolist(), strict=True):
            start = position * self.sequence_length
            row[:] = self.split.read(start, start + self.sequence_length + 1)
        return rows


def permute(indices: npt.NDArray[np.int64], size: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Where the permutation of range(size) keyed by (seed, epoch) sends `indices`.

    A balanced Feistel network permutes the smallest even power of two that holds `size`; a value that leaves the range
    is sent through again until it is inside (cycle walking: Black and Rogaway, "Ciphers with arbitrary finite
    domains", 2002). That is less than four passes on average.
    """
    half_bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    keys = np.frombuffer(digest, dtype="<u8")

    def network(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = values >> half_bits, values & mask
        for key in keys:
            left, right = right, left ^ (mix(right ^ key) & mask)
        return (left << half_bits) | right

    result = network(indices.astype(np.uint64))
    while (outside := result >= size).any():
        result[outside] = network(result[outside])
    return result.astype(np.int64)


def mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A bijection of 64 bits in which every bit of the result hangs on all of the input (SplitMix64's finalizer)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
