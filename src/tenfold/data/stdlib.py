"""The running Python's own library as a corpus that every machine has: sources and the language documentation."""

from __future__ import annotations

import hashlib
import importlib
import os
import platform
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tenfold.data.reading import cut_text
from tenfold.errors import TenfoldError

_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def stdlib_files(root: Path | None = None) -> list[Path]:
    """The library's source files in a fixed order, without tests and installed packages."""
    root = root or Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT and not name.startswith("config-")]
        # _sysconfigdata is made by the build of this one machine; topics.py is read as documentation, not as code.
        names = [name for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")]
        files += [Path(folder, name) for name in names if (Path(folder).name, name) != ("pydoc_data", "topics.py")]
    if not files:
        raise TenfoldError(f"python-stdlib: there are no sources under {root}; give a file or folder of text instead")
    return sorted(files, key=lambda path: path.relative_to(root).parts)


def stdlib_topics() -> dict[str, str]:
    """The language documentation that `help()` shows, by topic."""
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        return {}
    return dict(sorted(topics.items()))


def stdlib_documents() -> Iterator[str]:
    """Every topic and every source file; long ones are cut as any text is."""
    for text in stdlib_topics().values():
        yield from cut_text([text])
    for path in stdlib_files():
        with tokenize.open(path) as file:
            yield from cut_text([file.read()])


def stdlib_fingerprint() -> str:
    """sha256 over the Python version and every file's relative path and bytes."""
    root = Path(sysconfig.get_path("stdlib"))
    listing = [f"python {platform.python_version()}"]
    listing += [f"{name} {len(text)}" for name, text in stdlib_topics().items()]
    listing += [f"{path.relative_to(root).as_posix()} {path.stat().st_size}" for path in stdlib_files(root)]
    return hashlib.sha256("\n".join(listing).encode()).hexdigest()
