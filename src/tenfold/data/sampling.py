"""Which tokens sample i of a run holds: a function of (seed, i) alone, in constant memory."""

from __future__ import annotations

import functools
import hashlib

import numpy as np
import numpy.typing as npt

from tenfold.data.shards import TokenSplit
from tenfold.errors import TenfoldError

_ROUNDS = 8
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_WINDOW = 512
"""Samples whose places are worked out at once, and kept: to permute one costs nearly as much as to permute these."""


class PackedSequences:
    """A split as training sequences of `sequence_length` inputs and the one token that follows.

    Documents lie end to end; sequence p is tokens p x sequence_length and on, so that in one epoch every token is a
    target once. Sample i belongs to epoch i // len(self), and each epoch has its own order of sequences.
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
        self._window = functools.lru_cache(maxsize=4)(self._permuted)

    def __len__(self) -> int:
        """Sequences in one epoch."""
        return (self.split.tokens - 1) // self.sequence_length

    def positions(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """Which sequences of the split samples first .. first + count - 1 are: int64 [count]."""
        return self.positions_of(np.arange(first, first + count, dtype=np.int64))

    def positions_of(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The same for samples in any order; quick where they lie close together."""
        if self.seed is None:
            return samples % len(self)
        windows, places = np.divmod(samples, _WINDOW)
        positions = np.empty_like(samples)
        for number in set(windows.tolist()):
            here = windows == number
            positions[here] = self._window(number)[places[here]]
        return positions

    def _permuted(self, window: int) -> npt.NDArray[np.int64]:
        assert self.seed is not None
        samples = np.arange(window * _WINDOW, (window + 1) * _WINDOW, dtype=np.int64)
        epochs, positions = np.divmod(samples, len(self))
        for epoch in np.unique(epochs):
            here = epochs == epoch
            positions[here] = permute(positions[here], len(self), self.seed, int(epoch))
        return positions

    def batch(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """Samples first .. first + count - 1, counted over the whole run: int64 [count, sequence_length + 1]."""
        return self.rows(np.arange(first, first + count, dtype=np.int64))

    def rows(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The tokens of samples in any order: int64 [samples, sequence_length + 1]."""
        starts = self.positions_of(samples) * self.sequence_length
        return self.split.rows(starts, self.sequence_length + 1)


def permute(indices: npt.NDArray[np.int64], size: int, seed: int, epoch: int | str) -> npt.NDArray[np.int64]:
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
            mixed = mix(right ^ key)
            mixed &= mask
            mixed ^= left
            left, right = right, mixed
        left <<= half_bits
        left |= right
        return left

    result = network(indices.astype(np.uint64))
    while (outside := result >= size).any():
        result[outside] = network(result[outside])
    return result.astype(np.int64)


def mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A bijection of 64 bits in which every bit of the result hangs on all of the input (SplitMix64's finalizer)."""
    values = values ^ (values >> _SHIFTS[0])
    values *= _FACTORS[0]
    values ^= values >> _SHIFTS[1]
    values *= _FACTORS[1]
    values ^= values >> _SHIFTS[2]
    return values
