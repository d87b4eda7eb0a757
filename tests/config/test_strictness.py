"""A run file is read strictly: every wrong key and value is an error that names its dotted path."""

from __future__ import annotations

import copy
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from tenfold.config.load import build, load_run
from tenfold.config.model import ModelConfig, MoEConfig
from tenfold.config.run import RunConfig
from tenfold.config.stage import StageConfig
from tenfold.errors import TenfoldError


def sections(model, prefix=()):
    """Every section class with its place."""
    yield prefix, model
    for key, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from sections(field.annotation, (*prefix, key))
    if model is RunConfig:
        yield from sections(StageConfig, ("stages", 0))


def full():
    """Every key of a run file, each with a valid value."""
    return RunConfig().model_dump(mode="json")


def keys():
    return [(*place, key) for place, model in sections(RunConfig) for key in model.model_fields]


def table_at(raw, place):
    for part in place:
        raw = raw[part]
    return raw


def refused(raw):
    with pytest.raises(TenfoldError) as caught:
        build(RunConfig, raw, "run.toml")
    return str(caught.value)


def test_the_full_configuration_is_valid_and_has_every_key():
    assert build(RunConfig, full(), "run.toml") == RunConfig()
    assert len(keys()) > 70
    assert all(place[-1] in table_at(full(), place[:-1]) for place in keys())


@pytest.mark.parametrize("place", keys(), ids=lambda place: ".".join(map(str, place)))
def test_one_changed_character_anywhere_in_a_key_is_an_error_with_its_path(place):
    *parents, key = place
    for position in range(len(key)):
        wrong = key[:position] + ("q" if key[position] != "q" else "z") + key[position + 1 :]
        raw = full()
        table = table_at(raw, parents)
        table[wrong] = table.pop(key)
        message = refused(raw)
        assert f"unknown key `{'.'.join(map(str, (*parents, wrong)))}`" in message
        if len(key) > 3:
            right = ".".join(map(str, place))[:-1]  # beta1 or beta2: nobody can tell
            assert f"did you mean `{right}" in message


@settings(max_examples=150)
@given(st.sampled_from(keys()), st.data())
def test_any_slip_of_the_pen_in_a_key_is_an_error(place, data):
    *parents, key = place
    position = data.draw(st.integers(0, len(key) - 1))
    letter = data.draw(st.sampled_from("abcdefghijklmnopqrstuvwxyz_-0123456789 AB"))
    kind = data.draw(st.sampled_from(["change", "insert", "drop", "swap", "upper"]))
    wrong = {
        "change": key[:position] + letter + key[position + 1 :],
        "insert": key[:position] + letter + key[position:],
        "drop": key[:position] + key[position + 1 :],
        "swap": key[:position] + key[position : position + 2][::-1] + key[position + 2 :],
        "upper": key.upper(),
    }[kind]
    raw = full()
    table = table_at(raw, parents)
    if wrong in table:
        return
    table[wrong] = table.pop(key)
    assert f"`{'.'.join(map(str, (*parents, wrong)))}`" in refused(raw)


def test_a_key_in_the_wrong_section_is_told_where_it_belongs():
    assert "did you mean `optim.lr`?" in refused({"training": {"steps": 1, "lr": 0.1}})


def test_all_faults_are_told_at_once():
    message = refused({"optim": {"lrr": 1.0, "clip": -1.0}, "data": {"sequence_lenght": 5}})
    assert all(part in message for part in ("optim.lrr", "optim.clip", "data.sequence_lenght"))


def numbers():
    """Fields that hold a plain number."""
    return [place for place in keys() if type(table_at(full(), place[:-1])[place[-1]]) in (int, float)]


@pytest.mark.parametrize("place", numbers(), ids=lambda place: ".".join(map(str, place)))
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1, True, False, "abc", [1], {"a": 1}], ids=str)
def test_a_number_is_neither_nan_infinite_negative_a_truth_value_nor_text(place, value):
    raw = full()
    table_at(raw, place[:-1])[place[-1]] = value
    assert f"`{'.'.join(map(str, place))}`" in refused(raw)


@pytest.mark.parametrize("place", numbers(), ids=lambda place: ".".join(map(str, place)))
def test_text_is_not_read_as_a_number_except_as_a_count_or_a_share(place):
    raw = full()
    table = table_at(raw, place[:-1])
    table[place[-1]] = str(table[place[-1]])
    if place[-1] in ("warmup", "decay", "final", "validation_fraction", "tokens") or place == ("data", "vocab_size"):
        build(RunConfig, raw, "run.toml")
    else:
        assert f"`{'.'.join(map(str, place))}` = '" in refused(raw)


def test_a_truth_value_is_neither_a_number_nor_text():
    for value in (1, 0, "true"):
        assert "`training.compile`" in refused({"training": {"steps": 1, "compile": value}})


def test_a_whole_number_is_not_read_from_a_fraction():
    assert "`model.layers` = 6.0" in refused({"model": {"layers": 6.0}})


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"hidden": 100, "heads": 3}, "hidden = 100 does not divide into heads = 3"),
        ({"heads": 4, "kv_heads": 3}, "heads = 4 is not a multiple of kv_heads = 3"),
        ({"hidden": 36, "heads": 4}, "even head width; it is 9"),
        ({"heads": 4, "head_dim": 7}, "even head width; it is 7"),
        ({"moe": {"experts": 6, "prototypes": 4}}, "experts = 6 does not divide into prototypes = 4"),
        ({"moe": {"experts": 8, "prototypes": 4, "top_k": 3}}, "top_k = 3 is more than the 2 experts"),
        ({"moe": {"shared_experts": 1}}, "shared_experts = 1 needs experts > 0"),
        ({"preset": "gpt5"}, "there is no preset 'gpt5'; there are tiny"),
        ({"preset": ["tiny"]}, "there is no preset ['tiny']; there are tiny"),
        ({"moe": 3}, "model.moe"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_with_its_numbers(fields, told):
    assert told in refused({"model": fields})


def test_a_head_width_of_its_own_frees_the_hidden_width():
    config = ModelConfig(hidden=100, heads=3, head_dim=32)
    assert (config.head_width, config.key_heads) == (32, 3)


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        ({"stages": [{"name": "a"}, {"name": "b"}]}, "stages.0 (a) needs `until`"),
        ({"stages": [{"name": "a", "until": "20%"}]}, "stages.0 (a) is the last stage"),
        ({"stages": [{"name": "a", "until": "20%"}, {"name": "a"}]}, "different names; these are a, a"),
        ({"stages": []}, "`stages`"),
        ({"training": {"steps": 1, "batch_size": 6, "micro_batch_size": 4}}, "batch_size = 6 is not a multiple"),
        (
            {"training": {"steps": 1, "batch_size": 4, "micro_batch_size": 4}, "stages": [{"batch_size": 6}]},
            "stages.0.batch_size = 6 is not a multiple of training.micro_batch_size = 4",
        ),
        (
            {"model": {"preset": "gpt2-124m"}, "data": {"sequence_length": 2048}},
            "data.sequence_length = 2048 is more than model.max_positions = 1024",
        ),
        ({"model": {"document_end": 0}}, "set data.document_mask = true"),
        ({"stages": [{"sharing": {"groups": 0}}]}, "stages.0.sharing"),
        ({"stages": [{"until": {"steps": -1}}, {"name": "b"}]}, "stages.0.until"),
        ({"training": {"tokens": 0}}, "training.tokens"),
        ({"training": {"steps": 1, "seed": 2**63}}, "`training.seed` = 9223372036854775808"),
    ],
)
def test_a_run_that_cannot_be_is_refused_with_the_path(raw, told):
    assert told in refused(raw)


def test_every_field_has_a_description():
    for place, model in sections(RunConfig):
        assert model.__doc__, model
        for key, field in model.model_fields.items():
            section = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
            assert section or field.description, (*place, key)


def test_every_section_is_checked_here():
    assert {model for _, model in sections(RunConfig)} > {RunConfig, ModelConfig, MoEConfig, StageConfig}


def test_a_configuration_does_not_change_once_it_is_made():
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().training.batch_size = 3


def test_reading_changes_nothing_of_what_was_given():
    raw = {"model": {"preset": "moe-tiny", "moe": {"top_k": 2}}}
    given_ = copy.deepcopy(raw)
    build(RunConfig, raw, "run.toml")
    assert raw == given_


def test_a_missing_file_a_folder_and_broken_toml_are_told_by_name(tmp_path):
    with pytest.raises(TenfoldError, match=r"no run file .*nothing\.toml"):
        load_run(tmp_path / "nothing.toml")
    with pytest.raises(TenfoldError, match="is a folder"):
        load_run(tmp_path)
    (tmp_path / "bad.toml").write_text("a = = 1")
    with pytest.raises(TenfoldError, match=r"bad\.toml is not valid TOML.*line 1"):
        load_run(tmp_path / "bad.toml")
    (tmp_path / "bytes.toml").write_bytes(b"a = '\xff'")
    with pytest.raises(TenfoldError, match=r"bytes\.toml is not valid TOML"):
        load_run(tmp_path / "bytes.toml")


@pytest.mark.parametrize("experts", ["layer", "prototype"])
def test_experts_can_share_only_where_there_are_some(experts):
    raw = {"training": {"steps": 1}, "stages": [{"experts": experts}]}
    with pytest.raises(TenfoldError, match=rf'stages\.0\.experts = "{experts}" needs a mixture.*model\.moe\.experts'):
        build(RunConfig, raw, "run.toml")
    build(RunConfig, {**raw, "model": {"moe": {"experts": 4}}}, "run.toml")
