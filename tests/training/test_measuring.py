"""Measured moments in a run: from the stage's own coming samples, of which none is skipped; the same on resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from runs import final_state, losses, of_kind, stopping_at
from tenfold.cli.main import main
from tenfold.config.run import OptimConfig, RunConfig, TrainingConfig
from tenfold.nn.objective import backward
from tenfold.sharing.delinking import delink
from tenfold.sharing.patterns import Pattern
from tenfold.sharing.tying import Sharing
from tenfold.training.measuring import Coming, measure_moments
from tenfold.training.optimizers import build_optimizers
from tenfold.training.step import micro_batches_of

MEASURE = """
[[stages]]
name = "pseudo"
sharing = "all"
until = "50%"
[[stages]]
name = "real"
sharing = {sharing}
moments = "{moments}"
moments_steps = 3
"""


@pytest.mark.parametrize("moe", [{}, {"experts": 4, "prototypes": 2, "ffn": 8}], ids=["dense", "moe"])
@pytest.mark.parametrize("micro", [0, 2])
def test_measured_moments_are_the_means_over_the_steps_of_a_plain_loop(
    tiny_decoder: Callable[..., Any], moe: dict[str, Any], micro: int
) -> None:
    """Each step's gradient from a free model of the same weights; with one micro-batch a step, squares as well."""
    pairs = Sharing(Pattern([0, 0, 1, 1]))
    model = tiny_decoder("all", moe=moe)
    training = TrainingConfig(steps=9, batch_size=4, micro_batch_size=micro, precision="fp32")
    config = RunConfig(model=model.config, training=training, optim=OptimConfig(clip=0.0))
    optimizers = build_optimizers(model, config.optim)
    random = torch.Generator().manual_seed(0)
    coming = [Coming(torch.randint(0, 50, (4, 9), generator=random), 4 * number, 1) for number in range(3)]

    free = tiny_decoder("none", moe=moe)
    tied = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, parameter in free.named_parameters():
            parameter.copy_(tied[name])
    means: dict[str, Any] = {}
    for step in coming:
        parts, valid = micro_batches_of(step.batch, config, step.first_sample, 1)
        for part in parts:
            backward(free, part, valid, config.training.loss_chunk)
        for name, _ in free.layers[0].named_parameters():
            columns = [dict(layer.named_parameters())[name].grad for layer in free.layers]
            for first in (0, 2):
                if columns[0] is not None:
                    gradient = (columns[first] + columns[first + 1]) / 2
                    m, v = means.get((first, name), (0.0, 0.0))
                    means[first, name] = (m + gradient / 3, v + gradient**2 / 3)
        free.zero_grad(set_to_none=True)

    freed = delink(model.layers, optimizers, pairs, "measure")
    measure_moments(model, optimizers, freed, coming, config)
    seen = 0
    for (first, name), (m, v) in means.items():
        state = optimizers[0].state[dict(model.layers[first].named_parameters())[name]]
        assert state["step"] == 3
        torch.testing.assert_close(state["exp_avg"], m * (1 - 0.9**3), rtol=1e-7, atol=1e-12)
        if micro == 0:
            torch.testing.assert_close(state["exp_avg_sq"], v * (1 - 0.95**3), rtol=1e-7, atol=1e-15)
        seen += 1
    assert seen == 2 * sum(parameter.requires_grad for parameter in model.layers[0].parameters())


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "muon"])
def test_a_run_measures_on_the_samples_that_it_then_trains_on(
    run_file: Callable[..., Path], tmp_path: Path, optimizer: str
) -> None:
    for moments in ("measure", "rescale"):
        stages = MEASURE.format(sharing='"none"', moments=moments)
        flags = ["--optim.name", optimizer, "--training.micro-batch-size", "2"]
        assert main(["train", str(run_file(stages=stages)), "--out", str(tmp_path / moments), *flags]) == 0
    (delinked,) = of_kind(tmp_path / "measure", "delink")
    assert delinked["moments"] == "measure"
    assert delinked["measured_steps"] == 3
    assert delinked["measured_grad_norm"] > 0
    assert delinked["logits_equal"] is True
    measured, rescaled = losses(tmp_path / "measure"), losses(tmp_path / "rescale")
    # The same weights and the same samples up to the first step after delinking, and the same number of steps in all.
    assert {step: measured[step] for step in range(1, 8)} == {step: rescaled[step] for step in range(1, 8)}
    assert measured[8] != rescaled[8]
    assert [event["tokens"] for event in of_kind(tmp_path / "measure", "step")] == [
        event["tokens"] for event in of_kind(tmp_path / "rescale", "step")
    ]


def test_a_stage_shorter_than_what_is_to_be_measured_is_measured_whole(
    run_file: Callable[..., Path], tmp_path: Path
) -> None:
    stages = MEASURE.format(sharing="{groups = 2}", moments="measure")
    out = tmp_path / "run"
    assert main(["train", str(run_file(stages=stages)), "--out", str(out), "--stages.0.until", "steps=11"]) == 0
    assert of_kind(out, "delink")[0]["measured_steps"] == 1


@pytest.mark.parametrize("stop_at", [6, 7])
def test_a_run_stopped_about_its_delinking_measures_the_same_again(
    run_file: Callable[..., Path], tmp_path: Path, stop_at: int
) -> None:
    file = str(run_file(stages=MEASURE.format(sharing='"none"', moments="measure")))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(["train", file, "--out", str(whole)]) == 0
    with stopping_at(stop_at):
        assert main(["train", file, "--out", str(parts)]) == 0
    assert main(["train", file, "--out", str(parts), "--resume"]) == 0
    assert losses(parts) == losses(whole)
    mine, theirs = final_state(parts), final_state(whole)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert [event["measured_grad_norm"] for event in of_kind(parts, "delink")] == [
        event["measured_grad_norm"] for event in of_kind(whole, "delink")
    ]
