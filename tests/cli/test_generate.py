"""`tenfold generate` on a trained run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tenfold.cli.main import main


def generated(capsys: pytest.CaptureFixture[str], run: Path, *flags: str) -> str:
    capsys.readouterr()
    assert main(["generate", str(run), "--tokens", "12", *flags]) == 0
    return capsys.readouterr().out


def records(shown: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in shown.splitlines()]


def test_one_prompt_is_written_on(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = generated(capsys, trained, "--prompt", "abc de")
    (told,) = records(generated(capsys, trained, "--prompt", "abc de", "--json"))
    assert shown == f"abc de{told['text']}\n"
    assert len(told["tokens"]) <= 12
    tokenizer = Tokenizer.from_file(str(trained / "tokenizer.json"))
    assert told["text"] == tokenizer.decode(told["tokens"])


def test_without_a_prompt_it_begins_a_document(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generated(capsys, trained) == generated(capsys, trained, "--prompt", "")


def test_several_prompts_keep_their_order_and_their_texts_in_any_batch(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["abc de", "f", "ghij abab abab abab", "c d e f g"]
    flags = [part for prompt in prompts for part in ("--prompt", prompt)]
    for size in ("1", "3", "8"):
        told = records(generated(capsys, trained, *flags, "--json", "--batch-size", size))
        assert [each["prompt"] for each in told] == prompts
        for each in told:
            (alone,) = records(generated(capsys, trained, "--prompt", each["prompt"], "--json"))
            assert each == alone
    shown = generated(capsys, trained, *flags)
    assert shown == "--------\n".join(f"{each['prompt']}{each['text']}\n" for each in told)


def test_prompts_come_from_lines_and_from_json_lines(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lines.txt").write_text("abc\n\nde f\n")
    (tmp_path / "records.jsonl").write_text('{"prompt": "abc\\nx"}\n{"prompt": "de f"}\n')
    lines = records(generated(capsys, trained, "--prompts", str(tmp_path / "lines.txt"), "--json"))
    assert [each["prompt"] for each in lines] == ["abc", "de f"]
    found = records(generated(capsys, trained, "--prompt", "z", "--prompts", str(tmp_path / "records.jsonl"), "--json"))
    assert [each["prompt"] for each in found] == ["z", "abc\nx", "de f"]
    assert found[2] == lines[1]


def test_a_stop_text_ends_a_text_before_it(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (free,) = records(generated(capsys, trained, "--prompt", "abc", "--json"))
    stop = free["text"][4:7]
    (told,) = records(generated(capsys, trained, "--prompt", "abc", "--json", "--stop", stop))
    assert told["text"] == free["text"][: free["text"].index(stop)]
    assert told["ended"] == "stop"
    assert len(told["tokens"]) < len(free["tokens"])
    assert generated(capsys, trained, "--prompt", "abc", "--stop", stop) == f"abc{told['text']}\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--stop", ""], "--stop is empty"),
        (["--batch-size", "0"], "--batch-size 0: it must be more than 0"),
        (["--prompts", "nowhere.txt"], "there is no nowhere.txt"),
        (["--prompt", "\udcff"], "not valid UTF-8"),
        (["--checkpoint", "99"], "no whole checkpoint of step 99: there are 3, 6"),
        (["--device", "tpu"], "tpu"),
    ],
)
def test_what_cannot_be_done_is_one_message(
    trained: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(trained), *flags]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert len(told.splitlines()) == 1


def test_a_run_whose_checkpoints_are_all_damaged_is_told(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    for weights in run.glob("checkpoints/*/weights.safetensors"):
        weights.write_bytes(weights.read_bytes()[:100])
    assert main(["generate", str(run)]) == 2
    assert "every checkpoint" in (told := capsys.readouterr().err)
    assert "(3, 6) is damaged" in told


def test_a_file_without_prompts_and_one_without_the_field_are_told(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    assert main(["generate", str(trained), "--prompts", str(tmp_path / "empty.txt")]) == 2
    assert "holds no prompts" in capsys.readouterr().err
    (tmp_path / "other.jsonl").write_text('{"question": "a"}\n')
    assert main(["generate", str(trained), "--prompts", str(tmp_path / "other.jsonl")]) == 2
    assert "--text-field" in capsys.readouterr().err


def test_a_prompt_longer_than_the_window_is_told(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(trained), "--prompt", "abc " * 60, "--tokens", "2"]) == 0
    assert "the model sees the last 32" in capsys.readouterr().err
