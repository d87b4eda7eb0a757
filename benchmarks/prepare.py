"""Speed and memory of preparing text.

Speed: `tenfold prepare` of a JSONL file, from the file to checked shards on disk, beside the `tokenizers` library's own
`encode_batch` and `encode_batch_fast` on the same texts in lists in memory. Same tokenizer, same number of threads,
each measurement in a process of its own, in turn, `--rounds` times; the median counts. Prints MB of text a second, and
at last the ratio of prepare to the faster call of the library.

    python benchmarks/prepare.py [--rounds 5] [--megabytes 16] [--threads 2]

Memory: `--memory GB` makes that much text, prepares it and a twentieth of it with a tokenizer that does next to
nothing, so that gigabytes pass in a minute, and prints the peak of resident memory of both, without and with dedup.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

CALLS_DOCUMENTS = 1000
"""Documents in one call of the library."""
CASES = ("encode_batch", "encode_batch_fast", "prepare", "prepare, dedup")


def worker(case: str, folder: Path, threads: int) -> dict[str, float]:
    """One measurement: seconds, bytes of text and peak memory."""
    from tokenizers import Tokenizer

    from tenfold.config.run import PrepareConfig
    from tenfold.data.prepare import prepare

    source, tokenizer_file = folder / "text.jsonl", folder / "tokenizer.json"
    if case.startswith("prepare"):
        options = PrepareConfig(tokenizer=str(tokenizer_file), workers=threads, dedup="dedup" in case)
        with tempfile.TemporaryDirectory(dir=folder) as out:
            began = time.monotonic()
            prepare(str(source), Path(out) / "shards", options, show_progress=False)
            seconds = time.monotonic() - began
    else:
        with source.open(encoding="utf-8") as file:
            texts = [json.loads(line)["text"] for line in file]
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
        encode = getattr(tokenizer, case)
        began = time.monotonic()
        for start in range(0, len(texts), CALLS_DOCUMENTS):
            encode(texts[start : start + CALLS_DOCUMENTS], add_special_tokens=False)
        seconds = time.monotonic() - began
    return {"seconds": seconds, "memory": peak_memory()}


def peak_memory() -> int:
    """Bytes resident at most; not getrusage's, which counts those of the process that started this one too."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def real_text(megabytes: float) -> Iterator[str]:
    """Python's own library, each time with another number before every document, so that none is equal."""
    from tenfold.data.stdlib import stdlib_documents

    size = 0
    for turn in itertools.count():
        for number, text in enumerate(stdlib_documents()):
            yield f"{turn}.{number}\n{text}"
            size += len(text)
            if size > megabytes * 1e6:
                return


def made_text(gigabytes: float) -> Iterator[str]:
    """Documents of some two thousand characters, one in ten equal to an earlier one."""
    draw = random.Random(0)
    filler = [" ".join(draw.choices(["sea", "ship", "north", "wind", "sails"], k=400)) for _ in range(50)]
    for number in range(int(gigabytes * 1e9 / 2000)):
        name = draw.randrange(number) if number and draw.random() < 0.1 else number
        yield f"{name} {filler[name % 50]}"


def write(folder: Path, texts: Iterator[str]) -> int:
    """The texts as JSON lines; their bytes."""
    size = 0
    with (folder / "text.jsonl").open("w", encoding="utf-8") as file:
        for text in texts:
            file.write(json.dumps({"text": text}) + "\n")
            size += len(text.encode())
    return size


def measure(case: str, folder: Path, threads: int) -> dict[str, float]:
    """`worker` in a process of its own."""
    command = [sys.executable, __file__, "--worker", case, "--folder", str(folder), "--threads", str(threads)]
    environment = os.environ | {"RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "true"}
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def speed(rounds: int, megabytes: float, vocabulary: int, threads: int) -> None:
    """The table and the ratio."""
    from tenfold.data.vocabulary import train_bpe

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        size = write(folder, real_text(megabytes))
        train_bpe(list(real_text(4)), vocabulary).save(str(folder / "tokenizer.json"))
        rates: dict[str, list[float]] = {case: [] for case in CASES}
        memory: dict[str, float] = {}
        for _ in range(rounds):
            for case in CASES:
                found = measure(case, folder, threads)
                rates[case].append(size / found["seconds"] / 1e6)
                memory[case] = max(memory.get(case, 0), found["memory"])
    table = Table("case", "MB/s (median)", "least", "most", "peak memory, MB", box=None)
    for case, values in rates.items():
        row = [f"{value:.2f}" for value in (statistics.median(values), min(values), max(values))]
        table.add_row(case, *row, f"{memory[case] / 1e6:,.0f}")
    Console().print(f"{size / 1e6:.1f} MB of text, {vocabulary:,} entries, {threads} threads, {rounds} rounds")
    Console().print(table)
    library = max(statistics.median(rates[case]) for case in CASES[:2])
    print(f"ratio, dedup: {statistics.median(rates['prepare, dedup']) / library:.3f}")
    print(f"ratio: {statistics.median(rates['prepare']) / library:.3f}")


def memory(gigabytes: float, threads: int) -> None:
    """The table of peaks."""
    from tokenizers import Tokenizer, models

    table = Table("text, GB", "case", "seconds", "peak memory, MB", box=None)
    peaks = []
    for size in (gigabytes / 20, gigabytes):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            text_bytes = write(folder, made_text(size))
            # A document is one unknown word: encoding is nearly free.
            model = models.WordLevel({"<|endoftext|>": 0, "<unk>": 1}, unk_token="<unk>")
            Tokenizer(model).save(str(folder / "tokenizer.json"))
            for case in CASES[2:]:
                found = measure(case, folder, threads)
                peaks.append(found["memory"])
                table.add_row(
                    f"{text_bytes / 1e9:.2f}", case, f"{found['seconds']:.1f}", f"{found['memory'] / 1e6:,.0f}"
                )
    Console().print(table)
    print(f"ratio: {peaks[2] / peaks[0]:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=float, default=16)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory", type=float, metavar="GB", help="measure memory on this much text instead")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments: Any = parser.parse_args()
    if arguments.worker:
        print(json.dumps(worker(arguments.worker, arguments.folder, arguments.threads)))
    elif arguments.memory:
        memory(arguments.memory, arguments.threads)
    else:
        speed(arguments.rounds, arguments.megabytes, arguments.vocabulary, arguments.threads)


if __name__ == "__main__":
    main()
