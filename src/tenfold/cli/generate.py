"""`tenfold generate`: let a trained model write."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from tenfold.errors import TenfoldError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from tenfold.evaluation.text import WrittenText
    from tenfold.nn.decoder import Decoder

DESCRIPTION = """Write text with a model out of a run directory, Pseudo or Real: one prompt as the tokens are chosen,
several side by side, each in its turn when it is whole. An encoder fills in each [MASK] of its prompts instead.

Examples:
  tenfold generate runs/demo --prompt "def read(self):"
  tenfold generate runs/demo --prompt "import " --prompt "class A" --temperature 0 --stop "\\n\\n"
  tenfold generate runs/demo --prompts prompts.jsonl --json > written.jsonl
  tenfold generate runs/demo --checkpoint 300 --top-p 0.9
  tenfold generate runs/encoder --prompt "for i in [MASK](len(names)):" --top-k 5"""


@dataclass(frozen=True)
class GenerateArguments:
    run: Annotated[Path, tyro.conf.Positional]
    """Run directory, as given to `tenfold train --out`."""
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text to go on from, as often as you like; none begins a document."""
    prompts: Path | None = None
    """File of prompts: one a line, or JSON lines (.jsonl) that hold each in --text-field."""
    text_field: str = "prompt"
    """The field of a JSON record that holds the prompt."""
    tokens: int = 200
    """Tokens to write at most, for each prompt."""
    temperature: float = 0.8
    """0 takes the likeliest token; higher is more varied."""
    top_k: int = 0
    """Choose among this many likeliest tokens; 0 is all."""
    top_p: float = 1.0
    """Choose among the likeliest tokens that make up this probability."""
    seed: int = 1
    """The same seed writes the same text."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """End a text before this; \\n is a new line. As often as you like. The end of a document always ends it."""
    batch_size: int = 8
    """Prompts continued side by side; it changes the speed alone."""
    json: bool = False
    """One JSON object a line for each prompt: prompt, text, tokens, and what ended it (stop or length)."""
    checkpoint: int | None = None
    """Step of the checkpoint to use; unset takes the newest."""
    device: str = "auto"
    """auto, cpu, or cuda."""


def main(argv: list[str]) -> int:
    """Print each prompt and what the model makes of it."""
    arguments = tyro.cli(GenerateArguments, args=argv, prog="tenfold generate", description=DESCRIPTION)
    limits = {
        "tokens": ("more than 0", arguments.tokens > 0),
        "temperature": ("0 or more", arguments.temperature >= 0),
        "top_k": ("0 or more", arguments.top_k >= 0),
        "top_p": ("over 0, up to 1", 0 < arguments.top_p <= 1),
        "seed": ("from 0 to 2**63 - 1", 0 <= arguments.seed < 2**63),
        "batch_size": ("more than 0", arguments.batch_size > 0),
    }
    for name, (allowed, fits) in limits.items():
        if not fits:
            flag = name.replace("_", "-")
            raise TenfoldError(f"--{flag} {getattr(arguments, name)}: it must be {allowed}")
    stops = [stop.replace("\\n", "\n") for stop in arguments.stop]
    if "" in stops:
        raise TenfoldError("--stop is empty: every text ends before nothing; leave it out, or give a text")
    prompts = _prompts(arguments)

    from tenfold.data.vocabulary import end_of_text, load_tokenizer
    from tenfold.evaluation.generation import generate_batch
    from tenfold.evaluation.text import WrittenText
    from tenfold.hardware.device import pick_device
    from tenfold.training.setup import load_model

    if not (arguments.run / "tokenizer.json").is_file() and (arguments.run / "config.toml").is_file():
        raise TenfoldError(f"{arguments.run} was trained on tokens without a tokenizer: put its tokenizer.json there")
    model = load_model(arguments.run, arguments.checkpoint, pick_device(arguments.device)).eval()
    tokenizer = load_tokenizer(arguments.run / "tokenizer.json")
    end = end_of_text(tokenizer, arguments.run / "tokenizer.json")
    if model.config.objective == "masked":
        return _fill(model, tokenizer, end, prompts, arguments)
    encoded = [[end, *tokenizer.encode(prompt, add_special_tokens=False).ids] for prompt in prompts]
    for number, tokens in enumerate(encoded, start=1):
        if len(tokens) > model.max_positions:
            message = f"prompt {number} has {len(tokens):,} tokens; the model sees the last {model.max_positions:,}"
            print(f"tenfold: {message}", file=sys.stderr)

    texts = [WrittenText(tokenizer, stops) for _ in prompts]
    streaming = len(prompts) == 1 and not arguments.json
    if streaming:
        print(prompts[0], end="", flush=True)
    printed = 0
    sampling = (arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed)
    for number, token in generate_batch(
        model,
        encoded,
        arguments.tokens,
        *sampling,
        stop=end,
        batch_size=arguments.batch_size,
        ended=lambda number: texts[number].stopped,
    ):
        # A batch is over when a token of the next one comes.
        while not streaming and printed < number // arguments.batch_size * arguments.batch_size:
            _print(prompts[printed], texts[printed], printed, arguments)
            printed += 1
        shown = texts[number].add(token)
        if streaming and shown:
            print(shown, end="", flush=True)
    if streaming:
        print(texts[0].end())
        return 0
    for number in range(printed, len(prompts)):
        _print(prompts[number], texts[number], number, arguments)
    return 0


def _fill(model: Decoder, tokenizer: Tokenizer, end: int, prompts: list[str], arguments: GenerateArguments) -> int:
    """An encoder's way: the likeliest tokens for each [MASK] of each prompt, --top-k of them or five."""
    from tenfold.evaluation.masked import encode_masked, fill_masks

    assert model.config.mask_token is not None
    encoded = [[end, *encode_masked(tokenizer, prompt, model.config.mask_token)] for prompt in prompts]
    for prompt, tokens in zip(prompts, encoded, strict=True):
        fills = [
            [{"token": token, "text": tokenizer.decode([token]), "probability": share} for token, share in fill]
            for fill in fill_masks(model, tokens, arguments.top_k or 5)
        ]
        if arguments.json:
            print(json.dumps({"prompt": prompt, "fills": fills}, ensure_ascii=False), flush=True)
            continue
        print(prompt)
        for number, fill in enumerate(fills, start=1):
            shown = ", ".join(f"{each['text']!r} {each['probability']:.1%}" for each in fill)
            print(f"  mask {number}: {shown}", flush=True)
    return 0


def _prompts(arguments: GenerateArguments) -> list[str]:
    """What to go on from, in order: the prompts of the command line, then those of the file."""
    prompts = list(arguments.prompt)
    for prompt in prompts:
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise TenfoldError("--prompt is not valid UTF-8") from None
    if arguments.prompts is None:
        return prompts or [""]

    from tenfold.data.reading import RECORD_SUFFIXES, plain_suffix, read_text

    found = read_text(arguments.prompts, arguments.text_field)
    if plain_suffix(arguments.prompts) in RECORD_SUFFIXES:
        prompts += found
    else:
        prompts += [line for line in "".join(found).splitlines() if line.strip()]
    if not prompts:
        raise TenfoldError(f"{arguments.prompts} holds no prompts; write one a line")
    return prompts


def _print(prompt: str, written: WrittenText, number: int, arguments: GenerateArguments) -> None:
    written.end()
    if arguments.json:
        full = len(written.tokens) == arguments.tokens and not written.stopped
        told = {"prompt": prompt, "text": written.text, "tokens": written.tokens, "ended": "length" if full else "stop"}
        print(json.dumps(told, ensure_ascii=False), flush=True)
        return
    print(f"{'' if number == 0 else '-' * 8 + chr(10)}{prompt}{written.text}", flush=True)
