"""What is counted while text is read, which documents are held out, and a sample to train a tokenizer on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from tenfold.data.progress import Advance
from tenfold.data.shards import SplitName
from tenfold.data.sources import Part

SAMPLE_BYTES = 16 * 1024 * 1024
_SAMPLE_CHARACTERS = 256 * 1024
"""No document gives more than this many to the sample."""
_KEYS = 2**64


def document_key(text: bytes) -> int:
    """64 bits that hang on the document's text alone, so that equal documents share a fate wherever they stand."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def first_bound(fraction: float) -> int:
    """The key below which a share of all possible documents lies: what `Tally.held_out_below` nearly always is."""
    return int(fraction * _KEYS)


@dataclass
class Tally:
    """What was read so far. Two readings that end with equal tallies saw the same documents."""

    documents: int = 0
    text_bytes: int = 0
    key_sum: int = 0
    lowest: int = _KEYS
    """Smallest document key among those whose split their text decides."""
    highest: int = -1

    def add(self, key: int, text_bytes: int, split: SplitName | None) -> None:
        """Count one document; `split` is the one that its source gives it."""
        self.documents += 1
        self.text_bytes += text_bytes
        self.key_sum += key
        if split is None:
            self.lowest, self.highest = min(self.lowest, key), max(self.highest, key)

    def merge(self, other: Tally) -> None:
        """Count what another tally counted."""
        self.documents += other.documents
        self.text_bytes += other.text_bytes
        self.key_sum += other.key_sum
        self.lowest, self.highest = min(self.lowest, other.lowest), max(self.highest, other.highest)

    def held_out_below(self, fraction: float) -> int:
        """The document key below which a document goes to validation.

        A share between 0 and 1 always leaves both splits something when there are two different documents: the one
        with the lowest key goes to validation, the one with the highest to training. A single document is trained on.
        """
        bound = first_bound(fraction)
        if not 0 < fraction < 1:
            return bound
        if self.lowest >= self.highest:
            return 0
        return min(max(bound, self.lowest + 1), self.highest)

    def moves(self, bound: int, fraction: float) -> bool:
        """Whether a document that was told apart by `bound` belongs on the other side now that all are known."""
        right = self.held_out_below(fraction)
        return self.highest >= 0 and any((key < bound) != (key < right) for key in (self.lowest, self.highest))


@dataclass
class Survey:
    """What one pass over all documents found."""

    tally: Tally = field(default_factory=Tally)
    sample: list[tuple[int, str]] = field(default_factory=list)
    """(key, text) of the documents whose keys lie under a bound that is halved until they are few enough."""


def survey(parts: Sequence[Part], dedup: bool, advance: Advance) -> Survey:
    """Look at every document once; the result does not depend on their order.

    The sample leaves out what the source itself holds out, and with `dedup` takes equal documents once.
    """
    found = Survey()
    bound, sample_bytes = _KEYS, 0
    sampled: set[int] = set()
    for part in parts:
        for text in part.read(0):
            if not text.strip():
                continue
            encoded = text.encode()
            key = document_key(encoded)
            found.tally.add(key, len(encoded), part.split)
            advance(len(encoded), 1, 0)
            if key >= bound or part.split == "validation" or (dedup and key in sampled):
                continue
            sampled.add(key)
            found.sample.append((key, text[:_SAMPLE_CHARACTERS]))
            sample_bytes += len(found.sample[-1][1].encode())
            while sample_bytes > SAMPLE_BYTES:
                bound //= 2
                found.sample = [(kept, text) for kept, text in found.sample if kept < bound]
                sampled = {kept for kept, _ in found.sample}
                sample_bytes = sum(len(text.encode()) for _, text in found.sample)
    return found
