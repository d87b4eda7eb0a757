"""Run files on disk, read with flags."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tenfold.config.load import load_run
from tenfold.config.run import RunConfig


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., RunConfig]:
    """The configuration of a run file's text and of flags."""

    def build(text: str, *flags: str) -> RunConfig:
        path = tmp_path / "run.toml"
        path.write_text(text)
        return load_run(path, flags)

    return build
