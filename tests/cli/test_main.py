"""The command line as a whole."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys

import pytest

from tenfold.cli import main as command_line
from tenfold.cli.main import COMMANDS, main
from tenfold.errors import TenfoldError


def test_without_arguments_it_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)


def test_an_unknown_command_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "there is no command 'trian'" in capsys.readouterr().err


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert f"tenfold {command} " in capsys.readouterr().out


def test_python_dash_m_tenfold_is_the_same_command_line() -> None:
    done = subprocess.run([sys.executable, "-m", "tenfold", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("tenfold ")


def test_help_and_version_do_not_wait_for_torch() -> None:
    script = "import sys; from tenfold.cli.main import main; main(['--help']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


@pytest.mark.parametrize("argv", [["train"], ["train", "run.toml", "--out"]])
def test_an_argument_too_few_shows_the_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith("usage: tenfold train RUN.toml")
    assert "--stages.0.until 10%" in shown


@pytest.mark.parametrize("flags", [["--temperature", "nan"], ["--top-p", "0"], ["--seed", "9" * 20]])
def test_generate_refuses_what_cannot_be_drawn_from(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "run", *flags]) == 2
    assert re.search(rf"{flags[0]} \S+: it must be ", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (TenfoldError("mend this"), 2),
        (OSError(28, "No space left on device"), 2),
        (NotADirectoryError(20, "Not a directory", "file/run"), 2),
        (OSError(40, "Too many levels of symbolic links", "loop"), 2),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_for_people_become_one_line(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Command:
        @staticmethod
        def main(argv: list[str]) -> int:
            raise error

    monkeypatch.setattr(command_line.importlib, "import_module", lambda name: Command)
    assert main(["report"]) == code
    assert len(capsys.readouterr().err.splitlines()) == 1


_SHAPES = """
import ctypes
from tenfold.cli.main import main
main(["--version"])
import torch
names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
Info = type("Info", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_size_t) for name in names.split()]})
told = ctypes.CDLL(None).mallinfo2
told.restype = Info
for rows in range(1, 401):
    torch.nn.functional.gelu(torch.zeros(rows, 16))
    if rows == 200:
        before = told().uordblks
print((told().uordblks - before) // 1024)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs the allocator of glibc 2.33 or newer")
def test_memory_does_not_grow_with_every_new_shape() -> None:
    done = subprocess.run([sys.executable, "-c", _SHAPES], capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) < 500  # KiB for 200 shapes; 3,000 where all are kept
