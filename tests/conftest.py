"""What tests of several floors share: a tiny decoder, of any pattern and shape; offload in small pieces.

And what a run spends more on than its few steps cost is little here: it writes short samples, and one measurement of
the machine's matrix rate serves all runs of a process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
import torch

from tenfold.config.model import ModelConfig
from tenfold.hardware.device import matrix_rate
from tenfold.nn.decoder import Decoder
from tenfold.nn.init import initialize
from tenfold.nn.recompute import Mode, Recompute
from tenfold.offload import units
from tenfold.sharing.patterns import Pattern
from tenfold.sharing.tying import PARTS, Sharing, tie
from tenfold.training import observing, offloading, run_state

# The same examples on every run, however slow the machine.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("fixed")

TINY: dict[str, Any] = {"vocab_size": 50, "layers": 4, "hidden": 16, "heads": 2, "ffn": 24, "init_std": 0.2}


@pytest.fixture(scope="session", autouse=True)
def _quick_runs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(observing, "SAMPLE_TOKENS", 6)
        measured = functools.cache(matrix_rate)
        patch.setattr(run_state, "matrix_rate", measured)
        patch.setattr(offloading, "matrix_rate", measured)
        yield


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offload cuts large parameters into several pieces: of a page of fp32."""
    monkeypatch.setattr(units, "PIECE", 1024)


@pytest.fixture
def tiny_config() -> Callable[..., ModelConfig]:
    """A configuration of a tiny model, with fields changed by keyword."""
    return lambda **fields: ModelConfig(**{**TINY, **fields})


@pytest.fixture
def tiny_decoder(tiny_config: Callable[..., ModelConfig]) -> Callable[..., Decoder]:
    """A tiny decoder of a pattern, initialized; float64 unless told otherwise."""

    def build(
        sharing: Any = "none",
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
        recompute: Mode | Recompute = "none",
        parts: tuple[str, ...] = PARTS,
        **fields: Any,
    ) -> Decoder:
        config = tiny_config(**fields)
        model = Decoder(config, 32, dtype, Recompute(recompute) if isinstance(recompute, str) else recompute)
        tie(model.layers, Sharing(Pattern.parse(sharing, config.layers), parts))
        initialize(model, seed)
        return model.double() if dtype == torch.float64 else model

    return build
