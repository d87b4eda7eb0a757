"""Text -> tokenizer -> token shards: the order of the steps, and the cache of what was made."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tenfold.config.run import DataConfig, PrepareConfig
from tenfold.data.inplace import open_in_place
from tenfold.data.journal import JOURNAL, Journal, forget
from tenfold.data.progress import Progress
from tenfold.data.shards import INDEX, VERSION, Duplicates, Index, TokenData, TokenizerEntry, holds_shards, sha256_of
from tenfold.data.sources import Source, open_source, readable_name
from tenfold.data.token_files import find_token_files
from tenfold.data.tokenizing import TOKENIZER, token_dtype, write_tokens
from tenfold.data.vocabulary import end_of_text, vocabulary_size
from tenfold.data.writing import appearing_whole, partial_folder, write_file
from tenfold.errors import TenfoldError


def prepare(source: str, out: Path, options: PrepareConfig, show_progress: bool = True) -> TokenData:
    """Make token shards of `source` in the new folder `out`; the result does not depend on `options.workers`.

    A folder that already holds just this is opened; one that holds anything else raises a TenfoldError.
    What a recipe downloads is kept in `recipes` beside `out`.
    """
    progress = Progress(show_progress)
    path = Path(source).expanduser()
    if not holds_shards(path) and find_token_files(path) is not None:
        raise TenfoldError(f"{source} holds tokens already: they need no preparation, name them as data.path")
    found = open_source(source, options.text_field, out.parent / "recipes", progress)
    return _prepare(found, out, options, progress)


def ensure_prepared(data: DataConfig, show_progress: bool = True) -> TokenData:
    """The tokens that `data.path` names: those of a prepared folder or of other programs' files as they are, or shards
    of its text from `data.cache`.

    The cache folder's name holds a hash of the text and of the options: text that changed is prepared anew.
    """
    progress = Progress(show_progress)
    found = look_up(data, progress)
    if isinstance(found, TokenData):
        return found
    return _prepare(found.source, found.folder, found.options, progress)


@dataclass(frozen=True)
class Unprepared:
    """A text, and the folder where its shards will be."""

    source: Source
    folder: Path
    options: PrepareConfig


def look_up(data: DataConfig, progress: Progress) -> TokenData | Unprepared:
    """What `data.path` names, without preparing it: tokens, or text whose shards are not there yet."""
    path = Path(data.path).expanduser()
    if holds_shards(path):
        shards = TokenData.open(path)
        _check_agreement(data, shards)
        return shards
    if (tokens := find_token_files(path)) is not None:
        return open_in_place(data, *tokens, progress)
    for key in ("dtype", "end_of_text"):
        if getattr(data, key) is not None:
            raise TenfoldError(f"data.{key} is for token files, and data.path = {data.path!r} is text; leave it out")
    options = PrepareConfig(**{key: getattr(data, key) for key in PrepareConfig.model_fields})
    cache = Path(data.cache).expanduser()
    found = open_source(data.path, data.text_field, cache / "recipes", progress)
    wanted = json.dumps([VERSION, found.fingerprint, _decisive(options)], sort_keys=True)
    folder = cache / f"{readable_name(data.path)}-{hashlib.sha256(wanted.encode()).hexdigest()[:16]}"
    if (existing := _existing(found, folder, options)) is not None:
        return existing
    return Unprepared(found, folder, options)


def _check_agreement(data: DataConfig, shards: TokenData) -> None:
    """What the run file says of preparation must be what the shards were prepared with: it cannot be done anew."""
    for key in ("dtype", "end_of_text"):
        if (value := getattr(data, key)) not in (None, (made := getattr(shards.index, key))):
            raise TenfoldError(f"data.{key} = {value!r}, but the shards in {shards.path} have {made!r}: leave it out")
    for key in data.model_fields_set & PrepareConfig.model_fields.keys():
        value, made = getattr(data, key), shards.index.options.get(key)
        if key == "tokenizer" and value is not None:
            value = sha256_of(Path(value).expanduser())
            made = shards.index.tokenizer and shards.index.tokenizer.sha256
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
        forget(out)  # if it was stopped between appearing and this
        return existing
    decisive = _decisive(options)
    try:
        with appearing_whole(out, JOURNAL) as folder:
            journal, tokenizer, splits = write_tokens(source, folder, out, options, json.dumps(decisive), progress)
            index = Index(
                tokenizer=TokenizerEntry(file=TOKENIZER, sha256=sha256_of(folder / TOKENIZER)),
                vocab_size=vocabulary_size(tokenizer),
                end_of_text=end_of_text(tokenizer, folder / TOKENIZER),
                dtype=token_dtype(vocabulary_size(tokenizer)),
                splits=splits,
                duplicates=_duplicates(journal, progress) if options.dedup else None,
                source={"name": source.name, "fingerprint": source.fingerprint, **source.about},
                options=decisive,
            )
            write_file(folder / INDEX, json.dumps(index.model_dump(mode="json"), indent=1, ensure_ascii=False).encode())
    except BaseException:
        partial = partial_folder(out)
        if (partial / JOURNAL).is_file():
            progress.note(f"what is done is kept in {partial}: the same command goes on from there")
        raise
    forget(out)
    return TokenData.open(out)


def _duplicates(journal: Journal, progress: Progress) -> Duplicates:
    share = journal.dropped_bytes / journal.read.text_bytes
    progress.note(
        f"dropped {journal.dropped_documents:,} documents that repeat an earlier one "
        f"({journal.dropped_bytes / 1e6:,.1f} MB, {share:.1%} of the text)"
    )
    return Duplicates(documents=journal.dropped_documents, text_bytes=journal.dropped_bytes)


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
