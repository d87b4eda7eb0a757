"""Attention under document masks: by document, as Tenfold does it, against a mask over whole sequences and none.

Forward and backward over random documents of several mean lengths, fp32, one process. Milliseconds, the best of
`--rounds`, all cases in turn.

    python benchmarks/documents.py [--rounds 7]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tenfold.nn.documents import attend_within, document_mask, documents_of

SHAPES = ((8, 8, 256, 32), (4, 8, 1024, 64), (1, 8, 4096, 64))
MEAN_LENGTHS = (32, 128, 512)


def batch_of(sequences: int, length: int, mean: int) -> Tensor:
    """Tokens 0 that end a document, on average every `mean` tokens, and 1."""
    ends = torch.rand(sequences, length, generator=torch.Generator().manual_seed(0)) < 1 / mean
    return (~ends).long()


def cases(sequences: int, heads: int, length: int, width: int, mean: int) -> dict[str, Callable[[], Tensor]]:
    """What is compared, each a forward pass over the same tensors that are to be given gradients."""
    shape = (sequences, length, heads, width)
    q, k, v = (torch.randn(shape).transpose(1, 2).requires_grad_() for _ in range(3))
    starts = documents_of(batch_of(sequences, length, mean), 0).starts
    mask = document_mask(starts, sequences, length)
    return {
        "no mask": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "mask T x T": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
        "by document": lambda: attend_within(q, k, v, starts),
    }


def main() -> None:
    """Run every case in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    table = Table(
        "sequences x heads x tokens x width", "mean document", "no mask", "mask T x T", "by document", box=None
    )
    for shape in SHAPES:
        for mean in MEAN_LENGTHS:
            best: dict[str, float] = {}
            for _ in range(arguments.rounds):
                for name, forward in cases(*shape, mean).items():
                    began = time.perf_counter()
                    forward().sum().backward()
                    best[name] = min(best.get(name, 1e9), time.perf_counter() - began)
            times = [f"{seconds * 1e3:,.1f}" for seconds in best.values()]
            table.add_row(" x ".join(map(str, shape)), str(mean), *times)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
