"""The reference page and the shipped run files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tenfold.config.load import load_run
from tenfold.config.reference import reference
from tenfold.config.run import RunConfig
from tenfold.planning.stages import plan_stages

ROOT = Path(__file__).parents[2]


def test_the_page_in_docs_is_the_one_the_code_makes() -> None:
    assert (ROOT / "docs" / "run-file.md").read_text(encoding="utf-8") == reference(), "run `make docs`"


def test_the_page_names_every_section() -> None:
    page = reference()
    assert all(f"[{section}]" in page for section in [*RunConfig.model_fields, "model.moe"])


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_every_shipped_run_file_is_a_run(path: Path) -> None:
    assert plan_stages(load_run(path))
