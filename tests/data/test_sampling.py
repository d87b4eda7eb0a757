"""The order of samples: a bijection an epoch, a function of (seed, index) alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenfold.data.sampling import PackedSequences, permute
from tenfold.data.shards import ShardEntry, TokenSplit
from tenfold.errors import TenfoldError


def split_of(path: Path, lengths: list[int], name: str = "train") -> TokenSplit:
    """A split over shards of these lengths that holds 0, 1, 2, ..."""
    start, shards = 0, []
    for number, length in enumerate(lengths):
        np.arange(start, start + length).astype("<u4").tofile(path / f"{number}.bin")
        start += length
        shards.append(
            ShardEntry(
                file=f"{number}.bin",
                documents_file=f"{number}.idx",
                tokens=length,
                documents=1,
                text_bytes=1,
                max_token=start - 1,
                sha256="",
                documents_sha256="",
            )
        )
    return TokenSplit(path, name, "uint32", shards)


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 2**40))
def test_every_epoch_is_a_bijection(size: int, seed: int, epoch: int) -> None:
    assert sorted(permute(np.arange(size), size, seed, epoch).tolist()) == list(range(size))


@pytest.mark.parametrize("size", [2**20 - 1, 2**20, 2**20 + 1])
def test_a_large_epoch_is_a_bijection(size: int) -> None:
    assert np.array_equal(np.bincount(permute(np.arange(size), size, 7, 3), minlength=size), np.ones(size))


def test_a_huge_range_stays_inside_and_distinct() -> None:
    size = 10**15 + 7
    positions = permute(np.arange(size - 1000, size), size, 1, 0)
    assert len(set(positions.tolist())) == 1000
    assert positions.min() >= 0
    assert positions.max() < size


def test_epochs_and_seeds_have_their_own_orders() -> None:
    orders = {tuple(permute(np.arange(50), 50, seed, epoch).tolist()) for seed in range(6) for epoch in range(6)}
    assert len(orders) == 36
    assert tuple(range(50)) not in orders


def test_every_sequence_is_first_about_equally_often() -> None:
    size, epochs = 7, 3500
    counts = np.bincount([permute(np.arange(1), size, 3, epoch)[0] for epoch in range(epochs)], minlength=size)
    chi_square = ((counts - epochs / size) ** 2 / (epochs / size)).sum()
    assert chi_square < 22.5  # 6 degrees of freedom: 0.1 %


def test_neighbours_are_not_kept_together() -> None:
    positions = permute(np.arange(5000), 5000, 1, 0)
    assert (np.abs(np.diff(positions)) == 1).sum() < 10


def test_a_batch_is_slices_of_the_tokens(tmp_path: Path) -> None:
    sequences = PackedSequences(split_of(tmp_path, [40, 3, 58]), 7, seed=1)
    batch = sequences.batch(0, len(sequences))
    assert batch.dtype == np.int64
    assert batch.shape == (14, 8)
    tokens = np.arange(101)
    expected = {tuple(tokens[7 * p : 7 * p + 8].tolist()) for p in range(14)}
    assert {tuple(row) for row in batch.tolist()} == expected


def test_without_a_seed_the_order_is_that_of_the_text(tmp_path: Path) -> None:
    sequences = PackedSequences(split_of(tmp_path, [50, 51]), 10, seed=None)
    assert len(sequences) == 10
    assert sequences.batch(0, 10)[:, 0].tolist() == list(range(0, 100, 10))


@pytest.mark.parametrize("tokens", [70, 71, 72, 77, 78])
def test_the_last_token_is_a_target_when_there_is_one_more_than_a_multiple(tmp_path: Path, tokens: int) -> None:
    assert len(PackedSequences(split_of(tmp_path, [tokens]), 7, seed=1)) == (tokens - 1) // 7


def test_samples_do_not_depend_on_how_they_are_asked_for(tmp_path: Path) -> None:
    sequences = PackedSequences(split_of(tmp_path, [101]), 7, seed=5)
    whole = sequences.batch(0, 50)
    parts = [sequences.batch(first, count) for first, count in ((0, 3), (3, 20), (23, 1), (24, 26))]
    assert np.array_equal(np.concatenate(parts), whole)
    again = PackedSequences(split_of(tmp_path, [101]), 7, seed=5)
    assert np.array_equal(again.batch(31, 10), whole[31:41])  # a resume in the middle of the third epoch


def test_after_a_resume_in_mid_epoch_later_epochs_are_whole(tmp_path: Path) -> None:
    sequences = PackedSequences(split_of(tmp_path, [101]), 7, seed=5)
    n = len(sequences)
    seen = Counter(sequences.positions(n + n // 2, n - n // 2 + 3 * n).tolist()[n - n // 2 :])
    assert seen == Counter(dict.fromkeys(range(n), 3))


def test_the_first_epoch_is_not_the_second(tmp_path: Path) -> None:
    sequences = PackedSequences(split_of(tmp_path, [701]), 7, seed=5)
    assert not np.array_equal(sequences.positions(0, 100), sequences.positions(100, 100))


def test_a_distant_sample_is_found_at_once(tmp_path: Path) -> None:
    sequences = PackedSequences(split_of(tmp_path, [101]), 7, seed=5)
    index = 10**12
    epoch, position = divmod(index, len(sequences))
    expected = int(permute(np.array([position]), len(sequences), 5, epoch)[0])
    assert sequences.batch(index, 1)[0].tolist() == list(range(7 * expected, 7 * expected + 8))


@pytest.mark.parametrize("name", ["train", "validation"])
def test_too_few_tokens_is_an_error_with_the_numbers(tmp_path: Path, name: str) -> None:
    with pytest.raises(TenfoldError) as caught:
        PackedSequences(split_of(tmp_path, [64], name), 64, seed=1)
    assert all(word in str(caught.value) for word in (f"the {name} split", "64 tokens", "needs 65", "at most 63"))


def test_samples_in_any_order_are_those_in_order(tmp_path: Path) -> None:
    sequences = PackedSequences(split_of(tmp_path, [40, 3, 2000, 58]), 7, seed=5)
    whole = sequences.batch(0, 3000)
    some = np.random.default_rng(0).integers(0, 3000, 200)
    assert np.array_equal(sequences.rows(some), whole[some])
    assert sequences.rows(some[:0]).shape == (0, 8)


@pytest.mark.parametrize("start", [1, 50])  # within the first shard, and across the border of two
def test_a_token_that_the_index_does_not_allow_is_told_by_file(tmp_path: Path, start: int) -> None:
    split = split_of(tmp_path, [53, 47])
    content = np.fromfile(tmp_path / "0.bin", "<u4")
    content[start] = 53  # allowed in the second shard alone
    content.tofile(tmp_path / "0.bin")
    with pytest.raises(TenfoldError, match=r"0\.bin is damaged: it holds token id 53"):
        TokenSplit(tmp_path, "train", "uint32", split._shards).rows(np.array([start - 1]), 7)
