"""Exact duplicates: which documents were read before, by the 128 bits of a hash each, in bounded memory."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

DIGEST_BYTES = 16
_FRESH_AT_LEAST = 2**16
_FRESH_SHARE = 1 / 32
_BLOCK = 2**20


def document_digest(text: bytes) -> bytes:
    """128 bits that stand for a document: BLAKE2b of its UTF-8 as it is.

    Among 10^12 different documents the chance that any two agree is below 10^-14.
    """
    return hashlib.blake2b(text, digest_size=DIGEST_BYTES).digest()


class SeenDocuments:
    """The digests of all documents so far.

    Memory is about 23 bytes a document and some 30 MB besides: sorted arrays of 16 bytes a document, and a set of the
    newest (at most a thirty-second of all, at some 200 bytes each) that is merged into the arrays when it is full. The
    arrays grow in place and are merged block by block from their ends, so that merging needs no second copy.
    """

    def __init__(self) -> None:
        self._high = np.empty(0, np.uint64)
        self._low = np.empty(0, np.uint64)
        self._fresh: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._high) + len(self._fresh)

    def add(self, digests: Sequence[bytes]) -> list[bool]:
        """Whether each of the digests is new, in their order; the new ones are kept."""
        known = self._among_sorted(*_halves(b"".join(digests)))
        new = []
        for digest, is_known in zip(digests, known.tolist(), strict=True):
            is_new = not is_known and digest not in self._fresh
            new.append(is_new)
            if is_new:
                self._fresh.add(digest)
        if len(self._fresh) >= self._room():
            self._merge(*_halves(b"".join(self._fresh)))
            self._fresh.clear()
        return new

    def restore(self, digests: npt.NDArray[np.uint8]) -> None:
        """Take up the digests of different documents, end to end; memory stays in its bound while it is done."""
        start, count = 0, len(digests) // DIGEST_BYTES
        while start < count:
            stop = min(start + max(self._room(), _BLOCK), count)
            self._merge(*_halves(digests[start * DIGEST_BYTES : stop * DIGEST_BYTES].tobytes()))
            start = stop

    def _room(self) -> int:
        return max(_FRESH_AT_LEAST, int(len(self._high) * _FRESH_SHARE))

    def _among_sorted(self, high: npt.NDArray[np.uint64], low: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        found = np.zeros(len(high), np.bool_)
        place = np.searchsorted(self._high, high)
        open_ = np.flatnonzero(place < len(self._high))
        while len(open_):  # more than once only where first halves agree
            open_ = open_[self._high[place[open_]] == high[open_]]
            found[open_] |= self._low[place[open_]] == low[open_]
            place[open_] += 1
            open_ = open_[~found[open_] & (place[open_] < len(self._high))]
        return found

    def _merge(self, high: npt.NDArray[np.uint64], low: npt.NDArray[np.uint64]) -> None:
        order = np.argsort(high, kind="stable")
        high, low = high[order], low[order]
        before, count = len(self._high), len(high)
        places = np.searchsorted(self._high, high)
        for array in (self._high, self._low):
            array.resize(before + count, refcheck=False)
        for start in range((before - 1) // _BLOCK * _BLOCK if before else 0, -1, -_BLOCK):
            stop = min(start + _BLOCK, before)
            # The new ones that go before an old one of this block; those beyond the last block's end go with it.
            first = int(np.searchsorted(places, start, side="left"))
            last = count if stop == before else int(np.searchsorted(places, stop, side="left"))
            for array, new in ((self._high, high), (self._low, low)):
                block = np.insert(array[start:stop], places[first:last] - start, new[first:last])
                array[start + first : stop + last] = block


def _halves(digests: bytes) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    pairs = np.frombuffer(digests, ">u8").reshape(-1, 2)
    return pairs[:, 0].astype(np.uint64), pairs[:, 1].astype(np.uint64)
