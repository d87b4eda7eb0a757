"""What a run trains on: one source or several, all of one tokenizer, behind one interface."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from tenfold.config.run import DataConfig, PrepareConfig, SourceConfig
from tenfold.data.mixing import MixedSequences, Phase
from tenfold.data.prepare import as_prepared, ensure_prepared
from tenfold.data.progress import Progress
from tenfold.data.sampling import PackedSequences
from tenfold.data.shards import TokenData, holds_shards
from tenfold.data.sources import Source, open_source
from tenfold.data.survey import SAMPLE_BYTES, Survey, survey
from tenfold.data.token_files import find_token_files
from tenfold.data.tokenizing import train_tokenizer
from tenfold.data.writing import write_file
from tenfold.errors import TenfoldError

_SAMPLED_AT_MOST = 4
"""How often a small source may be repeated in what a common tokenizer is trained on."""


class TrainingData:
    """One prepared source or several, by name, in the order of the run file; the one of `data.path` has no name."""

    def __init__(self, parts: Mapping[str, TokenData]) -> None:
        """Raises TenfoldError when the parts were not made with one tokenizer."""
        self.parts = dict(parts)
        self._check_tokenizers()
        self._first = next(iter(self.parts.values()))
        self.vocab_size = max(part.vocab_size for part in self.parts.values())
        self.end_of_text = self._first.end_of_text
        self.fingerprint = self._first.fingerprint
        """sha256 over all that decides which tokens are read."""
        if len(self.parts) > 1:
            told = json.dumps([[name, part.fingerprint] for name, part in self.parts.items()])
            self.fingerprint = hashlib.sha256(told.encode()).hexdigest()

    @property
    def tokenizer_file(self) -> Path | None:
        """The tokenizer's file, where it is known."""
        entry = self._first.index.tokenizer
        return None if entry is None else self._first.path / entry.file

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of all parts."""
        return self._first.tokenizer()

    def mask_token(self) -> int | None:
        """The tokenizer's id for a masked token, if it has one."""
        return self._first.mask_token()

    def training(self, sequence_length: int, seed: int, phases: Sequence[Phase]) -> MixedSequences:
        """The training sequences. Every source has an order of its own; a single one that of `seed` itself."""
        sources = {
            name: PackedSequences(part.split("train"), sequence_length, _seed_of(name, seed))
            for name, part in self.parts.items()
        }
        return MixedSequences(sources, phases, seed)

    def held_out(self, sequence_length: int, missing: Callable[[str], None]) -> dict[str, PackedSequences]:
        """The validation sequences of each source, in the order of the text; `missing` is told of a source that has
        none."""
        found = {}
        for name, part in self.parts.items():
            try:
                found[name] = PackedSequences(part.split("validation"), sequence_length, None)
            except TenfoldError as error:
                missing(f"no validation{name and f' of {name}'}: {error}")
        return found

    def _check_tokenizers(self) -> None:
        (first, wanted), *others = ((name, part.index.tokenizer) for name, part in self.parts.items())
        for name, part in self.parts.items():
            if (end := part.end_of_text) != self.parts[first].end_of_text:
                raise TenfoldError(
                    f"data.mixture: documents of {name} end in id {end}, those of {first} in "
                    f"{self.parts[first].end_of_text}; sources are mixed only when they end in the same"
                )
        for name, entry in others:
            if wanted is None or entry is None:
                unknown = first if wanted is None else name
                raise TenfoldError(
                    f"data.mixture: the tokenizer of {unknown} ({self.parts[unknown].path}) is not known, and sources "
                    "are mixed only when they have the same; name it as data.tokenizer"
                )
            if entry.sha256 != wanted.sha256:
                raise TenfoldError(
                    f"data.mixture: {name} ({self.parts[name].path}) and {first} ({self.parts[first].path}) were "
                    "prepared with different tokenizers; prepare them with one (--tokenizer), or name their text as "
                    "path and the tokenizer as data.tokenizer"
                )


def _seed_of(name: str, seed: int) -> int:
    if not name:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")


def open_data(data: DataConfig, show_progress: bool = True) -> TrainingData:
    """All sources that the section names, prepared where they are not yet.

    The text of a mixture is tokenized with `data.tokenizer`; without one with that of a source that is prepared; when
    none is, with a BPE trained on a sample of all of them by weight, which is kept in `data.cache`.
    """
    if not data.mixture:
        return TrainingData({"": ensure_prepared(data, show_progress)})
    progress = Progress(show_progress)
    parts: dict[str, TokenData] = {}
    texts = []
    for source in data.mixture:
        path = Path(source.path).expanduser()
        if holds_shards(path) or find_token_files(path) is not None:
            parts[source.name] = _prepared(data, source, show_progress)
        else:
            texts.append(source)
    if texts and data.tokenizer is None:
        entries = [(part.path, part.index.tokenizer) for part in parts.values()]
        known = [path / entry.file for path, entry in entries if entry is not None]
        made = known[0] if known else _common_tokenizer(data, texts, progress)
        data = data.model_copy(update={"tokenizer": str(made)})
    for source in texts:
        parts[source.name] = _prepared(data, source, show_progress)
    return TrainingData({source.name: parts[source.name] for source in data.mixture})


def data_as_prepared(data: DataConfig, opened: TrainingData) -> DataConfig:
    """The same section with the options that its sources were really prepared with, as far as they all agree."""
    sections = [as_prepared(data, part) for part in opened.parts.values()]
    agreed = {
        key: getattr(sections[0], key)
        for key in PrepareConfig.model_fields
        if all(getattr(section, key) == getattr(sections[0], key) for section in sections)
    }
    return data.model_copy(update=agreed)


def section_of(data: DataConfig, source: SourceConfig) -> DataConfig:
    """The section as it would be if the source stood in it alone.

    What stands at its default is no wish: sources of a mixture may have been prepared differently.
    """
    wishes = {
        key: getattr(data, key)
        for key, field in DataConfig.model_fields.items()
        if key not in ("path", "mixture") and getattr(data, key) != field.default
    }
    return DataConfig(**wishes, path=source.path)


def _prepared(data: DataConfig, source: SourceConfig, show_progress: bool) -> TokenData:
    try:
        return ensure_prepared(section_of(data, source), show_progress)
    except TenfoldError as error:
        raise TenfoldError(f"data.mixture, {source.name}: {error}") from None


def _common_tokenizer(data: DataConfig, sources: Sequence[SourceConfig], progress: Progress) -> Path:
    """A BPE trained on the texts of all sources, each with a share by its weight; made once and kept."""
    cache = Path(data.cache).expanduser()
    opened = []
    for source in sources:
        try:
            opened.append(open_source(source.path, data.text_field, cache / "recipes", progress))
        except TenfoldError as error:
            raise TenfoldError(f"data.mixture, {source.name}: {error}") from None
    smallest = min(source.weight for source in data.mixture if source.weight)
    weights = [source.weight or smallest for source in sources]
    told = [[text.fingerprint, weight] for text, weight in zip(opened, weights, strict=True)]
    wanted = json.dumps([told, data.text_field, data.dedup, data.vocab_size, data.validation_fraction])
    path = cache / f"tokenizer-{hashlib.sha256(wanted.encode()).hexdigest()[:16]}.json"
    if not path.is_file():
        texts = _weighted_sample(opened, weights, data, progress)
        cache.mkdir(parents=True, exist_ok=True)
        tokenizer = train_tokenizer(texts, data.vocab_size, progress)
        temporary = path.with_name(f".{path.name}.tmp")
        write_file(temporary, tokenizer.to_str(pretty=True).encode())
        temporary.replace(path)
    return path


def _weighted_sample(
    opened: Sequence[Source], weights: Sequence[float], data: DataConfig, progress: Progress
) -> list[str]:
    """Texts of each source that are trained on, their bytes in the proportion of the weights.

    As many as are needed to take the largest source once; a small one is taken up to `_SAMPLED_AT_MOST` times.
    """
    samples = []
    for source in opened:
        with progress.phase(f"reading {source.name}", source.text_bytes) as advance:
            samples.append(_trained_on(survey(source.parts, data.dedup, advance), data.validation_fraction))
    sizes = [sum(len(text.encode()) for text in texts) for texts in samples]
    by_weight = [size / weight for size, weight in zip(sizes, weights, strict=True) if size] or [0.0]
    each = min(SAMPLE_BYTES / sum(weights), max(by_weight), _SAMPLED_AT_MOST * min(by_weight))
    chosen = []
    for texts, weight in zip(samples, weights, strict=True):
        left = each * weight
        for text in itertools.cycle(texts):
            if left <= 0:
                break
            chosen.append(text)
            left -= len(text.encode())
    return chosen


def _trained_on(seen: Survey, validation_fraction: float) -> list[str]:
    below = seen.tally.held_out_below(validation_fraction)
    return [text for key, text in sorted(seen.sample) if key >= below]
