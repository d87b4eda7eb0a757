"""The timetable: where stages end, which samples they read, and the learning rate of every step."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenfold.config.run import RunConfig
from tenfold.errors import TenfoldError
from tenfold.planning.stages import learning_rate, plan_stages
from tenfold.sharing.tying import PARTS


def run(stages, optim=None, **training):
    """A run of 8 layers and sequences of 10 tokens in batches of 4: 40 tokens a step."""
    return RunConfig.model_validate(
        {
            "model": {"layers": 8},
            "data": {"sequence_length": 10},
            "training": {"batch_size": 4, **training},
            "optim": optim or {},
            "stages": stages,
        }
    )


def two(until, **training):
    return plan_stages(run([{"name": "a", "sharing": "all", "until": until}, {"name": "b"}], **training))


@pytest.mark.parametrize(
    ("until", "training", "first"),
    [
        ("20%", {"steps": 50}, 10),
        ("20%", {"tokens": 2000}, 10),
        ({"share": 0.5}, {"steps": 5}, 2),  # round(2.5) is to even
        ({"steps": 7}, {"steps": 50}, 7),
        ({"steps": 7}, {"tokens": 2000}, 7),
        ({"tokens": 400}, {"steps": 50}, 10),
        ({"tokens": 401}, {"steps": 50}, 11),  # a stage ends with the first step that reaches it
        ({"tokens": "0.4k"}, {"tokens": "2k"}, 10),
    ],
)
def test_a_stage_ends_at_a_share_at_tokens_or_at_steps(until, training, first):
    stages = two(until, **training)
    assert (stages[0].first_step, stages[0].last_step) == (0, first)
    total = training.get("steps", 50)
    assert (stages[1].first_step, stages[1].last_step) == (first, total)
    assert stages[0].steps == first
    assert stages[0].tokens == first * 40


def test_one_stage_covers_the_whole_run():
    (stage,) = plan_stages(run([{}], steps=30))
    assert (stage.first_step, stage.last_step, stage.first_sample, stage.tokens) == (0, 30, 0, 1200)


def test_tokens_that_do_not_fill_the_last_step_are_rounded_up():
    (stage,) = plan_stages(run([{}], tokens=1201))
    assert stage.steps == 31


def test_stages_with_different_batch_sizes_share_out_the_tokens_of_the_run():
    stages = plan_stages(
        run(
            [
                {"name": "a", "sharing": "all", "until": {"tokens": 800}, "batch_size": 8},
                {"name": "b", "sharing": {"groups": 2}, "until": "60%", "batch_size": 2},
                {"name": "c"},
            ],
            tokens=2000,
        )
    )
    assert [stage.batch_size for stage in stages] == [8, 2, 4]
    assert [stage.steps for stage in stages] == [10, 20, 20]
    assert [stage.first_sample for stage in stages] == [0, 80, 120]
    assert sum(stage.tokens for stage in stages) == 2000
    assert stages[1].tokens_at(12) == 800 + 2 * 20


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 7)), min_size=1, max_size=4),
)
def test_samples_are_read_in_order_without_a_gap_or_a_repeat(parts):
    ends, end = [], 0
    for steps, _ in parts:
        end += steps
        ends.append(end)
    raw = [
        {"name": str(number), "sharing": "all", "batch_size": batch, "until": {"steps": ends[number]}}
        for number, (_, batch) in enumerate(parts)
    ]
    del raw[-1]["until"]
    stages = plan_stages(run(raw, steps=end))
    read, step = [], 0
    for stage in stages:
        for step in range(stage.first_step, stage.last_step):
            first = stage.sample_at(step)
            assert stage.tokens_at(step) == len(read) * 10
            read += range(first, first + stage.batch_size)
    assert step == end - 1
    assert read == list(range(len(read)))


@pytest.mark.parametrize(
    ("until", "training"), [({"steps": 0}, {"steps": 9}), ("1%", {"steps": 9}), ({"steps": 9}, {"steps": 9})]
)
def test_a_stage_without_steps_is_refused_by_name(until, training):
    with pytest.raises(TenfoldError, match=r"stages\.[01] \([ab]\) would have no steps"):
        two(until, **training)


def test_a_stage_that_ends_before_the_one_before_it_is_refused():
    stages = [
        {"name": "a", "sharing": "all", "until": "50%"},
        {"name": "b", "sharing": "all", "until": "40%"},
        {"name": "c"},
    ]
    with pytest.raises(TenfoldError, match=r"stages\.1 \(b\) would have no steps: it ends at 20 steps.* 25 steps"):
        plan_stages(run(stages, steps=50))


def test_patterns_that_do_not_refine_one_another_are_refused_with_both():
    stages = [{"name": "a", "sharing": {"groups": 2}, "until": "50%"}, {"name": "b", "sharing": {"cycle": 2}}]
    with pytest.raises(TenfoldError, match=r"stages\.1 \(b\).*\(0,1,0,1,0,1,0,1\).*\(0,0,0,0,1,1,1,1\)"):
        plan_stages(run(stages, steps=50))


@pytest.mark.parametrize(
    ("moe", "stage", "complete"),
    [
        ({}, {"parts": ["attention", "ffn", "norms"]}, True),
        ({}, {"parts": ["attention", "norms"]}, False),
        ({"experts": 4}, {"parts": ["attention", "experts", "router", "norms"]}, True),
        ({"experts": 4}, {"parts": ["attention", "experts", "norms"]}, False),
        ({"experts": 4}, {"parts": ["attention", "experts", "norms"], "experts": "layer"}, True),
        ({"experts": 4, "shared_experts": 1}, {"parts": ["attention", "experts", "router", "norms"]}, False),
    ],
)
def test_parts_that_name_all_a_model_has_are_the_whole_of_it(moe, stage, complete):
    """So that the next stage may name them otherwise, or not at all; what is left out is not shared again."""
    given = run([{}], steps=50).model_dump() | {"model": {"layers": 8, "moe": moe}}
    given["stages"] = [{"name": "a", "sharing": "all", "until": "50%", **stage}, {"sharing": {"groups": 2}}]
    config = RunConfig.model_validate(given)
    if not complete:
        with pytest.raises(TenfoldError, match="does not refine"):
            plan_stages(config)
        return
    first, second = plan_stages(config)
    assert first.sharing.parts == second.sharing.parts == PARTS


def test_a_rule_does_not_watch_parts_that_the_model_has_not():
    parts = ["attention", "ffn", "norms"]
    stages = [{"name": "a", "sharing": "all", "until": "auto"}, {"name": "b", "sharing": "all", "parts": parts}]
    with pytest.raises(TenfoldError, match="frees none of"):
        plan_stages(run(stages, steps=50))


def test_a_pattern_that_does_not_fit_the_model_is_refused_with_the_stage():
    stages = [{"name": "a", "sharing": {"groups": 3}, "until": "50%"}, {"name": "b"}]
    with pytest.raises(TenfoldError, match=r"stages\.0 \(a\).*groups = 3.*8 layers"):
        plan_stages(run(stages, steps=50))


def rates(optim, stages=None, steps=100):
    config = run(stages or [{}], optim, steps=steps)
    planned = plan_stages(config)
    return [
        learning_rate(config.optim, planned, stage, step)
        for stage in planned
        for step in range(stage.first_step, stage.last_step)
    ]


BASE = {"lr": 1.0, "warmup": 0.1, "final": 0.1, "decay": 0.2}


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_the_rate_rises_in_a_line_over_the_warm_up(schedule):
    found = rates({**BASE, "schedule": schedule})
    assert found[:10] == pytest.approx([(step + 0.5) / 10 for step in range(10)])


@pytest.mark.parametrize(
    ("schedule", "step", "expected"),
    [
        # The middle of step s is the share (s + 0.5) / 100 of the run; what is left after the warm-up is 0.9 of it.
        ("cosine", 10, 0.1 + 0.9 * (1 + math.cos(math.pi * 0.005 / 0.9)) / 2),
        ("cosine", 54, 0.1 + 0.9 * (1 + math.cos(math.pi * 0.445 / 0.9)) / 2),
        ("cosine", 99, 0.1 + 0.9 * (1 + math.cos(math.pi * 0.895 / 0.9)) / 2),
        ("linear", 10, 1 - 0.9 * 0.005 / 0.9),
        ("linear", 54, 1 - 0.9 * 0.445 / 0.9),
        ("linear", 99, 1 - 0.9 * 0.895 / 0.9),
        ("wsd", 10, 1.0),
        ("wsd", 79, 1.0),
        ("wsd", 89, 1 - 0.9 * 0.095 / 0.2),
        ("wsd", 99, 1 - 0.9 * 0.195 / 0.2),
        ("constant", 10, 1.0),
        ("constant", 99, 1.0),
    ],
)
def test_every_schedule_falls_as_its_formula_says(schedule, step, expected):
    assert rates({**BASE, "schedule": schedule})[step] == pytest.approx(expected)


def test_without_warm_up_the_first_rate_is_the_peak_of_a_constant_schedule():
    assert rates({**BASE, "warmup": 0, "schedule": "constant"}) == [1.0] * 100


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
@pytest.mark.parametrize("edge", [{"warmup": 1.0}, {"decay": 0.0}, {"decay": 1.0, "warmup": 0.0}, {"final": 0.0}])
def test_rates_stay_between_zero_and_the_peak_at_the_edges(schedule, edge):
    assert all(0 < rate <= 1 for rate in rates({**BASE, "schedule": schedule, **edge}))


def test_the_schedule_goes_over_the_tokens_of_the_run_whatever_the_stages():
    plain = rates({**BASE, "schedule": "cosine"})
    split = rates({**BASE, "schedule": "cosine"}, [{"name": "a", "sharing": "all", "until": "30%"}, {"name": "b"}])
    assert split == plain


def test_a_stage_with_larger_batches_passes_through_the_schedule_faster():
    stages = [{"name": "a", "sharing": "all", "until": {"tokens": 2000}, "batch_size": 20}, {"name": "b"}]
    found = rates({**BASE, "warmup": 0, "schedule": "linear"}, stages, steps=60)
    # 10 steps of 200 tokens, then 50 of 40: half of the run's 4000 tokens each.
    assert found[:10] == pytest.approx([1 - 0.9 * (step + 0.5) / 20 for step in range(10)])
    assert found[10:] == pytest.approx([1 - 0.9 * (0.5 + (step + 0.5) / 100) for step in range(50)])


def test_a_stage_scales_its_rates_and_warms_up_again():
    stages = [
        {"name": "a", "sharing": "all", "until": {"steps": 50}},
        {"name": "b", "lr_scale": 0.5, "rewarm": 3},
    ]
    found = rates({**BASE, "warmup": 0, "schedule": "constant"}, stages)
    assert found[:50] == [1.0] * 50
    assert found[50:55] == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.5])


def test_a_length_grows_in_divisors_of_the_sample():
    (stage,) = plan_stages(
        RunConfig.model_validate(
            {
                "data": {"sequence_length": 1024},
                "training": {"steps": 1000},
                "stages": [{"sequence_length": {"from": 64, "over": "50%"}}],
            }
        )
    )
    lengths = [stage.length_at(step) for step in range(1000)]
    assert sorted(set(lengths)) == stage.lengths == [64, 128, 256, 512, 1024]
    assert lengths == sorted(lengths)
    assert lengths.index(512) == math.ceil((512 - 64) / (1024 - 64) * 500)
    assert lengths.index(1024) == 500


@pytest.mark.parametrize("root", [1, 2])
def test_a_root_grows_faster_at_first(root):
    lengths = {"sequence_length": {"from": 2, "to": 10, "over": 10, "root": root}}
    (stage,) = plan_stages(run([lengths], steps=40))
    assert stage.length_at(0) == 2
    assert stage.length_at(10) == 10
    reached = next(step for step in range(11) if stage.length_at(step) == 5)
    assert reached == math.ceil(10 * (3 / 8) ** root)


def test_weights_hold_until_a_stage_gives_others():
    stages = plan_stages(
        RunConfig.model_validate(
            {
                "model": {"layers": 8},
                "data": {"mixture": [{"name": "a", "path": "x", "weight": 2}, {"name": "b", "path": "y"}]},
                "training": {"steps": 40},
                "stages": [
                    {"name": "1", "until": "25%"},
                    {"name": "2", "until": "50%", "mixture": {"b": 3}},
                    {"name": "3"},
                ],
            }
        )
    )
    assert [stage.weights for stage in stages] == [(2.0, 1.0), (0.0, 3.0), (0.0, 3.0)]
