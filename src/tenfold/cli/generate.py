"""`tenfold generate`: let a trained model write."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from tenfold.errors import TenfoldError

DESCRIPTION = """Write text with a model out of a run directory, Pseudo or Real, as it is chosen.

Examples:
  tenfold generate runs/demo --prompt "def read(self):"
  tenfold generate runs/demo --checkpoint 300 --temperature 0"""


@dataclass(frozen=True)
class GenerateArguments:
    run: Annotated[Path, tyro.conf.Positional]
    """Run directory, as given to `tenfold train --out`."""
    prompt: str = ""
    """Text to go on from; empty begins a document."""
    tokens: int = 200
    """Tokens to write at most."""
    temperature: float = 0.8
    """0 takes the likeliest token; higher is more varied."""
    top_k: int = 0
    """Choose among this many likeliest tokens; 0 is all."""
    top_p: float = 1.0
    """Choose among the likeliest tokens that make up this probability."""
    seed: int = 1
    """The same seed writes the same text."""
    checkpoint: int | None = None
    """Step of the checkpoint to use; unset takes the newest."""
    device: str = "auto"
    """auto, cpu, or cuda."""


def main(argv: list[str]) -> int:
    """Print the prompt and what the model makes of it."""
    arguments = tyro.cli(GenerateArguments, args=argv, prog="tenfold generate", description=DESCRIPTION)
    fits = arguments.tokens > 0 and arguments.temperature >= 0 and arguments.top_k >= 0 and 0 < arguments.top_p <= 1
    if not (fits and 0 <= arguments.seed < 2**63):
        raise TenfoldError(
            "generate needs --tokens > 0, --temperature >= 0, --top-k >= 0, --top-p over 0 up to 1 and --seed from 0 "
            "to 2**63 - 1"
        )

    try:
        arguments.prompt.encode()
    except UnicodeEncodeError:
        raise TenfoldError("--prompt is not valid UTF-8") from None

    from tenfold.data.vocabulary import end_of_text, load_tokenizer
    from tenfold.evaluation.generation import generate
    from tenfold.hardware.device import pick_device
    from tenfold.training.setup import load_model

    model = load_model(arguments.run, arguments.checkpoint, pick_device(arguments.device))
    tokenizer = load_tokenizer(arguments.run / "tokenizer.json")
    end = end_of_text(tokenizer, arguments.run / "tokenizer.json")
    prompt = [end, *tokenizer.encode(arguments.prompt, add_special_tokens=False).ids]
    sampling = (arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed)
    print(arguments.prompt, end="", flush=True)
    written: list[int] = []
    shown = ""
    for token in generate(model, prompt, arguments.tokens, *sampling, stop=end):
        written.append(token)
        text = tokenizer.decode(written)
        # A character may need several tokens; what is not whole yet ends in the replacement character.
        if not text.endswith("�"):
            print(text[len(shown) :], end="", flush=True)
            shown = text
    print(tokenizer.decode(written)[len(shown) :])
    return 0
