"""Presets, files and flags: which wins, and what is written back."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenfold.config.load import build, dump_toml, leaves
from tenfold.config.model import ModelConfig
from tenfold.config.presets import PRESETS
from tenfold.config.run import DataConfig, RunConfig
from tenfold.errors import TenfoldError


def test_an_empty_file_is_the_default_run(read):
    assert read("") == RunConfig()


def test_units_are_read_in_a_file(read):
    config = read('training.tokens = "1.5M"\noptim.warmup = "5%"\nstages = [{sharing = {groups = 2}}]')
    assert (config.training.tokens, config.optim.warmup, config.stages[0].sharing) == (1_500_000, 0.05, {"groups": 2})


def test_fields_win_over_the_preset_and_flags_over_fields(read):
    text = '[model]\npreset = "moe-tiny"\nlayers = 3\nffn = 100\n[model.moe]\ntop_k = 2'
    config = read(text, "--model.ffn", "200", "--model.moe.balance-loss", "0.5")
    assert config.model.layers == 3  # the file's, over the preset's 6
    assert config.model.ffn == 200  # the flag's, over the file's 100
    assert config.model.moe.top_k == 2  # the file's, beside what the preset says of the experts
    assert config.model.moe.prototypes == 2  # the preset's
    assert config.model.moe.balance_loss == 0.5  # the flag's, over the preset's 0.01
    assert config.model.tie_embeddings is True  # the preset's


def test_values_with_units_warn_of_nothing_on_the_command_line(read, recwarn):
    text = 'training.tokens = "2M"\noffload = {device_budget = "1GiB", disk = ["."]}'
    config = read(text, "--offload.device-budget", "300MiB")
    assert (config.offload.device_budget, config.training.tokens) == (300 * 2**20, 2_000_000)
    assert not list(recwarn)


def test_a_flag_that_is_not_given_changes_nothing(read):
    text = '[model]\npreset = "tiny"\n[optim]\nlr = 0.5'
    assert read(text, "--optim.clip", "2.0").optim.lr == 0.5


@pytest.mark.parametrize("spelling", [("--training.batch-size", "8"), ("--training.batch_size=8",)])
def test_flags_are_spelt_with_dashes_or_underscores_with_a_space_or_an_equals_sign(read, spelling):
    assert read("training.steps = 5", *spelling).training.batch_size == 8


def test_flags_of_stages_count_from_zero(read):
    text = 'stages = [{name = "a", sharing = "all", until = "20%"}, {name = "b"}]'
    config = read(text, "--stages.0.sharing", "groups=3", "--stages.0.until", "tokens=2M", "--stages.1.lr-scale", "0.5")
    assert config.stages[0].sharing == {"groups": 3}
    assert config.stages[0].until == {"tokens": 2_000_000}
    assert config.stages[1].lr_scale == 0.5
    assert config.stages[1].name == "b"


def test_a_flag_that_says_two_things_of_one_degree_is_refused(read, capsys):
    with pytest.raises(SystemExit) as ended:
        read('stages = [{name = "a", until = "20%"}, {name = "b"}]', "--stages.1.parallel", "tensor=2,tensor=1")
    assert ended.value.code == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "--stages.1.parallel" in told
    assert "tensor is given twice" in told


@pytest.mark.parametrize(
    ("given", "found"), [("true", "full"), ("false", "none"), ('"selective"', "selective"), ('"full"', "full")]
)
def test_recompute_is_a_mode_or_true_or_false_in_files_and_flags(read, given, found):
    assert read(f"training = {{steps = 1, recompute = {given}}}").training.recompute == found
    config = read("", "--training.recompute", given.strip('"'))
    assert config.training.recompute == found
    assert build(RunConfig, tomllib.loads(dump_toml(config)), "written") == config


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ('recompute = "some"', 'training.recompute` = \'some\': expected "none", "selective" or "full"'),
        ("recompute = 1", "training.recompute` = 1: expected"),
        ("recompute_layers = 1", 'recompute_layers = 1 needs recompute = "selective" or "full", and it is "none"'),
        ("recompute = true\nrecompute_layers = 99", "training.recompute_layers = 99 is more than model.layers"),
    ],
)
def test_a_wrong_recompute_is_refused_with_its_path(read, given, told):
    with pytest.raises(TenfoldError) as caught:
        read(f"[training]\nsteps = 1\n{given}")
    assert told in str(caught.value)


STAGES = """
training = {steps = 9, batch_size = 8, micro_batch_size = 4, recompute = "full", recompute_layers = 3}
model.layers = 6
parallel = {tensor = 2, reshard = "backward"}
"""


@pytest.mark.parametrize(
    ("own", "passes", "recompute"),
    [
        ("", 4, ("full", 3)),
        ("micro_batch_size = 2", 2, ("full", 3)),
        ("micro_batch_size = 0", 0, ("full", 3)),
        ("recompute_layers = 5", 4, ("full", 5)),
        ('recompute = "selective"', 4, ("selective", None)),
        ("recompute = false", 4, ("none", None)),
        ("recompute = true\nrecompute_layers = 1", 4, ("full", 1)),
    ],
)
def test_a_stage_has_its_own_passes_and_recompute_or_the_runs(read, own, passes, recompute):
    config = read(f'{STAGES}\n[[stages]]\nuntil = "50%"\n{own}\n[[stages]]\nname = "last"')
    found = config.of_stage(config.stages[0]).training
    assert (found.micro_batch_size, found.recompute, found.recompute_layers) == (passes, *recompute)
    assert config.of_stage(config.stages[1]) == config
    assert config.of_stage(config.stages[0]).of_stage(config.stages[0]) == config.of_stage(config.stages[0])


def test_a_stage_lies_as_its_keys_of_parallel_say_and_else_as_the_run(read):
    text = STAGES + '[[stages]]\nparallel = {reshard = "step", pipeline = 2, pipeline_schedule = "gpipe"}'
    config = read(text)
    own = config.of_stage(config.stages[0]).parallel
    assert (own.tensor, own.reshard, own.pipeline, own.pipeline_schedule) == (2, "step", 2, "gpipe")
    assert build(RunConfig, tomllib.loads(dump_toml(config)), "written") == config
    flagged = read(STAGES, "--stages.0.parallel", "reshard=step,pipeline=2,pipeline_schedule=gpipe")
    assert flagged.of_stage(flagged.stages[0]).parallel == own
    opened = read(STAGES, "--stages.0.parallel", "auto")
    assert opened.of_stage(opened.stages[0]).parallel.tensor == "auto"


def test_a_flag_adds_to_what_is_all_open(read):
    config = read('parallel = "auto"\n[training]\nsteps = 5', "--parallel.tensor", "2", "--parallel.cluster", "8:h100")
    assert (config.parallel.tensor, config.parallel.data_shard, config.parallel.cluster) == (2, "auto", "8:h100")


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ("micro_batch_size = 3", "training.batch_size = 8 is not a multiple of stages.0.micro_batch_size = 3"),
        ("batch_size = 6", "stages.0.batch_size = 6 is not a multiple of training.micro_batch_size = 4"),
        ("recompute_layers = 7", "stages.0.recompute_layers = 7 is more than model.layers = 6"),
        ("recompute = false\nrecompute_layers = 2", 'stages.0.recompute_layers = 2 needs recompute = "selective" or'),
        ("parallel = {tensors = 2}", "there is no key 'tensors'; the keys are data_replicate, data_shard, tensor,"),
        ("parallel = {tensor = 0}", "tensor = 0: expected a number of ranks"),
        ('parallel = {pipeline_schedule = "2f2b"}', "pipeline_schedule = '2f2b': Input should be 'gpipe', '1f1b'"),
        ("parallel = {timeout = 5.0}", "timeout holds for all stages of a run: set parallel.timeout"),
        ('parallel = {cluster = "h100"}', "cluster holds for all stages of a run: set parallel.cluster"),
        ("foreseen = {seconds = 1}", "expected {seconds = 0.41, device_bytes = "),
    ],
)
def test_a_wrong_key_of_a_stages_own_is_refused_with_its_path(read, own, told):
    with pytest.raises(TenfoldError) as caught:
        read(f"{STAGES}\n[[stages]]\n{own}")
    assert told in str(caught.value)


def test_switches_are_turned_on_and_off_by_flags(read):
    assert read("training.steps = 5", "--training.compile").training.compile is True
    assert read("training = {steps = 5, compile = true}", "--training.no-compile").training.compile is False


def test_a_flag_for_the_default_stage_needs_no_stage_in_the_file(read):
    assert read("", "--stages.0.sharing", "all").stages[0].sharing == "all"


@pytest.mark.parametrize("flags", [(), ("--training.tokens", "5", "--training.steps", "5")])
def test_tokens_and_steps_exclude_each_other(read, flags):
    with pytest.raises(TenfoldError, match=r"either training\.tokens or training\.steps"):
        read("training = {steps = 5, tokens = 100}" if not flags else "", *flags)


def test_neither_tokens_nor_steps_is_refused(read):
    with pytest.raises(TenfoldError, match=r"either training\.tokens or training\.steps"):
        read("training.batch_size = 5")


def test_tokens_as_a_flag_win_over_the_files_steps(read):
    config = read("training.steps = 5", "--training.tokens", "2k")
    assert (config.training.tokens, config.training.steps) == (2000, None)


def test_steps_as_a_flag_win_over_the_files_tokens(read):
    config = read('training.tokens = "2k"', "--training.steps=7")
    assert (config.training.tokens, config.training.steps) == (None, 7)


def test_other_flags_leave_the_files_tokens_alone(read):
    assert read('training.tokens = "2k"', "--training.batch-size", "2").training.tokens == 2000


def test_a_wrong_value_in_a_flag_is_refused_with_its_path(read):
    with pytest.raises(TenfoldError, match=r"and flags: `optim\.lr` = -1"):
        read("", "--optim.lr", "-1")


def test_an_unknown_flag_ends_the_program(read, capsys):
    with pytest.raises(SystemExit):
        read("", "--optim.learning-rate", "1")
    assert "learning-rate" in "".join(capsys.readouterr())


def written_and_read(config):
    return build(type(config), tomllib.loads(dump_toml(config)), "written.toml")


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_comes_back_from_its_own_toml(preset):
    config = RunConfig(model=ModelConfig(preset=preset), data=DataConfig(sequence_length=512))
    assert written_and_read(config) == config


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_that_is_written_is_written_out_in_full(preset):
    text = dump_toml(ModelConfig(preset=preset))
    raw = tomllib.loads(text)
    assert all(raw[key] == value for key, value in PRESETS[preset].items() if key != "moe")


STAGE = st.fixed_dictionaries(
    {
        "sharing": st.sampled_from(["all", "none", "sandwich", {"groups": 2}, {"cycle": 3}, [0, 0, 1, 0, 2, 2]]),
        "moments": st.sampled_from(["copy", "rescale", "reset"]),
        "batch_size": st.none() | st.integers(1, 100),
        "lr_scale": st.floats(1e-6, 10),
        "rewarm": st.integers(0, 100),
    }
)
UNTIL = st.one_of(
    st.floats(0, 1).map(lambda share: {"share": share}),
    st.integers(1, 10**12).map(lambda tokens: {"tokens": tokens}),
    st.integers(1, 10**6).map(lambda steps: {"steps": steps}),
)
RUN = st.builds(
    lambda stages, untils, training, optim, model: {
        "stages": [
            {**stage, "name": f"stage {number} “ä”", "until": untils[number] if number < len(stages) - 1 else None}
            for number, stage in enumerate(stages)
        ],
        "training": training,
        "optim": optim,
        "model": model,
    },
    st.lists(STAGE, min_size=1, max_size=3),
    st.lists(UNTIL, min_size=3, max_size=3),
    st.fixed_dictionaries({"seed": st.integers(0, 2**60), "compile": st.booleans()})
    .flatmap(lambda t: st.sampled_from([{"steps": 7}, {"tokens": 10**13}]).map(lambda end: {**t, **end})),
    st.fixed_dictionaries(
        {"lr": st.floats(1e-12, 1e3), "eps": st.floats(1e-300, 1), "warmup": st.floats(0, 1), "clip": st.floats(0, 9)}
    ),
    st.fixed_dictionaries(
        {
            "preset": st.none() | st.sampled_from(list(PRESETS)),
            "layers": st.integers(1, 100),
            "kv_heads": st.none() | st.just(1),
            "vocab_size": st.none() | st.integers(1, 10**6),
            "max_positions": st.none() | st.integers(1024, 5000),
            "qk_norm": st.booleans(),
        }
    ),
)  # fmt: skip


@settings(max_examples=100)
@given(RUN)
def test_any_configuration_comes_back_from_its_own_toml(raw):
    config = build(RunConfig, raw, "random")
    assert written_and_read(config) == config


def test_a_run_file_and_flags_come_back_from_what_is_written(read):
    config = read('[model]\npreset = "gpt2-124m"', "--model.vocab-size", "None", "--training.tokens", "2B")
    assert config.model.vocab_size is None
    assert written_and_read(config).model.vocab_size is None


def test_leaves_are_all_values_with_their_dotted_paths():
    found = dict(leaves(RunConfig()))
    assert found["optim.lr"] == 3e-4
    assert found["model.moe.experts"] == 0
    assert found["stages.0.name"] == "real"
    assert "model.moe" not in found


def test_a_flag_adds_to_the_defaults_of_a_table_that_the_file_leaves_out(read):
    assert read("", "--training.batch-size", "4").training == RunConfig().training.model_copy(update={"batch_size": 4})
