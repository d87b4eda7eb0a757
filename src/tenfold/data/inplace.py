"""Token files made elsewhere, read where they are: an index of them is made once and kept in `data.cache`.

The index is that of token shards, with whole paths in it, so that all that reads prepared text reads these too. Making
it reads every token once: for the largest id, the checksum, where documents end, and the bytes of their text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from tenfold.config.run import DataConfig
from tenfold.data.progress import Advance, Progress
from tenfold.data.shards import INDEX, VERSION, Index, ShardEntry, SplitName, TokenData, TokenizerEntry, sha256_of
from tenfold.data.sources import readable_name
from tenfold.data.token_files import Layout, TokenFile, read_headers
from tenfold.data.vocabulary import find_end_of_text, load_tokenizer, token_bytes, vocabulary_size
from tenfold.data.writing import appearing_whole, write_file
from tenfold.errors import TenfoldError

_TOKENIZER = "tokenizer.json"
_IDS_AT_ONCE = 1 << 22
_LARGEST_VOCABULARY = 10**7


@dataclass(frozen=True)
class _Stretch:
    """Tokens of a file from `start` to `stop` that belong to one split."""

    file: TokenFile
    split: SplitName
    start: int
    stop: int


def open_in_place(data: DataConfig, layout: Layout, paths: Sequence[Path], progress: Progress) -> TokenData:
    """The tokens in `paths` as prepared text, by the index in `data.cache`, which is made if it is not there.

    Vocabulary and end of text are those of `data.tokenizer`, or `data.vocab_size` and `data.end_of_text`; a vocabulary
    that nothing tells is one more than the largest id. An id outside it is a TenfoldError that names file and id.
    """
    if data.dedup:
        raise TenfoldError(
            f"data.dedup = true, but {data.path} holds tokens: duplicates are dropped when text is prepared; leave it "
            "out"
        )
    files = read_headers(layout, [path.absolute() for path in paths], data.dtype)
    tokenizer_file = None if data.tokenizer is None else Path(data.tokenizer).expanduser()
    told = {
        "layout": layout,
        "tokenizer": None if tokenizer_file is None else sha256_of(tokenizer_file),
        "validation_fraction": data.validation_fraction,
        "end_of_text": data.end_of_text,
        "dtype": files[0].dtype,
    }
    stats = [(str(file.path), file.path.stat().st_size, file.path.stat().st_mtime_ns) for file in files]
    key = hashlib.sha256(json.dumps([VERSION, told, stats], sort_keys=True).encode()).hexdigest()
    out = Path(data.cache).expanduser() / f"{readable_name(data.path)}-{key[:16]}"
    if not (out / INDEX).is_file():
        tokenizer = None if tokenizer_file is None else load_tokenizer(tokenizer_file)
        progress.note(f"{data.path}: {len(files)} token file(s) of {layout}, read in place; their index goes to {out}")
        with appearing_whole(out) as folder:
            if tokenizer_file is not None:
                write_file(folder / _TOKENIZER, tokenizer_file.read_bytes())
            index = _index(data, files, layout, tokenizer, folder, told, progress)
            write_file(folder / INDEX, json.dumps(index.model_dump(mode="json"), indent=1, ensure_ascii=False).encode())
    tokens = TokenData.open(out)
    if data.document_mask and (unended := tokens.index.options.get("documents_without_end")):
        raise TenfoldError(
            f"data.document_mask = true, but {unended:,} documents of {data.path} do not end in id "
            f"{tokens.end_of_text}, by which training tells them apart: set data.end_of_text to the id that does, or "
            "write the file anew with one (--append-eod of Megatron's preprocess_data)"
        )
    return _with_vocabulary(tokens, data)


def _told_vocabulary(data: DataConfig) -> int | None:
    return data.vocab_size if "vocab_size" in data.model_fields_set else None


def _with_vocabulary(tokens: TokenData, data: DataConfig) -> TokenData:
    """The same tokens with the vocabulary that the run file tells, where that is larger than the known one."""
    told = _told_vocabulary(data)
    if told is None or (tokens.index.tokenizer is not None and told <= tokens.vocab_size):
        return tokens
    for shard in (shard for shards in tokens.index.splits.values() for shard in shards):
        if shard.max_token >= told:
            raise TenfoldError(
                f"{shard.file} holds token id {shard.max_token}, but data.vocab_size has ids below {told:,} only: "
                "raise it, or give the tokenizer that belongs to the file"
            )
    options = tokens.index.options | {"vocab_size": told}
    return TokenData(tokens.path, tokens.index.model_copy(update={"vocab_size": told, "options": options}))


def _index(
    data: DataConfig,
    files: list[TokenFile],
    layout: Layout,
    tokenizer: Tokenizer | None,
    folder: Path,
    told: dict[str, Any],
    progress: Progress,
) -> Index:
    end = data.end_of_text
    if end is None and tokenizer is not None:
        end = find_end_of_text(tokenizer)
    bound, says = _told_vocabulary(data) or 0, "data.vocab_size"
    if tokenizer is not None and (known := vocabulary_size(tokenizer)) >= bound:
        bound, says = known, f"the tokenizer {data.tokenizer}"
    if bound and end is not None and end >= bound:
        raise TenfoldError(f"data.end_of_text = {end}, but {says} has ids below {bound:,} only")
    sizes = None if tokenizer is None else token_bytes(tokenizer, end, bound)
    splits: dict[SplitName, list[ShardEntry]] = {"train": [], "validation": []}
    unended = 0
    stretches = _stretches(files, data.validation_fraction, end)
    total = sum((part.stop - part.start) for part in stretches) * np.dtype(files[0].dtype).itemsize
    with progress.phase("indexing", total) as advance:
        for part in stretches:
            name = f"{part.split}-{len(splits[part.split]):05d}.idx"
            entry, starts = _read(part, end, bound, says, sizes, name, advance)
            write_file(folder / name, starts.astype("<i8").tobytes())
            splits[part.split].append(entry)
            unended += _unended(part, starts, end)
    if tokenizer is not None:
        vocab_size = vocabulary_size(tokenizer)
    else:
        vocab_size = 1 + max(end or 0, *(entry.max_token for entries in splits.values() for entry in entries))
        if not bound:
            progress.note(f"no tokenizer and no data.vocab_size: the vocabulary is taken to be {vocab_size:,}")
    return Index.model_validate(
        {
            "layout": layout,
            "tokenizer": tokenizer and TokenizerEntry(file=_TOKENIZER, sha256=sha256_of(folder / _TOKENIZER)),
            "vocab_size": vocab_size,
            "end_of_text": end,
            "dtype": files[0].dtype,
            "splits": splits,
            "source": {"name": data.path},
            "options": told | {"vocab_size": vocab_size, "documents_without_end": unended},
        }
    )


def _unended(part: _Stretch, starts: npt.NDArray[np.int64], end_of_text: int | None) -> int:
    """How many of the documents that the file tells do not end in the token that is to end them."""
    if part.file.document_starts is None or end_of_text is None:
        return 0
    last = np.append(starts[1:], part.stop - part.start) - 1
    return int((_ids(part.file)[part.start + last] != end_of_text).sum())


def _stretches(files: list[TokenFile], fraction: float, end_of_text: int | None) -> list[_Stretch]:
    """Which tokens are of which split: as the files' names say, else the last documents are held out."""
    if any(file.split is not None for file in files) or not fraction > 0:
        return [_Stretch(file, file.split or "train", 0, file.tokens) for file in files]
    cut = round(sum(file.tokens for file in files) * (1 - fraction))
    stretches, before = [], 0
    for file in files:
        place = min(max(cut - before, 0), file.tokens)
        if 0 < place < file.tokens:
            place = _document_bound(file, place, end_of_text)
        stretches += [_Stretch(file, "train", 0, place), _Stretch(file, "validation", place, file.tokens)]
        before += file.tokens
    return [part for part in stretches if part.stop > part.start]


def _document_bound(file: TokenFile, place: int, end_of_text: int | None) -> int:
    """Where a document begins: at `place` or next after it, else last before it; `place` where none is known."""
    if file.document_starts is not None:
        starts = file.document_starts
        after = int(np.searchsorted(starts, place))
        return int(starts[min(after, len(starts) - 1)]) if len(starts) > 1 else place
    if end_of_text is None:
        return place
    ids = _ids(file)
    for start in range(place, file.tokens - 1, _IDS_AT_ONCE):
        found = np.flatnonzero(ids[start - 1 : min(start - 1 + _IDS_AT_ONCE, file.tokens - 1)] == end_of_text)
        if len(found):
            return start + int(found[0])
    for stop in range(place, 0, -_IDS_AT_ONCE):
        start = max(stop - _IDS_AT_ONCE, 0)
        found = np.flatnonzero(ids[start : stop - 1] == end_of_text)
        if len(found):
            return start + int(found[-1]) + 1
    return place


def _ids(file: TokenFile) -> npt.NDArray[Any]:
    return np.memmap(file.path, np.dtype(file.dtype).newbyteorder("<"), "r", file.offset_bytes, (file.tokens,))


def _read(
    part: _Stretch,
    end_of_text: int | None,
    vocab_size: int,
    says: str,
    sizes: npt.NDArray[np.int64] | None,
    documents_file: str,
    advance: Advance,
) -> tuple[ShardEntry, npt.NDArray[np.int64]]:
    """Read a stretch once: its index entry, and where its documents begin in it."""
    file, ids = part.file, _ids(part.file)
    digest, ends = hashlib.sha256(), [np.zeros(1, np.int64)]
    largest = text_bytes = 0
    bound = vocab_size or _LARGEST_VOCABULARY
    for start in range(part.start, part.stop, _IDS_AT_ONCE):
        here = ids[start : min(start + _IDS_AT_ONCE, part.stop)]
        digest.update(here.data)
        largest = max(largest, int(here.max()))
        if largest >= bound or int(here.min()) < 0:
            place = int(np.flatnonzero((here >= bound) | (here < 0))[0])
            known = f"{says} has ids below {bound:,} only" if vocab_size else "no vocabulary is that large"
            raise TenfoldError(
                f"{file.path} holds token id {int(here[place])} at token {start + place:,}, but {known}: give the "
                f"tokenizer or data.vocab_size that belongs to it, and check data.dtype (read as {file.dtype})"
            )
        if sizes is not None:
            text_bytes += int(sizes[here.astype(np.intp)].sum())
        if end_of_text is not None and file.document_starts is None:
            ends.append(np.flatnonzero(here == end_of_text) + (start - part.start + 1))
        advance(here.nbytes, 0, len(here))
    if file.document_starts is not None:
        first, last = np.searchsorted(file.document_starts, [part.start, part.stop])
        starts = file.document_starts[first:last] - part.start
        starts = starts if len(starts) and starts[0] == 0 else np.concatenate([ends[0], starts])
    else:
        starts = np.concatenate(ends)
        starts = starts[starts < part.stop - part.start]
    entry = ShardEntry(
        file=str(file.path),
        documents_file=documents_file,
        offset_bytes=file.offset_bytes + part.start * ids.itemsize,
        tokens=part.stop - part.start,
        documents=len(starts),
        text_bytes=None if sizes is None else text_bytes,
        max_token=largest,
        sha256=digest.hexdigest(),
        documents_sha256=hashlib.sha256(starts.astype("<i8").tobytes()).hexdigest(),
    )
    return entry, starts
