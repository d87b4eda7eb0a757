"""The first pass over a text: how much it is, which documents are held out, and a sample to train a tokenizer on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from tenfold.data.progress import Advance

SAMPLE_BYTES = 16 * 1024 * 1024
_SAMPLE_CHARACTERS = 256 * 1024
"""No document gives more than this many to the sample."""
_KEYS = 2**64


def document_key(text: bytes) -> int:
    """64 bits that hang on the document's text alone, so that equal documents share a fate wherever they stand."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


@dataclass
class Survey:
    """What one pass over all documents found."""

    documents: int = 0
    text_bytes: int = 0
    key_sum: int = 0
    """Of all document keys: tells whether a second pass saw the same text."""
    lowest: int = _KEYS
    highest: int = -1
    sample: list[tuple[int, str]] = field(default_factory=list)
    """(key, text) of the documents whose keys lie under a bound that is halved until they are few enough."""

    def held_out_below(self, fraction: float) -> int:
        """The document key below which a document goes to validation.

        A share between 0 and 1 always leaves both splits something when there are two different documents: the one
        with the lowest key goes to validation, the one with the highest to training. A single document is trained on.
        """
        bound = int(fraction * _KEYS)
        if not 0 < fraction < 1:
            return bound
        if self.lowest >= self.highest:
            return 0
        return min(max(bound, self.lowest + 1), self.highest)


def survey(documents: Iterable[str], with_sample: bool, advance: Advance) -> Survey:
    """Look at every document once; the result does not depend on their order."""
    found = Survey()
    bound, sample_bytes = _KEYS, 0
    for text in documents:
        if not text.strip():
            continue
        encoded = text.encode()
        key = document_key(encoded)
        found.documents += 1
        found.text_bytes += len(encoded)
        found.key_sum += key
        found.lowest, found.highest = min(found.lowest, key), max(found.highest, key)
        advance(len(encoded), 1, 0)
        if with_sample and key < bound:
            found.sample.append((key, text[:_SAMPLE_CHARACTERS]))
            sample_bytes += len(found.sample[-1][1].encode())
            while sample_bytes > SAMPLE_BYTES:
                bound //= 2
                found.sample = [(kept, text) for kept, text in found.sample if kept < bound]
                sample_bytes = sum(len(text.encode()) for _, text in found.sample)
    return found
