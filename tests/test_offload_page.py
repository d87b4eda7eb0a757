"""What docs/offload.md shows works as shown."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tenfold.cli.main import COMMANDS, main
from tenfold.config.load import load_run

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "offload.md").read_text(encoding="utf-8")
FENCED = [block.split("\n", 1) for block in PAGE.split("```")[1::2]]
LINES = [line.split("#")[0].strip() for kind, text in FENCED for line in text.splitlines() if not kind]
COMMAND_LINES = [line for line in LINES if line.startswith("tenfold ")]


def blocks(language: str) -> list[str]:
    return [text for kind, text in FENCED if kind == language]


@pytest.fixture
def run_toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text(blocks("toml")[0].replace("/nvme", str(tmp_path)))
    return path


@pytest.mark.parametrize("line", [line for line in COMMAND_LINES if line.startswith("tenfold train")])
def test_the_training_commands_are_understood(run_toml: Path, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = shlex.split(line)[1:]
    assert main([*arguments, *([] if "--dry-run" in arguments else ["--dry-run"])]) == 0
    assert "where the state of real would lie" in capsys.readouterr().out


def test_the_dry_run_says_what_the_page_shows(run_toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(run_toml), "--dry-run"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    (shown,) = [text for kind, text in FENCED if not kind and text.startswith("where the state of real would lie")]
    assert " ".join(shown.split()) in said


def test_the_rules_are_those_of_a_run(run_toml: Path) -> None:
    whole, rules = blocks("toml")[:2]
    begin = whole.index("[offload]")
    run_toml.write_text(whole[:begin] + rules + whole[whole.index("[[stages]]") :])
    assert [rule.layers for rule in load_run(run_toml).offload.placement] == ["all", "4-11"]


def test_every_other_command_is_there() -> None:
    assert {line.split()[1] for line in COMMAND_LINES} <= set(COMMANDS)


def test_the_loop_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("python")
    scope: dict[str, object] = {}
    exec(compile(code, "docs/offload.md", "exec"), scope)
    assert "moments" in capsys.readouterr().out
    assert all(each.isfinite().all() for each in scope["model"].parameters())  # type: ignore[attr-defined]


def test_the_picture_is_what_its_script_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    scope: dict[str, object] = {"__name__": "timeline"}
    exec((DOCS / "timeline.py").read_text(encoding="utf-8"), scope)
    assert scope["picture"]() == (DOCS / "offload.svg").read_text(encoding="utf-8")  # type: ignore[operator]


def test_files_that_are_linked_or_named_exist() -> None:
    linked = re.findall(r"\]\(((?!https?:|#)[^)#]+)", PAGE)
    assert linked
    assert all((DOCS / path).exists() for path in linked)
    assert all((DOCS.parent / path).exists() for path in re.findall(r"`((?:tests|benchmarks)/[^`]+)`", PAGE))
