"""What README shows works as shown."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tenfold.cli.main import COMMANDS, main
from tenfold.config.load import load_run
from tenfold.planning.stages import plan_stages

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language; "" is those without one."""
    fenced = [block.split("\n", 1) for block in README.split("```")[1::2]]
    return [text for name, text in fenced if name == language]


COMMAND_LINES = [
    line.split("#")[0].strip() for block in blocks("") for line in block.splitlines() if line.startswith("tenfold ")
]


@pytest.fixture
def run_toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text(blocks("toml")[0])
    return path


def test_the_run_file_is_a_run_of_two_stages(run_toml: Path) -> None:
    assert [stage.name for stage in plan_stages(load_run(run_toml))] == ["pseudo", "real"]


@pytest.mark.parametrize("line", [line for line in COMMAND_LINES if line.startswith("tenfold train")])
def test_the_training_commands_are_understood(run_toml: Path, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = shlex.split(line)[1:]
    assert main([*arguments, *([] if "--dry-run" in arguments else ["--dry-run"])]) == 0
    assert "pseudo" in capsys.readouterr().out


def test_every_command_is_shown() -> None:
    assert {line.split()[1] for line in COMMAND_LINES} == set(COMMANDS)


def test_make_has_every_target_that_is_named() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"^make ([a-z-]+)", README, re.MULTILINE)) <= targets


def test_the_library_example_runs() -> None:
    (code,) = blocks("python")
    scope: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), scope)
    layers = scope["model"].model.layers  # type: ignore[attr-defined]
    assert len({layer.self_attn.q_proj.weight for layer in layers}) == 6


def test_files_that_are_linked_exist() -> None:
    linked = re.findall(r"\]\(((?!https?:|#)[^)#]+)", README)
    assert linked
    assert all((ROOT / path).exists() for path in linked)
