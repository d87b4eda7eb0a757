"""The house: each floor imports only from floors below it."""

from __future__ import annotations

import ast
from pathlib import Path

import tenfold

FLOORS = [
    "cli",
    "training",
    "reporting",
    "evaluation",
    "checkpoint",
    "integrations",
    "planning",
    "offload",
    "parallel",
    "sharing",
    "nn",
    "data",
    "hardware",
    "config",
    "errors",
]
SOURCE = Path(tenfold.__file__).parent


def imported_floors(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("tenfold.")}


def test_every_folder_is_a_floor() -> None:
    folders = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(FLOORS) - {"errors"}


def test_floors_import_only_from_floors_below() -> None:
    for path in SOURCE.rglob("*.py"):
        floor = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if floor in ("__main__", "__init__"):
            continue
        allowed = set(FLOORS[FLOORS.index(floor) :])
        assert imported_floors(path) <= allowed, f"{path.relative_to(SOURCE)} reaches above its floor"


def test_the_architecture_page_draws_the_same_house() -> None:
    page = (SOURCE.parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    drawn = page.split("## Floors")[1].split("```")[1].split("\n")
    assert [line.split()[0].rstrip("/").removesuffix(".py") for line in drawn if line.strip()] == FLOORS
