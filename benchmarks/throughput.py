"""Tokens a second and memory of a dense training step, in Tenfold and in its peers from PyPI.

Every system trains the same Llama-shaped models on random tokens, forward, backward, clipping and AdamW, in an
environment of its own under --environments (made if missing: some 7 GB, and a C++ compiler is needed for DeepSpeed's),
each in its settings, with one process of two threads or two processes of one (--threads in all). Runs alternate,
--rounds times. The first step of a run is not counted; a run goes on for --seconds, and one whose first step takes
longer than --limit seconds is told as slower than that. All results are kept in --out, and a table of what is there is
printed; the last lines are the ratios of Tenfold to the best peer. Memory is the peak of all processes together, the
libraries' pages counted once.

    python benchmarks/throughput.py                                   # everything: an hour or two
    python benchmarks/throughput.py --sizes 10M --shapes 8x256 --precisions fp32 --seconds 15
    python benchmarks/throughput.py --table                           # only print what --out holds
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).absolute().parent
TORCH = ["torch==2.13.0", "numpy<3"]  # first, so that no peer brings a build with CUDA
PINS: dict[str, list[str]] = {
    "hf": ["transformers==5.24.0", "accelerate==1.15.0"],
    "litgpt": ["litgpt==0.5.13", "lightning==2.6.6"],
    "deepspeed": ["deepspeed==0.19.8", "transformers==5.24.0"],
    "olmo": ["ai2-olmo-core==3.0.0"],
    "torchtitan": ["torchtitan==0.3.0", "triton==3.7.1"],  # it imports Triton, which only PyTorch's CUDA builds bring
}
# DeepSpeed is built from source: its set-up imports torch, and compiles the operators that a CPU run uses here, once,
# so that no run waits for them or finds them half done. They need a C++ compiler and take some minutes.
BUILD = ["setuptools", "wheel", "ninja", "py-cpuinfo"]
OPERATORS = {f"DS_BUILD_{name}": "1" for name in ("CPU_ADAM", "FUSED_ADAM", "SHM_COMM")} | {"DS_ACCELERATOR": "cpu"}
# What each system is run as: name, setting, processes (two threads over all of them).
SETTINGS: list[tuple[str, str, int]] = [
    ("tenfold", "plain", 1),
    ("hf", "plain", 1),
    ("hf", "plain", 2),
    ("litgpt", "plain", 1),
    ("litgpt", "plain", 2),
    ("litgpt", "pure", 1),  # weights in bf16 too; the same as plain in fp32, and left out there
    ("deepspeed", "plain", 1),
    ("deepspeed", "plain", 2),
    ("deepspeed", "offload", 2),
    ("olmo", "plain", 1),
    ("olmo", "plain", 2),
    ("torchtitan", "plain", 1),
]


def environment(name: str, folder: Path) -> Path:
    """The Python of a peer's environment, made and filled if it is not there as pinned."""
    if name == "tenfold":
        return Path(sys.executable)
    root = folder.absolute() / name
    groups = [TORCH, BUILD, PINS[name]] if name == "deepspeed" else [TORCH, PINS[name]]
    pins = "\n".join(package for group in groups for package in group)
    python, marker = root / "bin" / "python", root / "pins.txt"
    if not marker.is_file() or marker.read_text() != pins:
        print(f"making the environment of {name} in {root} ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", root], check=True)
        variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        variables["PATH"] = f"{python.parent}:{os.environ['PATH']}"  # its ninja
        for group in groups:
            options = []
            if name == "deepspeed" and group is PINS[name]:
                variables |= OPERATORS
                options = ["--no-build-isolation", "--no-cache-dir"]  # a wheel from pip's cache has no operators in it
            subprocess.run([python, "-m", "pip", "install", "-q", *options, *group], check=True, env=variables)
        marker.write_text(pins)
    return python


def run_once(python: Path, job: dict[str, Any], limit: float) -> dict[str, Any]:
    """Start the processes of one run and collect what they tell; kills them when the first step exceeds `limit`."""
    world = job["processes"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children, outputs = [], []
    command = [python, HERE / "peers" / f"run_{job['system']}.py", json.dumps(job)]
    with tempfile.TemporaryDirectory() as scratch:
        for rank in range(world):
            variables = {
                **os.environ,
                "OMP_NUM_THREADS": str(job["threads"]),
                "PATH": f"{python.parent}:{os.environ['PATH']}",
            }
            if job["system"] != "tenfold":
                variables.pop("PYTHONPATH", None)
            if world > 1 or job["system"] in ("deepspeed", "torchtitan"):  # these two start no other way
                variables |= {
                    "RANK": str(rank), "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "benchmark",
                    "GROUP_RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
                }  # fmt: skip
            errors = Path(scratch, f"errors{rank}")
            with errors.open("w") as sink:
                child = subprocess.Popen(
                    command, env=variables, stdout=subprocess.PIPE, stderr=sink, text=True, cwd=scratch
                )
            children.append(child)
            outputs.append((child, errors))
        facts: list[dict[str, Any]] = []

        def stop() -> None:
            for child in children:
                if child.poll() is None:
                    child.kill()

        # Start-up (imports, operators that compile once) may take its time; the first step then has its limit twice.
        timer = threading.Timer(240 + 2 * limit + job["seconds"], stop)
        timer.start()
        late = threading.Timer(60 + limit, stop)
        late.start()

        def read(child: subprocess.Popen[str]) -> None:
            assert child.stdout is not None
            for line in child.stdout:
                if line.startswith("@"):
                    facts.append(json.loads(line[1:]))
                    late.cancel()

        readers = [threading.Thread(target=read, args=(child,)) for child in children]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        for child in children:
            child.wait()
        timer.cancel()
        late.cancel()
        messages = [errors.read_text(errors="replace").strip().splitlines() for _, errors in outputs]
    steps = [fact["seconds"] for fact in facts if "step" in fact and fact["rank"] == 0]
    result: dict[str, Any] = {**job, "steps_seconds": steps}
    peaks = [fact for fact in facts if "peak" in fact]
    if len(peaks) == world:  # the libraries' pages are the same memory for all processes
        shared = sorted(fact["files"] for fact in peaks)[1:]
        result["peak_bytes"] = sum(fact["peak"] for fact in peaks) - sum(shared)
    if len(steps) < 2:
        if any(child.returncode == -9 for child in children):
            result["slower_than"] = job["batch"] * job["length"] / (steps[0] if steps else limit)
        else:
            last = [next((line for line in reversed(lines) if "Error" in line), "") for lines in messages]
            result["error"] = next(filter(None, last), "ended without a step")[:300]
    else:
        tokens = job["batch"] * job["length"]
        result["tokens_per_second"] = tokens / statistics.median(steps[1:])
        worked = [
            statistics.median(fact["cpu_seconds"] for fact in facts if fact.get("step") and fact["rank"] == rank)
            for rank in range(world)
        ]
        result["tokens_per_cpu_second"] = tokens / sum(worked)
    return result


def summary(results: list[dict[str, Any]], rate: str) -> tuple[Table, list[str]]:
    """The table of all results, and the lines of ratios, by the figure named `rate`."""
    table = Table("case", "system", "setting", "tokens/s", "of Tenfold", "peak MB", box=None)
    lines = []
    keys = dict.fromkeys((r["size"], f"{r['batch']}x{r['length']}", r["precision"]) for r in results)
    for size, shape, precision in sorted(keys, key=lambda key: (key[0], key[1] != "8x256", key[2])):
        case = f"{size} {shape} {precision}"
        chosen = [
            r for r in results if (r["size"], f"{r['batch']}x{r['length']}", r["precision"]) == (size, shape, precision)
        ]
        rates: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
        for result in chosen:
            rates.setdefault((result["system"], result["setting"], result["processes"]), []).append(result)
        medians = {
            key: statistics.median(found)
            for key, runs in rates.items()
            if (found := [r[rate] for r in runs if rate in r])
        }
        ours = medians.get(("tenfold", "plain", 1))
        for key, runs in rates.items():
            system, setting, processes = key
            how = f"{setting}, {processes} x {runs[0]['threads']}"
            peaks = [r["peak_bytes"] for r in runs if "peak_bytes" in r]
            peak = f"{statistics.median(peaks) / 1e6:,.0f}" if peaks else ""
            if key in medians:
                share = f"{medians[key] / ours:.2f}" if ours else ""
                table.add_row(case, system, how, f"{medians[key]:,.0f}", share, peak)
            elif "slower_than" in runs[-1]:
                table.add_row(case, system, how, f"under {runs[-1]['slower_than']:,.0f}", "", peak)
            else:
                table.add_row(case, system, how, "does not run", "", "")
        peers = {key: rate for key, rate in medians.items() if key[0] != "tenfold"}
        bounds = [r["slower_than"] for r in chosen if "slower_than" in r and r["system"] != "tenfold"]
        if ours and peers:
            best = max(peers, key=lambda key: peers[key])
            lines.append(
                f"ratio {case}: {ours / peers[best]:.2f} (best peer: {best[0]}, {best[1]}, {best[2]} processes)"
            )
        elif ours and bounds:
            lines.append(f"ratio {case}: over {ours / max(bounds):.2f} (no peer ended a step within the limit)")
    return table, lines


def closing(lines: list[str]) -> str:
    """The last line: the ratio of the 10M model, batch 8 x 256, in bf16, or the first that there is."""
    wanted = [line for line in lines if line.startswith("ratio 10M 8x256 bf16")] or lines
    return f"ratio: {wanted[0].split(': ')[1].split(' (')[0]}" if wanted else "ratio: none"


def main() -> None:
    """Run what was asked for, keep it, print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--environments", type=Path, default=Path("build/peers"), help="folder of the peers' environments"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/throughput.json"), help="results, added to if it exists"
    )
    parser.add_argument("--sizes", nargs="+", default=["10M", "60M"], choices=["10M", "60M"])
    parser.add_argument("--shapes", nargs="+", default=["8x256", "4x1024"], help="sequences x tokens")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--systems", nargs="+", default=["tenfold", *PINS], choices=["tenfold", *PINS])
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2], choices=[1, 2])
    parser.add_argument("--threads", type=int, default=2, help="of all processes of a run together")
    parser.add_argument(
        "--clock",
        choices=["wall", "cpu"],
        default="wall",
        help="cpu: compare tokens per second of processor time, for a machine that others use too, with --threads 1",
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of measured steps in a run")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds that a first step may take")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--table", action="store_true", help="run nothing; print what --out holds")
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = json.loads(arguments.out.read_text()) if arguments.out.is_file() else []
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    console = Console(width=110)
    pythons: dict[str, Path] = {}
    for name in [] if arguments.table else arguments.systems:
        try:
            pythons[name] = environment(name, arguments.environments)
        except subprocess.CalledProcessError as problem:  # pip has said why; the others can still be compared
            console.print(f"left out, its environment could not be made: {name} ({problem})", soft_wrap=True)
    for _ in range(0 if arguments.table else arguments.rounds):
        for size in arguments.sizes:
            for shape in arguments.shapes:
                for precision in arguments.precisions:
                    batch, length = map(int, shape.split("x"))
                    for system, setting, processes in SETTINGS:
                        if (
                            system not in pythons
                            or (processes not in arguments.processes and system != "tenfold")
                            or processes > arguments.threads
                        ):
                            continue
                        if setting == "pure" and precision == "fp32":
                            continue
                        job = {
                            "size": size, "batch": batch, "length": length, "precision": precision, "system": system,
                            "setting": setting, "processes": processes, "threads": arguments.threads // processes,
                            "seconds": arguments.seconds, "steps": 200,
                        }  # fmt: skip
                        result = run_once(pythons[system], job, arguments.limit)
                        results.append(result)
                        arguments.out.write_text(json.dumps(results, indent=1))
                        told = {
                            key: result[key]
                            for key in ("tokens_per_second", "tokens_per_cpu_second", "slower_than", "error")
                            if key in result
                        }
                        console.print(
                            f"{size} {shape} {precision} {system} {setting} x{processes}: {told}", highlight=False
                        )
    table, lines = summary(results, {"wall": "tokens_per_second", "cpu": "tokens_per_cpu_second"}[arguments.clock])
    console.print(table)
    failed = dict.fromkeys(
        f"{r['system']} ({r['setting']}, {r['processes']}): {r['error']}" for r in results if "error" in r
    )
    for line in (*(f"does not run: {line}" for line in failed), *lines, closing(lines)):
        console.print(line, soft_wrap=True, highlight=False)


if __name__ == "__main__":
    main()
