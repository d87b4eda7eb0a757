"""A run directory, trained once: a mixture of experts with a limited capacity, shared and then delinked."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tenfold.cli.main import main

RUN = """
[model]
layers = 2
hidden = 32
heads = 2
ffn = 48
[model.moe]
experts = 4
capacity = "k"
capacity_factor = 1.0
[data]
path = "{data}"
cache = "{data}-cache"
sequence_length = 32
vocab_size = 300
validation_fraction = 0.1
[training]
steps = 6
batch_size = 4
precision = "fp32"
device = "cpu"
[[stages]]
name = "pseudo"
sharing = "all"
until = "50%"
[[stages]]
name = "real"
"""


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory; its text lies in the folder `corpus` beside it."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "corpus").mkdir()
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefghij", k=chance.randint(2, 6))) for _ in range(60)]
    for number in range(40):
        text = " ".join(chance.choices(words, k=80)) + ".\n"
        (folder / "corpus" / f"{number:02d}.txt").write_text(text, encoding="utf-8")
    (folder / "run.toml").write_text(RUN.format(data=folder / "corpus"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tenfold.reporting.report.write_report", lambda run: run / "report.html")
        assert main(["train", str(folder / "run.toml"), "--out", str(folder / "run")]) == 0
    return folder / "run"
