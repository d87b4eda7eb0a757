"""Several sources in one stream of samples, by weights that may change on the way.

A run is phases of constant weights, and a phase is blocks of samples. Before sample n of a phase source k has given

    c[k] = round(W[k] n) - round(W[k-1] n)        W: cumulative weights, W[K] = 1

samples at every border of blocks, so shares are never off by a whole sample there, and what each source has given
before any sample is known without looking at those before. Inside a block a permutation keyed by (seed, block) says
which source comes when, and which of the source's next samples it is. A source counts its samples by itself: it has
its own order and epochs, and a change of weights skips and repeats nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tenfold.data.sampling import PackedSequences, permute

_BLOCK = 256
"""Samples in a block, unless the smallest weight needs more to be one."""
_ONE = 2**40
"""Cumulative weights are whole numbers over this, so that counts are exact however long the run."""
_KEPT = 1024
"""Places of a block that are worked out at once."""


@dataclass(frozen=True)
class Phase:
    """Samples `first` .. `last` - 1 of a run, with one weight for each source. Weights need not add up to 1.

    `planned`: where it was to end when it began, for one that was cut short (`cut_short`): its blocks are those of the
    plan.
    """

    first: int
    last: int
    weights: tuple[float, ...]
    planned: int | None = None


@dataclass(frozen=True)
class _Laid:
    """A phase with its cumulative weights, its blocks, and what each source has given before it."""

    first: int
    last: int
    cumulative: tuple[int, ...]
    block: int
    blocks: int
    before: tuple[int, ...]
    mixed: bool
    planned: int

    def border(self, block: int) -> int:
        """Where a block begins, from the phase's first sample; the last block also takes what is left over."""
        return self.planned - self.first if block == self.blocks else block * self.block

    def given(self, samples: int) -> list[int]:
        """For each source what the phase takes from it in its first `samples` samples (a border of blocks)."""
        return [high - low for low, high in pairwise(self.edges(samples))]

    def edges(self, samples: int) -> list[int]:
        return [(weight * samples + _ONE // 2) // _ONE for weight in self.cumulative]


class Order:
    """Which sample of which source each sample of a run is: a function of (seed, index, phases) alone."""

    def __init__(self, phases: Sequence[Phase], seed: int) -> None:
        """`phases` follow one another from sample 0 on; neighbours of equal weights are one."""
        self.seed = seed
        self._phases: list[_Laid] = []
        self._part = functools.lru_cache(maxsize=4)(self._worked_out)
        before = (0,) * len(phases[0].weights)
        for phase in joined(phases):
            laid = _lay(phase, before)
            self._phases.append(laid)
            before = tuple(map(sum, zip(before, laid.given(laid.last - laid.first), strict=True)))

    def __call__(self, first: int, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Source and index in it of samples first .. first + count - 1, two int64 [count]."""
        sources, indices = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        sample, end = first, first + count
        while sample < end:
            number = self._phase_of(sample)
            phase = self._phases[number]
            within = sample - phase.first
            block = min(within // phase.block, phase.blocks - 1)
            place = within - phase.border(block)
            part = self._part(number, block, place // _KEPT)
            begin = place % _KEPT
            stop = min(begin + end - sample, len(part[0]))
            sources.append(part[0][begin:stop])
            indices.append(part[1][begin:stop])
            sample += stop - begin
        return np.concatenate(sources), np.concatenate(indices)

    def given(self, samples: int) -> list[int]:
        """How many of the run's first `samples` samples each source gives. Exact at the ends of phases; elsewhere
        by whole blocks and then by weight."""
        phase = self._phases[self._phase_of(max(samples - 1, 0))]
        return [old + new for old, new in zip(phase.before, phase.given(samples - phase.first), strict=True)]

    def _phase_of(self, sample: int) -> int:
        for number, phase in enumerate(self._phases):
            if sample < phase.last:
                return number
        return len(self._phases) - 1

    def _worked_out(self, number: int, block: int, part: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        phase = self._phases[number]
        begin, end = phase.border(block), phase.border(block + 1)
        places = np.arange(part * _KEPT, min((part + 1) * _KEPT, end - begin), dtype=np.int64)
        if phase.mixed:
            places = permute(places, end - begin, self.seed, f"{number}/{block}")
        low, high = phase.edges(begin), phase.edges(end)
        ends = np.array([b - a for a, b in zip(low, high, strict=True)])  # cumulative over sources, from 0
        sources = np.searchsorted(ends, places, side="right") - 1
        given = np.array(phase.before) + np.array(phase.given(begin))
        return sources, given[sources] + places - ends[sources]


def joined(phases: Sequence[Phase]) -> list[Phase]:
    """The phases with neighbours of equal weights made one, except after one that was cut short."""
    found: list[Phase] = []
    for phase in phases:
        if found and found[-1].weights == phase.weights and found[-1].planned is None:
            phase = Phase(found.pop().first, phase.last, phase.weights, phase.planned)
        found.append(phase)
    return found


def cut_short(phases: Sequence[Phase], sample: int) -> list[Phase]:
    """The phases, ended at the first border of blocks from `sample` on, where no source has given a part of a block."""
    found = []
    for phase in joined(phases):
        if phase.first < sample < phase.last:
            laid = _lay(phase, (0,) * len(phase.weights))
            block = min(-(-(sample - phase.first) // laid.block), laid.blocks)
            phase = Phase(phase.first, phase.first + laid.border(block), phase.weights, laid.planned)
        if phase.first < sample:
            found.append(phase)
    return found


def _lay(phase: Phase, before: tuple[int, ...]) -> _Laid:
    total = sum(phase.weights)
    cumulative = [round(sum(phase.weights[:number]) / total * _ONE) for number in range(len(phase.weights))] + [_ONE]
    shares = [high - low for low, high in pairwise(cumulative) if high > low]
    # In a block a source's count is its weight's share, rounded at both ends: at least 0 once that share is 1 or more.
    block = max(_BLOCK, -(-_ONE // min(shares)))
    planned = phase.last if phase.planned is None else phase.planned
    blocks = max(1, (planned - phase.first) // block)
    return _Laid(phase.first, phase.last, tuple(cumulative), block, blocks, before, len(shares) > 1, planned)


class MixedSequences:
    """The training sequences of a run over one or several sources, by name."""

    def __init__(self, sources: Mapping[str, PackedSequences], phases: Sequence[Phase], seed: int) -> None:
        self.sources = dict(sources)
        self.order = Order(phases, seed)
        self.sequence_length = next(iter(self.sources.values())).sequence_length

    def __len__(self) -> int:
        """Sequences in one epoch of every source."""
        return sum(map(len, self.sources.values()))

    def batch(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """Samples first .. first + count - 1, counted over the whole run: int64 [count, sequence_length + 1]."""
        sources, indices = self.order(first, count)
        parts = list(self.sources.values())
        if len(parts) == 1:
            return parts[0].rows(indices)
        rows = np.empty((count, self.sequence_length + 1), dtype=np.int64)
        for number in set(sources.tolist()):
            here = sources == number
            rows[here] = parts[number].rows(indices[here])
        return rows

    def epochs(self, samples: int) -> dict[str, float]:
        """How often each source has been read when the run has had `samples` samples."""
        given = self.order.given(samples)
        return {name: count / len(part) for (name, part), count in zip(self.sources.items(), given, strict=True)}
