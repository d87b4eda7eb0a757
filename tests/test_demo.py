"""The demo as `make demo` runs it, cut to a few steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tenfold.cli.main import main
from tenfold.reporting.metrics import read_metrics

ENCODER = Path(__file__).parents[1] / "examples" / "encoder.toml"
DEMO = Path(__file__).parents[1] / "examples" / "demo.toml"


@pytest.mark.slow
def test_the_demo_trains_both_stages_reports_and_can_be_asked_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    out = tmp_path / "demo"
    arguments = ["train", str(DEMO), "--out", str(out), "--resume", "--training.tokens", "20k", "--data.cache"]
    arguments.append(str(tmp_path / "data"))
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    for part in ("stored parameters", "bigram loss", "logits equal to the last bit", "the model writes", str(out)):
        assert part in shown.replace("\n", "")
    pseudo, real = read_metrics(out)[0]["stages"]
    assert 10e6 < real["total_parameters"] == pseudo["total_parameters"] < 20e6
    assert pseudo["stored_parameters"] < real["stored_parameters"] / 4
    assert (out / "report.html").stat().st_size > 10_000

    assert main(arguments) == 0
    assert "finished already" in capsys.readouterr().out
    assert main(["generate", str(out), "--prompt", "def ", "--tokens", "5", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("def ")


def test_the_example_of_an_encoder_trains_both_stages_and_fills_masks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenfold.reporting.report.write_report", lambda run: run / "report.html")
    (tmp_path / "texts").mkdir()
    for number in range(8):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"for i in range({number}): print(names[i])\n" * 60)
    out = tmp_path / "encoder"
    flags = ["--data.path", str(tmp_path / "texts"), "--data.cache", str(tmp_path / "data"), "--training.tokens", "10k"]
    flags += ["--data.validation-fraction", "20%", "--data.vocab-size", "300", "--training.log-every", "1"]
    assert main(["train", str(ENCODER), "--out", str(out), *flags]) == 0
    assert "logits equal to the last bit" in " ".join(capsys.readouterr().out.split())
    losses = [event["loss"] for event in read_metrics(out) if event["event"] == "step"]
    assert losses[-1] < losses[0]
    assert main(["generate", str(out), "--prompt", "for i in [MASK]("]) == 0
    assert capsys.readouterr().out.startswith("for i in [MASK](\n  mask 1: ")
