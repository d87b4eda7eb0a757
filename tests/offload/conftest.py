"""`tenfold.offload` as the tests of it call it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tenfold
from offload.loops import ALL


@pytest.fixture
def offload(tmp_path: Path, small_pieces: None) -> Iterator[Callable[..., Any]]:
    """`tenfold.offload` of everything to a disk, unless told otherwise; closed at the end."""
    made = []

    def begin(model: Any, optimizer: Any, **how: Any) -> Any:
        how = {"placement": ALL, "disk": tmp_path, "note": lambda _: None} | how
        made.append(tenfold.offload(model, optimizer, **how))
        return made[-1]

    yield begin
    for each in made:
        each.close()
    assert os.listdir(tmp_path) == []
