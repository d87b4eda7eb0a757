"""`tenfold train`: pretrain a model from a run file."""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from tenfold.cli.ranks import on_ranks
from tenfold.config.load import build, dump_toml, leaves, load_run, parse_flags, read_toml
from tenfold.config.parallel import ParallelConfig
from tenfold.config.run import EnergyConfig, RunConfig
from tenfold.errors import TenfoldError
from tenfold.parallel.launch import world_of

if TYPE_CHECKING:
    import torch

    from tenfold.data.mixture import TrainingData
    from tenfold.parallel.launch import World
    from tenfold.parallel.logs import RankLog
    from tenfold.planning.machine import Ranks
    from tenfold.training.deciding import Decided
    from tenfold.training.run import Run

USAGE = """usage: tenfold train RUN.toml [--out FOLDER] [--resume] [--dry-run] [flags]

RUN.toml   the run file; every value in it can be given as a flag too
--out      run directory for all that the run writes (runs/NAME of the run file)
--resume   go on from the newest whole checkpoint; begin if there is none
--dry-run  print what every stage weighs and costs, and exit

examples:
  tenfold train examples/demo.toml --out runs/demo
  tenfold train run.toml --optim.lr 3e-4 --stages.0.until 10%
  tenfold train run.toml --start.checkpoint runs/pseudo --out runs/real
  tenfold train run.toml --model.preset m6-10t --dry-run
"""

# What may differ between a run and its resumption: nothing that training depends on.
_FREE = {"training.log_every", "training.validate_every", "training.device", "checkpoint.every", "checkpoint.keep"}
_FREE |= {f"energy.{key}" for key in EnergyConfig.model_fields}
_FREE |= {f"parallel.{key}" for key in ParallelConfig.model_fields}

_BEGINNING = {".lock", "tokenizer.json", "logs"}


def main(argv: list[str]) -> int:
    """Run the command, on one process or as one of many; TenfoldError tells what the user can put right."""
    if "-h" in argv or "--help" in argv:
        if not world_of(os.environ).first:
            return 0
        print(USAGE)
        list(parse_flags(RunConfig(), ["--help"], "tenfold train RUN.toml"))
    return on_ranks(lambda world, log: _main(argv, world, log))


def _main(argv: list[str], world: World, log: RankLog | None) -> int:
    parser = argparse.ArgumentParser(
        prog="tenfold train", usage=USAGE.removeprefix("usage: ").replace("%", "%%"), add_help=False, allow_abbrev=False
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    arguments, flags = parser.parse_known_args(argv)
    config = load_run(arguments.run, flags)
    if arguments.dry_run:
        return dry_run(config)
    return train(config, arguments.out or Path("runs") / arguments.run.stem, arguments.resume, world, log)


def dry_run(config: RunConfig) -> int:
    """Print what every stage is, from the configuration alone: no data is read, no weights are made."""
    from tenfold.planning.stages import plan_stages
    from tenfold.reporting.display import dry_run_table
    from tenfold.training.setup import describe_stages, with_vocabulary
    from tenfold.training.start import Start

    if config.model.vocab_size is None:
        model = with_vocabulary(config.model, *expected_vocabulary(config))
        config = config.model_copy(update={"model": model})
    training = config.training
    if training.precision == "auto":
        training = training.model_copy(update={"precision": "fp32"})
        config = config.model_copy(update={"training": training})
    stages = plan_stages(config)
    if config.start.checkpoint is not None:
        Start(config, stages[0], None)  # for its faults
    console = Console()
    console.print(dry_run_table(describe_stages(config, stages)))
    if any(config.offload.of_stage(stage.config.offload).on for stage in stages):
        from tenfold.hardware.device import pick_device
        from tenfold.reporting.placement import placement_table
        from tenfold.training.offload_plan import budgets_here, foresee

        device = pick_device(training.device)
        for placed in foresee(config, stages, device, lambda wanted: budgets_here(wanted, device)):
            console.print(f"\nwhere the state of {placed['stage']} would lie, on one rank in {training.precision}:")
            console.print(placement_table(placed))
    return 0


def expected_vocabulary(config: RunConfig) -> tuple[int, int | None]:
    """Size of the vocabulary, and the id of its mask token, if it has one."""
    from tenfold.data.shards import INDEX, TokenData
    from tenfold.data.vocabulary import load_tokenizer, mask_token, vocabulary_size

    for path in [source.path for source in config.data.mixture] or [config.data.path]:
        if (Path(path) / INDEX).is_file():
            data = TokenData.open(Path(path))
            return data.vocab_size, data.mask_token()
    if config.data.tokenizer is not None:
        tokenizer = load_tokenizer(Path(config.data.tokenizer))
        return vocabulary_size(tokenizer), mask_token(tokenizer)
    return config.data.vocab_size, None


def train(config: RunConfig, folder: Path, resume: bool, world: World, log: RankLog | None) -> int:
    """Train in the run directory `folder`; the exit code. A signal saves, and is no failure."""
    if world.first:
        started = _check_folder(folder, resume)

    # Imported here, and only now: PyTorch takes seconds, and a mistake in the arguments should be told at once.
    from tenfold.hardware.device import pick_device
    from tenfold.parallel.launch import open_world

    device = pick_device(config.training.device)
    with open_world(world, device.type, config.parallel.timeout):
        started = world.agreed(started if world.first else False)
        if log is not None:
            _open_log(log, folder, device, world)
        return _train(config, folder, started, device, world)


def _open_log(log: RankLog, folder: Path, device: torch.device, world: World) -> None:
    """Let each rank's output go to the run directory, which all of them must see."""
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    where = f"{socket.gethostname()}, {device}{f':{world.local_rank}' if device.type == 'cuda' else ''}"
    header = f"rank {world.rank} of {world.size} on {where}, process {os.getpid()}, restart {attempt}"
    first = [str(log.open(folder, header).resolve())] if world.first else []
    world.check_seen(first, "which is in the run directory")
    if not world.first:
        log.open(folder, header)


def _check_folder(folder: Path, resume: bool) -> bool:
    """Whether a run was begun in `folder`; TenfoldError where none can be begun, or gone on with."""
    started = (folder / "config.toml").is_file()
    if folder.exists() and not folder.is_dir():
        raise TenfoldError(f"{folder} is not a folder; give another --out")
    # What a run that was killed while it began may have left is no run yet.
    if folder.is_dir() and {path.name for path in folder.iterdir()} - _BEGINNING and not (resume and started):
        if resume:
            raise TenfoldError(f"{folder} is not a run directory: it has no config.toml; give another --out")
        raise TenfoldError(f"{folder} exists already; give --resume to go on with it, or another --out")
    return started


def _train(config: RunConfig, folder: Path, started: bool, device: torch.device, world: World) -> int:
    import torch

    from tenfold.data.mixture import open_data
    from tenfold.hardware.cores import usable_cores
    from tenfold.hardware.memory import address_space_is_limited, keep_freed_memory, return_freed_memory
    from tenfold.planning.stages import plan_stages
    from tenfold.reporting.display import Display, closing_table
    from tenfold.reporting.foreseen import foreseen_table
    from tenfold.reporting.metrics import MetricsWriter, read_metrics
    from tenfold.reporting.report import write_report
    from tenfold.training.run import Run
    from tenfold.training.setup import check_tokens

    within = any(config.offload.of_stage(stage.offload).on for stage in config.stages)
    return_freed_memory() if within and address_space_is_limited() else keep_freed_memory()
    if world.size == 1:  # of many, each was given its own
        torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))
    plan_stages(config)  # its faults are told before any text is read
    given = config
    decided, prepared = world.at_leisure("preparing data", lambda: _decided(given, folder, started, device, world))
    config = decided.config
    world.check_seen(prepared, "which is the prepared data (data.path, data.cache)")
    data = open_data(config.data)
    assert config.model.vocab_size is not None
    check_tokens(data, config.model.vocab_size)

    console = Console(quiet=not world.first)
    writer: MetricsWriter | None = None

    def emit(event: dict[str, object]) -> None:
        assert writer is not None
        writer.write(event)
        display.event(event)

    stages = plan_stages(config)
    display = Display(stages[-1].tokens_at(stages[-1].last_step), console=console)
    # Whatever does not fit is told here, before anything is written.
    run = Run(config, data, folder, device, emit, display.note, world, decided.foreseen)
    if decided.lines:
        run.record({"event": "plan", "lines": decided.lines})
    with ExitStack() as held:
        held.callback(run.close)
        if not started:
            run.open_start()
        if world.first:
            held.enter_context(_only_one(folder))
        if world.first and not started:
            _begin(folder, decided.given, data)
        if world.first:
            decided.save(folder)
        step = run.restore() if started else None
        if step == run.stages[-1].last_step and world.by_first(lambda: bool(_ended(read_metrics(folder)))):
            display.note(f"{folder} is finished already")
        else:
            writer = MetricsWriter(folder, resume_step=(step or 0) if started else None) if world.first else None
            try:
                with display if world.first else nullcontext():
                    finished = run.run(writer.former if writer is not None else None)
            except (MemoryError, RuntimeError) as error:
                raise _told(error, run) from None
            finally:
                if writer is not None:
                    writer.close()
            if not finished:
                return 0
        if not world.first:
            return 0
        report = write_report(folder)
        events = read_metrics(folder)
        delinks = [event for event in events if event["event"] in ("delink", "split")]
        measured = [event for event in events if event["event"] == "measured"]
        foreseen = foreseen_table(measured) if measured else None
        console.print(closing_table(_ended(events)[-1], delinks, report, foreseen))
    return 0


def _decided(
    given: RunConfig, folder: Path, started: bool, device: torch.device, world: World
) -> tuple[Decided, list[str]]:
    """The configuration with everything decided that was left open, once the data is there; where that is."""
    from tenfold.data.mixture import data_as_prepared, open_data
    from tenfold.training.deciding import decide
    from tenfold.training.setup import resolve

    data = open_data(given.data)
    paths = [str(part.path.resolve()) for part in data.parts.values()]
    config = given.model_copy(update={"data": data_as_prepared(given.data, data)})
    if started:
        config = _same_config(config, folder, data, device)
    else:
        config = resolve(config, data.vocab_size, device, data.mask_token(), data.end_of_text)

    def ranks() -> Ranks:
        from tenfold.planning.machine import Ranks

        return Ranks.here(world.size, world.per_machine, device)

    return decide(config, world.size, ranks, folder if started else None), paths


def _begin(folder: Path, config: RunConfig, data: TrainingData) -> None:
    """What a run directory has from the first."""
    from tenfold.reporting.metrics import write_atomically

    if data.tokenizer_file is not None:
        shutil.copyfile(data.tokenizer_file, folder / "tokenizer.json")
    write_atomically(folder / "config.toml", dump_toml(config))


def _told(error: Exception, run: Run) -> Exception:
    """An error of PyTorch's as one for people, where it is known."""
    from tenfold.hardware.memory import is_out_of_memory

    if not is_out_of_memory(error):
        return error
    return TenfoldError(
        f"out of memory after step {run.place.step}: {str(error).splitlines()[0]}. Set a smaller "
        'training.micro_batch_size, or training.recompute = "selective" or "full", in a new --out'
    )


def _ended(events: list[dict[str, object]]) -> list[dict[str, object]]:
    return [event for event in events if event["event"] == "end"]


def _same_config(given: RunConfig, folder: Path, data: TrainingData, device: torch.device) -> RunConfig:
    """The run directory's own configuration, with what may change taken from `given`; refuses any other difference."""
    from tenfold.training.setup import resolve

    saved = build(RunConfig, read_toml(folder / "config.toml"), str(folder / "config.toml"))
    if given.training.precision == "auto":
        training = given.training.model_copy(update={"precision": saved.training.precision})
        given = given.model_copy(update={"training": training})
    given = resolve(given, data.vocab_size, device, data.mask_token(), data.end_of_text)
    mine, theirs = dict(leaves(given)), dict(leaves(saved))
    for path in sorted(mine.keys() | theirs.keys()):
        section, key = path.partition(".")[0], path.rpartition(".")[2]
        free = path in _FREE or section in ("evaluations", "offload") or key in ("parallel", "offload", "foreseen")
        if mine.get(path) != theirs.get(path) and not free:
            raise TenfoldError(
                f"{folder} was begun with {path} = {theirs.get(path)!r}, and now it is {mine.get(path)!r}; "
                "a run goes on as it began. Put it back, or give another --out"
            )
    return given


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Hold the run directory for this process alone."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TenfoldError(f"another process is training in {folder}") from None
        yield
