"""`tenfold plan`: what fits, how fast, how to lay it out, before anything runs."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tenfold.cli.train import expected_vocabulary
from tenfold.config.load import load_run, parse_flags
from tenfold.config.run import RunConfig
from tenfold.config.units import parse_joules, parse_seconds
from tenfold.errors import TenfoldError

if TYPE_CHECKING:
    from tenfold.planning.cluster import Cluster
    from tenfold.planning.plans import Objective, Plan, StagePlan

USAGE = """usage: tenfold plan RUN.toml --cluster CLUSTER [options] [flags]

RUN.toml        the run file; every value in it can be given as a flag too
--cluster       64x8:v100-32gb (nodes x accelerators), 8:h100, a file of tenfold doctor --save, or
                here (measured now); changes behind it: 8:h100,host_memory=1TiB,price=2.5; unset: the
                run file's parallel.cluster
--objective     what is to be least: time (the default), energy or cost
--json          print one JSON object with everything
--dry-run       count what the plan needs, too: real code of one rank of each kind, without memory
                (minutes)
--timeline      draw a step of each stage: .html to look at, .json for Perfetto
--write         write the run file with the plan in it
--share-until   run directories of short runs, one that never shares and one that does, best also
                a delinked one: how long to share is told from their losses and the plan's times
--target-loss   ... to reach this loss soonest
--deadline      ... to reach the lowest loss by then (90m, 36h, 10d); unset: the plan's own time
--energy-budget ... or for so much energy (500kWh, 2GJ)

Nothing is started and no data is read; no accelerator is needed. Every stage gets a layout, passes,
recompute and a placement of its state that fit, the best in time (or energy, or cost). What nearly
fits is told with what it lacked, and then what bounds each stage. docs/planning.md has all of it.

examples:
  tenfold plan run.toml --cluster 8:h100
  tenfold plan examples/m6-10t.toml --cluster 64x8:v100-32gb,host_memory=768GiB
  tenfold plan run.toml --cluster 2x8:a100-80gb --optim.state bf16 --json
  tenfold plan run.toml --cluster here.toml --timeline step.html --write planned.toml
  tenfold plan run.toml --cluster 8:h100 --share-until runs/free runs/shared --deadline 10d
"""


def main(argv: list[str]) -> int:
    """Print the plan."""
    if "-h" in argv or "--help" in argv:
        print(USAGE)
        list(parse_flags(RunConfig(), ["--help"], "tenfold plan RUN.toml"))
    arguments, flags = _parser().parse_known_args(argv)
    given = load_run(arguments.run, flags, "tenfold plan RUN.toml")
    aim = _aim(arguments)
    named = arguments.cluster or given.parallel.cluster
    if named is None:
        raise TenfoldError('--cluster is missing, and the run file has no parallel.cluster: give "8:h100", say')
    if arguments.timeline is not None and arguments.timeline.suffix not in (".html", ".json"):
        raise TenfoldError(f"--timeline {arguments.timeline}: give a name that ends in .html, or in .json for Perfetto")

    # Imported here: PyTorch takes seconds, and a mistake in the arguments should be told at once.
    from rich.console import Console

    from tenfold.planning.cluster import load_cluster
    from tenfold.planning.search import plan
    from tenfold.reporting.plan_advice import plan_advice
    from tenfold.reporting.plan_numbers import gains_told, plan_told
    from tenfold.reporting.planning import plan_view

    cluster = load_cluster(named)
    config, notes = decided(given, cluster, arguments.objective)
    with Console(stderr=True).status("looking for layouts") as status:
        found = plan(config, cluster, arguments.objective, status.update)
    told = {"run": str(arguments.run), **plan_told(found, cluster, _described(config, found))}
    told["cluster"]["notes"] += notes
    for stage, planned in zip(told["stages"], found.stages, strict=True):
        stage["doubled"] = gains_told(_doubled(config, planned, cluster))
    told["compute_optimal"] = _compute_optimal(config, told["stages"])
    told["advice"] = plan_advice(told)
    if arguments.share_until:
        told["horizon"] = _horizon(found, arguments.share_until, aim)
    if arguments.dry_run:
        told["dry_run"] = _counted(config, found, cluster)
    if arguments.json:
        print(json.dumps(told, indent=2))
    else:
        terminal = Console()
        console = Console(width=min(100, terminal.width))
        console.print(plan_view(told))
        if arguments.dry_run:
            from tenfold.reporting.dry_run import dry_run_view

            console.print("", dry_run_view(told["dry_run"]))
    if arguments.timeline is not None:
        _draw(arguments.timeline, found)
    if arguments.write is not None:
        _write(arguments.write, given, found, cluster)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tenfold plan", usage=USAGE.removeprefix("usage: ").replace("%", "%%"), add_help=False, allow_abbrev=False
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--cluster")
    parser.add_argument("--objective", choices=("time", "energy", "cost"), default="time")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--timeline", type=Path)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--share-until", nargs="+", type=Path, default=[])
    parser.add_argument("--target-loss", type=float)
    parser.add_argument("--deadline")
    parser.add_argument("--energy-budget")
    return parser


def _aim(arguments: argparse.Namespace) -> tuple[str, float] | None:
    """What sharing is to be best for: "loss", "seconds" or "joules", and how much; None: the plan's own time."""
    asked = {
        "--target-loss": arguments.target_loss,
        "--deadline": arguments.deadline,
        "--energy-budget": arguments.energy_budget,
    }
    given = [flag for flag, value in asked.items() if value is not None]
    if not given:
        return None
    if len(given) > 1:
        raise TenfoldError(f"{' and '.join(given)} exclude each other: give one of them")
    if not arguments.share_until:
        raise TenfoldError(f"{given[0]} is for --share-until, which names the runs whose losses are known")
    try:
        if given == ["--deadline"]:
            return "seconds", parse_seconds(arguments.deadline)
        if given == ["--energy-budget"]:
            return "joules", parse_joules(arguments.energy_budget)
    except ValueError as error:
        raise TenfoldError(f"{given[0]}: {error}") from None
    return "loss", arguments.target_loss


def decided(config: RunConfig, cluster: Cluster, objective: Objective) -> tuple[RunConfig, list[str]]:
    """The configuration with what is open decided for the cluster, and what was assumed for it."""
    import torch

    from tenfold.planning.search import settled
    from tenfold.training.setup import resolve, with_vocabulary

    notes = []
    vocabulary, mask = expected_vocabulary(config)
    if config.model.vocab_size is None:
        model = with_vocabulary(config.model, vocabulary, mask)
        config = config.model_copy(update={"model": model})
        notes.append(
            f"a vocabulary of {model.vocab_size}: that of the prepared data or of data.tokenizer if there is one, else "
            "data.vocab_size; set model.vocab_size if it will be another"
        )
    open_precision = config.training.precision == "auto"
    config = settled(config, cluster, objective)
    if open_precision:
        notes.append(f"training.precision = {config.training.precision}, which these accelerators multiply faster")
    ends = config.data.end_of_text or 0 if config.data.document_mask else None
    rows = config.model.vocab_size or vocabulary
    return resolve(config, min(vocabulary, rows), torch.device("cpu"), mask, ends), notes


def _described(config: RunConfig, found: Plan) -> list[dict[str, Any]]:
    from tenfold.training.setup import describe_stages

    stages = [planned.stage for planned in found.stages] + [unfit.stage for unfit in found.unfit]
    return describe_stages(config, stages)


def _counted(config: RunConfig, found: Plan, cluster: Cluster) -> dict[str, Any]:
    """What the stages of a plan need, counted."""
    from rich.console import Console

    from tenfold.training.dry_run import dry_run

    if found.unfit or not found.stages:
        names = ", ".join(each.stage.name for each in found.unfit)
        raise TenfoldError(f"--dry-run: {names} fits in no way, so there is no plan to go through")
    stages = [each.stage for each in found.stages]
    candidates, placements = [each.candidate for each in found.stages], [each.placements for each in found.stages]
    with Console(stderr=True).status("counting") as status:
        return dry_run(config, stages, candidates, cluster.accelerator.kind, placements, status.update).told()


def _draw(path: Path, found: Plan) -> None:
    """A file for each stage; of several, with the stage's name in its own."""
    from tenfold.reporting.metrics import write_atomically
    from tenfold.reporting.timeline import timeline_page, trace_json

    for planned in found.stages:
        name = planned.stage.name
        one = path if len(found.stages) == 1 else path.with_stem(f"{path.stem}-{'-'.join(name.split())}")
        write_atomically(one, trace_json(planned.step) if path.suffix == ".json" else timeline_page(planned.step, name))


def _write(path: Path, given: RunConfig, found: Plan, cluster: Cluster) -> None:
    """The run file with the plan in it, whole or not at all."""
    from tenfold.config.load import dump_toml
    from tenfold.planning.applied import applied
    from tenfold.reporting.metrics import write_atomically

    if found.unfit:
        raise TenfoldError(
            f"--write: {', '.join(each.stage.name for each in found.unfit)} fits in no way: there is no plan to write"
        )
    write_atomically(path, dump_toml(applied(given, found, cluster.name), whole=False))


def _doubled(config: RunConfig, planned: StagePlan, cluster: Cluster) -> list[Any]:
    """The stage's step played again with twice of each rate."""
    from tenfold.planning.doubling import gains
    from tenfold.planning.step import play_step

    def play(other: Cluster) -> float:
        memory, placements = list(planned.memory), list(planned.placements)
        return play_step(config, planned.stage, planned.candidate, other, memory, placements).seconds

    return gains(cluster, planned.step.seconds, play)


def _compute_optimal(config: RunConfig, stages: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The best size and tokens for the run's operations, beside its own; None where no law is known, for encoders and
    the smallest runs."""
    from tenfold.planning.scaling import LEAST, optimal_tokens, optimum

    if config.model.objective != "next-token" or not stages:
        return None
    moe = config.model.moe
    experts = moe.experts / (moe.prototypes * moe.top_k) if moe.experts else 1.0
    flops = sum(stage["flops_per_token"] * stage["tokens"] for stage in stages)
    if flops < LEAST:
        return None
    active = stages[-1]["active_parameters"]
    best = dataclasses.asdict(optimum(flops, experts))
    return best | {
        "active_parameters": active,
        "run_tokens": sum(stage["tokens"] for stage in stages),
        "tokens_for_this_model": optimal_tokens(active, experts),
    }


def _horizon(found: Plan, runs: Sequence[Path], aim: tuple[str, float] | None) -> dict[str, Any]:
    """How long to share, from the losses of short runs and the prices of the plan's first and last stage."""
    from tenfold.planning.curves import fit
    from tenfold.planning.horizon import Price, lowest, soonest
    from tenfold.reporting.learned import observed

    if len(found.stages) < 2:
        raise TenfoldError(
            "--share-until needs two stages that fit, one whose layers share and one whose do not: the plan has "
            f"{', '.join(stage.stage.name for stage in found.stages) or 'none'}"
        )
    first, last = found.stages[0], found.stages[-1]
    unit, amount = aim or ("seconds", found.seconds)
    known = fit([observed(run) for run in runs])
    delinkings = [stage.delinking for stage in found.stages if stage.delinking is not None]
    if unit == "joules":
        if first.joules is None or last.joules is None:
            raise TenfoldError(
                "--energy-budget: the cluster does not say what its accelerators draw; add ,watts=... behind its name"
            )
        spent = sum(each.joules or 0.0 for each in delinkings)
        price = Price(first.joules / first.stage.tokens, last.joules / last.stage.tokens, spent, "joules")
    else:
        spent = sum(each.seconds for each in delinkings)
        price = Price(1 / first.tokens_per_second, 1 / last.tokens_per_second, spent)
    horizon = soonest(known, price, amount) if unit == "loss" else lowest(known, price, amount)
    told = dataclasses.asdict(horizon)
    for key, course in (("best", horizon.best), ("never", horizon.never)):
        told[key] |= {"tokens": course.tokens, "share": course.share}
    return told | {"curves": dataclasses.asdict(known.curves), "price": dataclasses.asdict(price)}
