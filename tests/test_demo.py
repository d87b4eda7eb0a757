"""The demo as `make demo` runs it, cut to a few steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tenfold.cli.main import main
from tenfold.reporting.metrics import read_metrics

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
