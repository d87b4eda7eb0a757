"""Sources mixed: shares at every block, every source's samples each once and in a closed form."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenfold.data.mixing import MixedSequences, Order, Phase
from tenfold.data.sampling import PackedSequences
from tenfold.data.shards import ShardEntry, TokenSplit


@st.composite
def runs(draw: st.DrawFn) -> list[Phase]:
    """One to four phases over one to five sources, some of them left out, some hardly there."""
    sources = draw(st.integers(1, 5))
    weight = st.one_of(st.just(0.0), st.floats(0.001, 10.0))
    phases, first = [], 0
    for _ in range(draw(st.integers(1, 4))):
        weights = draw(st.lists(weight, min_size=sources, max_size=sources).filter(any))
        last = first + draw(st.integers(1, 1500))
        phases.append(Phase(first, last, tuple(weights)))
        first = last
    return phases


@given(phases=runs(), seed=st.integers(0, 2**63 - 1))
def test_every_source_gives_its_samples_once_each_without_a_gap_whatever_the_weights_do(
    phases: list[Phase], seed: int
) -> None:
    order = Order(phases, seed)
    total = phases[-1].last
    sources, indices = order(0, total)
    for source in range(len(phases[0].weights)):
        mine = np.sort(indices[sources == source])
        assert mine.tolist() == list(range(len(mine)))
    assert order.given(total) == np.bincount(sources, minlength=len(phases[0].weights)).tolist()
    for phase in order._phases:  # and up to the end of every one
        before = sources[: phase.last]
        for source in range(len(phases[0].weights)):
            seen = indices[: phase.last][before == source]
            assert sorted(seen.tolist()) == list(range(len(seen)))
    for phase in phases:
        for source, weight in enumerate(phase.weights):
            assert weight != 0 or source not in sources[phase.first : phase.last]


@given(phases=runs(), seed=st.integers(0, 100))
def test_shares_are_within_one_sample_of_what_is_asked_at_every_block(phases: list[Phase], seed: int) -> None:
    order = Order(phases, seed)
    sources, _ = order(0, phases[-1].last)
    for laid in order._phases:
        weights = np.diff(laid.cumulative) / laid.cumulative[-1]
        for block in range(laid.blocks + 1):
            border = laid.border(block)
            counts = np.bincount(sources[laid.first : laid.first + border], minlength=len(weights))
            assert np.abs(counts - weights * border).max() < 1 + 1e-6


@given(phases=runs(), data=st.data())
def test_samples_do_not_depend_on_how_they_are_asked_for(phases: list[Phase], data: st.DataObject) -> None:
    whole = Order(phases, 3)(0, phases[-1].last)
    first = data.draw(st.integers(0, phases[-1].last - 1))
    count = data.draw(st.integers(1, phases[-1].last - first))
    part = Order(phases, 3)(first, count)
    for mine, theirs in zip(part, whole, strict=True):
        assert np.array_equal(mine, theirs[first : first + count])


def test_a_stage_that_keeps_the_weights_changes_no_order() -> None:
    whole = Order([Phase(0, 2000, (0.7, 0.3))], 1)
    cut = Order([Phase(0, 500, (0.7, 0.3)), Phase(500, 2000, (0.7, 0.3))], 1)
    for mine, theirs in zip(whole(0, 2000), cut(0, 2000), strict=True):
        assert np.array_equal(mine, theirs)


def test_one_source_is_read_in_its_own_order() -> None:
    sources, indices = Order([Phase(0, 3000, (2.0,))], 1)(100, 2000)
    assert indices.tolist() == list(range(100, 2100))
    assert not sources.any()


def test_sources_come_mixed_and_not_in_runs() -> None:
    sources, _ = Order([Phase(0, 10_000, (0.5, 0.5))], 1)(0, 10_000)
    changes = int((np.diff(sources) != 0).sum())
    assert 4700 < changes < 5300  # as coins would: 5000 +- 50


def test_a_distant_sample_of_a_tiny_source_is_found_at_once() -> None:
    order = Order([Phase(0, 10**13, (1.0, 1e-7))], 1)
    sources, indices = order(9 * 10**12, 4096)
    assert len(set(zip(sources.tolist(), indices.tolist(), strict=True))) == 4096
    given = order.given(9 * 10**12)
    assert given[1] == pytest.approx(9 * 10**12 * 1e-7, rel=1e-4)
    # A block holds each source's next samples: none is further off than a block is long.
    assert np.abs(indices[sources == 0] - given[0]).max() < 2 * 10**7 + 4096


def split_of(path: Path, name: str, tokens: int, first: int) -> TokenSplit:
    """A split that holds first, first + 1, ..."""
    np.arange(first, first + tokens).astype("<u4").tofile(path / f"{name}.bin")
    shard = ShardEntry(
        file=f"{name}.bin",
        documents_file=f"{name}.idx",
        tokens=tokens,
        documents=1,
        text_bytes=1,
        max_token=first + tokens - 1,
        sha256="",
        documents_sha256="",
    )
    return TokenSplit(path, "train", "uint32", [shard])


def test_every_source_has_epochs_of_its_own(tmp_path: Path) -> None:
    small = PackedSequences(split_of(tmp_path, "small", 51, 0), 5, seed=1)  # 10 sequences
    large = PackedSequences(split_of(tmp_path, "large", 501, 1000), 5, seed=2)  # 100 sequences
    phases = [Phase(0, 60, (0.5, 0.5)), Phase(60, 120, (1.0, 0.0)), Phase(120, 200, (0.25, 0.75))]
    mixed = MixedSequences({"small": small, "large": large}, phases, seed=1)
    rows = mixed.batch(0, 200)
    assert rows.shape == (200, 6)
    counts = Counter(rows[:, 0].tolist())
    assert rows.tolist() == [list(range(row[0], row[0] + 6)) for row in rows.tolist()]
    given = {
        name: round(times * len(part))
        for (name, times), part in zip(mixed.epochs(200).items(), (small, large), strict=True)
    }
    assert given == {"small": 30 + 60 + 20, "large": 30 + 60}
    for start in range(0, 50, 5):  # 110 samples of 10 sequences: eleven times each
        assert counts[start] == 11
    assert max(counts[start] for start in range(1000, 1500, 5)) == 1
    parts = [mixed.batch(first, count) for first, count in ((0, 7), (7, 100), (107, 93))]
    assert np.array_equal(np.concatenate(parts), rows)
