"""Which positions a context rank has, and what its queries see of each rank's keys.

Of c context ranks rank i has chunks i and 2c - 1 - i of the 2c of a sequence: under a causal mask the ends of a
sequence have most and least to do, and every pair so made has the same.

What is seen is told in rectangles, all of queries by all of keys, besides the triangle of a chunk by itself. That holds
for documents too: in a chunk before its own a position sees the document that runs on into its chunk and no other.
So no mask is ever made, and what no document crosses is no work.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class Part(NamedTuple):
    """Queries of this rank that see keys of one rank; places count from the start of what either has."""

    rows: slice
    """Sequences of the batch."""
    queries: slice
    keys: slice
    causal: bool
    """A triangle: each query sees the keys up to its own place. Else all of them see all."""


def chunks_of(ranks: int, rank: int) -> tuple[int, int]:
    """The two chunks of a sequence that a rank has, in order."""
    return rank, 2 * ranks - 1 - rank


def own_chunks(x_BT: Tensor, ranks: int, rank: int) -> Tensor:
    """A rank's positions (dimension 1) of whole sequences."""
    length = x_BT.shape[1] // (2 * ranks)
    return torch.cat([x_BT.narrow(1, chunk * length, length) for chunk in chunks_of(ranks, rank)], 1)


def order_of_runs(ranks: int, parts: int) -> Tensor:
    """Where in a sequence each run of positions stands: [context ranks, parts of each, runs of each part].

    A part is one of `parts` equal ones, in order, of what a context rank has (a tensor rank's). The one in the middle
    may lie in both chunks: so each is told as two runs of equal length, or one where sequences are whole.
    """
    if ranks == 1:
        return torch.arange(parts).view(1, parts, 1)
    chunks = [torch.arange(parts) + chunk * parts for rank in range(ranks) for chunk in chunks_of(ranks, rank)]
    return torch.cat(chunks).view(ranks, parts, 2)


def parts_of(ranks: int, rank: int, batch: int, length: int, causal: bool) -> list[list[Part]]:
    """For each rank whose keys are seen the parts that this rank's `length` queries of each sequence see."""
    rows, half = slice(0, batch), slice(length // 2, length)
    every = slice(0, length)
    found = []
    for other in range(ranks):
        if other == rank or not causal:
            found.append([Part(rows, every, every, causal)])
        elif other < rank:  # its earlier chunk is before both of this rank's, its later one after both
            found.append([Part(rows, every, slice(0, length // 2), False)])
        else:
            found.append([Part(rows, half, every, False)])
    return found


def parts_within(
    ranks: int, rank: int, batch: int, length: int, starts: Sequence[int], causal: bool
) -> list[list[Part]]:
    """The same where nothing is seen across documents; `starts` as in `nn.documents.Documents`."""
    chunk, whole = length // 2, length * ranks
    found: list[dict[tuple[range, range, bool], list[int]]] = [{} for _ in range(ranks)]  # and the sequences
    for start, stop in pairwise(starts):
        row = start // whole
        first, last = start - row * whole, stop - row * whole
        touched = range(first // chunk, (last - 1) // chunk + 1)
        for mine in chunks_of(ranks, rank):
            if mine not in touched:
                continue
            for other in touched if not causal else range(touched.start, mine + 1):
                owner = min(other, 2 * ranks - 1 - other)
                queries, keys = (_inside(first, last, each, chunk, ranks) for each in (mine, other))
                found[owner].setdefault((queries, keys, causal and mine == other), []).append(row)
    return [
        [
            Part(rows, slice(queries.start, queries.stop), slice(keys.start, keys.stop), triangle)
            for (queries, keys, triangle), each in parts.items()
            for rows in _runs(each)
        ]
        for parts in found
    ]


def _inside(first: int, last: int, chunk: int, length: int, ranks: int) -> range:
    """The positions `first` to `last` of a sequence that are in a chunk, as places of the rank that has it."""
    shift = (0 if chunk < ranks else length) - chunk * length
    return range(max(first, chunk * length) + shift, min(last, (chunk + 1) * length) + shift)


def _runs(rows: list[int]) -> list[slice]:
    """Ascending numbers as slices."""
    edges = [at for at in range(1, len(rows)) if rows[at] != rows[at - 1] + 1]
    return [slice(rows[a], rows[b - 1] + 1) for a, b in pairwise([0, *edges, len(rows)])]
