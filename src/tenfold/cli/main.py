"""The command line: picks the command, and turns what people can put right into one message and exit code 2."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable

from tenfold import __version__
from tenfold.cli.help import error_lines, is_asked, shown_fitting
from tenfold.errors import TenfoldError

COMMANDS = {
    "prepare": "make token shards of a text",
    "inspect": "show what data holds",
    "advise": "tell whether sharing will pay for a run",
    "plan": "tell what fits a cluster, how fast, and how to lay it out",
    "train": "pretrain a model from a run file",
    "delink": "make a finer checkpoint of one whose layers share",
    "eval": "measure a trained model on a text",
    "generate": "let a trained model write",
    "report": "make one HTML page of a run",
    "doctor": "tell what this machine is, and what will hurt",
    "completion": "complete this command line in bash, zsh or fish",
}

USAGE = """usage: tenfold COMMAND ...

commands:
{commands}

examples:
  tenfold inspect corpus/
  tenfold plan run.toml --cluster 8:h100
  tenfold train examples/demo.toml --out runs/demo
  tenfold train run.toml --optim.lr 3e-4 --dry-run
  tenfold train run.toml --out runs/big --resume
  tenfold eval runs/demo wiki.test.raw --task strided
  tenfold generate runs/demo --prompt "def read(self):"

tenfold COMMAND --help tells more of one."""


def main(argv: list[str] | None = None) -> int:
    """Run a command; the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    # An OpenMP thread without work spins before it sleeps, by GNU's default for milliseconds, on a processor that the
    # threads of Python that do a mixture's experts could use (`nn.workers`). This is a fraction of one.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    # oneDNN keeps what it made for every shape it met, 1024 of them unless told. Where experts drop tokens GELU has
    # other shapes in every step, and what is kept lies between the large tensors and holds their memory apart.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE.format(commands="\n".join(f"  {name:<10}{what}" for name, what in COMMANDS.items())))
        return 0
    if argv[0] == "--version":
        print(f"tenfold {__version__}")
        return 0
    try:
        if argv[0] not in COMMANDS:
            raise TenfoldError(f"there is no command {argv[0]!r}; there are {', '.join(COMMANDS)}")
        command: Callable[[list[str]], int] = importlib.import_module(f"tenfold.cli.{argv[0]}").main
        return shown_fitting(command, argv[1:]) if is_asked(argv[1:]) else command(argv[1:])
    except TenfoldError as error:
        print(error_lines(f"tenfold: {error}"), file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 0
    except OSError as error:
        if error.errno is None:  # not the system's word on a file, so a fault of ours
            raise
        print(error_lines(f"tenfold: {error.filename or 'a file'}: {error.strerror}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tenfold: stopped", file=sys.stderr)
        return 130
