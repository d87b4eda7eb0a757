"""A tensor that ranks have in regions, on its way to those that are to have other regions of it.

Who has what before and after is known to all (`pieces.regions`), so that each rank finds for itself what it sends and
what it gets: of every region that several have, who wants it gets it from the nearest. Nobody gets what it has, or does
not want; between ranks that have what they want nothing goes at all.

A rank sends to the ranks behind it and gets from those before it, one after the other, and both in parts of bounded
size: so what is under way is two parts. The order is the same everywhere, and the rank that is furthest back in it
waits for none.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from tenfold.parallel.regions import Region, common, cut_to, elements, put, shape_of, taken

PART = 2**24
"""Elements that a rank sends at once, and gets, at most."""


@dataclass
class Route:
    """What one rank does so that every rank comes to what it wants of a tensor."""

    has: Region | None
    wants: Region | None
    keeps: Region | None = None
    """What it has itself of what it wants."""
    sends: dict[int, Region] = field(default_factory=dict)
    """To which rank what."""
    gets: dict[int, Region] = field(default_factory=dict)
    """From which rank what."""

    @property
    def here(self) -> bool:
        """Whether this rank has exactly what it wants."""
        return self.wants is not None and self.wants == self.has

    @property
    def needs(self) -> bool:
        """Whether what this rank has is of use to any."""
        return self.keeps is not None or bool(self.sends)

    @torch.no_grad()
    def carry(self, local: Tensor | None, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """What this rank wants: `local` itself where that is it, else on the CPU. Every rank must call it.

        `local` is what it has, which it may leave out where nobody `needs` it; `device` is where exchanges take place.
        """
        found = local if self.here else None
        if self.wants is not None and not self.here:
            found = torch.empty(shape_of(self.wants), dtype=dtype)
            if self.keeps is not None:
                assert local is not None
                assert self.has is not None
                put(found, self.wants, taken(local, self.has, self.keeps), self.keeps)
        if self.sends or self.gets:
            self._exchange(local, found, dtype, device)
        return found

    def _exchange(self, local: Tensor | None, found: Tensor | None, dtype: torch.dtype, device: torch.device) -> None:
        mine, ranks = dist.get_rank(), dist.get_world_size()
        for step in sorted(
            {(to - mine) % ranks for to in self.sends} | {(mine - other) % ranks for other in self.gets}
        ):
            to, other = (mine + step) % ranks, (mine - step) % ranks
            going = cut_to(self.sends[to], PART) if to in self.sends else iter(())
            coming = cut_to(self.gets[other], PART) if other in self.gets else iter(())
            for out, into in zip_longest(going, coming):
                ways: list[dist.P2POp] = []
                if out is not None:
                    assert local is not None
                    assert self.has is not None
                    ways.append(dist.P2POp(dist.isend, taken(local, self.has, out).to(device).contiguous(), to))
                if into is not None:
                    came = torch.empty(shape_of(into), dtype=dtype, device=device)
                    ways.append(dist.P2POp(dist.irecv, came, other))
                for work in dist.batch_isend_irecv(ways):
                    work.wait()
                if into is not None:
                    assert found is not None
                    assert self.wants is not None
                    put(found, self.wants, came, into)


def route(has: Sequence[Region | None], wants: Sequence[Region | None], rank: int) -> Route:
    """That of `rank`, from what every rank has and wants, by its number; None is nothing.

    Regions that ranks have must be the same or apart, and together all that is wanted.
    """
    mine = Route(has[rank], wants[rank])
    if all(wanted is None or wanted == had for had, wanted in zip(has, wants, strict=True)):
        mine.keeps = mine.wants
        return mine
    holders: dict[Region, list[int]] = {}
    for each, region in enumerate(has):
        if region is not None and elements(region):
            holders.setdefault(region, []).append(each)
    if mine.wants is not None and elements(mine.wants):
        found = 0
        for region, ranks in holders.items():
            if elements(both := common(region, mine.wants)):
                found += elements(both)
                if (owner := _nearest(ranks, rank)) == rank:
                    mine.keeps = both
                else:
                    mine.gets[owner] = both
        assert found == elements(mine.wants), (has, wants)
    if mine.has is not None and elements(mine.has):
        alike = holders[mine.has]
        for other, wanted in enumerate(wants):
            if other == rank or wanted is None or _nearest(alike, other) != rank:
                continue
            if elements(both := common(mine.has, wanted)):
                mine.sends[other] = both
    return mine


def _nearest(ranks: list[int], rank: int) -> int:
    """Of some ranks, in order, the one whose number is nearest: likely on the same node."""
    at = bisect_left(ranks, rank)
    return min(ranks[max(at - 1, 0) : at + 1], key=lambda each: (abs(each - rank), each))
