"""Documents to tokens on all cores, in order, from any place in the source.

Threads, not processes: `tokenizers` is Rust and lets go of the interpreter while it encodes, so threads use the cores
as well, without start-up time, copies of the text, or the dead-locks of a fork after its thread pool was used.
"""

from __future__ import annotations

import array
import contextlib
import os
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from tenfold.data.dedup import SeenDocuments, document_digest
from tenfold.data.shards import SplitName
from tenfold.data.sources import Part
from tenfold.data.survey import Tally, document_key
from tenfold.errors import TenfoldError
from tenfold.hardware.cores import usable_cores

_BATCH_CHARACTERS = 256 * 1024

Place = tuple[int, int]
"""How far a source was read: its parts before this number, and so many documents of that part."""


@dataclass(frozen=True)
class Encoded:
    """Documents of one split, end to end, each with its end-of-text token."""

    split: SplitName
    tokens: npt.NDArray[np.uint32]
    lengths: npt.NDArray[np.int64]
    text_bytes: int


@dataclass
class Batch:
    """Some 256 thousand characters of documents, and what is known of them before they are encoded."""

    place: Place = (0, 0)
    """Where the source stands after them."""
    texts: list[str] = field(default_factory=list)
    splits: list[SplitName] = field(default_factory=list)
    text_bytes: list[int] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    """Of all that was read, duplicates too."""
    dropped_documents: int = 0
    dropped_bytes: int = 0
    digests: bytes = b""
    """Of the documents that are kept, where duplicates are looked for."""


def encode_documents(
    parts: Sequence[Part],
    tokenizer: Tokenizer,
    end_of_text: int,
    held_out_below: int,
    workers: int,
    start: Place = (0, 0),
    seen: SeenDocuments | None = None,
) -> Generator[tuple[Batch, list[Encoded]], None, None]:
    """The documents from `start` on in tokens, batch by batch in their order, whatever the number of workers.

    With `seen`, a document that it holds is dropped. At most two batches per worker exist at once: memory is constant.
    """
    workers = workers or usable_cores()
    waiting: deque[tuple[Batch, Future[list[Encoded]]]] = deque()
    with _one_thread_per_call(), ThreadPoolExecutor(workers) as pool:
        try:
            for batch in _batches(parts, held_out_below, start, seen):
                if len(waiting) >= 2 * workers:
                    done, future = waiting.popleft()
                    yield done, future.result()
                waiting.append((batch, pool.submit(_encode, batch, tokenizer, end_of_text)))
            while waiting:
                done, future = waiting.popleft()
                yield done, future.result()
        finally:
            for _, future in waiting:
                future.cancel()


def _batches(parts: Sequence[Part], held_out_below: int, start: Place, seen: SeenDocuments | None) -> Iterator[Batch]:
    batch, characters = Batch(), 0
    documents: list[bytes] = []
    first, skip = start
    for number, part in enumerate(parts[first:], first):
        row = skip
        for row, text in enumerate(part.read(skip), skip + 1):
            if not text.strip():
                continue
            encoded = text.encode()
            key = document_key(encoded)
            batch.tally.add(key, len(encoded), part.split)
            batch.texts.append(text)
            batch.splits.append(part.split or ("validation" if key < held_out_below else "train"))
            documents.append(encoded)
            characters += len(text)
            if characters >= _BATCH_CHARACTERS:
                yield _finished(batch, documents, (number, row), seen)
                batch, characters, documents = Batch(), 0, []
        skip = 0
    yield _finished(batch, documents, (len(parts), 0), seen)


def _finished(batch: Batch, documents: list[bytes], place: Place, seen: SeenDocuments | None) -> Batch:
    batch.place = place
    batch.text_bytes = [len(document) for document in documents]
    if seen is not None and documents:
        digests = [document_digest(document) for document in documents]
        new = seen.add(digests)
        batch.dropped_documents = new.count(False)
        batch.dropped_bytes = sum(size for size, is_new in zip(batch.text_bytes, new, strict=True) if not is_new)
        for name in ("texts", "splits", "text_bytes"):
            setattr(batch, name, [value for value, is_new in zip(getattr(batch, name), new, strict=True) if is_new])
        batch.digests = b"".join(digest for digest, is_new in zip(digests, new, strict=True) if is_new)
    return batch


def _encode(batch: Batch, tokenizer: Tokenizer, end_of_text: int) -> list[Encoded]:
    try:
        encodings = tokenizer.encode_batch_fast(batch.texts, add_special_tokens=False)
    except Exception as error:  # tokenizers raises plain Exception
        raise TenfoldError(f"the tokenizer cannot encode this text: {error}; mend it or take another one") from None
    encoded = []
    for split in ("train", "validation"):
        ids, lengths, text_bytes = array.array("I"), [], 0
        for place, size, encoding in zip(batch.splits, batch.text_bytes, encodings, strict=True):
            if place == split:
                before = len(ids)
                ids.fromlist(encoding.ids)
                ids.append(end_of_text)
                lengths.append(len(ids) - before)
                text_bytes += size
        if lengths:
            tokens = np.frombuffer(ids, np.dtype(f"u{ids.itemsize}")).astype(np.uint32, copy=False)
            encoded.append(Encoded(split, tokens, np.array(lengths, np.int64), text_bytes))
    return encoded


@contextlib.contextmanager
def _one_thread_per_call() -> Iterator[None]:
    """Keeps `tokenizers` from starting a second layer of threads under ours."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
