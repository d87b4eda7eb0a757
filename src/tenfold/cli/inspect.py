"""`tenfold inspect`: what data holds."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console

from tenfold.config.load import build, load_run, parse_flags
from tenfold.config.run import DataConfig, RunConfig
from tenfold.errors import TenfoldError

USAGE = """usage: tenfold inspect DATA [--documents N] [--json] [flags]

DATA         text, prepared shards, token files of other programs (docs/data.md),
             or a run file, whose [data] is then looked at
--documents  how many of the first documents are shown (3)
--json       print the figures as one JSON object

examples:
  tenfold inspect data/corpus
  tenfold inspect corpus/ --text-field body
  tenfold inspect megatron/my_text_document --tokenizer tokenizer.json
  tenfold inspect run.toml
"""


def main(argv: list[str]) -> int:
    """Print what was found; TenfoldError tells what the user can put right."""
    prog = "tenfold inspect DATA"
    if "-h" in argv or "--help" in argv:
        print(USAGE)
        list(parse_flags(DataConfig(), ["--help"], prog))
    parser = argparse.ArgumentParser(
        prog="tenfold inspect", usage=USAGE.removeprefix("usage: "), add_help=False, allow_abbrev=False
    )
    parser.add_argument("data")
    parser.add_argument("--documents", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments, flags = parser.parse_known_args(argv)
    if arguments.documents < 0:
        raise TenfoldError(f"--documents {arguments.documents}: give 0 or more")
    if arguments.data.endswith(".toml"):
        run = load_run(Path(arguments.data), flags, "tenfold inspect RUN.toml")
        data = run.data
        if data.mixture:
            _mixture(run, arguments.documents, arguments.json)
            return 0
    else:
        told = dict(parse_flags(DataConfig(), flags, prog))
        data = build(DataConfig, told | {"path": arguments.data}, "flags")
    _inspect(data, arguments.documents, arguments.json)
    return 0


def _mixture(run: RunConfig, documents: int, as_plain: bool) -> None:
    """The weights of all sources stage by stage, then each source by itself."""
    from tenfold.data.mixture import section_of
    from tenfold.reporting.contents import mixture_lines

    if not as_plain:
        print("\n".join(mixture_lines(run)))
    for source in run.data.mixture:
        if not as_plain:
            print(f"\n{f'-- {source.name} ':-<80}")
        _inspect(section_of(run.data, source), documents, as_plain)


def _inspect(data: DataConfig, documents: int, as_plain: bool) -> None:
    from tenfold.data.inspection import TextFacts, TokenFacts, as_json, inspect_text, inspect_tokens
    from tenfold.data.prepare import look_up
    from tenfold.data.progress import Progress
    from tenfold.data.shards import TokenData
    from tenfold.data.vocabulary import load_tokenizer
    from tenfold.reporting.contents import text_lines, token_lines

    progress, console = Progress(show=True), Console(highlight=False, soft_wrap=True, markup=False)
    found = look_up(data, progress)
    if data.tokenizer is not None:  # one that cannot be used is told now, not when the text is prepared
        load_tokenizer(Path(data.tokenizer).expanduser())
    facts: TokenFacts | TextFacts
    with progress.phase("reading") as advance:
        if isinstance(found, TokenData):
            facts = inspect_tokens(found, documents, advance)
        else:
            facts = inspect_text(found.source.parts, documents, advance)
            if not facts.lengths.documents:
                raise TenfoldError(f"{data.path} holds no text: {facts.empty:,} documents, and all of them are empty")
    if as_plain:
        print(json.dumps({"path": data.path} | as_json(facts), ensure_ascii=False))
        return
    width = min(console.width, 80)
    lines = token_lines(facts, width) if isinstance(facts, TokenFacts) else text_lines(data.path, facts, width)
    for line in lines:
        console.print(line)
