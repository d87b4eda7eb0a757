"""What data holds, as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.cells import cell_len, chop_cells

from tenfold.config.run import RunConfig
from tenfold.data.inspection import Lengths, TextFacts, TokenFacts
from tenfold.reporting.format import format_bytes, format_share

_EIGHTHS = " ▏▎▍▌▋▊▉"
_LINES_OF_A_DOCUMENT = 4
_LAYOUTS = {
    "tenfold": "token shards",
    "megatron": "Megatron's .bin and .idx, read in place",
    "nanogpt": "nanoGPT's or llm.c's .bin, read in place",
    "olmo": "OLMo's or NumPy's .npy, read in place",
}


def token_lines(facts: TokenFacts, width: int) -> Iterator[str]:
    """Everything about tokens."""
    index = facts.data.index
    yield f"{facts.data.path}"
    rows = [["split", "documents", "tokens", "bytes", "bytes/token", "files"]]
    for split in facts.splits:
        per_token = "?" if split.text_bytes is None else f"{split.text_bytes / split.tokens:.2f}"
        known = f"{split.documents:,}" if facts.documents_known else "?"
        text_bytes = "?" if split.text_bytes is None else f"{split.text_bytes:,}"
        files = len({shard.file for shard in index.splits[split.name]})  # type: ignore[index]
        rows.append([split.name, known, f"{split.tokens:,}", text_bytes, per_token, f"{files:,}"])
    yield ""
    yield from _table(rows)
    if index.layout == "tenfold":
        dropped = index.duplicates
        repeats = "not looked for (dedup = false)"
        if dropped is not None:
            repeats = f"{dropped.documents:,} documents dropped ({format_bytes(dropped.text_bytes)})"
    else:
        repeats = "not looked for (tokens made elsewhere)"
    used = f"{facts.used:,} of {facts.data.vocab_size:,} ids occur ({format_share(facts.used / facts.data.vocab_size)})"
    end = "none" if facts.data.end_of_text is None else f"{facts.data.end_of_text}"
    tokenizer = "not known (data.tokenizer names one)" if index.tokenizer is None else index.tokenizer.file
    source = str(index.source.get("name", ""))
    yield ""
    yield from _facts(
        [
            ("source", source),
            ("format", f"{_LAYOUTS[index.layout]}, {index.dtype}"),
            ("tokenizer", tokenizer),
            ("end of text", f"id {end}" if end != "none" else "no id (data.end_of_text tells one)"),
            ("vocabulary", used),
            ("duplicates", repeats),
        ]
    )
    if facts.documents_known:
        yield ""
        yield from _lengths(facts.lengths, "tokens", width)
    yield ""
    yield from _first(facts.first, f"first documents of {facts.splits[0].name}", width)


def text_lines(name: str, facts: TextFacts, width: int) -> Iterator[str]:
    """Everything about text that is not prepared."""
    lengths = facts.lengths
    yield f"{name}: text, not prepared"
    yield ""
    empty = f" ({facts.empty:,} more are empty)" if facts.empty else ""
    share = format_share(facts.repeated_bytes / lengths.total) if lengths.total else "0%"
    yield from _facts(
        [
            ("documents", f"{lengths.documents:,}{empty}"),
            ("text", f"{lengths.total:,} bytes, {facts.characters:,} characters"),
            ("duplicates", f"{facts.repeated:,} documents repeat an earlier one ({share} of the text)"),
            *((("splits", ", ".join(f"{key} {count:,}" for key, count in facts.splits.items())),) * bool(facts.splits)),
        ]
    )
    if lengths.documents:
        yield ""
        yield from _lengths(lengths, "bytes", width)
        yield ""
        yield from _first(facts.first, "first documents", width)


def mixture_lines(run: RunConfig) -> Iterator[str]:
    """The share of each source in every stage."""
    sources = run.data.mixture
    weights = {source.name: source.weight for source in sources}
    rows = [["source", *(stage.name for stage in run.stages), "path"]]
    columns = []
    for stage in run.stages:
        weights = stage.mixture if stage.mixture is not None else weights
        columns.append([weights.get(source.name, 0.0) / sum(weights.values()) for source in sources])
    for number, source in enumerate(sources):
        rows.append([source.name, *(format_share(column[number]) for column in columns), source.path])
    yield f"a mixture of {len(sources)} sources; their shares of the tokens, by stage:"
    yield ""
    yield from _table(rows)


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(cell_len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for name, *numbers in rows:
        right = (f"{number:>{size}}" for number, size in zip(numbers, widths[1:], strict=True))
        yield "  ".join([f"{name:<{widths[0]}}", *right])


def _facts(pairs: Sequence[tuple[str, str]]) -> Iterator[str]:
    size = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        yield f"{name:<{size}}  {value}"


def _lengths(lengths: Lengths, unit: str, width: int) -> Iterator[str]:
    assert lengths.shortest is not None
    assert lengths.longest is not None
    (low, low_at), (high, high_at) = lengths.shortest, lengths.longest
    yield f"{unit} in a document: {lengths.total / lengths.documents:,.1f} on average"
    yield f"shortest {low:,} (document {low_at + 1:,}), longest {high:,} (document {high_at + 1:,})"
    filled = [place for place, count in enumerate(lengths.counts) if count]
    rows = range(filled[0], filled[-1] + 1)
    labels = {place: f"{2**place:,} - {2 ** (place + 1) - 1:,}" if place else "1" for place in rows}
    counts = {place: f"{int(lengths.counts[place]):,}" for place in rows}
    label, count = max(map(len, labels.values())), max(map(len, counts.values()))
    room = max(width - label - count - 4, 8)
    most = int(lengths.counts.max())
    for place in rows:
        bar = _bar(int(lengths.counts[place]) / most, room)
        yield f"{labels[place]:>{label}}  {bar:<{room}}  {counts[place]:>{count}}"


def _bar(share: float, room: int) -> str:
    """A bar of a share of `room` cells, at least an eighth of one where there is anything."""
    eighths = max(round(share * room * 8), 1 if share else 0)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _first(documents: Sequence[tuple[str, bool]], title: str, width: int) -> Iterator[str]:
    if not documents:
        return
    yield f"{title}:"
    size = len(str(len(documents)))
    for number, (text, goes_on) in enumerate(documents, 1):
        # On one line, and nothing in it that a terminal would obey.
        plain = "".join(" " if char == "\t" else char if char.isprintable() else "↵" for char in text)
        lines = chop_cells(plain, width - size - 4) or [""]
        for place, line in enumerate(lines[:_LINES_OF_A_DOCUMENT]):
            is_last = place == _LINES_OF_A_DOCUMENT - 1 or place == len(lines) - 1
            cut = " …" if is_last and (goes_on or len(lines) > _LINES_OF_A_DOCUMENT) else ""
            yield f"{number if place == 0 else '':>{size}}  {line}{cut}"
