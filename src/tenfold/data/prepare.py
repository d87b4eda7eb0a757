"""Text -> tokenizer -> token shards: the order of the steps, and the cache of what was made."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer

from tenfold.config.run import DataConfig, PrepareConfig
from tenfold.data.encoding import encode_documents
from tenfold.data.progress import Progress
from tenfold.data.shards import INDEX, VERSION, Index, SplitName, TokenData, TokenizerEntry, holds_shards, sha256_of
from tenfold.data.sources import Source, open_source, readable_name
from tenfold.data.survey import Survey, survey
from tenfold.data.vocabulary import end_of_text, for_documents, load_tokenizer, train_bpe, vocabulary_size
from tenfold.data.writing import ShardWriter, appearing_whole, telling_disk_faults, write_file
from tenfold.errors import TenfoldError

_TOKENIZER = "tokenizer.json"
_BYTES_PER_TOKEN_AT_LEAST = 2.5
"""For the estimate of disk space; English on 8,192 entries has 3 to 4."""


def prepare(source: str, out: Path, options: PrepareConfig, show_progress: bool = True) -> TokenData:
    """Make token shards of `source` in the new folder `out`; the result does not depend on `options.workers`.

    A folder that already holds just this is opened; one that holds anything else raises a TenfoldError.
    What a recipe downloads is kept in `recipes` beside `out`.
    """
    progress = Progress(show_progress)
    found = open_source(source, options.text_field, out.parent / "recipes", progress)
    return _prepare(found, out, options, progress)


def ensure_prepared(data: DataConfig, show_progress: bool = True) -> TokenData:
    """The shards that `data.path` names: a prepared folder as it is, or shards of its text from `data.cache`.

    The cache folder's name holds a hash of the text and of the options: text that changed is prepared anew.
    """
    path = Path(data.path).expanduser()
    if holds_shards(path):
        shards = TokenData.open(path)
        _check_agreement(data, shards)
        return shards
    progress = Progress(show_progress)
    options = PrepareConfig(**{key: getattr(data, key) for key in PrepareConfig.model_fields})
    cache = Path(data.cache).expanduser()
    found = open_source(data.path, data.text_field, cache / "recipes", progress)
    wanted = json.dumps([VERSION, found.fingerprint, _decisive(options)], sort_keys=True)
    name = f"{readable_name(data.path)}-{hashlib.sha256(wanted.encode()).hexdigest()[:16]}"
    return _prepare(found, cache / name, options, progress)


def _check_agreement(data: DataConfig, shards: TokenData) -> None:
    """What the run file says of preparation must be what the shards were prepared with: it cannot be done anew."""
    for key in data.model_fields_set & PrepareConfig.model_fields.keys():
        value, made = getattr(data, key), shards.index.options.get(key)
        if key == "tokenizer" and value is not None:
            value, made = sha256_of(Path(value).expanduser()), shards.index.tokenizer.sha256
        if made is not None and value is not None and value != made:
            raise TenfoldError(
                f"data.{key} = {getattr(data, key)!r}, but the shards in {shards.path} were prepared with {made!r}: "
                "leave it out, or prepare the text anew"
            )


def as_prepared(data: DataConfig, shards: TokenData) -> DataConfig:
    """The same section with the options that `shards` were really prepared with."""
    known = {key: value for key, value in shards.index.options.items() if key in PrepareConfig.model_fields}
    known.pop("tokenizer", None)  # a checksum there, a path here
    return data.model_copy(update=known)


def _prepare(source: Source, out: Path, options: PrepareConfig, progress: Progress) -> TokenData:
    if (existing := _existing(source, out, options)) is not None:
        progress.note(f"{out} holds just this already")
        return existing
    given = None if options.tokenizer is None else load_tokenizer(Path(options.tokenizer).expanduser())
    with appearing_whole(out) as folder:
        with progress.phase("reading") as advance:
            seen = survey(source.documents(), with_sample=given is None, advance=advance)
        if not seen.documents:
            raise TenfoldError(f"{source.name} holds no text: every file or record is empty")
        held_out_below = seen.held_out_below(options.validation_fraction)
        tokenizer = given or _train(seen, held_out_below, options.vocab_size, progress)
        seen.sample.clear()
        write_file(folder / _TOKENIZER, _tokenizer_file(tokenizer, options))
        index = _write_shards(source, seen, tokenizer, held_out_below, folder, out, options, progress)
        write_file(folder / INDEX, json.dumps(index.model_dump(mode="json"), indent=1, ensure_ascii=False).encode())
    return TokenData.open(out)


def _write_shards(
    source: Source,
    seen: Survey,
    tokenizer: Tokenizer,
    held_out_below: int,
    folder: Path,
    out: Path,
    options: PrepareConfig,
    progress: Progress,
) -> Index:
    end = end_of_text(tokenizer, Path(options.tokenizer or _TOKENIZER))
    vocab_size = vocabulary_size(tokenizer)
    dtype: Literal["uint16", "uint32"] = "uint16" if vocab_size <= 2**16 else "uint32"
    writers: dict[SplitName, ShardWriter] = {
        "train": ShardWriter(folder, "train", dtype),
        "validation": ShardWriter(folder, "validation", dtype),
    }
    bytes_needed = (
        int(seen.text_bytes / _BYTES_PER_TOKEN_AT_LEAST + seen.documents) * np.dtype(dtype).itemsize
        + 8 * seen.documents
    )
    written, key_sum = 0, 0
    batches = encode_documents(source.documents(), tokenizer, end, held_out_below, options.workers)
    with (
        telling_disk_faults(out, bytes_needed),
        contextlib.closing(batches),
        progress.phase("tokenizing", seen.text_bytes) as advance,
    ):
        for batch in batches:
            for part in batch:
                writers[part.split].add(part.tokens, part.lengths, part.text_bytes)
                advance(part.text_bytes, len(part.lengths), len(part.tokens))
                written, key_sum = written + part.text_bytes, key_sum + part.key_sum
        splits = {split: writer.close() for split, writer in writers.items()}
    if (written, key_sum) != (seen.text_bytes, seen.key_sum):
        raise TenfoldError(f"{source.name} changed while it was read; run again when nothing writes to it")
    return Index(
        tokenizer=TokenizerEntry(file=_TOKENIZER, sha256=sha256_of(folder / _TOKENIZER)),
        vocab_size=vocab_size,
        end_of_text=end,
        dtype=dtype,
        splits=splits,
        source={"name": source.name, "fingerprint": source.fingerprint, **source.about},
        options=_decisive(options),
    )


def _train(seen: Survey, held_out_below: int, vocab_size: int, progress: Progress) -> Tokenizer:
    """A BPE made from a sample of the documents that are trained on."""
    texts = [text for key, text in seen.sample if key >= held_out_below]
    progress.note(f"training a BPE of {vocab_size:,} entries on {sum(map(len, texts)) / 1e6:,.1f} M characters")
    start = time.monotonic()
    tokenizer = for_documents(train_bpe(texts, vocab_size))
    progress.note(f"trained in {time.monotonic() - start:.1f} s")
    if (made := vocabulary_size(tokenizer)) < vocab_size:
        progress.note(f"the text gives a BPE of {made:,} entries, not {vocab_size:,}: nothing more in it repeats")
    return tokenizer


def _tokenizer_file(tokenizer: Tokenizer, options: PrepareConfig) -> bytes:
    if options.tokenizer is None:
        return tokenizer.to_str(pretty=True).encode()
    return Path(options.tokenizer).expanduser().read_bytes()


def _decisive(options: PrepareConfig) -> dict[str, Any]:
    """The options that decide what is written. A tokenizer counts by its content; `workers` decides nothing."""
    told = options.model_dump(mode="json", exclude={"workers"})
    if options.tokenizer is not None:
        told["tokenizer"] = sha256_of(Path(options.tokenizer).expanduser())
        del told["vocab_size"]
    return told


def _existing(source: Source, out: Path, options: PrepareConfig) -> TokenData | None:
    """What `out` holds if it is just what would be made, None if it is free."""
    if out.absolute() == Path.cwd():
        raise TenfoldError(f"{out} is the folder you are in; name a new one")
    if out.exists() and not out.is_dir():
        raise TenfoldError(f"{out} is a file; choose a new folder")
    if not out.exists() or not any(out.iterdir()):
        return None
    if not holds_shards(out):
        raise TenfoldError(f"{out} holds other files; choose a new folder")
    data = TokenData.open(out)
    differing = [key for key, value in _decisive(options).items() if data.index.options.get(key) != value]
    if data.index.source.get("fingerprint") != source.fingerprint:
        differing.insert(0, "text")
    if differing:
        raise TenfoldError(
            f"{out} holds token shards of {data.index.source.get('name')} made with another {', '.join(differing)}; "
            "choose a new folder, or delete this one"
        )
    return data
