"""Parts of a tensor as sets of indices, dimension by dimension: what two have in common, how one is taken out of
another or put into it, and how it is cut.

A region has for every dimension runs of indices, in rising order; that of a number has none, and is its one element.
Where a tensor has only a region of a whole one in memory, it has these indices one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate, product

import torch
from torch import Tensor

Ranges = tuple[range, ...]
Region = tuple[Ranges, ...]


def all_of(shape: tuple[int, ...]) -> Region:
    """A whole tensor."""
    return tuple((range(size),) for size in shape)


def length(ranges: Ranges) -> int:
    """How many indices there are."""
    return sum(map(len, ranges))


def shape_of(region: Region) -> tuple[int, ...]:
    """Of the tensor that has it."""
    return tuple(map(length, region))


def elements(region: Region) -> int:
    """How many it has."""
    return math.prod(map(length, region))


def runs_of(indices: list[int]) -> Ranges:
    """Rising indices as runs."""
    ranges: list[range] = []
    for at in indices:
        if ranges and ranges[-1].stop == at:
            ranges[-1] = range(ranges[-1].start, at + 1)
        else:
            ranges.append(range(at, at + 1))
    return tuple(ranges)


def part_of(ranges: Ranges, places: range) -> Ranges:
    """Of the indices in `ranges`, in order, those at `places`."""
    begins = accumulate(map(len, ranges), initial=0)
    parts = (
        each[max(places.start - at, 0) : max(places.stop - at, 0)] for each, at in zip(ranges, begins, strict=False)
    )
    return tuple(part for part in parts if part)


def common(one: Region, other: Region) -> Region:
    """What two regions of a tensor have in common."""
    return tuple(_common(*each) for each in zip(one, other, strict=True))


def _common(one: Ranges, other: Ranges) -> Ranges:
    if one == other:
        return one
    found, at, place = [], 0, 0
    while at < len(one) and place < len(other):
        mine, theirs = one[at], other[place]
        both = range(max(mine.start, theirs.start), min(mine.stop, theirs.stop))
        if both:
            found.append(both)
        at, place = (at + 1, place) if mine.stop <= theirs.stop else (at, place + 1)
    return tuple(found)


def cut_to(region: Region, most: int) -> Iterator[Region]:
    """A region in parts of at most `most` elements, along its first dimensions."""
    if elements(region) <= most:
        yield region
        return
    dim = next(dim for dim, ranges in enumerate(region) if length(ranges) > 1)
    size = length(region[dim])
    for places in (range(size // 2), range(size // 2, size)):
        yield from cut_to((*region[:dim], part_of(region[dim], places), *region[dim + 1 :]), most)


def taken(tensor: Tensor, has: Region, wanted: Region) -> Tensor:
    """Of a tensor that has a region a part of that; where it is one run in each dimension a view."""
    for dim, (mine, each) in enumerate(zip(has, wanted, strict=True)):
        if each != mine:
            places = list(_places(mine, each)) or [slice(0, 0)]
            runs = [tensor.narrow(dim, run.start, run.stop - run.start) for run in places]
            tensor = runs[0] if len(runs) == 1 else torch.cat(runs, dim)
    return tensor


def put(tensor: Tensor, has: Region, part: Tensor, where: Region) -> None:
    """Write a part of the region that a tensor has."""
    if not has:
        tensor.copy_(part)
        return
    part = part.to(tensor.device)
    # Run by run: an index of every number would be larger than the numbers.
    runs = [
        list(zip(_places(mine, each), accumulate(map(len, each), initial=0), strict=False))
        for mine, each in zip(has, where, strict=True)
    ]
    for block in product(*runs):
        there = tuple(run for run, _ in block)
        tensor[there] = part[tuple(slice(at, at + run.stop - run.start) for run, at in block)]


def _places(has: Ranges, wanted: Ranges) -> Iterator[slice]:
    """Where runs of indices, each of which is in one of `has`, stand among them."""
    begin, rest = 0, iter(has)
    mine = next(rest, range(0))
    for each in wanted:
        while each.start >= mine.stop:
            begin += len(mine)
            mine = next(rest)
        assert mine.start <= each.start < each.stop <= mine.stop, (has, wanted)
        at = begin + each.start - mine.start
        yield slice(at, at + len(each))
