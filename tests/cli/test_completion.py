"""Completion, asked of the shells themselves."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tenfold.cli.completion import command_flags
from tenfold.cli.main import COMMANDS, main
from tenfold.config.presets import PRESETS


@pytest.fixture
def script(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def write(shell: str) -> Path:
        if shutil.which(shell) is None:
            pytest.skip(f"needs {shell}")
        assert main(["completion", shell]) == 0
        path = tmp_path / f"tenfold.{shell}"
        path.write_text(capsys.readouterr().out, encoding="utf-8")
        return path

    return write


def ran(*command: str, folder: Path) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


# The last word is being written; bash makes three words of --flag=value.
CASES = [
    (["tra"], ["train"]),
    (["tr", "x"], []),
    (["train", "--model.pre"], ["--model.preset"]),
    (["train", "run.toml", "--res"], ["--resume"]),
    (["train", "run.toml", "--model.preset", "gpt"], ["gpt2-124m"]),
    (["train", "run.toml", "--model.moe.exp"], ["--model.moe.experts"]),
    (["train", "run.toml", "--stages.0.rew"], ["--stages.0.rewarm"]),
    (["train", "run.toml", "--stages.0.moments", "re"], ["rescale", "reset"]),
    (["train", "run.toml", "--training.no-comp"], ["--training.no-compile"]),
    (["prepare", "a", "b", "--valid"], ["--validation-fraction"]),
    (["generate", "run", "--temp"], ["--temperature"]),
    (["completion", ""], ["bash", "zsh", "fish"]),
]


@pytest.mark.parametrize(("words", "expected"), CASES, ids=lambda value: " ".join(value))
def test_bash_completes(script, tmp_path: Path, words: list[str], expected: list[str]) -> None:
    call = " ".join(f"'{word}'" for word in ["tenfold", *words])
    lines = [f"source {script('bash')}", f"COMP_WORDS=({call})", f"COMP_CWORD={len(words)}"]
    lines += ["_tenfold", 'printf "%s\\n" "${COMPREPLY[@]}"']
    found = ran("bash", "--norc", "-c", "\n".join(lines), folder=tmp_path)
    assert [line for line in found if line and line not in ("--help", "--version")] == expected


def test_bash_completes_a_value_after_an_equals_sign_and_offers_every_command(script, tmp_path: Path) -> None:
    path = script("bash")

    def asked(words: list[str]) -> list[str]:
        call = " ".join(f"'{word}'" for word in words)
        lines = f'source {path}\nCOMP_WORDS=({call})\nCOMP_CWORD={len(words) - 1}\n_tenfold\necho "${{COMPREPLY[*]}}"'
        return ran("bash", "--norc", "-c", lines, folder=tmp_path)[0].split()

    assert asked(["tenfold", "train", "--model.preset", "=", "m6-1"]) == ["m6-10b", "m6-100b", "m6-1t", "m6-10t"]
    assert asked(["tenfold", "train", "--model.preset", "="]) == list(PRESETS)
    assert asked(["tenfold", ""]) == [*COMMANDS, "--help", "--version"]


def test_bash_leaves_files_to_readline(script, tmp_path: Path) -> None:
    lines = [f"source {script('bash')}", "complete -p tenfold"]
    assert "-o default" in ran("bash", "--norc", "-c", "\n".join(lines), folder=tmp_path)[0]


@pytest.mark.parametrize(("words", "expected"), CASES, ids=lambda value: " ".join(value))
def test_fish_completes(script, tmp_path: Path, words: list[str], expected: list[str]) -> None:
    line = " ".join(["tenfold", *words])
    found = ran("fish", "--no-config", "-c", f"source {script('fish')}; complete -C '{line}'", folder=tmp_path)
    assert {name.partition("\t")[0] for name in found} == set(expected)


def test_fish_completes_files_and_tells_what_a_flag_is(script, tmp_path: Path) -> None:
    (tmp_path / "run.toml").touch()
    path = script("fish")

    def asked(line: str) -> list[str]:
        return ran("fish", "--no-config", "-c", f"source {path}; complete -C '{line}'", folder=tmp_path)

    assert "run.toml" in asked("tenfold train run")
    assert "run.toml" in asked("tenfold train --data.path run")
    assert asked("tenfold train --optim.lr run") == []
    assert asked("tenfold train --optim.clip") == [
        "--optim.clip\tLargest global norm of the gradient; 0 is no clipping"
    ]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["tra"], "train:pretrain"),
        (["train", "--model.pre"], "--model.preset=[Start from a named shape"),
        (["train", "run.toml", "--stages.0.mom"], ":value:(copy rescale reset measure)"),
        (["completion", ""], "*:shell:(bash zsh fish)"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_zsh_is_given_the_words_of_the_command(script, tmp_path: Path, words: list[str], expected: str) -> None:
    # Zsh completes on a terminal only; its two functions are replaced by ones that print what they are given.
    call = " ".join(f"'{word}'" for word in ["tenfold", *words])
    lines = [
        "autoload -U compinit && compinit -D -u",
        f"source {script('zsh')}",
        "[[ $_comps[tenfold] == _tenfold ]] || exit 1",
        "_describe() { print -l -- ${(P)2} }",
        "_arguments() { print -l -- $words[1] $CURRENT $@ }",
        f"words=({call}); CURRENT={len(words) + 1}",
        "_tenfold",
    ]
    found = ran("zsh", "-f", "-c", "\n".join(lines), folder=tmp_path)
    assert expected in "\n".join(found)
    if len(words) > 1:
        assert found[:2] == [words[0], str(len(words))]


def test_every_command_has_its_own_flags_besides_help() -> None:
    for command, (what, flags) in command_flags().items():
        assert what
        names = [flag.name for flag in flags]
        assert len(names) == len(set(names))
        assert "--help" in names
        assert len(names) > 1 or command == "completion", command
        assert all(flag.help for flag in flags), command
