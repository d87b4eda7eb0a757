"""The pass that writes token shards, and how it goes on after it was stopped."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Literal

import numpy as np
from tokenizers import Tokenizer

from tenfold.config.run import PrepareConfig
from tenfold.data.dedup import DIGEST_BYTES
from tenfold.data.encoding import encode_documents
from tenfold.data.journal import DIGESTS, JOURNAL, DigestFile, Journal, read_journal
from tenfold.data.progress import Progress
from tenfold.data.shards import VERSION, ShardEntry, SplitName
from tenfold.data.sources import Source
from tenfold.data.survey import first_bound, survey
from tenfold.data.vocabulary import end_of_text, for_documents, load_tokenizer, train_bpe, vocabulary_size
from tenfold.data.writing import ShardWriter, WriterState, clear, telling_disk_faults, write_file
from tenfold.errors import TenfoldError

TOKENIZER = "tokenizer.json"
JOURNAL_TOKENS = 16 * 1024 * 1024
"""After this many tokens what is written goes to the disk and into the journal: at most so many are done twice."""
_LEAST_VOCABULARY = 257
_BYTES_PER_TOKEN_AT_LEAST = 2.5
"""For the estimate of disk space; English on 8,192 entries has 3 to 4."""


def write_tokens(
    source: Source, folder: Path, out: Path, options: PrepareConfig, decisive: str, progress: Progress
) -> tuple[Journal, Tokenizer, dict[SplitName, list[ShardEntry]]]:
    """The tokenizer and all shards of `source` in `folder`, from where a journal there says that it was stopped.

    `decisive` says all that the result depends on besides the text; `out` is where the folder will be, for messages.
    With a tokenizer given, the text is read once; without, it is read before to take a sample and train one.
    """
    key = hashlib.sha256(json.dumps([VERSION, source.fingerprint, decisive]).encode()).hexdigest()
    journal = read_journal(folder, key)
    if journal is None:
        if any(folder.iterdir()):
            progress.note(f"{out}: cleared what was left of another preparation")
        journal = _begin(source, folder, options, key, progress)
    else:
        files = {name for state in journal.writers.values() for name in state.files()}
        clear(folder, {JOURNAL, DIGESTS, TOKENIZER, *files})
        progress.note(
            f"{out}: going on after {journal.read.documents:,} documents ({journal.read.text_bytes / 1e6:,.1f} MB)"
        )
    tokenizer = load_tokenizer(folder / TOKENIZER)
    splits = _tokenize(source, tokenizer, folder, out, journal, options, progress)
    if journal.expected is None and journal.read.moves(journal.held_out_below, options.validation_fraction):
        # So few documents that one split would stay empty: now that all keys are known, each gets one.
        journal = Journal(
            key=key,
            held_out_below=journal.read.held_out_below(options.validation_fraction),
            expected=journal.read,
        )
        clear(folder, {TOKENIZER})
        splits = _tokenize(source, tokenizer, folder, out, journal, options, progress)
    if journal.expected is not None and journal.expected != journal.read:
        (folder / JOURNAL).unlink(missing_ok=True)  # nothing to go on with
        raise TenfoldError(f"{source.name} changed while it was read; run again when nothing writes to it")
    if not journal.read.documents:
        (folder / JOURNAL).unlink(missing_ok=True)
        raise _no_text(source)
    return journal, tokenizer, splits


def _begin(source: Source, folder: Path, options: PrepareConfig, key: str, progress: Progress) -> Journal:
    """The tokenizer, and a journal of nothing done yet."""
    clear(folder)
    if options.tokenizer is not None:
        path = Path(options.tokenizer).expanduser()
        tokenizer = load_tokenizer(path)
        end_of_text(tokenizer, path)  # its fault is told before any work
        write_file(folder / TOKENIZER, path.read_bytes())
        return Journal(key=key, held_out_below=first_bound(options.validation_fraction))
    if options.vocab_size < _LEAST_VOCABULARY:
        raise TenfoldError(
            f"vocab_size = {options.vocab_size}, but a byte-level BPE has {_LEAST_VOCABULARY} entries at least: one "
            "for each byte, and the end of a text"
        )
    with progress.phase("reading", source.text_bytes) as advance:
        seen = survey(source.parts, options.dedup, advance)
    if not seen.tally.documents:
        raise _no_text(source)
    held_out_below = seen.tally.held_out_below(options.validation_fraction)
    texts = [text for document, text in seen.sample if document >= held_out_below]
    seen.sample.clear()
    write_file(folder / TOKENIZER, train_tokenizer(texts, options.vocab_size, progress).to_str(pretty=True).encode())
    journal = Journal(key=key, held_out_below=held_out_below, expected=seen.tally)
    journal.write(folder)
    return journal


def _no_text(source: Source) -> TenfoldError:
    return TenfoldError(f"{source.name} holds no text: every file or record is empty")


def train_tokenizer(texts: list[str], vocab_size: int, progress: Progress) -> Tokenizer:
    """A BPE made from a sample of the documents that are trained on."""
    characters = sum(map(len, texts))
    with progress.timed(f"training a BPE of {vocab_size:,} entries on {characters / 1e6:,.1f} M characters"):
        tokenizer = for_documents(train_bpe(texts, vocab_size))
    if (made := vocabulary_size(tokenizer)) < vocab_size:
        progress.note(f"the text gives a BPE of {made:,} entries, not {vocab_size:,}: nothing more in it repeats")
    return tokenizer


def token_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """The smallest dtype of shards that holds every id."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def _tokenize(
    source: Source,
    tokenizer: Tokenizer,
    folder: Path,
    out: Path,
    journal: Journal,
    options: PrepareConfig,
    progress: Progress,
) -> dict[SplitName, list[ShardEntry]]:
    """Write every document from `journal.place` on; the journal is brought up to date."""
    dtype = token_dtype(vocabulary_size(tokenizer))
    names: tuple[SplitName, ...] = ("train", "validation")
    states = {name: journal.writers.get(name, WriterState(split=name, dtype=dtype)) for name in names}
    writers = {name: ShardWriter(folder, state) for name, state in states.items()}
    digests = DigestFile(folder, journal.kept) if options.dedup else None
    tokens = sum(shard.tokens for state in states.values() for shard in state.shards())
    done = (journal.read.text_bytes, journal.read.documents, tokens)
    expected = journal.expected.text_bytes if journal.expected else source.text_bytes
    total = (expected or 0) // _BYTES_PER_TOKEN_AT_LEAST * np.dtype(dtype).itemsize
    batches = encode_documents(
        source.parts,
        tokenizer,
        end_of_text(tokenizer, Path(options.tokenizer or TOKENIZER)),
        journal.held_out_below,
        options.workers,
        journal.place,
        None if digests is None else digests.seen,
    )
    unsaved = 0
    with (
        telling_disk_faults(out, int(total)),
        contextlib.closing(batches),
        progress.phase("tokenizing", expected, done) as advance,
    ):
        for batch, encoded in batches:
            for part in encoded:
                writers[part.split].add(part.tokens, part.lengths, part.text_bytes)
            if digests is not None:
                digests.write(batch.digests)
            tokens = sum(len(part.tokens) for part in encoded)
            advance(batch.tally.text_bytes, batch.tally.documents, tokens)
            journal.read.merge(batch.tally)
            journal.place = batch.place
            journal.kept += len(batch.digests) // DIGEST_BYTES
            journal.dropped_documents += batch.dropped_documents
            journal.dropped_bytes += batch.dropped_bytes
            unsaved += tokens
            if unsaved >= JOURNAL_TOKENS:
                if digests is not None:
                    digests.flush()
                journal.writers = {name: writer.save() for name, writer in writers.items()}
                journal.write(folder)
                unsaved = 0
        if digests is not None:
            digests.close()
        return {name: writer.close() for name, writer in writers.items()}
