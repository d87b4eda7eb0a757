"""A small corpus, prepared once, and a run file over it; runs whose report is not made."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tenfold.config.run import PrepareConfig
from tenfold.data.prepare import prepare

RUN = """
[model]
layers = 4
hidden = 32
heads = 2
ffn = 48
activation = "gelu"
{model}

[data]
path = "{data}"
sequence_length = 32

[training]
steps = 12
batch_size = 4
precision = "fp32"
log_every = 1
validation_sequences = 8
device = "cpu"
{training}

[optim]
lr = 1e-2
{optim}

[checkpoint]
every = 3

{stages}
"""

PSEUDO_REAL = """
[[stages]]
name = "pseudo"
sharing = "all"
until = "50%"
[[stages]]
name = "real"
sharing = "none"
rewarm = 2
"""

MOE = """
[model.moe]
experts = 4
prototypes = 2
balance_loss = 0.01
bias_rate = 0.001
"""


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some hundred short documents of invented words, as token shards."""
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefghij", k=chance.randint(2, 6))) for _ in range(120)]
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(60):
        text = " ".join(chance.choices(words, weights=range(1, 121), k=120))
        (folder / f"{number:03d}.txt").write_text(text, encoding="utf-8")
    out = folder.parent / "shards"
    prepare(str(folder), out, PrepareConfig(vocab_size=400, validation_fraction=0.1, workers=1), show_progress=False)
    return out


@pytest.fixture
def run_file(shards: Path, tmp_path: Path) -> Callable[..., Path]:
    """Writes a run file: `run_file(model=..., training=..., optim=..., stages=...)` are lines for those sections."""

    def write(model: str = MOE, training: str = "", optim: str = "", stages: str = PSEUDO_REAL) -> Path:
        path = tmp_path / "run.toml"
        path.write_text(RUN.format(data=shards, model=model, training=training, optim=optim, stages=stages))
        return path

    return write


@pytest.fixture(autouse=True)
def _without_report(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots take longer than these runs; the tests of `reporting` make them, and those here that are marked."""
    if "report" not in request.keywords:
        monkeypatch.setattr("tenfold.reporting.report.write_report", lambda run: run / "report.html")
