"""The second pass: documents to tokens on all cores, in order.

Threads, not processes: `tokenizers` is Rust and lets go of the interpreter while it encodes, so threads use the cores
as well, without start-up time, copies of the text, or the dead-locks of a fork after its thread pool was used.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from tenfold.data.shards import SplitName
from tenfold.data.survey import document_key
from tenfold.errors import TenfoldError
from tenfold.hardware.cores import usable_cores

_BATCH_CHARACTERS = 256 * 1024


@dataclass(frozen=True)
class Encoded:
    """Documents of one split, end to end, each with its end-of-text token."""

    split: SplitName
    tokens: npt.NDArray[np.uint32]
    lengths: npt.NDArray[np.int64]
    text_bytes: int
    key_sum: int


def encode_documents(
    documents: Iterable[str], tokenizer: Tokenizer, end_of_text: int, held_out_below: int, workers: int
) -> Generator[list[Encoded], None, None]:
    """The documents in tokens, batch by batch in their order, whatever the number of workers.

    A batch holds some 256 thousand characters and at most two per worker exist at once: memory is constant.
    """
    workers = workers or usable_cores()
    waiting: deque[Future[list[Encoded]]] = deque()
    with _one_thread_per_call(), ThreadPoolExecutor(workers) as pool:
        try:
            for batch in _batches(documents):
                if len(waiting) >= 2 * workers:
                    yield waiting.popleft().result()
                waiting.append(pool.submit(_encode, batch, tokenizer, end_of_text, held_out_below))
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in documents:
        if not text.strip():
            continue
        batch.append(text)
        characters += len(text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encode(batch: list[str], tokenizer: Tokenizer, end_of_text: int, held_out_below: int) -> list[Encoded]:
    ids: dict[SplitName, list[int]] = {"train": [], "validation": []}
    lengths: dict[SplitName, list[int]] = {"train": [], "validation": []}
    text_bytes: dict[SplitName, int] = {"train": 0, "validation": 0}
    key_sums: dict[SplitName, int] = {"train": 0, "validation": 0}
    try:
        encodings = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
    except Exception as error:  # tokenizers raises plain Exception
        raise TenfoldError(f"the tokenizer cannot encode this text: {error}; mend it or take another one") from None
    for text, encoding in zip(batch, encodings, strict=True):
        encoded = text.encode()
        key = document_key(encoded)
        split: SplitName = "validation" if key < held_out_below else "train"
        tokens = encoding.ids
        ids[split] += tokens
        ids[split].append(end_of_text)
        lengths[split].append(len(tokens) + 1)
        text_bytes[split] += len(encoded)
        key_sums[split] += key
    return [
        Encoded(split, np.array(ids[split], np.uint32), np.array(counts, np.int64), text_bytes[split], key_sums[split])
        for split, counts in lengths.items()
        if counts
    ]


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
