"""Numbers, times and sharing patterns as people read them; what is missing or not finite is shown as a dash."""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Sequence
from typing import Any

MISSING = "–"


def _finite(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def format_count(number: float | None) -> str:
    """A count in powers of ten with at most four digits that matter: 15200000 is "15.2M", 10.05e12 is "10.05T"."""
    return _scaled(number, 1000, ["", "k", "M", "B", "T", "P", "E"])


def format_bytes(number: float | None) -> str:
    """Bytes in powers of 1024: 3221225472 is "3 GiB"."""
    return _scaled(number, 1024, [" B", " KiB", " MiB", " GiB", " TiB", " PiB"])


def format_flops(rate: float | None) -> str:
    """A rate of floating-point operations: 412e9 is "412 GFLOP/s"."""
    return _scaled(rate, 1000, [f" {prefix}FLOP/s" for prefix in ("", "k", "M", "G", "T", "P", "E")])


def format_joules(joules: float | None) -> str:
    """Energy: 1520 is "1.52 kJ"; less than a joule in thousandths, "14.2 mJ"."""
    if joules is not None and _finite(joules) and 0 < abs(joules) < 1:
        return _scaled(joules * 1000, 1000, [" mJ"])
    return _scaled(joules, 1000, [f" {prefix}J" for prefix in ("", "k", "M", "G", "T", "P")])


def format_co2(kilograms: float | None) -> str:
    """A mass of CO2: "3.1 g", "1.24 kg", "5.2 t"."""
    return _scaled(None if kilograms is None else kilograms * 1000, 1000, [" g", " kg", " t", " kt"])


def format_energy_source(source: Any) -> str:
    """How energy was counted, in words; an estimate is called one."""
    words = {
        "nvml": "the GPU, measured by NVML",
        "rapl": "processor and memory, measured by RAPL",
        "nvml+rapl": "GPU and processor, measured by NVML and RAPL",
        "estimate": "estimate from stated watts",
    }
    return words.get(source, f"measured by {source}") if source else MISSING


def _scaled(number: float | None, base: int, units: Sequence[str]) -> str:
    if number is None or not _finite(number):
        return MISSING
    step = 0
    while step < len(units) - 1 and round(abs(number) / base**step, _decimals(number / base**step)) >= base:
        step += 1
    value = number / base**step
    text = f"{value:.{_decimals(value)}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text) + units[step]


def _decimals(value: float) -> int:
    """Decimals that make four digits in all."""
    value = abs(value)
    return 2 if value < 100 else 1 if value < 1000 else 0


def format_seconds(seconds: float | None) -> str:
    """A length of time by its two largest units: 0.42 s, 42 s, 3m 20s, 2h 05m, 3d 04h."""
    if seconds is None or not _finite(seconds):
        return MISSING
    if abs(seconds) < 9.95:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60}h {minutes % 60:02d}m"
    hours = round(seconds / 3600)
    return f"{hours // 24}d {hours % 24:02d}h"


def format_number(value: float | None, spec: str = ".3f") -> str:
    """A measured value under a format spec."""
    return format(value, spec) if value is not None and _finite(value) else MISSING


def format_share(value: float | None) -> str:
    """A share of one as per cent."""
    return format_number(value, ".1%")


def format_measure(name: str, value: float) -> str:
    """A value of an evaluation: counts as counts, accuracies as per cent."""
    if isinstance(value, int):
        return format_count(value)
    return format_share(value) if name.endswith("accuracy") else format_number(value, ".4g")


def format_pattern(pattern: Any) -> str:
    """A sharing pattern in few signs: "all", "groups=4", "(0,0,1,1)", and for many layers "24 layers, 4 blocks"."""
    if pattern is None:
        return MISSING
    if isinstance(pattern, dict):
        return ", ".join(f"{kind}={number}" for kind, number in pattern.items())
    if not isinstance(pattern, list | tuple):
        return str(pattern)
    if len(pattern) <= 12:
        return "(" + ",".join(str(block) for block in pattern) + ")"
    blocks = len(set(pattern))
    segments = sum(1 for _ in itertools.groupby(pattern))
    each = "" if segments == blocks else f" in {segments} runs"
    return f"{len(pattern)} layers, {blocks} block{'s' * (blocks != 1)}{each}"


def format_sharing(stage: dict[str, Any]) -> str:
    """What a stage shares, of the `start` event: its pattern, its parts where they are not all, the rank of differences
    where there are any, and which experts."""
    parts, rank, experts = (stage.get(key) for key in ("parts", "rank", "experts"))
    of_parts = f" of {', '.join(parts)}" if parts and stage.get("sharing") != "none" else ""
    by = f", experts by {experts}" if experts else ""
    return f"{format_pattern(stage.get('sharing'))}{of_parts}{f' + rank {rank}' if rank else ''}{by}"


def logits_kept(delink: dict[str, Any]) -> bool | None:
    """Whether a delinking left the model's output as it promises: to the last bit or, with a `tolerance`, to rounding;
    None where nothing was compared."""
    equal, difference = delink.get("logits_equal"), delink.get("max_difference")
    if equal is False and difference is not None and difference <= (delink.get("tolerance") or 0.0):
        return True
    return equal if equal is None else bool(equal)


def format_logits(delink: dict[str, Any]) -> str:
    """Whether a delinking left the model's output as it was, in words."""
    if delink.get("logits_equal") is True:
        return "equal to the last bit"
    if delink.get("logits_equal") is False:
        difference = format_number(delink.get("max_difference"), ".3g")
        return f"equal to rounding, {difference} apart" if logits_kept(delink) else f"DIFFERENT, by up to {difference}"
    return "not compared"


def describe_check(event: dict[str, Any]) -> str:
    """One check in a line: what was measured, and what came of it."""
    if event.get("rule") == "returns":
        seen = (
            f"loss falls {format_number(event.get('loss_per_second'), '.3g')} a second, delinked "
            f"{format_number(event.get('next_loss_per_second'), '.3g')} predicted (gain "
            f"{format_number(event.get('gain'), '.2f')} a step, {format_seconds(event.get('next_step_seconds'))} for "
            f"{format_seconds(event.get('step_seconds'))})"
        )
    else:
        values = [value for value in event.get("correlations") or [] if value is not None]
        span = f"{min(values):.2f} to {max(values):.2f}" if values else "unknown"
        seen = (
            f"gradients of neighbouring layers correlate by {span}, {event.get('under')} of "
            f"{len(event.get('pairs') or [])} under {format_number(event.get('threshold'), 'g')}"
        )
    seen += f"; {event.get('in_a_row')} of {event.get('checks')} checks in a row"
    if event.get("decision") == "end":
        return f"{seen}: stage {event.get('stage')} ends here"
    return f"{seen}: {_cuts(event)}" if event.get("decision") == "split" else seen


def _cuts(event: dict[str, Any]) -> str:
    return "split between layers " + ", ".join(f"{one} and {other}" for one, other in event.get("cut") or [])
