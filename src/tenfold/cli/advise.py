"""`tenfold advise`: will Pseudo-to-Real pay for this run, on this machine?"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tenfold.cli.train import expected_vocabulary
from tenfold.config.load import load_run, parse_flags
from tenfold.config.run import RunConfig
from tenfold.errors import TenfoldError

if TYPE_CHECKING:
    import torch

    from tenfold.data.progress import Progress
    from tenfold.planning.stages import Stage
    from tenfold.training.advising import Candidate

USAGE = """usage: tenfold advise RUN.toml [--seconds N] [--json] [flags]

RUN.toml   the run file; every value in it can be given as a flag too
--seconds  for how long steps of each of the two stages are timed (20)
--json     print one JSON object

Will sharing pay here? The first and the last stage of the run file (of one
stage: with all layers shared, and as it is) are built one after the other, and
some of their steps are timed on random tokens: no data is prepared or read.

time    sharing for a share f of the run saves f (1 - p / r) of its time, p and
        r being the seconds of a token in a Pseudo and a Real step
energy  likewise, from the machine's meters, or from energy.watts; else none is
        claimed
memory  weights, gradients and optimizer state by stored parameters
loss    not computed: what is told is the measured run that is most like this
        one in length, then in the share that was shared

Both stages do the same arithmetic: sharing saves the optimizer's work, memory
and traffic. Where arithmetic bounds the step it saves next to nothing, and the
advice is not to share. docs/sharing.md has the rule in full.

examples:
  tenfold advise run.toml
  tenfold advise run.toml --seconds 60 --energy.watts 250
  tenfold advise run.toml --model.preset gpt2-124m --json
"""


def main(argv: list[str]) -> int:
    """Print the advice."""
    if "-h" in argv or "--help" in argv:
        print(USAGE)
        list(parse_flags(RunConfig(), ["--help"], "tenfold advise RUN.toml"))
    parser = argparse.ArgumentParser(
        prog="tenfold advise", usage=USAGE.removeprefix("usage: "), add_help=False, allow_abbrev=False
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json", action="store_true")
    arguments, flags = parser.parse_known_args(argv)
    if not 0 < arguments.seconds < 86400:
        raise TenfoldError(f"--seconds = {arguments.seconds:g}: give the seconds that each stage is timed for")
    config = load_run(arguments.run, flags, "tenfold advise RUN.toml")

    # Imported here: PyTorch takes seconds, and a mistake in the arguments should be told at once.
    import torch
    from rich.console import Console

    from tenfold.data.progress import Progress
    from tenfold.hardware.cores import usable_cores
    from tenfold.hardware.device import matrix_rate, pick_device
    from tenfold.hardware.memory import keep_freed_memory
    from tenfold.planning.stages import plan_stages
    from tenfold.reporting.tables import advice_table
    from tenfold.training.advising import decide
    from tenfold.training.setup import DTYPES, check_compiler, memory_for_state, resolve

    device = pick_device(config.training.device)
    keep_freed_memory()  # as training does
    torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))
    vocabulary, mask = expected_vocabulary(config)
    ends = config.data.end_of_text or 0 if config.data.document_mask else None
    config = resolve(config, vocabulary, device, mask, ends)
    if config.training.compile:
        check_compiler(device)
    stages = plan_stages(config)
    last = stages[-1]
    pair = _two_stages(stages)
    show = Progress(True)
    tokens, steps, memory = last.tokens_at(last.last_step), last.last_step, memory_for_state(device)
    pseudo, real = (_counted(config, stage) for stage in pair)
    if max(pseudo.state_bytes, real.state_bytes) <= memory:
        rate = matrix_rate(device, DTYPES[config.training.precision])
        pseudo = _timed(pseudo, config, pair[0], device, arguments.seconds, rate, show)
        real = _timed(real, config, pair[1], device, arguments.seconds, rate, show)
    asked = None
    if len(stages) > 1 and stages[0].rule is None:
        asked = (stages[0].tokens_at(stages[0].last_step) / tokens, stages[0].last_step)
    advice = decide(pseudo, real, tokens, steps, asked, memory)
    found = {
        "run": str(arguments.run),
        "device": str(device),
        "tokens": tokens,
        "steps": steps,
        "memory_bytes": memory,
        "stages": [_told(candidate) for candidate in (pseudo, real)],
        **dataclasses.asdict(advice),
    }
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        terminal = Console()
        console = Console(width=min(100, terminal.width))
        console.print(advice_table(found))
    return 0


def _two_stages(stages: list[Stage]) -> tuple[Stage, Stage]:
    """The coarsest stage of a run and its finest; for a run of one stage, that one with all layers shared beside it."""
    from tenfold.sharing.patterns import Pattern

    first, last = stages[0], stages[-1]
    if len(stages) == 1:
        named = first.config.model_copy(update={"name": "shared", "sharing": "all"})
        shared = dataclasses.replace(last.sharing, pattern=Pattern([0] * last.sharing.pattern.layers))
        first = dataclasses.replace(first, config=named, sharing=shared)
    if first.sharing == last.sharing:
        raise TenfoldError(
            f"there is nothing to compare: {first.name} and {last.name} share as {last.sharing}. Advice is on sharing "
            "against a last stage whose layers share less"
        )
    return first, last


def _counted(config: RunConfig, stage: Stage) -> Candidate:
    """A stage by its shape alone."""
    from tenfold.reporting.format import format_sharing
    from tenfold.training.advising import Candidate
    from tenfold.training.setup import describe_stages, state_bytes

    (told,) = describe_stages(config, [stage])
    stored = told["stored_parameters"]
    needed = state_bytes(stored, config.optim)
    return Candidate(stage.name, format_sharing(told), stored, needed, told["flops_per_token"])


def _timed(
    candidate: Candidate,
    config: RunConfig,
    stage: Stage,
    device: torch.device,
    seconds: float,
    rate: float,
    show: Progress,
) -> Candidate:
    """The stage with its steps timed; `rate` is the machine's matrix rate."""
    from tenfold.hardware.memory import is_out_of_memory
    from tenfold.training.timing import time_stage

    try:
        with show.timed(f"timing steps of {stage.name} for some {seconds:g} s"):
            timing = time_stage(config, stage, device, seconds, show.note)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise TenfoldError(
            f"out of memory while {stage.name} was timed: {str(error).splitlines()[0]}. Set a smaller "
            'training.micro_batch_size, or training.recompute = "selective" or "full"'
        ) from None
    reached = candidate.flops_per_token / timing.seconds_per_token / rate
    return dataclasses.replace(candidate, timing=timing, rate_share=reached)


def _told(candidate: Candidate) -> dict[str, Any]:
    told = {key: value for key, value in vars(candidate).items() if key != "timing"}
    if (timing := candidate.timing) is None:
        return told
    low, median, high = timing.quartiles
    return told | {
        "step_seconds": median,
        "step_seconds_quartiles": [low, high],
        "timed_steps": len(timing.step_seconds),
        "tokens_per_step": timing.tokens_per_step,
        "tokens_per_second": 1 / timing.seconds_per_token,
        "optimizer_share": timing.optimizer_share,
        "joules_per_token": timing.joules_per_token,
        "energy_source": timing.energy_source,
    }
