"""Sharing patterns: parsing, equality, the refinement order, and segments against brute force."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenfold.errors import TenfoldError
from tenfold.sharing.patterns import Pattern

maps = st.lists(st.integers(0, 5), min_size=1, max_size=8)
patterns_of_five = st.lists(st.integers(0, 4), min_size=5, max_size=5).map(Pattern)


@pytest.mark.parametrize(
    ("spec", "layers", "blocks"),
    [
        ("all", 4, (0, 0, 0, 0)),
        ("none", 4, (0, 1, 2, 3)),
        ({"groups": 2}, 4, (0, 0, 1, 1)),
        ({"groups": 3}, 6, (0, 0, 1, 1, 2, 2)),
        ({"cycle": 2}, 4, (0, 1, 0, 1)),
        ({"cycle": 3}, 6, (0, 1, 2, 0, 1, 2)),
        ("sandwich", 4, (0, 1, 1, 2)),
        ("sandwich", 3, (0, 1, 2)),
        ("sandwich", 2, (0, 1)),
        ("sandwich", 1, (0,)),
        ("all", 1, (0,)),
        ([0, 1, 1, 0], 4, (0, 1, 1, 0)),
        ([7, 3, 7], 3, (0, 1, 0)),
    ],
)
def test_every_kind_of_pattern_is_read(spec, layers, blocks):
    assert Pattern.parse(spec, layers).blocks == blocks


@pytest.mark.parametrize(
    ("spec", "layers", "told"),
    [
        ({"groups": 4}, 6, ["groups = 4", "6"]),
        ({"cycle": 5}, 12, ["cycle = 5", "12"]),
        ({"groups": 8}, 4, ["groups = 8", "4"]),
        ([0, 0, 1], 4, ["3 layers", "4"]),
        ("some", 4, ["some"]),
    ],
)
def test_a_pattern_that_does_not_fit_is_refused_with_the_numbers(spec, layers, told):
    with pytest.raises(TenfoldError) as caught:
        Pattern.parse(spec, layers)
    assert all(part in str(caught.value) for part in told)


@given(maps, st.permutations(range(6)))
def test_patterns_are_equal_whatever_their_blocks_are_called(blocks, names):
    renamed = Pattern(names[block] for block in blocks)
    assert renamed == Pattern(blocks)
    assert hash(renamed) == hash(Pattern(blocks))
    assert str(renamed) == str(Pattern(blocks))


@given(maps, maps)
def test_patterns_are_equal_exactly_when_the_same_layers_share(one, two):
    def sharing(blocks):
        return [(i, j) for i, j in itertools.combinations(range(len(blocks)), 2) if blocks[i] == blocks[j]]

    assert (Pattern(one) == Pattern(two)) == (len(one) == len(two) and sharing(one) == sharing(two))


@given(patterns_of_five, patterns_of_five)
def test_refinement_is_that_whoever_shares_has_shared_before(fine, coarse):
    pairs = itertools.combinations(range(5), 2)
    by_definition = all(coarse.blocks[i] == coarse.blocks[j] for i, j in pairs if fine.blocks[i] == fine.blocks[j])
    assert fine.refines(coarse) == by_definition


@given(patterns_of_five, patterns_of_five, patterns_of_five)
def test_refinement_is_a_partial_order(a, b, c):
    assert a.refines(a)
    if a.refines(b) and b.refines(a):
        assert a == b
    if a.refines(b) and b.refines(c):
        assert a.refines(c)


@given(patterns_of_five)
def test_none_refines_every_pattern_and_every_pattern_refines_all(pattern):
    assert Pattern.parse("none", 5).refines(pattern)
    assert pattern.refines(Pattern.parse("all", 5))


def test_patterns_of_different_depth_do_not_refine_each_other():
    assert not Pattern([0, 1]).refines(Pattern([0, 0, 0]))


def test_a_pattern_that_cannot_be_reached_is_refused_with_both_shown():
    with pytest.raises(TenfoldError, match=r"stages.1.*\(0,0,1,1\).*\(0,1,0,1\)"):
        Pattern([0, 0, 1, 1]).check_refines(Pattern([0, 1, 0, 1]), "stages.1")


@given(maps)
def test_segments_are_the_longest_list_of_runs_that_cut_no_block(blocks):
    pattern = Pattern(blocks)
    layers = len(blocks)
    # A cut before layer i is allowed when no block is used on both sides; the segments take every allowed cut.
    cuts = [i for i in range(1, layers) if not set(blocks[:i]) & set(blocks[i:])]
    places = [0, *cuts, layers]
    expected = [pattern.blocks[a:b] for a, b in itertools.pairwise(places)]
    assert pattern.segments() == expected


@pytest.mark.parametrize(
    ("blocks", "segments"),
    [
        ([0, 0, 0], [(0, 0, 0)]),
        ([0, 1, 2], [(0,), (1,), (2,)]),
        ([0, 1, 0, 1], [(0, 1, 0, 1)]),
        ([0, 1, 1, 2], [(0,), (1, 1), (2,)]),
        ([0, 1, 0, 2, 2, 3], [(0, 1, 0), (2, 2), (3,)]),
    ],
)
def test_segments_by_hand(blocks, segments):
    assert Pattern(blocks).segments() == segments


@given(maps)
def test_uses_and_first_layers_agree_with_the_map(blocks):
    pattern = Pattern(blocks)
    assert pattern.layers == len(blocks)
    assert sum(pattern.uses(block) for block in range(pattern.stored_blocks)) == len(blocks)
    for block in range(pattern.stored_blocks):
        first = pattern.first_layer(block)
        assert pattern.blocks[first] == block
        assert block not in pattern.blocks[:first]
