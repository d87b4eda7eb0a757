"""Runs over several sources, and over sequences that grow."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path

import pytest
import torch

from runs import of_kind, stopping_at
from tenfold.checkpoint.store import list_checkpoints, load_checkpoint
from tenfold.cli.main import main
from tenfold.config.load import load_run
from tenfold.config.run import PrepareConfig
from tenfold.data.prepare import prepare
from tenfold.data.sampling import PackedSequences
from tenfold.data.shards import TokenData
from tenfold.evaluation.loss import held_out_loss
from tenfold.training.setup import load_model

RUN = """
[model]
layers = 2
hidden = 32
heads = 2
ffn = 48

[data]
sequence_length = 32
[[data.mixture]]
name = "words"
path = "{shards}"
weight = 3
[[data.mixture]]
name = "numbers"
path = "{numbers}"

[training]
steps = 40
batch_size = 8
precision = "fp32"
log_every = 1
validation_sequences = 8
device = "cpu"

[optim]
lr = 1e-2

[checkpoint]
every = 7

[[stages]]
name = "pseudo"
sharing = "all"
until = "50%"
sequence_length = {{from = 8, over = 15}}
[[stages]]
name = "real"
sharing = "none"
mixture = {{numbers = 1}}
"""


@pytest.fixture(scope="module")
def numbers(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small second source, made with the first one's tokenizer."""
    chance = random.Random(1)
    folder = tmp_path_factory.mktemp("numbers")
    for number in range(20):
        (folder / f"{number}.txt").write_text(" ".join(str(chance.randrange(10**4)) for _ in range(60)))
    out = folder.parent / "number-shards"
    options = PrepareConfig(tokenizer=str(shards / "tokenizer.json"), validation_fraction=0.3, workers=1)
    prepare(str(folder), out, options, show_progress=False)
    return out


@pytest.fixture
def run_file(shards: Path, numbers: Path, tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(shards=shards, numbers=numbers))
    return path


def test_a_run_over_two_sources_tells_shares_epochs_and_losses_of_each(
    run_file: Path, shards: Path, numbers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["train", str(run_file), "--out", str(out)]) == 0
    steps = {event["step"]: event for event in of_kind(out, "step")}
    assert steps[1]["mixture"] == {"words": 0.75, "numbers": 0.25}
    assert steps[21]["mixture"] == {"words": 0.0, "numbers": 1.0}
    words, other = (steps[20]["source_tokens"][name] / steps[20]["tokens"] for name in ("words", "numbers"))
    assert abs(words - 0.75) < 1 / 160
    assert words + other == 1
    assert steps[40]["source_tokens"]["words"] == steps[20]["source_tokens"]["words"]

    sizes = {
        name: TokenData.open(path).split("train").tokens for name, path in (("words", shards), ("numbers", numbers))
    }
    (end,) = of_kind(out, "end")
    for name, tokens in steps[40]["source_tokens"].items():
        assert end["epochs"][name] == pytest.approx(tokens / 32 / ((sizes[name] - 1) // 32))
    assert end["epochs"]["numbers"] > 1
    shown = capsys.readouterr().out
    assert "this run reads words 0." in shown
    many = [event["text"] for event in of_kind(out, "note") if "teaches little new" in event["text"]]
    assert len(many) == (end["epochs"]["numbers"] > 4)

    last = of_kind(out, "validation")[-1]
    model = load_model(out, None, torch.device("cpu"))
    for name, path in (("words", shards), ("numbers", numbers)):
        held_out = PackedSequences(TokenData.open(path).split("validation"), 32, None)
        assert last["source_losses"][name] == pytest.approx(held_out_loss(model, held_out, 8, 8, 2048))
    mean = 0.75 * last["source_losses"]["words"] + 0.25 * last["source_losses"]["numbers"]
    assert last["validation_loss"] == pytest.approx(mean)
    assert math.isfinite(end["bigram_loss"])
    # Trained on numbers alone at the end, it forgot words: the losses are really of two sources.
    assert last["source_losses"]["words"] > of_kind(out, "validation")[0]["source_losses"]["words"]


def test_sequences_grow_and_tokens_a_step_do_not(run_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert main(["train", str(run_file), "--out", str(out), "--training.micro-batch-size", "4"]) == 0
    steps = of_kind(out, "step")
    lengths = [event["sequence_length"] for event in steps]
    assert lengths[:20] == [8] * 5 + [16] * 10 + [32] * 5
    assert set(lengths[20:]) == {32}
    assert [event["tokens"] for event in steps] == [256 * step for step in range(1, 41)]
    first, last = (steps[index]["flops_share"] / steps[index]["tokens_per_second"] for index in (0, 19))
    assert first < last, "shorter sequences have less attention to compute"


def state(run: Path) -> dict[str, torch.Tensor]:
    _, weights, optimizer = load_checkpoint(list_checkpoints(run / "checkpoints")[-1])
    return {name: tensor.clone() for name, tensor in (weights | optimizer).items()}


@pytest.mark.parametrize("stop_at", [9, 23])
def test_a_mixture_that_was_stopped_goes_on_bit_for_bit_from_its_own_configuration(
    run_file: Path, tmp_path: Path, stop_at: int
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(["train", str(run_file), "--out", str(whole)]) == 0
    with stopping_at(stop_at):
        assert main(["train", str(run_file), "--out", str(parts)]) == 0
    assert main(["train", str(parts / "config.toml"), "--out", str(parts), "--resume"]) == 0
    mine, theirs = state(parts), state(whole)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_run_over_one_source_of_a_mixture_is_the_run_over_its_path(
    run_file: Path, shards: Path, tmp_path: Path
) -> None:
    """But for the order of samples, which hangs on the name: the losses are those of the same text."""
    text = run_file.read_text()
    single = text[: text.index('[[data.mixture]]\nname = "numbers"')] + text[text.index("[training]") :]
    single = single[: single.index("mixture = {numbers")]
    run_file.write_text(single)
    out = tmp_path / "run"
    assert main(["train", str(run_file), "--out", str(out), "--training.steps", "8"]) == 0
    assert "mixture" not in of_kind(out, "step")[0]
    assert list(of_kind(out, "end")[0]["epochs"]) == ["words"]


def test_other_data_behind_a_source_is_refused_on_resuming(
    run_file: Path, numbers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(numbers, moved)
    run_file.write_text(run_file.read_text().replace(str(numbers), str(moved)))
    out = tmp_path / "run"
    assert main(["train", str(run_file), "--out", str(out), "--training.steps", "20"]) == 0
    index = json.loads((moved / "index.json").read_text())
    index["splits"]["train"], index["splits"]["validation"] = index["splits"]["validation"], index["splits"]["train"]
    (moved / "index.json").write_text(json.dumps(index))
    assert main(["train", str(run_file), "--out", str(out), "--training.steps", "20", "--resume"]) == 2
    assert "the training data is not what" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("mixture = {numbers = 1}", "mixture = {nunbers = 1}"), "stages.1.mixture names nunbers"),
        (("mixture = {numbers = 1}", "mixture = {numbers = 0}"), "all weights are 0"),
        (("mixture = {numbers = 1}", "mixture = {numbers = -1}"), "the weight of numbers is -1"),
        (("weight = 3", "weight = -3"), "data.mixture.0.weight"),
        (('name = "numbers"', 'name = "words"'), "sources need different names"),
        (("sequence_length = 32", 'sequence_length = 32\npath = "text"'), "exclude each other"),
        (("{from = 8, over = 15}", "{from = 5, over = 15}"), "sequence_length.from = 5 does not divide"),
        (("{from = 8, over = 15}", "12"), "sequence_length = 12 does not divide data.sequence_length = 32"),
        (("{from = 8, over = 15}", "{from = 16, to = 8, over = 15}"), "grows from 16 to 8"),
        (("{from = 8, over = 15}", "{from = 8}"), "cannot read"),
        (("{from = 8, over = 15}", "{from = 8, over = 0}"), "cannot read"),
        (("{from = 8, over = 15}", "{from = 8, over = 15, steps = 3}"), "cannot read"),
        (('name = "numbers"', 'name = "numbers"\nwieght = 3'), "data.mixture.1.wieght"),
    ],
)
def test_a_mixture_or_a_length_that_cannot_be_is_one_clear_message(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: tuple[str, str], told: str
) -> None:
    text = run_file.read_text()
    assert change[0] in text
    run_file.write_text(text.replace(*change))
    assert main(["train", str(run_file), "--out", str(tmp_path / "run")]) == 2
    message = capsys.readouterr().err
    assert told in message
    assert "Traceback" not in message
    assert not (tmp_path / "run").exists()


def test_flags_reach_sources_weights_and_lengths(run_file: Path) -> None:
    flags = [
        *("--data.mixture.1.weight", "0.5"),
        *("--stages.1.mixture", "words=1,numbers=3"),
        *("--stages.0.sequence-length", "from=4,to=16,over=50%,root=2"),
        *("--stages.1.sequence-length", "16"),
    ]
    config = load_run(run_file, flags)
    assert [source.weight for source in config.data.mixture] == [3.0, 0.5]
    assert config.stages[1].mixture == {"words": 1.0, "numbers": 3.0}
    assert config.stages[0].sequence_length == {"from": 4, "to": 16, "over": 0.5, "root": 2.0}
    assert config.stages[1].sequence_length == 16
