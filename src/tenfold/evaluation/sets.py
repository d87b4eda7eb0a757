"""What a model is asked about: a text or prepared shards, read for one task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from tenfold.config.run import DataConfig, EvaluationOptions
from tenfold.data.arrow import COLUMN_SUFFIXES
from tenfold.data.inplace import open_in_place
from tenfold.data.progress import Progress
from tenfold.data.reading import RECORD_SUFFIXES, plain_suffix
from tenfold.data.sampling import PackedSequences
from tenfold.data.saved import is_saved_dataset
from tenfold.data.shards import TokenData, TokenSplit, holds_shards, sha256_of
from tenfold.data.sources import open_source
from tenfold.data.token_files import find_token_files
from tenfold.data.vocabulary import end_of_text, load_tokenizer
from tenfold.errors import TenfoldError
from tenfold.evaluation.cloze import Passage, cloze, cut_passages, read_passages
from tenfold.evaluation.loss import Row, batches, bits_per_byte, perplexity, text_loss
from tenfold.evaluation.masked import masked_loss
from tenfold.nn.decoder import Decoder

WORDS_COUNTED_TOKENS = 4_000_000
"""Words of shards are counted on at most so many of their first tokens."""


@dataclass(frozen=True)
class TextTokenizer:
    """The tokenizer of a run, and how it is told from another."""

    tokenizer: Tokenizer
    sha256: str
    end_of_text: int
    file: Path

    @classmethod
    def of(cls, file: Path) -> TextTokenizer:
        """The tokenizer of a tokenizer.json."""
        tokenizer = load_tokenizer(file)
        return cls(tokenizer, sha256_of(file), end_of_text(tokenizer, file), file)


@dataclass(frozen=True)
class TextRow:
    """A text in tokens: its documents end to end, each with the token that ends it."""

    ids: npt.NDArray[np.uint32]
    text_bytes: int
    words: int
    path: str
    name: str = "text"

    @property
    def tokens(self) -> int:
        """How many."""
        return len(self.ids)

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Tokens start .. stop - 1."""
        return self.ids[start:stop]

    def rows(self, starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
        """`length` tokens from each of `starts` on: int64 [starts, length]."""
        return self.ids[starts[:, None] + np.arange(length)].astype(np.int64)


@dataclass(frozen=True)
class EvaluationSet:
    """Text read for one task; `row` and `words_per_token` for losses, `passages` for cloze."""

    options: EvaluationOptions
    window: int
    row: Row | None = None
    words_per_token: float | None = None
    passages: tuple[Passage, ...] = ()

    @property
    def work(self) -> int:
        """Tokens or passages that will count."""
        limit = self.options.limit or 10**18
        return min(limit, len(self.passages) if self.row is None else self.row.tokens - 1)

    @property
    def stride(self) -> int:
        """Tokens from one window to the next."""
        return (self.options.stride or max(1, self.window // 2)) if self.options.task == "strided" else self.window

    def sequences(self) -> PackedSequences:
        """The row cut into windows, as an encoder is asked about it; a TenfoldError where it does not fill one."""
        assert self.row is not None
        return PackedSequences(self.row, self.window, None)  # type: ignore[arg-type]


def read_set(
    data: str, options: EvaluationOptions, tokenizer: TextTokenizer, window: int, recipes: Path, progress: Progress
) -> EvaluationSet:
    """Read `data` (as `data.path`) for `options.task`, with the run's tokenizer and its `window` in tokens.

    Raises TenfoldError where there is nothing to count, or the shards are of another tokenizer.
    """
    if options.task == "strided" and options.stride > window:
        raise TenfoldError(f"stride = {options.stride} is more than the window of {window}: tokens would not count")
    path = Path(data).expanduser()
    if holds_shards(path):
        shards = TokenData.open(path)
        entry = shards.index.tokenizer
        if entry is None or entry.sha256 != tokenizer.sha256:
            known = "an unknown tokenizer, which may not be" if entry is None else "another tokenizer than"
            raise TenfoldError(
                f"{path} was prepared with {known} the run's: its token ids would mean other text. Give the text "
                "itself, or prepare it with --tokenizer RUN/tokenizer.json"
            )
        return _split_set(shards.split(options.split), options, tokenizer, window)
    if (token_files := find_token_files(path)) is not None:
        # They do not say what made them: that it was the run's tokenizer is the user's word, as in training.
        fraction = 1.0 if options.split == "validation" else 0.0  # all of them, where their names do not split them
        told = DataConfig(
            path=data, cache=str(recipes.parent), tokenizer=str(tokenizer.file), validation_fraction=fraction
        )
        tokens = open_in_place(told, *token_files, progress)
        return _split_set(tokens.split(options.split), options, tokenizer, window)
    if options.task == "cloze":
        kind = options.passages
        if kind == "auto" and _holds_records(path):
            kind = "documents"
        texts = (part for text in _texts(data, options, recipes, progress) for part in cut_passages(text, kind))
        return _cloze_set(texts, data, options, tokenizer, window)
    row = _encode(_texts(data, options, recipes, progress), data, tokenizer)
    return EvaluationSet(options, window, _checked(row, data), row.words / row.tokens)


def _split_set(split: TokenSplit, options: EvaluationOptions, tokenizer: TextTokenizer, window: int) -> EvaluationSet:
    """The same of prepared tokens."""
    where = f"the {split.name} split in {split.path}"
    documents = _decoded(split, tokenizer.tokenizer)
    if options.task == "cloze":
        texts = (part for text, _ in documents for part in cut_passages(text, options.passages))
        return _cloze_set(texts, where, options, tokenizer, window)
    words = tokens = 0
    for text, length in documents:
        words, tokens = words + len(text.split()), tokens + length
        if tokens >= WORDS_COUNTED_TOKENS:
            break
    return EvaluationSet(options, window, _checked(split, where), words / tokens)


def evaluate(
    model: Decoder,
    subject: EvaluationSet,
    batch_size: int = 8,
    chunk: int = 2048,
    advance: Callable[[int], None] = lambda done: None,
) -> dict[str, float | int]:
    """What the task measures on `subject`, by name; docs/evaluation.md says what each is.

    The same for a model in training and for its checkpoint, and for any `batch_size` and `chunk`, but for rounding.
    """
    options = subject.options
    if model.config.objective == "masked":
        if options.task != "loss":
            raise TenfoldError(f"task {options.task} asks what comes next; an encoder can be asked for loss alone")
        sequences = subject.sequences()
        limit = len(sequences) if options.limit is None else max(1, options.limit // subject.window)
        found = masked_loss(model, sequences, limit, batch_size, chunk)
        return {"loss": found.loss, "masked_accuracy": found.accuracy, "sequences": min(limit, len(sequences))}
    if subject.row is None:
        return cloze(model, subject.passages, batch_size, advance, subject.window)
    loss = text_loss(model, subject.row, subject.window, subject.stride, options.limit, batch_size, chunk, advance)
    values: dict[str, float | int] = {
        "loss": loss.mean,
        "perplexity": perplexity(loss.mean),
    }
    if (bits := bits_per_byte(loss.mean, subject.row)) is not None:
        values["bits_per_byte"] = bits
    if subject.words_per_token:
        values["word_perplexity"] = perplexity(loss.mean / subject.words_per_token)
        values["words"] = round(loss.tokens * subject.words_per_token)
    values |= {"tokens": loss.tokens, "window": subject.window}
    if options.task == "strided":
        values["stride"] = subject.stride
    return values


def _holds_records(path: Path) -> bool:
    return plain_suffix(path) in (*RECORD_SUFFIXES, *COLUMN_SUFFIXES) or is_saved_dataset(path)


def _texts(data: str, options: EvaluationOptions, recipes: Path, progress: Progress) -> Iterator[str]:
    """The documents of `data`. A plain file is one, however long: training cuts it, but none of its words may lose
    what stands before them."""
    source = open_source(data, options.text_field, recipes, progress)
    path = Path(data).expanduser()
    documents = (text for part in source.parts for text in part.read(0))
    if options.joined or (path.is_file() and not _holds_records(path)):
        yield "".join(documents)
    else:
        yield from documents


def _encode(texts: Iterator[str], data: str, tokenizer: TextTokenizer) -> TextRow:
    parts, text_bytes, words = [], 0, 0
    for batch in batches((text for text in texts if text.strip()), 256):
        try:
            encodings = tokenizer.tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        except Exception as error:  # tokenizers raises plain Exception
            raise TenfoldError(f"{data}: the run's tokenizer cannot encode this text: {error}") from None
        for text, encoding in zip(batch, encodings, strict=True):
            parts.append(np.array([*encoding.ids, tokenizer.end_of_text], dtype=np.uint32))
            text_bytes, words = text_bytes + len(text.encode()), words + len(text.split())
    if not parts:
        raise TenfoldError(f"{data} holds no text: every file or record is empty")
    return TextRow(np.concatenate(parts), text_bytes, words, data)


def _checked(row: Row, where: str) -> Row:
    if row.tokens < 2 or not row.text_bytes:
        raise TenfoldError(f"{where} holds {row.tokens} token(s): nothing can be predicted; give more text")
    return row


def _cloze_set(
    texts: Iterator[str], where: str, options: EvaluationOptions, tokenizer: TextTokenizer, window: int
) -> EvaluationSet:
    found = read_passages(texts, tokenizer.tokenizer, tokenizer.end_of_text, options.min_words)
    passages = tuple(islice(found, options.limit))
    if not passages:
        raise TenfoldError(
            f"{where} holds no passage of {options.min_words} words or more; passages are {options.passages} "
            "(documents, lines or paragraphs: choose by `passages`)"
        )
    if all(len(passage.word) > window for passage in passages):
        raise TenfoldError(f"{where}: every last word is longer than the model's window of {window} tokens")
    return EvaluationSet(options, window, passages=passages)


def _decoded(split: TokenSplit, tokenizer: Tokenizer) -> Iterator[tuple[str, int]]:
    """Each document of prepared tokens as text, and its length in tokens with the one that ends it."""
    starts = [*split.document_starts().tolist(), split.tokens]
    for batch in batches(pairwise(starts), 256):
        ids = [split.read(start, stop - 1).tolist() for start, stop in batch]
        texts = tokenizer.decode_batch(ids, skip_special_tokens=False)
        yield from zip(texts, (stop - start for start, stop in batch), strict=True)
