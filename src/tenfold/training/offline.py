"""Delinking a checkpoint on disk: a finer one beside it, made without the model."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tenfold.checkpoint.saved import SavedCheckpoint
from tenfold.checkpoint.store import flush, write_checkpoint
from tenfold.checkpoint.tensors import Stored
from tenfold.config.load import build, dump_toml, read_toml
from tenfold.config.run import RunConfig
from tenfold.errors import TenfoldError
from tenfold.sharing.delinking import Moments
from tenfold.sharing.patterns import Pattern
from tenfold.sharing.tying import Sharing
from tenfold.training.setup import run_of


class OfflineDelinking:
    """The checkpoint in the folder `path`, to be delinked to `sharing` (as in a run file), `parts` and `experts`.

    `out` is the run directory to be made; it must not exist. Raises TenfoldError for damage, for a pattern that does
    not refine the checkpoint's, and where nothing is to free.
    """

    def __init__(
        self, path: Path, out: Path, sharing: Any, parts: Sequence[str], moments: Moments, experts: str = "free"
    ) -> None:
        if out.exists() or out.is_symlink():
            raise TenfoldError(f"{out} exists already; give a new folder for the delinked checkpoint")
        self.out = out
        self.saved, self.moments = SavedCheckpoint(path), moments
        model = self.saved.config
        self.after = Sharing(Pattern.parse(sharing, model.layers), tuple(parts), experts=experts).of_model(model)
        self._weights, self._optimizer = self.saved.delinked(self.after, moments)
        if _shapes(self._weights) == _shapes(self.saved.weights):
            raise TenfoldError(f"{path} shares its layers as {self.saved.sharing} already: there is nothing to delink")

    @property
    def bytes(self) -> int:
        """Of the tensors that will be written."""
        return sum(stored.bytes for part in (self._weights, self._optimizer) for stored in part.values())

    @property
    def stored_parameters(self) -> tuple[int, int]:
        """Before, and after."""
        before, after = (_elements(tensors) for tensors in (self.saved.weights, self._weights))
        return before, after

    def write(self, advance: Callable[[int], None] = lambda _: None) -> Path:
        """Write the new checkpoint and return its path; `advance` is told of the bytes.

        What lies beside the old one in its run directory and is needed to evaluate a model goes with it. The folder
        gets its name when all of it is on the disk. Raises TenfoldError, leaving nothing behind, when it cannot be
        written.
        """
        out = self.out.absolute()
        temporary = out.parent / f".writing-{out.name}"
        shutil.rmtree(temporary, ignore_errors=True)  # what a former call that was killed has left
        manifest = dict(self.saved.manifest)
        step = manifest.pop("step")
        for key in ("format", "files", "sha256"):
            manifest.pop(key, None)
        manifest |= self.after.dump() | {
            "delinked_from": {
                "checkpoint": str(self.saved.path.absolute()),
                **self.saved.sharing.dump(),
                "moments": self.moments,
            }
        }
        try:
            made = temporary / "checkpoints" / f"step-{step:08d}"
            made.parent.mkdir(parents=True)
            self._write_run_files(temporary)
            write_checkpoint(made, step, self._weights, self._optimizer, manifest, advance)
            for path in [*temporary.iterdir(), temporary]:
                flush(path)
            temporary.rename(out)
            flush(temporary.parent)
        except OSError as error:
            raise TenfoldError(f"cannot write {self.out}: {error.strerror or error}") from None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return self.out / "checkpoints" / f"step-{step:08d}"

    def _write_run_files(self, folder: Path) -> None:
        """The tokenizer, and the configuration with one stage: of the new pattern."""
        run = run_of(self.saved.path)
        if run is not None and (run / "tokenizer.json").is_file():
            shutil.copyfile(run / "tokenizer.json", folder / "tokenizer.json")
        if run is not None and (run / "config.toml").is_file():
            stage = {
                "sharing": list(self.after.pattern.blocks),
                "parts": list(self.after.parts),
                "experts": self.after.experts,
            }
            raw = read_toml(run / "config.toml") | {"stages": [stage | {"moments": self.moments}]}
            text = dump_toml(build(RunConfig, raw, str(run / "config.toml")))
            (folder / "config.toml").write_text(text, encoding="utf-8")


def _shapes(tensors: dict[str, Stored]) -> dict[str, tuple[int, ...]]:
    return {name: stored.shape for name, stored in tensors.items()}


def _elements(tensors: dict[str, Stored]) -> int:
    return sum(stored.elements for stored in tensors.values())
