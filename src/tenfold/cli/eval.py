"""`tenfold eval`: measure a trained model on a text."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tenfold.config.load import build, parse_flags, read_toml
from tenfold.config.run import EvaluationOptions, RunConfig
from tenfold.errors import TenfoldError

if TYPE_CHECKING:
    from tenfold.evaluation.held_out import HeldOut

USAGE = """usage: tenfold eval RUN [DATA] [flags]

RUN           run directory, as given to `tenfold train --out`
DATA          text or token shards, whatever data.path may be; without it the
              run's own held-out text, just as its validation reads it
--checkpoint  step of the checkpoint to ask; the newest if left out
--window      tokens the model sees at once; the run's sequence_length
--batch-size  windows or passages asked at once; changes the speed alone (8)
--device      auto, cpu, or cuda
--json        print one JSON object

The numbers are also added to RUN/evals.jsonl. docs/evaluation.md says what
each of them is.

examples:
  tenfold eval runs/demo
  tenfold eval runs/demo wiki.test.raw --task strided --stride 256
  tenfold eval runs/demo wikitext/test.parquet --joined
  tenfold eval runs/demo lambada_test.jsonl --task cloze
  tenfold eval runs/demo novel.txt --task cloze --passages paragraphs --min-words 20
"""

FILE = "evals.jsonl"

_UNITS = {
    "loss": "nats per token",
    "perplexity": "per token",
    "word_perplexity": "per word",
    "cut": "longer than the window: their beginning was not seen",
    "too_long": "left out: the last word is longer than the window",
}


def main(argv: list[str]) -> int:
    """Run the command; TenfoldError tells what the user can put right."""
    prog = "tenfold eval RUN [DATA]"
    if "-h" in argv or "--help" in argv:
        print(USAGE)
        list(parse_flags(EvaluationOptions(), ["--help"], prog))
    parser = argparse.ArgumentParser(
        prog="tenfold eval", usage=USAGE.removeprefix("usage: "), add_help=False, allow_abbrev=False
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--checkpoint", type=int)
    parser.add_argument("--window", type=int)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", action="store_true")
    arguments, rest = parser.parse_known_args(argv)
    data = rest.pop(0) if rest and not rest[0].startswith("-") else None
    options = build(EvaluationOptions, dict(parse_flags(EvaluationOptions(), rest, prog)), "flags")
    if arguments.batch_size < 1:
        raise TenfoldError(f"--batch-size = {arguments.batch_size}: at least one window is asked at once")
    config = _config(arguments.run)
    window = arguments.window or config.data.sequence_length
    most = config.model.max_positions or window
    if not 0 < window <= most:
        raise TenfoldError(f"--window = {window}: the model sees 1 to {most:,} tokens")

    # Imported here: PyTorch takes seconds, and a mistake in the arguments should be told at once.
    from tenfold.data.progress import Progress
    from tenfold.evaluation.sets import TextTokenizer, evaluate, read_set
    from tenfold.hardware.device import pick_device
    from tenfold.training.setup import find_checkpoint, load_model

    device = pick_device(arguments.device)
    checkpoint = find_checkpoint(arguments.run, arguments.checkpoint)
    step = int(checkpoint.name.removeprefix("step-"))
    if data is None:
        held_out = _held_out(config, checkpoint, options, window)
    else:
        tokenizer, recipes = TextTokenizer.of(arguments.run / "tokenizer.json"), Path(config.data.cache) / "recipes"
        subject = read_set(data, options, tokenizer, window, recipes, Progress(not arguments.json))
    model = load_model(arguments.run, step, device).eval()
    began = time.monotonic()
    if data is None:
        values = _validation_values(held_out.evaluate(model, arguments.batch_size))
    else:
        with _progress(subject.work) as advance:
            values = evaluate(model, subject, arguments.batch_size, config.training.loss_chunk, advance)
    asked = data or "held-out text"
    found = {
        "run": str(arguments.run),
        "step": step,
        "data": asked,
        "task": options.task,
        "values": values,
        "options": options.model_dump(mode="json", exclude={"task"}, exclude_none=True),
        "seconds": round(time.monotonic() - began, 3),
    }
    print(json.dumps(found, ensure_ascii=False) if arguments.json else describe(found))
    try:
        with (arguments.run / FILE).open("a", encoding="utf-8") as record:
            record.write(json.dumps(found, ensure_ascii=False) + "\n")
    except OSError as error:
        print(f"tenfold: not added to {arguments.run / FILE}: {error.strerror}", file=sys.stderr)
    return 0


def describe(found: dict[str, Any]) -> str:
    """What was measured, in lines for people."""
    lines = [f"{found['run']}, step {found['step']}, on {found['data']}: {found['task']} ({found['seconds']:.1f} s)"]
    for key, value in found["values"].items():
        unit = "nats per word" if found["task"] == "cloze" and key == "loss" else _UNITS.get(key, "")
        if found["task"] == "cloze" and key == "perplexity":
            unit = "per word"
        number = f"{value:,}" if isinstance(value, int) else f"{value:,.4f}"
        lines.append(f"  {key.replace('_', ' '):<16}{number:>14}  {unit}".rstrip())
    return "\n".join(lines)


def _config(run: Path) -> RunConfig:
    path = run / "config.toml"
    if not path.is_file():
        raise TenfoldError(
            f"{run} is no run directory: it has no config.toml; give what `tenfold train --out` was given"
        )
    return build(RunConfig, read_toml(path), str(path))


def _held_out(config: RunConfig, checkpoint: Path, options: EvaluationOptions, window: int) -> HeldOut:
    """The run's own held-out text, as much of it as its validations read unless a limit is given."""
    from tenfold.checkpoint.store import read_manifest
    from tenfold.data.mixture import open_data
    from tenfold.evaluation.held_out import HeldOut

    if options.task != "loss":
        raise TenfoldError(
            f"--task {options.task} needs a DATA; the run's own held-out text is asked for loss, as its validation is"
        )
    opened = open_data(config.data)
    if opened.fingerprint != read_manifest(checkpoint)["data_fingerprint"]:
        raise TenfoldError(
            f"data.path = {config.data.path} is not what this run was trained on: it has changed since. Name a DATA"
        )
    missing: list[str] = []
    found = opened.held_out(window, missing.append)
    if not found:
        raise TenfoldError(f"{'; '.join(missing)}. Name a DATA")
    training = config.training
    if options.limit is not None:
        training = training.model_copy(update={"validation_sequences": -(-options.limit // window)})
    return HeldOut(found, config.data, training)


def _validation_values(told: dict[str, Any]) -> dict[str, float | int]:
    """What a validation tells, under the names of an evaluation."""
    from tenfold.evaluation.loss import perplexity

    values = {"loss": told["validation_loss"]}
    if "bits_per_byte" in told:
        values["perplexity"] = perplexity(told["validation_loss"])
    values |= {key: told[key] for key in ("bits_per_byte", "masked_accuracy") if key in told}
    return values | {f"loss_of_{name}": loss for name, loss in told.get("source_losses", {}).items()}


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar with the time left, on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("evaluating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        yield lambda done: progress.advance(task, done)
