"""Which layers to share, which parts of them, for how long, and with which hand-over? A study on real text.

Trains one small model many times on Python's own library (documentation and sources), with every way of sharing below,
over several seeds, all for the same tokens, and compares each with the model that never shared, seed by seed. Results
go to --out, one line a run: what is there is not trained again, so that the study can be stopped, and several processes
can share the work (--seeds 1 in one, --seeds 2 in another). Prints a table for each question; --plot draws them.

    python benchmarks/sharing_study.py                       # everything: about an hour and a half on one core
    python benchmarks/sharing_study.py --only pattern --seeds 1
    python benchmarks/sharing_study.py --table --plot docs/sharing-study.svg
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from delinking import measure
from tenfold.config.load import build
from tenfold.config.run import RunConfig

MIXTURE = {"experts": 8, "prototypes": 2, "ffn": 96}
QUESTIONS = {
    "rate": "At which learning rate all layers share, for the first 20%",
    "until": "How long all layers share everything",
    "pattern": "Which layers share, for the first 20%",
    "moments": "What state the freed layers start from, after 20%",
    "parts": "Which parts all layers share, for the first 20%",
    "moe": "A mixture of experts: which layers and parts share, for the first 20%",
}


@dataclass(frozen=True)
class Case:
    """One way to train: its question, its name there, the stages before the last, and the model's own keys."""

    question: str
    name: str
    stages: tuple[dict[str, Any], ...] = ()
    moments: str = "rescale"
    moe: bool = False
    divide: bool = True


def cases() -> list[Case]:
    """All of them; the first of dense and of moe never shares."""
    found = [Case("never", "never shared"), Case("never", "never shared", moe=True)]

    def add(
        question: str, name: str, moe: bool = False, moments: str = "rescale", divide: bool = True, **stage: Any
    ) -> None:
        stage = {"name": "pseudo", "sharing": "all", "until": "20%", **stage}
        found.append(Case(question, name, (stage,), moments, moe, divide))

    add("rate", "of free layers", divide=False)
    add("rate", "a quarter, of everything", divide=False, lr_scale=0.25)
    for until in ("5%", "10%", "40%"):
        add("until", until, until=until)

    patterns: list[Any] = ["all", *({kind: n} for kind in ("groups", "cycle") for n in (2, 3, 4)), "sandwich"]
    for pattern in patterns:
        name = pattern if isinstance(pattern, str) else " ".join(f"{kind} {n}" for kind, n in pattern.items())
        add("pattern", name, sharing=pattern)
    for moments in ("copy", "reset", "measure"):
        add("moments", moments, moments=moments)
    add("parts", "attention", parts=["attention"])
    add("parts", "ffn", parts=["ffn"])
    add("parts", "all but norms", parts=["attention", "ffn"])
    for pattern in ("all", {"groups": 3}):
        add("moe", "all" if pattern == "all" else "groups 3", moe=True, sharing=pattern)
    add("moe", "attention", moe=True, parts=["attention"])
    add("moe", "experts", moe=True, parts=["experts"])
    add("moe", "all but norms", moe=True, parts=["attention", "experts", "router"])
    add("moe", "all but router and norms", moe=True, parts=["attention", "experts"])
    return found


def configuration(case: Case, seed: int, tokens: int) -> RunConfig:
    """The run of one case and seed."""
    stages = [*case.stages, {"name": "real", "sharing": "none", "moments": case.moments}]
    model = {
        "layers": 12,
        "hidden": 64,
        "heads": 4,
        "ffn": 192,
        "activation": "swiglu",
        "qk_norm": True,
        "init_std": 0.06,
        **({"moe": MIXTURE} if case.moe else {}),
    }
    raw = {
        "model": model,
        "data": {"path": "python-stdlib", "vocab_size": 512, "sequence_length": 128},
        "training": {
            "tokens": tokens,
            "batch_size": 4,
            "seed": seed,
            "precision": "fp32",
            "validation_sequences": 64,
            "log_every": 1000,
        },
        "optim": {"lr": 4e-3, "warmup": 0.05, "divide_shared": case.divide},
        "checkpoint": {"every": 0, "keep": 1},
        "stages": stages,
    }
    return build(RunConfig, raw, "benchmark")


def key_of(case: Case, seed: int, tokens: int) -> str:
    """What a result is found by: everything that decides it."""
    config = configuration(case, seed, tokens)
    told = {"model": config.model, "training": config.training, "optim": config.optim}
    stages = [stage.model_dump(mode="json") for stage in config.stages]
    return json.dumps({name: section.model_dump(mode="json") for name, section in told.items()} | {"stages": stages})


def read(out: Path) -> dict[str, dict[str, float]]:
    """Results so far, by key; a line cut short by a kill is left out."""
    found = {}
    for line in out.read_text(encoding="utf-8").splitlines() if out.exists() else []:
        try:
            result = json.loads(line)
        except ValueError:
            continue
        found[result.pop("key")] = result
    return found


def spread(values: list[float]) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.3f} ± {deviation:.3f}"


def differences(
    case: Case, results: dict[str, dict[str, float]], seeds: list[int], tokens: int
) -> tuple[list[float], list[float]]:
    """Final losses, and their differences to the model that never shared, of the seeds for which both are there."""
    finals, apart = [], []
    for seed in seeds:
        mine = results.get(key_of(case, seed, tokens))
        theirs = results.get(key_of(Case("never", "", moe=case.moe), seed, tokens))
        if mine and theirs:
            finals.append(mine["final"])
            apart.append(mine["final"] - theirs["final"])
    return finals, apart


def questions_of(case: Case) -> list[tuple[str, str]]:
    """The tables that a case stands in, and its name there; "all, 20%, rescale" is an answer to each of four."""
    if case.question == "never":
        return [(question, case.name) for question in QUESTIONS if case.moe == (question == "moe")]
    if (case.question, case.name) == ("pattern", "all"):
        names = {"rate": "divided by 12", "until": "20%", "pattern": "all", "moments": "rescale", "parts": "everything"}
        return list(names.items())
    return [(case.question, case.name)]


def show(console: Console, results: dict[str, dict[str, float]], seeds: list[int], tokens: int) -> None:
    """A table for each question that has answers."""
    for question, title in QUESTIONS.items():
        table = Table("shared", "final loss", "difference to never", "by seed", title=title, box=None)
        for case in cases():
            for asked, name in questions_of(case):
                finals, apart = differences(case, results, seeds, tokens)
                if asked == question and finals:
                    by_seed = ", ".join(f"{each:+.3f}" for each in apart)
                    table.add_row(name, spread(finals), spread(apart), by_seed if case.stages else "")
        if table.row_count > 1:
            console.print(table)


def plot(path: Path, results: dict[str, dict[str, float]], seeds: list[int], tokens: int) -> None:
    """Each case's difference to never sharing: a dot a seed, a bar at the mean."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "tenfold"
    figure, panels = plt.subplots(1, len(QUESTIONS), figsize=(15, 3.6), sharey=True, layout="constrained")
    for panel, (question, title) in zip(panels, QUESTIONS.items(), strict=True):
        names = []
        for case in cases():
            for asked, name in questions_of(case):
                _, apart = differences(case, results, seeds, tokens)
                if asked == question and case.stages and apart:
                    panel.plot([len(names)] * len(apart), apart, "o", color="tab:blue", alpha=0.6)
                    panel.plot(len(names), statistics.mean(apart), "_", color="black", markersize=16)
                    names.append(name)
        panel.axhline(0, color="tab:gray", linewidth=0.8)
        panel.set_xticks(range(len(names)), names, rotation=40, ha="right", fontsize=8)
        panel.set_title(
            title.replace(", for", ",\nfor").replace(", after", ",\nafter").replace(": ", ":\n"), fontsize=8
        )
    panels[0].set_ylabel("final loss less that of\nnever sharing (nats a token)", fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Train what is missing, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", choices=[*QUESTIONS, "never"], help="questions to answer; all")
    parser.add_argument("--out", type=Path, default=Path("build/sharing-study.jsonl"))
    parser.add_argument("--table", action="store_true", help="train nothing, show what --out holds")
    parser.add_argument("--plot", type=Path, help="an SVG to draw")
    options = parser.parse_args()
    if options.tokens < 10_000:
        parser.error("--tokens must be at least 10000: the shortest stage would have no steps")
    console = Console(width=110, highlight=False)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    wanted = [case for case in cases() if not options.only or case.question in (*options.only, "never")]
    todo = [(case, seed) for seed in options.seeds for case in wanted]
    for number, (case, seed) in enumerate(todo if not options.table else [], 1):
        key = key_of(case, seed, options.tokens)
        if key in read(options.out):
            continue
        found = measure(configuration(case, seed, options.tokens))
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, **found}) + "\n")
        kind = "mixture" if case.moe else "dense"
        console.print(f"{number} of {len(todo)}: seed {seed}, {kind}, {case.question}, {case.name}: {found}")
    results = read(options.out)
    show(console, results, options.seeds, options.tokens)
    if options.plot:
        plot(options.plot, results, options.seeds, options.tokens)


if __name__ == "__main__":
    main()
