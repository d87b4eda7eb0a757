"""How numbers are shown."""

from __future__ import annotations

import pytest

from tenfold.reporting.format import (
    format_bytes,
    format_co2,
    format_count,
    format_energy_source,
    format_joules,
    format_logits,
    format_measure,
    format_pattern,
    format_seconds,
    format_share,
    format_sharing,
    logits_kept,
)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (7, "7"),
        (999, "999"),
        (1000, "1k"),
        (1234, "1.23k"),
        (845.26, "845.3"),
        (15_200_000, "15.2M"),
        (10_050_000_000_000, "10.05T"),
        (999_999, "1M"),
        (-2_500_000, "-2.5M"),
        (100_000, "100k"),
        (float("nan"), "–"),
        (None, "–"),
    ],
)
def test_counts(number: float | None, text: str) -> None:
    assert format_count(number) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**30, "3 GiB"), (2**40 - 1, "1 TiB"), (None, "–")],
)
def test_bytes(number: float | None, text: str) -> None:
    assert format_bytes(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4213, "0.42 s"),
        (9.97, "10 s"),
        (42.4, "42 s"),
        (59.7, "1m 00s"),
        (200, "3m 20s"),
        (3599.9, "1h 00m"),
        (7500, "2h 05m"),
        (86_399, "1d 00h"),
        (273_600, "3d 04h"),
        (float("inf"), "–"),
        (None, "–"),
    ],
)
def test_seconds(seconds: float | None, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("all", "all"),
        ({"groups": 4}, "groups=4"),
        ([0, 0, 1, 1], "(0,0,1,1)"),
        ([0] * 24, "24 layers, 1 block"),
        ([0] * 12 + [1] * 12, "24 layers, 2 blocks"),
        ([0, 1] * 12, "24 layers, 2 blocks in 24 runs"),
        (None, "–"),
    ],
)
def test_patterns(pattern: object, text: str) -> None:
    assert format_pattern(pattern) == text


@pytest.mark.parametrize(
    ("stage", "text"),
    [
        ({"sharing": "all"}, "all"),
        ({"sharing": {"groups": 2}, "rank": 8}, "groups=2 + rank 8"),
        ({"sharing": "all", "parts": ["attention", "ffn"], "rank": 4}, "all of attention, ffn + rank 4"),
        ({}, "–"),
    ],
)
def test_what_a_stage_shares(stage: dict[str, object], text: str) -> None:
    assert format_sharing(stage) == text


def test_shares() -> None:
    assert format_share(0.4137) == "41.4%"
    assert format_share(None) == "–"


@pytest.mark.parametrize(
    ("joules", "text"),
    [(0, "0 J"), (0.0142, "14.2 mJ"), (65, "65 J"), (17_100, "17.1 kJ"), (4.2e9, "4.2 GJ"), (None, "–")],
)
def test_joules(joules: float | None, text: str) -> None:
    assert format_joules(joules) == text


@pytest.mark.parametrize(
    ("kilograms", "text"), [(0.00181, "1.81 g"), (2.5, "2.5 kg"), (5200, "5.2 t"), (None, "–"), (0, "0 g")]
)
def test_co2(kilograms: float | None, text: str) -> None:
    assert format_co2(kilograms) == text


def test_an_estimate_is_called_one_and_a_meter_by_its_name() -> None:
    assert "estimate" in format_energy_source("estimate")
    assert all("measured" in format_energy_source(source) for source in ("nvml", "rapl", "nvml+rapl", "nvml, rapl"))
    assert format_energy_source(None) == "–"


def test_measures_of_evaluations() -> None:
    assert format_measure("accuracy", 0.4137) == "41.4%"
    assert format_measure("perplexity", 88.523) == "88.52"
    assert format_measure("words", 12_000) == "12k"


@pytest.mark.parametrize(
    ("stage", "text"),
    [
        ({"sharing": "all"}, "all"),
        ({"sharing": {"groups": 4}, "parts": ["ffn", "norms"]}, "groups=4 of ffn, norms"),
        ({"sharing": "none", "parts": ["ffn"], "experts": "layer"}, "none, experts by layer"),
        ({}, "–"),
    ],
)
def test_what_a_stage_shares_is_told_with_its_parts_and_experts(stage, text):
    assert format_sharing(stage) == text


@pytest.mark.parametrize(
    ("delink", "kept", "text"),
    [
        ({"logits_equal": True, "max_difference": 0.0}, True, "equal to the last bit"),
        ({"logits_equal": False, "max_difference": 1e-5}, False, "DIFFERENT, by up to 1e-05"),
        ({"logits_equal": False, "max_difference": 1e-5, "tolerance": 2e-5}, True, "equal to rounding, 1e-05 apart"),
        ({"logits_equal": False, "max_difference": 1e-5, "tolerance": 9e-6}, False, "DIFFERENT, by up to 1e-05"),
        ({"logits_equal": False, "max_difference": None, "tolerance": 9e-6}, False, "DIFFERENT, by up to –"),
        ({}, None, "not compared"),
    ],
)
def test_a_function_is_kept_to_the_last_bit_or_to_the_rounding_that_was_promised(delink, kept, text):
    assert logits_kept(delink) is kept
    assert format_logits(delink) == text
