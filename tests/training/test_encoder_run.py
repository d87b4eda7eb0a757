"""Masked-language-model runs: delinking, stopping and going on, the mask token, what an encoder does not do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from tenfold.checkpoint.store import list_checkpoints, load_checkpoint
from tenfold.cli.main import main
from tenfold.config.model import ModelConfig
from tenfold.errors import TenfoldError
from tenfold.reporting.metrics import read_metrics
from tenfold.training.setup import load_model, with_vocabulary

ENCODER = """
objective = "masked"
norm = "layernorm"
norm_position = "post"
embedding_norm = true
embedding_width = 16
positions = "learned"
bias = true
"""
MOE = "[model.moe]\nexperts = 4\nprototypes = 2\nbalance_loss = 0.01\n"


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_metrics(run) if event["event"] == kind]


def last_state(run: Path) -> dict[str, torch.Tensor]:
    _, weights, optimizer = load_checkpoint(list_checkpoints(run / "checkpoints")[-1])
    return {name: tensor.clone() for name, tensor in (weights | optimizer).items()}


@pytest.mark.parametrize("moe", ["", MOE], ids=["dense", "moe"])
def test_a_shared_encoder_learns_delinks_and_goes_on_as_if_never_stopped(
    run_file: Callable[..., Path], tmp_path: Path, moe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file, whole, halves = str(run_file(model=ENCODER + moe)), tmp_path / "whole", tmp_path / "halves"
    assert main(["train", file, "--out", str(whole)]) == 0
    shown = capsys.readouterr().out
    assert "of masked tokens right" in shown
    assert "for comparison: unigram loss" in shown
    assert "bigram" not in shown
    (delink,) = events(whole, "delink")
    assert delink["logits_equal"] is True
    steps = {event["step"]: event["loss"] for event in events(whole, "step")}
    assert steps[12] < steps[1] - 0.1
    (end,) = events(whole, "end")
    assert end["unigram_loss"] > 0
    assert end["bigram_loss"] is None
    validation = events(whole, "validation")[-1]
    assert 0 <= validation["masked_accuracy"] <= 1
    assert "bits_per_byte" not in validation

    # The same run, cut off inside its second stage (all later checkpoints lost) and taken up again.
    assert main(["train", file, "--out", str(halves), "--checkpoint.keep", "9"]) == 0
    for checkpoint in list_checkpoints(halves / "checkpoints"):
        if int(checkpoint.name.removeprefix("step-")) > 9:
            for path in checkpoint.iterdir():
                path.unlink()
            checkpoint.rmdir()
    assert main(["train", file, "--out", str(halves), "--resume", "--checkpoint.keep", "9"]) == 0
    assert events(halves, "resume")[0]["step"] == 9
    first, second = last_state(whole), last_state(halves)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_text_too_short_to_be_asked_about_is_told_before_the_first_step(
    run_file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short.txt").write_text("a b")
    file = run_file(model=ENCODER)
    file.write_text(f'{file.read_text()}\n[[evaluations]]\nname = "short"\ndata = "{tmp_path / "short.txt"}"\n')
    assert main(["train", str(file), "--out", str(tmp_path / "run")]) == 2
    assert "short.txt holds" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_micro_batches_change_no_loss(run_file: Callable[..., Path], tmp_path: Path) -> None:
    losses = []
    for micro in (0, 1):
        out = tmp_path / str(micro)
        file = run_file(model=ENCODER, training=f"micro_batch_size = {micro}")
        assert main(["train", str(file), "--out", str(out)]) == 0
        losses.append([event["loss"] for event in events(out, "step")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_the_mask_token_gets_a_row_after_the_vocabulary_and_is_kept(
    run_file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["train", str(run_file(model=ENCODER)), "--out", str(out)]) == 0
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    model = load_model(out, None, torch.device("cpu"))
    assert model.config.mask_token == tokenizer.get_vocab_size()
    assert model.vocab_size == tokenizer.get_vocab_size() + 1
    assert f"mask_token = {model.config.mask_token}" in (out / "config.toml").read_text()
    # What it names is read again as it stands.
    assert main(["train", str(out / "config.toml"), "--out", str(tmp_path / "again")]) == 0
    assert events(out, "step")[-1]["loss"] == events(tmp_path / "again", "step")[-1]["loss"]


@pytest.mark.parametrize(
    ("fields", "vocabulary", "tokenizer_mask", "rows", "mask"),
    [
        ({}, 400, None, 401, 400),
        ({}, 400, 7, 400, 7),
        ({"mask_token": 3}, 400, 7, 400, 3),
        ({"vocab_size": 500}, 400, None, 500, 400),
        ({"vocab_size": 400}, 400, 7, 400, 7),
    ],
)
def test_which_id_masks(
    fields: dict[str, Any], vocabulary: int, tokenizer_mask: int | None, rows: int, mask: int
) -> None:
    model = with_vocabulary(ModelConfig(objective="masked", **fields), vocabulary, tokenizer_mask)
    assert (model.vocab_size, model.mask_token) == (rows, mask)


def test_a_vocabulary_without_a_row_for_the_mask_is_told() -> None:
    with pytest.raises(TenfoldError, match=r"model\.vocab_size = 400 leaves no row for the mask token 400.*401"):
        with_vocabulary(ModelConfig(objective="masked", vocab_size=400), 400, None)


def test_a_tokenizers_own_mask_token_is_taken(
    run_file: Callable[..., Path], shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = json.loads((shards / "index.json").read_text())
    tokenizer = Tokenizer.from_file(str(shards / index["tokenizer"]["file"]))
    tokenizer.add_special_tokens(["[MASK]"])
    tokenizer.save(str(tmp_path / "masking.json"))
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(4):
        (texts / f"{number}.txt").write_text(f"abc def {number} " * 200)
    file = run_file(model=ENCODER)
    flags = ["--data.path", str(texts), "--data.tokenizer", str(tmp_path / "masking.json"), "--data.cache"]
    flags += [str(tmp_path / "cache"), "--data.validation-fraction", "25%"]
    assert main(["train", str(file), "--out", str(tmp_path / "run"), *flags]) == 0
    model = load_model(tmp_path / "run", None, torch.device("cpu"))
    assert model.config.mask_token == tokenizer.token_to_id("[MASK]")
    assert model.vocab_size == tokenizer.get_vocab_size()


def test_generate_fills_masks_and_says_so_where_there_are_none(
    run_file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["train", str(run_file(model=ENCODER)), "--out", str(out)]) == 0
    capsys.readouterr()
    assert main(["generate", str(out), "--prompt", "abc [MASK] de[MASK]", "--top-k", "3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [len(fill) for fill in told["fills"]] == [3, 3]
    shares = [each["probability"] for each in told["fills"][0]]
    assert 1 >= shares[0] >= shares[1] >= shares[2] > 0
    assert main(["generate", str(out), "--prompt", "abc [MASK] de"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "abc [MASK] de"
    assert shown[1].startswith("  mask 1: ")
    assert shown[1].count("%") == 5
    assert main(["generate", str(out), "--prompt", "abc"]) == 2
    assert "is an encoder" in capsys.readouterr().err
    assert main(["generate", str(out), "--prompt", "abc [MASK] " * 40]) == 2
    assert "the model sees 32" in capsys.readouterr().err
