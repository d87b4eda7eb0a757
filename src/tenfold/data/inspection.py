"""What data holds: counts, lengths of documents, the vocabulary that is used, the first documents."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tenfold.data.dedup import SeenDocuments, document_digest
from tenfold.data.progress import Advance
from tenfold.data.shards import TokenData, TokenSplit
from tenfold.data.sources import Part

_TOKENS_AT_ONCE = 1 << 22
_DOCUMENTS_AT_ONCE = 256
_SHOWN_TOKENS = 512
_SHOWN_CHARACTERS = 2048


@dataclass
class Lengths:
    """Lengths of documents, by powers of two."""

    counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(64, np.int64))
    """`counts[n]` documents have a length of 2**n up to 2**(n + 1) - 1."""
    documents: int = 0
    total: int = 0
    shortest: tuple[int, int] | None = None
    """Length and number, from 0 on, of the first of the shortest documents."""
    longest: tuple[int, int] | None = None

    def add(self, lengths: npt.NDArray[np.int64]) -> None:
        """Count documents of these lengths, each above 0, that follow those before."""
        if not len(lengths):
            return
        exponents = np.frexp(lengths.astype(np.float64))[1] - 1
        self.counts += np.bincount(exponents, minlength=64)
        low, high = int(lengths.argmin()), int(lengths.argmax())
        if self.shortest is None or lengths[low] < self.shortest[0]:
            self.shortest = int(lengths[low]), self.documents + low
        if self.longest is None or lengths[high] > self.longest[0]:
            self.longest = int(lengths[high]), self.documents + high
        self.documents += len(lengths)
        self.total += int(lengths.sum())


@dataclass
class TokenFacts:
    """What token shards hold, or token files made elsewhere."""

    data: TokenData
    splits: list[TokenSplit]
    lengths: Lengths
    """In tokens, over all splits in their order."""
    used: int
    """Different ids that occur."""
    first: list[tuple[str, bool]]
    """The first documents of the first split as text, or as ids without a tokenizer, and whether they go on."""

    @property
    def documents_known(self) -> bool:
        """Whether the files or an end of text say where documents begin."""
        return self.data.end_of_text is not None or self.data.index.layout in ("tenfold", "megatron")


def inspect_tokens(data: TokenData, documents: int, advance: Advance) -> TokenFacts:
    """Read all tokens once; memory does not grow with them but for 8 bytes a document."""
    splits = [data.split(name) for name, shards in data.index.splits.items() if shards]
    lengths, used = Lengths(), np.zeros(data.vocab_size, np.bool_)
    for split in splits:
        lengths.add(np.diff(split.document_starts(), append=split.tokens))
        for start in range(0, split.tokens, _TOKENS_AT_ONCE):
            tokens = split.read(start, min(start + _TOKENS_AT_ONCE, split.tokens))
            used[tokens] = True
            advance(tokens.nbytes, 0, len(tokens))
    return TokenFacts(data, splits, lengths, int(used.sum()), _first(data, splits[0], documents))


def _first(data: TokenData, split: TokenSplit, documents: int) -> list[tuple[str, bool]]:
    tokenizer = None if data.index.tokenizer is None else data.tokenizer()
    bounds = [*split.document_starts()[: documents + 1].tolist(), split.tokens]
    shown = []
    for start, stop in itertools.pairwise(bounds[: documents + 1]):
        tokens = split.read(start, min(stop, start + _SHOWN_TOKENS)).tolist()
        goes_on = stop > start + len(tokens)
        if tokens[-1] == data.end_of_text:
            tokens.pop()
        text = " ".join(map(str, tokens)) if tokenizer is None else tokenizer.decode(tokens, skip_special_tokens=False)
        shown.append((text, goes_on))
    return shown


@dataclass
class TextFacts:
    """What text holds that is not prepared."""

    lengths: Lengths = field(default_factory=Lengths)
    """In bytes of UTF-8, of the documents that are not empty."""
    characters: int = 0
    empty: int = 0
    repeated: int = 0
    """Documents whose text is equal to an earlier one's."""
    repeated_bytes: int = 0
    splits: dict[str, int] = field(default_factory=dict)
    """Documents that the source itself puts in a split."""
    first: list[tuple[str, bool]] = field(default_factory=list)


def inspect_text(parts: Sequence[Part], documents: int, advance: Advance) -> TextFacts:
    """Read all text once; memory grows by some 23 bytes a document (see `SeenDocuments`)."""
    facts, seen = TextFacts(), SeenDocuments()
    for part in parts:
        texts = part.read(0)
        while batch := list(itertools.islice(texts, _DOCUMENTS_AT_ONCE)):
            full = [text for text in batch if text.strip()]
            encoded = [text.encode() for text in full]
            sizes = [len(text) for text in encoded]
            facts.empty += len(batch) - len(full)
            facts.characters += sum(map(len, full))
            facts.lengths.add(np.array(sizes, np.int64))
            for size, is_new in zip(sizes, seen.add([document_digest(text) for text in encoded]), strict=True):
                facts.repeated += not is_new
                facts.repeated_bytes += 0 if is_new else size
            if part.split is not None:
                facts.splits[part.split] = facts.splits.get(part.split, 0) + len(full)
            for text in full[: max(documents - len(facts.first), 0)]:
                facts.first.append((text[:_SHOWN_CHARACTERS], len(text) > _SHOWN_CHARACTERS))
            advance(sum(sizes), len(full), 0)
    return facts


def as_json(facts: TokenFacts | TextFacts) -> dict[str, Any]:
    """The figures as plain values."""
    lengths = facts.lengths
    told: dict[str, Any] = {
        "documents": lengths.documents,
        "lengths": {str(2**place): int(count) for place, count in enumerate(lengths.counts) if count},
        "shortest": lengths.shortest,
        "longest": lengths.longest,
    }
    if isinstance(facts, TextFacts):
        return told | {
            "kind": "text",
            "text_bytes": lengths.total,
            "characters": facts.characters,
            "empty": facts.empty,
            "repeated": facts.repeated,
            "repeated_bytes": facts.repeated_bytes,
        }
    index = facts.data.index
    splits = {
        split.name: {"tokens": split.tokens, "documents": split.documents, "text_bytes": split.text_bytes}
        for split in facts.splits
    }
    return told | {
        "kind": "tokens",
        "layout": index.layout,
        "dtype": index.dtype,
        "tokens": lengths.total,
        "vocab_size": facts.data.vocab_size,
        "vocab_used": facts.used,
        "end_of_text": facts.data.end_of_text,
        "splits": splits,
        "duplicates": None if index.duplicates is None else index.duplicates.model_dump(),
        "source": index.source,
    }
