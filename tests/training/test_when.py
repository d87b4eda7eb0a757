"""`until = "auto"`: the rules on series with a known answer, whole runs, and the same decisions after a resumption."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from runs import final_state, losses, of_kind, refused, stopping_at
from tenfold.checkpoint.store import list_checkpoints
from tenfold.cli.main import main
from tenfold.config.run import RunConfig
from tenfold.data.mixing import Order
from tenfold.planning.stages import plan_stages, watched_pairs
from tenfold.sharing.correlation import LayerGradients
from tenfold.sharing.patterns import Pattern
from tenfold.training.sources import phases_of
from tenfold.training.when import Decision, Watch

AUTO = """
[[stages]]
name = "pseudo"
sharing = {sharing}
until = {until}
[[stages]]
name = "real"
sharing = {after}
moments = "{moments}"
moments_steps = 2
rewarm = 1
"""
AT_ONCE = '{auto = "correlation", threshold = 0.999, checks = 2, every = 2, at_most = "75%"}'
SPLIT = '{auto = "correlation", threshold = 0.5, checks = 2, every = 1, split = true, at_most = "75%"}'
RETURNS = '{auto = "returns", checks = 2, every = 2, at_most = "75%"}'


def stages(until: str, sharing: str = '"all"', after: str = '"none"', moments: str = "rescale") -> str:
    return AUTO.format(until=until, sharing=sharing, after=after, moments=moments)


def watch(until: dict[str, Any], sharing: Any = "all", after: Any = "none", layers: int = 4) -> Watch:
    """The rule of the first stage of a run of 1000 steps."""
    config = RunConfig.model_validate(
        {
            "model": {"layers": layers},
            "training": {"steps": 1000, "batch_size": 2},
            "data": {"sequence_length": 10},
            "stages": [{"name": "a", "sharing": sharing, "until": until}, {"name": "b", "sharing": after}],
        }
    )
    return Watch(*plan_stages(config), {})


PAIRS = [(0, 1), (1, 2), (2, 3)]


def test_a_stage_ends_when_most_pairs_were_under_the_threshold_in_three_checks_in_a_row() -> None:
    rule = watch({"auto": "correlation"})
    series = [
        ([0.9, 0.4, 0.4], None),  # two of three: one
        ([0.4, 0.4, 0.9], None),  # two
        ([0.4, 0.6, 0.9], None),  # one of three is not most: from the beginning
        ([0.4, 0.4, 0.4], None),
        ([0.4, 0.4, 0.5], None),
        ([0.49, 0.51, 0.49], "end"),
    ]
    for correlations, decision in series:
        found = rule.by_correlation(PAIRS, correlations)
        assert found.numbers["decision"] == decision
        assert found.ends == (decision == "end")
        assert not found.cuts
    assert found.numbers["in_a_row"] == 3
    assert found.numbers["under"] == 2


def test_with_split_each_pair_counts_by_itself_and_the_last_ends_the_stage() -> None:
    rule = watch({"auto": "correlation", "split": True, "checks": 2})
    assert rule.by_correlation(PAIRS, [0.4, 0.9, 0.9]).cuts == []
    assert rule.by_correlation(PAIRS, [0.4, 0.4, 0.9]).cuts == [(0, 1)]
    left = PAIRS[1:]
    found = rule.by_correlation(left, [0.6, 0.2])  # (1, 2) begins anew
    assert (found.cuts, found.ends) == ([], False)
    assert rule.by_correlation(left, [0.4, 0.2]).cuts == [(2, 3)]
    found = rule.by_correlation([(1, 2)], [0.3])
    assert found.ends
    assert found.numbers["decision"] == "end"


def test_splitting_between_two_layers_parts_those_before_from_those_after() -> None:
    assert Pattern([0, 0, 0, 0]).cut([(1, 2)]) == Pattern([0, 0, 1, 1])
    assert Pattern([0, 1, 0, 1, 0]).cut([(0, 2)]) == Pattern([0, 1, 2, 1, 2])
    assert Pattern([0] * 5).cut([(0, 1), (3, 4)]) == Pattern.parse("sandwich", 5)
    assert Pattern([0, 1, 0, 1, 0]).neighbours() == [(0, 2), (1, 3), (2, 4)]


@pytest.mark.parametrize(
    ("sharing", "after", "pairs"),
    [
        ("all", "none", [(0, 1), (1, 2), (2, 3)]),
        ("all", {"groups": 2}, [(1, 2)]),
        ({"groups": 2}, "none", [(0, 1), (2, 3)]),
        ({"cycle": 2}, "none", [(0, 2), (1, 3)]),
        ("all", "sandwich", [(0, 1), (2, 3)]),
    ],
)
def test_pairs_that_are_watched_are_those_that_the_next_stage_parts(sharing: Any, after: Any, pairs: Any) -> None:
    rule = watch({"auto": "correlation"}, sharing, after)
    assert watched_pairs(rule.stage, rule.following) == pairs


def returns(losses: Callable[[int], float], gain: float, free_seconds: float, every: int = 10) -> list[Decision]:
    """The decisions of the rule of returns on a loss curve; a shared step takes one second."""
    rule = watch({"auto": "returns", "every": every, "checks": 2})
    rule.state["timed"] = {"step_seconds": 1.0, "next_step_seconds": free_seconds}
    found = []
    for step in range(1, 401):
        rule.saw(step, losses(step), 1.0)
        if rule.due(step):
            found.append(rule.by_returns(gain))
            if found[-1].ends:
                break
    return found


def test_returns_compare_the_gain_with_the_two_step_times() -> None:
    line = lambda step: 5.0 - 0.01 * step  # noqa: E731
    assert len(returns(line, gain=1.5, free_seconds=1.4)) == 2  # at the second check
    kept = returns(line, gain=1.5, free_seconds=1.6)
    assert len(kept) == 39  # every tenth step to the last but one of 400
    numbers = kept[-1].numbers
    assert numbers["loss_fall"] == pytest.approx(0.01 / 20)  # a step has 20 tokens
    assert numbers["loss_per_second"] == pytest.approx(0.01)
    assert numbers["next_loss_per_second"] == pytest.approx(0.01 * 1.5 / 1.6)


def test_returns_end_a_stage_whose_loss_falls_no_more_however_little_the_next_one_promises() -> None:
    found = returns(lambda step: max(1.0, 2 - step / 50) + 0.01 * (step > 60), gain=1.0, free_seconds=3.0)
    assert found[-1].ends
    assert 8 < len(found) < 16  # the last half of the stage has to lie beyond step 50


def test_the_fall_is_that_of_a_line_through_the_last_half_of_the_steps() -> None:
    def curve(step: int) -> float:
        return 3 * step**-0.3 + 0.05 * math.sin(7.0 * step)

    rule = watch({"auto": "returns", "every": 20})
    rule.state["timed"] = {"step_seconds": 1.0, "next_step_seconds": 9.0}
    for step in range(1, 201):
        rule.saw(step, curve(step), 1.0)
        if rule.due(step):
            found = rule.by_returns(1.0)
    x = torch.arange(101, 201, dtype=torch.float64)
    y = torch.tensor([curve(step) for step in range(101, 201)], dtype=torch.float64)
    slope = ((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum()
    assert found.numbers["loss_per_second"] == pytest.approx(-slope.item(), rel=1e-9)


@pytest.mark.parametrize("moments", ["rescale", "measure"])
def test_a_run_is_delinked_when_its_gradients_part(run_file: Callable[..., Path], tmp_path: Path, moments: str) -> None:
    out = tmp_path / "run"
    assert main(["train", str(run_file(stages=stages(AT_ONCE, moments=moments))), "--out", str(out)]) == 0
    first, second = of_kind(out, "check")
    assert (first["step"], first["decision"], second["step"], second["decision"]) == (2, None, 4, "end")
    assert first["pairs"] == [[0, 1], [1, 2], [2, 3]]
    assert all(-1 <= value < 1 for value in first["correlations"])
    (delinked,) = of_kind(out, "delink")
    assert delinked["step"] == 4
    assert delinked["logits_equal"] is True
    assert list(losses(out)) == list(range(1, 13))
    assert [event["stage"] for event in of_kind(out, "validation")] == ["pseudo", "real"]
    assert (out / "checkpoints" / "step-00000004").is_dir()  # of the stage that ended
    (end,) = of_kind(out, "end")
    assert [stage["tokens"] for stage in end["stages"]] == [4 * 4 * 32, 8 * 4 * 32]
    # The same as one whose end was known, but for the time.
    fixed, known = tmp_path / "fixed", stages("{steps = 4}", moments=moments)
    assert main(["train", str(run_file(stages=known)), "--out", str(fixed)]) == 0
    assert losses(out) == losses(fixed)
    mine, theirs = final_state(out), final_state(fixed)
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_a_run_whose_rule_never_ends_the_stage_goes_to_its_latest_end(
    run_file: Callable[..., Path], tmp_path: Path
) -> None:
    out, until = (
        tmp_path / "run",
        '{auto = "correlation", threshold = 0.0001, every = 3, checks = 2, at_most = {steps = 7}}',
    )
    assert main(["train", str(run_file(stages=stages(until))), "--out", str(out)]) == 0
    assert [event["step"] for event in of_kind(out, "check")] == [3, 6]
    assert of_kind(out, "delink")[0]["step"] == 7


def scripted(self: LayerGradients, pairs: list[tuple[int, int]]) -> list[float]:
    """Layer 2 parts from 1 at once, all others when that is done."""
    low = {(1, 2)} if (1, 2) in pairs else set(pairs)
    return [0.1 if pair in low else 0.9 for pair in pairs]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenfold.training.when.LayerGradients.correlations", scripted)
    times = {"step_seconds": 1.0, "next_step_seconds": 1e-3}
    monkeypatch.setattr("tenfold.training.when.step_times", lambda *_: times)


@pytest.mark.usefixtures("script")
def test_only_the_group_whose_correlation_fell_is_split(run_file: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert main(["train", str(run_file(stages=stages(SPLIT))), "--out", str(out)]) == 0
    (split,) = of_kind(out, "split")
    assert (split["step"], split["pattern_from"], split["pattern_to"]) == (2, "(0,0,0,0)", "(0,0,1,1)")
    assert split["cut"] == [[1, 2]]
    assert split["logits_equal"] is True
    assert split["stored_before"] < split["stored_after"]
    (delinked,) = of_kind(out, "delink")
    assert (delinked["step"], delinked["pattern_from"], delinked["pattern_to"]) == (4, "(0,0,1,1)", "(0,1,2,3)")
    assert [event["decision"] for event in of_kind(out, "check")] == [None, "split", None, "end"]
    chain = """
[[stages]]
name = "one"
sharing = "all"
until = {steps = 2}
[[stages]]
name = "two"
sharing = {groups = 2}
until = {steps = 4}
[[stages]]
name = "real"
sharing = "none"
rewarm = 1
"""
    fixed = tmp_path / "fixed"
    assert main(["train", str(run_file(stages=chain)), "--out", str(fixed)]) == 0
    assert losses(out) == losses(fixed)
    mine, theirs = final_state(out), final_state(fixed)
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize(
    ("until", "stop_at"),
    # Before the first check, just before a decision, at it, after it.
    [(AT_ONCE, 1), (AT_ONCE, 3), (AT_ONCE, 4), (SPLIT, 1), (SPLIT, 2), (SPLIT, 3), (RETURNS, 3), (RETURNS, 5)],
)
def test_a_run_that_was_stopped_decides_and_goes_on_bit_for_bit(
    run_file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: str, stop_at: int
) -> None:
    if until == AT_ONCE:
        monkeypatch.setattr("tenfold.training.when.LayerGradients.correlations", lambda self, pairs: [0.5] * len(pairs))
    monkeypatch.setattr("tenfold.training.when.LayerGradients.gain", lambda self, share, divided: 1.0)
    file, whole, parts = str(run_file(stages=stages(until))), tmp_path / "whole", tmp_path / "parts"
    assert main(["train", file, "--out", str(whole)]) == 0
    with stopping_at(stop_at):
        assert main(["train", file, "--out", str(parts)]) == 0
    assert list_checkpoints(parts / "checkpoints")[-1].name == f"step-{stop_at:08d}"
    assert main(["train", file, "--out", str(parts), "--resume"]) == 0
    assert losses(parts) == losses(whole)
    mine, theirs = final_state(parts), final_state(whole)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    for kind in ("check", "split", "delink"):
        told = [
            [event.get(key) for key in ("step", "decision", "pattern_to", "in_a_row")] for event in of_kind(parts, kind)
        ]
        assert told == [
            [event.get(key) for key in ("step", "decision", "pattern_to", "in_a_row")] for event in of_kind(whole, kind)
        ]


def test_returns_decide_by_times_that_are_measured(run_file: Callable[..., Path], tmp_path: Path) -> None:
    out, until = tmp_path / "run", RETURNS.replace("every = 2", "every = 3")
    assert main(["train", str(run_file(stages=stages(until))), "--out", str(out)]) == 0
    checks = of_kind(out, "check")
    assert checks[0]["step"] == 3
    for check in checks:
        assert check["step_seconds"] == checks[0]["step_seconds"] > 0  # once, and kept
        assert check["next_step_seconds"] > 0
        assert 0 <= check["gain"] <= 16
        then = check["loss_per_second"] * check["gain"] * check["step_seconds"] / check["next_step_seconds"]
        assert check["next_loss_per_second"] == pytest.approx(then)
    assert of_kind(out, "delink")[0]["step"] <= 9


@pytest.mark.parametrize(
    ("until", "sharing", "after", "message"),
    [
        ('{auto = "correlation", threshold = 1.0}', '"all"', '"none"', "lies in (0, 1)"),
        ('{auto = "correlation", threshold = "0%"}', '"all"', '"none"', "lies in (0, 1)"),
        ('{auto = "correlation", threshold = 2}', '"all"', '"none"', "a share lies between 0 and 1"),
        ('{auto = "correlation", threshold = 2}', '"all"', '"none"', "threshold = 2: "),
        ('{auto = "correlation", every = "often"}', '"all"', '"none"', "every = 'often': "),
        ('{auto = "correlation", at_most = "140%"}', '"all"', '"none"', "at_most = '140%': "),
        ('{auto = "luck"}', '"all"', '"none"', "there are correlation, returns"),
        ('{auto = "returns", threshold = 0.5}', '"all"', '"none"', "has no threshold"),
        ('{auto = "correlation", every = 0}', '"all"', '"none"', "must be at least 1"),
        ('{auto = "correlation", split = "maybe"}', '"all"', '"none"', "true or false"),
        ('{auto = "correlation", at_most = "auto"}', '"all"', '"none"', "at the latest"),
        ('{auto = "correlation", at_most = "100%"}', '"all"', '"none"', "would have no steps"),
        ('"auto"', '"none"', '"none"', "frees none of"),
        ('"auto"', "{groups = 2}", "{groups = 2}", "frees none of"),
        ('{auto = "correlation", split = true}', '"all"', "{cycle = 2}", "leave split out"),
        ('{auto = "correlation", every = 2, checks = 2, at_most = {steps = 4}}', '"all"', '"none"', "set every to 1"),
        ('{auto = "returns", every = 1, checks = 3, at_most = {steps = 3}}', '"all"', '"none"', "set fewer checks"),
    ],
)
def test_a_rule_that_cannot_work_is_refused_before_the_run(
    run_file: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    until: str,
    sharing: str,
    after: str,
    message: str,
) -> None:
    file = str(run_file(stages=stages(until, sharing, after)))
    assert message in refused(["train", file, "--out", str(tmp_path / "run")], capsys)
    assert not (tmp_path / "run").exists()


def test_the_last_stage_has_no_rule_and_returns_want_two_halves(
    run_file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = str(run_file(stages=stages('"50%"'))), str(tmp_path / "run")
    assert "leave `until` out" in refused(["train", file, "--out", out, "--stages.1.until", "auto"], capsys)
    flags = ["--stages.0.until", "auto=returns,every=5", "--training.batch-size", "1"]
    assert "two halves of a batch" in refused(["train", file, "--out", out, *flags], capsys)


def test_what_was_read_before_a_decision_stays_and_nothing_is_skipped_or_repeated_after_it() -> None:
    """A mixture whose weights change where a rule ended the stage, in the middle of a block of samples."""
    config = RunConfig.model_validate(
        {
            "model": {"layers": 4},
            "training": {"steps": 500, "batch_size": 8},
            "data": {
                "sequence_length": 10,
                "mixture": [{"name": "x", "path": "x", "weight": 3}, {"name": "y", "path": "y", "weight": 1}],
            },
            "stages": [
                {"name": "a", "sharing": "all", "until": {"auto": "correlation", "every": 50}},
                {"name": "b", "sharing": {"groups": 2}, "until": {"auto": "returns", "every": 50, "at_most": "80%"}},
                {"name": "c", "mixture": {"x": 1, "y": 2}},
            ],
        }
    )
    plain = Order(phases_of(config, {}), 1)
    once = Order(phases_of(config, {"a": 77}), 1)
    twice = Order(phases_of(config, {"a": 77, "b": 150}), 1)
    before, after = once(0, 77 * 8), plain(0, 77 * 8)
    assert all((mine == theirs).all() for mine, theirs in zip(before, after, strict=True))
    before, after = twice(0, 150 * 8), once(0, 150 * 8)
    assert all((mine == theirs).all() for mine, theirs in zip(before, after, strict=True))
    sources, indices = twice(0, 500 * 8)
    for source in (0, 1):
        mine = sorted(indices[sources == source].tolist())
        assert mine == list(range(len(mine)))
    assert (sources[: 150 * 8] == 1).mean() == pytest.approx(1 / 4, abs=0.03)
    border = 77 * 8 // 256 * 256 + 256  # the first block is cut at 768 samples, the second one 512 further on
    assert (sources[border + 512 :] == 1).mean() == pytest.approx(2 / 3, abs=0.01)
