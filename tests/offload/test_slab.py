"""The slab against a plain model of it: a set of pages."""

from __future__ import annotations

import random

import pytest
import torch

from tenfold.offload.slab import Block, Runs, Slab
from tenfold.offload.tiers import ALIGN

CPU = torch.device("cpu")
PAGES = 64


@pytest.mark.parametrize("seed", range(5))
def test_blocks_never_overlap_and_all_comes_back(seed: int) -> None:
    draw = random.Random(seed)
    slab = Slab(PAGES * ALIGN, CPU)
    free, held = set(range(PAGES)), list[tuple[Block, int]]()
    for mark in range(400):
        if held and draw.random() < 0.5:
            block, written = held.pop(draw.randrange(len(held)))
            assert bool((block.bytes == written).all()), "another block wrote over it"
            free |= pages(block)
            slab.give(block)
        else:
            size = draw.randrange(1, 12 * ALIGN)
            count = -(-size // ALIGN)
            taken = slab.take(size)
            starts = [page for page in range(PAGES) if all(page + more in free for more in range(count))]
            if taken is None:
                assert not starts, f"{count} pages were free at {starts}"
                continue
            assert taken.begin == starts[0] * ALIGN, "not the first run that is long enough"
            assert len(taken.bytes) == count * ALIGN
            assert taken.bytes.data_ptr() % ALIGN == 0
            taken.bytes.fill_(mark % 251)
            free -= pages(taken)
            held.append((taken, mark % 251))
        assert slab.taken == (PAGES - len(free)) * ALIGN
    for block, _ in held:
        slab.give(block)
    assert slab.taken == 0
    whole = slab.take(PAGES * ALIGN)
    assert whole is not None
    assert whole.begin == 0


def pages(block: Block) -> set[int]:
    return set(range(block.begin // ALIGN, (block.begin + len(block.bytes)) // ALIGN))


def test_giving_back_twice_is_found() -> None:
    slab = Slab(4 * ALIGN, CPU)
    first, second = slab.take(ALIGN), slab.take(ALIGN)
    assert first is not None
    assert second is not None
    slab.give(first)
    with pytest.raises(AssertionError, match="twice"):
        slab.give(first)


def test_a_run_that_reaches_into_a_free_one_is_found() -> None:
    runs = Runs()
    runs.give(10, 20)
    for begin, end in ((5, 11), (19, 25), (12, 13), (5, 25)):
        with pytest.raises(AssertionError, match="twice"):
            runs.give(begin, end)
    assert runs.free == [(10, 20)]


def test_a_slab_of_nothing_gives_nothing() -> None:
    assert Slab(0, CPU).take(1) is None


def test_a_slab_that_is_full_says_so_and_has_room_again() -> None:
    slab = Slab(3 * ALIGN, CPU)
    blocks = [slab.take(ALIGN) for _ in range(3)]
    assert slab.take(1) is None
    assert blocks[1] is not None
    slab.give(blocks[1])
    again = slab.take(ALIGN)
    assert again is not None
    assert again.begin == ALIGN
