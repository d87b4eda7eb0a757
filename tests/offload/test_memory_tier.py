"""The tier that tests of offload use keeps the contract, and shows who breaks it."""

from __future__ import annotations

import pytest
import torch

from offload.memory_tier import MemoryTier
from tenfold.errors import TenfoldError
from tenfold.offload.slab import Slab
from tenfold.offload.tiers import ALIGN


@pytest.fixture
def slab():
    return Slab(8 * ALIGN, torch.device("cpu"))


def test_a_read_sees_the_writes_asked_for_before_it_however_late_they_are(slab):
    tier = MemoryTier(delay=None)
    extent, source, target = tier.reserve(2 * ALIGN), slab.take(2 * ALIGN).bytes, slab.take(ALIGN).bytes
    tier.write(extent, source.fill_(1))
    tier.write(extent, source[ALIGN:], begin=ALIGN)
    source[ALIGN:] = 7  # not looked at yet
    read = tier.read(extent, target, begin=ALIGN)
    assert (target == 0xFF).all()
    assert not read.done
    read.wait()
    assert (target == 7).all()
    assert read.done
    assert (tier.bytes_written, tier.bytes_read, tier.waits) == (3 * ALIGN, ALIGN, 1)


def test_a_transfer_is_done_after_so_many_questions(slab):
    tier = MemoryTier(delay=3)
    transfer = tier.write(tier.reserve(ALIGN), slab.take(ALIGN).bytes)
    assert [transfer.done for _ in range(4)] == [False, False, True, True]


def test_room_ends_and_comes_back():
    tier = MemoryTier(room=2 * ALIGN)
    extent = tier.reserve(2 * ALIGN)
    with pytest.raises(TenfoldError, match="4,096 bytes asked for, 0 free"):
        tier.reserve(ALIGN)
    tier.release(extent)
    tier.reserve(ALIGN)
    assert (tier.held, tier.most_held) == (ALIGN, 2 * ALIGN)


def test_the_transfer_that_is_to_fail_fails(slab):
    tier = MemoryTier()
    extent, source = tier.reserve(ALIGN), slab.take(ALIGN).bytes
    tier.fail_next(2)
    tier.write(extent, source).wait()
    failed = tier.write(extent, source)
    assert failed.done
    for _ in range(2):
        with pytest.raises(TenfoldError, match="writing 4096 bytes failed, transfer 2"):
            failed.wait()


def test_misuse_shows(slab):
    tier = MemoryTier()
    extent, block = tier.reserve(ALIGN), slab.take(2 * ALIGN).bytes
    with pytest.raises(AssertionError, match="never written"):
        tier.read(extent, block[:ALIGN])
    with pytest.raises(AssertionError):
        tier.write(extent, block[64 : 64 + ALIGN])
    tier.release(extent)
    with pytest.raises(AssertionError, match="released"):
        tier.write(extent, block[:ALIGN])
