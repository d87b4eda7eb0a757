"""Speed of the loader: tokens a second from `batch()`, in one process, in random order over memory-mapped shards.

Shards of random tokens (uint16) are written to a temporary folder. Every batch shape is read for `--seconds`, three
times in turn; the median counts. Beside it stands the rate by the processor time of this process alone, which company
on the machine does not lower as much. Then one sample at places all over the run is asked for, each by a reader of its
own, as a resumption does. With `--sources` N it is a mixture of N sources of equal weight. The last line is the slower
shape's rate.

    python benchmarks/loader.py [--gigabytes 1.5] [--seconds 3] [--sources 1]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from tenfold.data.mixing import MixedSequences, Phase
from tenfold.data.sampling import PackedSequences
from tenfold.data.shards import ShardEntry, TokenSplit

SHAPES = ((64, 1024), (8, 256))
SHARD_TOKENS = 2**26


def write_shards(folder: Path, gigabytes: float) -> TokenSplit:
    """A split of random tokens."""
    random = np.random.default_rng(0)
    shards = []
    for number in range(max(1, round(gigabytes * 1e9 / 2 / SHARD_TOKENS))):
        random.integers(0, 2**16, SHARD_TOKENS, dtype=np.uint16).tofile(folder / f"{number}.bin")
        shards.append(
            ShardEntry(
                file=f"{number}.bin",
                documents_file=f"{number}.idx",
                tokens=SHARD_TOKENS,
                documents=1,
                text_bytes=0,
                max_token=2**16 - 1,
                sha256="",
                documents_sha256="",
            )
        )
    return TokenSplit(folder, "train", "uint16", shards)


def rate(sequences: PackedSequences | MixedSequences, batch: int, seconds: float) -> tuple[float, float]:
    """Tokens a second, and a second of processor time."""
    began, began_process, sample = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - began < seconds:
        for _ in range(20):
            sequences.batch(sample, batch)
            sample += batch
    tokens = sample * sequences.sequence_length
    return tokens / (time.perf_counter() - began), tokens / (time.process_time() - began_process)


def seek_seconds(split: TokenSplit, length: int) -> list[float]:
    """Seconds until a reader that is new gives one sample, at places over many epochs."""
    taken = []
    for sample in np.random.default_rng(1).integers(0, 10**10, 200).tolist():
        began = time.perf_counter()
        PackedSequences(split, length, 1).batch(sample, 1)
        taken.append(time.perf_counter() - began)
    return taken


def main() -> None:
    """Write, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--sources", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        split = write_shards(Path(folder), arguments.gigabytes)
        weights = (1.0,) * arguments.sources
        readers = {}
        for batch, length in SHAPES:
            sources = {str(number): PackedSequences(split, length, 1 + number) for number in range(len(weights))}
            readers[batch, length] = MixedSequences(sources, [Phase(0, 10**12, weights)], 1)
        found: dict[tuple[int, int], list[tuple[float, float]]] = {shape: [] for shape in SHAPES}
        for _ in range(3):
            for (batch, length), sequences in readers.items():
                found[batch, length].append(rate(sequences, batch, arguments.seconds))
        medians = {}
        for (batch, length), rates in found.items():
            medians[batch, length], by_process = (statistics.median(kind) for kind in zip(*rates, strict=True))
            told = f"{medians[batch, length]:,.0f} tokens/s ({by_process:,.0f} by processor time)"
            print(f"batch {batch} x {length}: {told}")
        taken = seek_seconds(split, SHAPES[0][1])
        print(f"one sample anywhere: {statistics.median(taken) * 1e3:.3f} ms, at most {max(taken) * 1e3:.3f} ms")
        print(f"tokens/s: {min(medians.values()):,.0f}")


if __name__ == "__main__":
    main()
