"""`tenfold prepare`: make token shards of a text."""

from __future__ import annotations

from pathlib import Path

from tenfold.config.load import build, parse_flags
from tenfold.config.run import PrepareConfig
from tenfold.data.prepare import prepare
from tenfold.data.recipes import RECIPES
from tenfold.data.shards import TokenData
from tenfold.errors import TenfoldError

_USAGE = f"""usage: tenfold prepare SOURCE OUT [flags]

SOURCE  a file or folder of text (.txt .md .rst .py .jsonl, also .gz or .zst;
        .parquet .arrow; a dataset saved by `datasets`; docs/data.md),
        python-stdlib, or recipe:NAME, where NAME is one of
        {", ".join(RECIPES)}
OUT     a new folder for the token shards

examples:
  tenfold prepare python-stdlib data/python --vocab-size 4096
  tenfold prepare corpus/ data/corpus --validation-fraction 2% --dedup
  tenfold prepare fineweb/ data/fineweb --tokenizer tokenizer.json
  tenfold prepare wiki.jsonl.zst data/wiki --text-field body

A preparation that was stopped goes on when the same command is given again.
"""


def main(argv: list[str]) -> int:
    """Run the command; TenfoldError tells what the user can put right."""
    prog = "tenfold prepare SOURCE OUT"
    if "-h" in argv or "--help" in argv:
        print(_USAGE)
        list(parse_flags(PrepareConfig(), ["--help"], prog))
    places, flags = argv[:2], argv[2:]
    if len(places) < 2 or any(place.startswith("-") for place in places):
        raise TenfoldError(f"prepare needs a SOURCE and an OUT before any flags\n\n{_USAGE}")
    source, out = places
    options = build(PrepareConfig, dict(parse_flags(PrepareConfig(), flags, prog)), "flags")
    print(summary(prepare(source, Path(out), options)))
    return 0


def summary(data: TokenData) -> str:
    """What was made, in lines for people."""
    lines = [f"{data.path}: vocabulary of {data.vocab_size:,}, {data.index.dtype}"]
    for name, shards in data.index.splits.items():
        if shards:
            split = data.split(name)
            lines.append(
                f"  {name}: {split.tokens:,} tokens, {split.documents:,} documents, {split.text_bytes or 0:,} bytes "
                f"({(split.text_bytes or 0) / split.tokens:.2f} bytes a token), {len(shards)} shard(s)"
            )
        else:
            lines.append(f"  {name}: nothing")
    return "\n".join(lines)
