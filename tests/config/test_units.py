"""Quantities as people write them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenfold.config.parallel import parse_override
from tenfold.config.units import (
    _show_until,
    parse_count,
    parse_foreseen,
    parse_joules,
    parse_lengths,
    parse_seconds,
    parse_share,
    parse_sharing,
    parse_until,
    parse_weights,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("2B", 2_000_000_000),
        ("1.5M", 1_500_000),
        ("500k", 500_000),
        ("2T", 2 * 10**12),
        ("1.001k", 1001),
        ("4.35M", 4_350_000),
        ("0.000001M", 1),
        ("  7 k ", 7000),
        ("1_000", 1000),
        ("12", 12),
        (12, 12),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_counts_are_read_exactly(text, count):
    assert parse_count(text) == count


@given(st.integers(0, 10**6), st.sampled_from([("k", 3), ("M", 6), ("B", 9), ("T", 12)]), st.integers(0, 3))
def test_every_decimal_count_that_is_whole_is_read_exactly(number, unit, places):
    letter, power = unit
    text = f"{number // 10**places}.{number % 10**places:0{places}d}{letter}" if places else f"{number}{letter}"
    assert parse_count(text) == number * 10 ** (power - places)


@pytest.mark.parametrize(
    "value", ["2b", "B", "", "1.5", "1.0001k", "-5", "1e6", "2 GB", "two", "0x10", "nan", 1.5, 2.0, True, None, [1]]
)
def test_what_is_not_a_count_is_refused(value):
    with pytest.raises(ValueError, match=r"whole number|as a count"):
        parse_count(value)


@pytest.mark.parametrize(
    ("value", "share"),
    [("20%", 0.2), ("12.5%", 0.125), ("0%", 0), ("100%", 1), (" 7 % ", 0.07), (0.3, 0.3), (1, 1), (0, 0), ("0.5", 0.5)],
)
def test_shares_are_read_as_numbers_or_percentages(value, share):
    assert parse_share(value) == pytest.approx(share)


@pytest.mark.parametrize(
    "value", ["101%", "-1%", 1.01, -0.1, "20 percent", "%", "", math.nan, math.inf, "nan", "inf", True, None, [0.5]]
)
def test_what_is_not_a_share_is_refused(value):
    with pytest.raises(ValueError, match="share"):
        parse_share(value)


@pytest.mark.parametrize(
    ("value", "sharing"),
    [
        ("all", "all"),
        ("none", "none"),
        (" sandwich ", "sandwich"),
        ({"groups": 4}, {"groups": 4}),
        ({"cycle": 2}, {"cycle": 2}),
        ("groups=4", {"groups": 4}),
        ("cycle = 2", {"cycle": 2}),
        ([0, 0, 1, 1], [0, 0, 1, 1]),
        ("0,0,1, 1", [0, 0, 1, 1]),
        ("[0, 0, 1, 1]", [0, 0, 1, 1]),
        ("{groups = 4}", {"groups": 4}),
        ("0", [0]),
    ],
)
def test_every_sharing_pattern_is_read(value, sharing):
    assert parse_sharing(value) == sharing


@pytest.mark.parametrize(
    "value",
    ["some", "", "groups", "groups=", "groups=0", {"groups": 0}, {"groups": -1}, {"groups": True}, {"groups": "4"},
     {"groups": 2, "cycle": 2}, {"group": 2}, {}, [], [0, -1], [0, True], [0, "1"], [0.0], 3, None, True],
)  # fmt: skip
def test_what_is_not_a_sharing_pattern_is_refused_with_what_would_be_right(value):
    with pytest.raises(ValueError, match="groups = 4"):
        parse_sharing(value)


@pytest.mark.parametrize(
    ("value", "until"),
    [
        ("20%", {"share": 0.2}),
        ({"share": 0.2}, {"share": 0.2}),
        ({"share": "20%"}, {"share": 0.2}),
        ({"tokens": "2B"}, {"tokens": 2 * 10**9}),
        ({"tokens": 5}, {"tokens": 5}),
        ({"steps": 500}, {"steps": 500}),
        ("tokens=2B", {"tokens": 2 * 10**9}),
        ("steps = 500", {"steps": 500}),
        ("share=0.5", {"share": 0.5}),
        ('{tokens = "2B"}', {"tokens": 2 * 10**9}),
    ],
)
def test_every_end_of_a_stage_is_read(value, until):
    assert parse_until(value) == until


CORRELATION = {
    "auto": "correlation",
    "threshold": 0.5,
    "checks": 3,
    "every": 100,
    "split": False,
    "at_most": {"share": 0.4},
}


@pytest.mark.parametrize(
    ("value", "until"),
    [
        ("auto", CORRELATION),
        ({"auto": "correlation"}, CORRELATION),
        ("auto=correlation, split=true, threshold=30%", {**CORRELATION, "split": True, "threshold": 0.3}),
        ({"auto": "correlation", "at_most": {"steps": 5}}, {**CORRELATION, "at_most": {"steps": 5}}),
        ("{auto=correlation,at_most=tokens=2B}", {**CORRELATION, "at_most": {"tokens": 2 * 10**9}}),
        (
            {"auto": "returns", "every": "1k"},
            {"auto": "returns", "checks": 3, "every": 1000, "at_most": {"share": 0.4}},
        ),
        (CORRELATION, CORRELATION),
    ],
)
def test_a_rule_for_the_end_of_a_stage_has_all_its_keys(value, until):
    assert parse_until(value) == until
    assert parse_until(_show_until(until)) == until  # as the help of the command line shows it


@pytest.mark.parametrize(
    "value",
    ["auto=", "auto=luck", {"auto": 3}, {"auto": ["correlation"]}, {"auto": "returns", "split": True}, "auto=returns,x",
     {"auto": "correlation", "threshold": 1}, {"auto": "correlation", "threshold": [0.5]}, "auto=correlation,checks=0",
     {"auto": "correlation", "split": [True]}, {"auto": "correlation", "at_most": None}, "auto=returns,at_most=auto",
     {"auto": "correlation", "every": 1.5}],
)  # fmt: skip
def test_a_rule_that_makes_no_sense_is_refused(value):
    with pytest.raises(ValueError, match=r"auto|threshold|checks|split|end of a stage|share|whole number|at_most"):
        parse_until(value)


@pytest.mark.parametrize(
    "value",
    ["", "20", "120%", "-20%", "soon", 0.2, 500, True, [], {}, {"steps": 1.5}, {"steps": True}, {"steps": -5},
     {"tokens": -1}, {"share": 2}, {"step": 5}, {"steps": 5, "tokens": 5}, "tokens=-5", "steps=x"],
)  # fmt: skip
def test_what_is_not_an_end_of_a_stage_is_refused(value):
    with pytest.raises(ValueError, match=r"stage|share|count|whole number"):
        parse_until(value)


@pytest.mark.parametrize(
    ("parse", "text", "told"),
    [
        (parse_override, "tensor=2,data_shard=2,tensor=1", "tensor is given twice, as '2' and as '1'"),
        (parse_override, "{tensor=2, tensor=2}", "tensor is given twice"),
        (parse_weights, "web=0.7,code=0.3,web=0.1", "web is given twice, as '0.7' and as '0.1'"),
        (parse_lengths, "from=64,over=50%,from=32", "from is given twice"),
        (parse_until, "auto=returns,every=50,every=60", "every is given twice"),
    ],
)
def test_a_key_that_a_flag_gives_twice_is_refused(parse, text, told):
    with pytest.raises(ValueError, match=told):
        parse(text)


def test_pairs_of_a_flag_are_read_with_spaces_and_quotes():
    assert parse_override('{tensor = 2, data_shard = "auto"}') == {"tensor": 2, "data_shard": "auto"}
    assert parse_weights("web = 0.7, 'code'=0.3") == {"web": 0.7, "code": 0.3}


def test_what_a_plan_foresaw_is_read_from_a_table_and_from_a_flag() -> None:
    found = {"seconds": 0.5, "device_bytes": 2**30, "cluster": "8:h100,price=2"}
    assert parse_foreseen({"seconds": 0.5, "device_bytes": "1GiB", "cluster": "8:h100,price=2"}) == found
    assert parse_foreseen("{seconds=0.5, device_bytes=1GiB, cluster=8:h100,price=2}") == found
    for wrong in (
        {**found, "seconds": 0},
        {**found, "seconds": "soon"},
        {**found, "device_bytes": "much"},
        "seconds=1",
    ):
        with pytest.raises(ValueError, match=r"seconds|device_bytes"):
            parse_foreseen(wrong)


def test_times_and_energies_are_read_with_their_units() -> None:
    assert [parse_seconds(text) for text in ("90m", "36h", "10d", "1.5 h", "20", "5s")] == [
        5400,
        129600,
        864000,
        5400,
        20,
        5,
    ]
    assert [parse_joules(text) for text in ("500kWh", "2GJ", "1.5 MWh", "7J")] == [1.8e9, 2e9, 5.4e9, 7]
    for text in ("", "d", "10w", "-3h", "0d"):
        with pytest.raises(ValueError, match="as a time"):
            parse_seconds(text)
    for text in ("", "5", "5kW", "0J"):
        with pytest.raises(ValueError, match="as energy"):
            parse_joules(text)
