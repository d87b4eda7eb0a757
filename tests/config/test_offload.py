"""What may leave the device, as a run file says it: read exactly, and refused by name where it cannot be."""

from __future__ import annotations

import itertools
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenfold.config.depth import experts_of, is_chosen, places_of
from tenfold.config.load import build, dump_toml
from tenfold.config.offload import OffloadConfig, PlacementRule, key_of, late, parse_override, staying
from tenfold.config.run import RunConfig
from tenfold.config.units import budget_bytes, parse_budget, parse_bytes
from tenfold.errors import TenfoldError

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "count"),
    [("20GiB", 20 * GIB), ("20 GB", 20 * 10**9), ("1.5MiB", 3 * 2**19), ("512kB", 512_000), ("512KiB", 2**19),
     ("0B", 0),
     ("1TiB", 2**40), ("2TB", 2 * 10**12), (4096, 4096), ("1_000B", 1000), ("4096", 4096), (" 7 B ", 7), (0, 0)],
)  # fmt: skip
def test_bytes_are_read_exactly(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("value", ["20G", "GiB", "-1GiB", -1, 1.5, True, None, "20Gib", "0x10", "60%", [1], ""])
def test_what_is_not_bytes_is_refused(value):
    with pytest.raises(ValueError, match='as bytes; write for example "20GiB"'):
        parse_bytes(value)


def test_a_budget_is_bytes_or_a_share_of_what_there_is():
    assert budget_bytes(parse_budget("20GiB"), 5) == 20 * GIB
    assert budget_bytes(parse_budget(" 62.5 % "), 64 * GIB) == 40 * GIB
    for wrong in ("101%", "-1%", "60 percent", 0.6):
        with pytest.raises(ValueError, match=r"share|60%"):
            parse_budget(wrong)


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("all", [-1, 0, 1, 2, 3, 4, 5, 6]),
        ("3", [3]),
        ("0-2, 5", [0, 1, 2, 5]),
        ("every 2", [0, 2, 4]),
        ("every 2 from 1", [1, 3, 5]),
        ("every 9", [0]),
        ("embedding", [-1]),
        ("head,0", [0, 6]),
    ],
)
def test_layers_are_named_in_few_words(text, places):
    assert sorted(places_of(text, 6)) == places


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("some", "cannot read 'some' as layers"),
        ("", "cannot read '' as layers"),
        ("1,,2", "cannot read ''"),
        ("-1", "cannot read '-1'"),
        ("every 0", "cannot read 'every 0'"),
        ("5-2", "run backwards: write 2-5"),
        ("4-6", "names layer 6, and the layers are 0 to 5"),
        ("6", "names layer 6"),
        ("every 2 from 6", "names layer 6"),
    ],
)
def test_layers_that_are_none_are_refused(text, told):
    with pytest.raises(ValueError, match=told):
        places_of(text, 6)


@given(st.integers(1, 60).flatmap(lambda total: st.tuples(st.integers(0, total), st.just(total))))
def test_so_many_of_them_lie_evenly_over_the_depth(case):
    count, total = case
    chosen = [number for number in range(total) if is_chosen(number, count, total)]
    gaps = {after - before for before, after in itertools.pairwise(chosen)}
    assert len(chosen) == count
    assert not gaps or max(gaps) - min(gaps) <= 1


RULES = """
optim.clip = 0
[offload]
disk = ["/fast/a", "/fast/b"]
placement = [{layers = "all", moments = "disk"}, {layers = "4-5", weights = "host", activations = "keep"}]
"""


def test_rules_and_budgets_are_read(read):
    offload = read(RULES).offload
    assert offload.on
    assert [rule.kinds for rule in offload.placement] == [
        {"moments": "disk"},
        {"weights": "host", "activations": "device"},
    ]
    budget = read('offload = {device_budget = "60%", host_budget = "1GiB", disk = ["/a"]}').offload
    assert (budget.device_budget, budget.host_budget, budget.on) == ("60%", GIB, True)
    assert not read("").offload.on


def test_rules_and_stages_come_back_from_what_is_written(read):
    config = read(
        RULES + '[[stages]]\nname = "a"\nsharing = "all"\nuntil = "20%"\noffload = "off"\n[[stages]]\n'
        'offload = {device_budget = "2GiB", step_in_backward = true}'
    )
    assert config.stages[1].offload == {"device_budget": 2 * GIB, "step_in_backward": True}
    assert build(RunConfig, tomllib.loads(dump_toml(config)), "written") == config


def test_flags_are_read(read):
    config = read(
        RULES, "--offload.disk", "/c", "/d", "--offload.placement.1.layers", "3", "--offload.step-in-backward"
    )
    assert config.offload.disk == ["/c", "/d"]
    assert (config.offload.placement[1].layers, config.offload.step_in_backward) == ("3", True)
    config = read("", "--offload.device-budget", "20GiB", "--offload.host-budget=5MB", "--offload.activations")
    assert (config.offload.device_budget, config.offload.host_budget) == (20 * GIB, 5 * 10**6)
    config = read("", "--stages.0.offload", "device_budget=60%,disk=/a,disk=/b,activations=true")
    assert config.stages[0].offload == {"device_budget": "60%", "disk": ["/a", "/b"], "activations": True}
    assert read(RULES, "--stages.0.offload", "off").stages[0].offload == "off"


def test_a_stages_budget_takes_the_place_of_the_runs_rules_and_the_other_way_round():
    rules = [{"layers": "all", "moments": "disk"}]
    by_rules = OffloadConfig.model_validate({"placement": rules, "disk": ["/a"]})
    stage = by_rules.of_stage({"device_budget": GIB})
    assert (stage.device_budget, stage.placement, stage.disk) == (GIB, [], ["/a"])
    by_budget = OffloadConfig.model_validate({"device_budget": GIB, "disk": ["/a"], "activations": True})
    stage = by_budget.of_stage({"placement": rules})
    assert stage == by_rules
    assert by_budget.of_stage(None) == by_budget
    assert not by_budget.of_stage("off").on


ONE = '{layers = "1", moments = "disk"}'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('device_budget = "lots"', "`offload.device_budget` = 'lots': cannot read 'lots' as bytes"),
        ('device_budget = "1GiB"\ndisk = [""]', "`offload.disk.0` = ''"),
        ('placement = [{layers = "1-0", moments = "disk"}]', "`offload.placement.0.layers` = '1-0': layers '1-0' run"),
        ('placement = [{layers = "1", moments = "tape"}]', "`offload.placement.0.moments` = 'tape'"),
        ('placement = [{layers = "1", moment = "disk"}]', "unknown key `offload.placement.0.moment`"),
        ('placement = [{layers = "1"}]', "says nothing: give weights, gradients, moments or activations"),
        ('placement = [{layers = "40", moments = "disk"}]', "offload.placement.0.layers: '40' names layer 40"),
        (f"placement = [{ONE}]", 'offload.placement.0.moments = "disk" needs a folder: set offload.disk'),
        ('disk = ["/a"]', "offload.disk is set, and nothing is offloaded: set offload.device_budget or offload.pl"),
        ("step_in_backward = true", "offload.step_in_backward is set, and nothing is offloaded"),
        (f'disk = ["/a"]\ndevice_budget = 5\nplacement = [{ONE}]', "device_budget and offload.placement exclude each"),
        ("device_budget = 5\nstep_in_backward = true", r"offload.step_in_backward = true .* optim.clip = 1 goes by it"),
        (f'disk = ["/a"]\nactivations = true\nplacement = [{ONE}]', "offload.activations = true is for a budget"),
        (
            "device_budget = 5\nactivations = true\n[training]\nsteps = 1\nrecompute = true",
            "offload.activations = true moves what layers keep, and training.recompute makes it again in every layer",
        ),
        (
            'placement = [{layers = "0,head", weights = "host"}]',
            r'placement.0.weights = "host", and .* weights of embedding and head stay on the device',
        ),
        (
            'step_in_backward = true\nplacement = [{layers = "0", gradients = "host"}]\n[optim]\nclip = 0',
            r'placement.0.gradients = "host" has gradients wait .* offload.step_in_backward = true',
        ),
        ('placement = [{layers = "head", activations = "host"}]', "placement.0.activations is of layers, and"),
        (
            'placement = [{layers = "every 2", activations = "host"}]\n[training]\nsteps = 1\nrecompute = "selective"',
            r'offload.placement.0.activations = "host" moves what layer 0 keeps, and training.recompute makes it again',
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(read, text, told):
    with pytest.raises(TenfoldError, match=told):
        read(f"[offload]\n{text}")


@pytest.mark.parametrize(
    ("rule", "more", "told"),
    [
        ('experts = "3", moments = "host"', "", "offload.placement.0.experts = '3', and this model is dense"),
        ('experts = "8-63", moments = "host"', "moe", "placement.0.experts: '8-63' names expert 63, and .* 0 to 15"),
        ('experts = "every 2 from 16", moments = "host"', "moe", "names expert 16, and the experts are 0 to 15"),
        (
            'experts = "head", moments = "host"',
            "moe",
            "`offload.placement.0.experts` = 'head': cannot read 'head' as exp",
        ),
        ('experts = "5-4", moments = "host"', "moe", "experts '5-4' run backwards: write 4-5"),
        ('experts = "3", activations = "host"', "moe", "experts = '3' and activations"),
        ('experts = "3"', "moe", "says nothing: give weights, gradients, moments or activations"),
        (
            'experts = "3", moments = "host"',
            "adafactor",
            'placement.0.experts = .3., and optim.name = "adafactor" steps',
        ),
    ],
)
def test_experts_that_cannot_lie_apart_are_refused_by_name(read, rule, more, told):
    model = {"moe": "[model.moe]\nexperts = 16\n"}
    model["adafactor"] = model["moe"] + '[optim]\nname = "adafactor"\n'
    with pytest.raises(TenfoldError, match=told):
        read(f'{model.get(more, "")}[offload]\nplacement = [{{layers = "0", {rule}}}]')


def test_experts_are_of_layers_and_those_that_stay_do_not_have_others_stay(read):
    moe = "[model.moe]\nexperts = 16\n[offload]\nplacement = "
    with pytest.raises(TenfoldError, match=r"experts = 'all' is of layers, and .*layers = 'head' names none of them"):
        read(moe + '[{layers = "head", experts = "all", moments = "host"}]')
    rules = '[{layers = "0", gradients = "host"}, {layers = "0", experts = "all", gradients = "device"}]'
    offload = read(moe + rules).offload
    assert offload.below("gradients", key_of(0, None), 2) == {0: 'offload.placement.0.gradients = "host"'}
    assert experts_of("1,all", 3) == {0, 1, 2}
    assert experts_of("0-1,every 2 from 3", 8) == {0, 1, 3, 5, 7}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{disk = ["/a"]}', "stages.0.offload is set, and nothing is offloaded in that stage"),
        ("{device_budget = 5, step_in_backward = true}", r"stages.0.offload.step_in_backward = true .* optim.clip = 1"),
        (f"{{placement = [{ONE}]}}", r"stages.0.offload.placement.0.moments = .disk. needs a folder: set offload.disk"),
        ("{budget = 5}", r"`stages.0.offload`: there is no key 'budget'; the keys are device_budget"),
        ('{device_budget = "much"}', r"device_budget = 'much': cannot read 'much' as bytes"),
        ('"on"', r"`stages.0.offload` = 'on': there is no key 'on'"),
        ("{}", "expected keys of"),
    ],
)
def test_what_a_stage_cannot_have_is_refused_by_name(read, text, told):
    with pytest.raises(TenfoldError, match=told):
        read(f"[[stages]]\noffload = {text}")


def test_layers_that_recompute_and_layers_that_are_moved_may_be_neighbours(read):
    """Of 12 layers 6 recompute: 1, 3, ..., 11; a later rule may keep what an earlier one moved."""
    text = (
        "[training]\nsteps = 1\nrecompute = true\nrecompute_layers = 6\n[model]\nlayers = 12\n[offload]\nplacement = "
    )
    assert read(text + '[{layers = "every 2", activations = "host"}]').offload.on
    kept = '{layers = "every 2 from 1", activations = "keep"}'
    assert read(text + f'[{{layers = "all", activations = "host"}}, {kept}]').offload.on
    with pytest.raises(TenfoldError, match=r'placement\.1\.activations = "host" moves what layer 3'):
        read(text + '[{layers = "0", activations = "host"}, {layers = "2-3", activations = "host"}]')
    assert read(text.replace("placement = ", 'activations = true\ndevice_budget = "60%"')).offload.activations


def test_a_cpu_has_no_host_tier():
    here = key_of(0, None)
    host = OffloadConfig(placement=[PlacementRule(layers="all", weights="host")])
    with pytest.raises(TenfoldError, match=r'offload\.placement\.0\.weights = "host".* whose RAM is the device'):
        host.check_device(here, "cpu")
    host.check_device(here, "cuda")
    with pytest.raises(TenfoldError, match=r"offload\.host_budget is for pinned RAM"):
        OffloadConfig(device_budget=5, disk=["/a"], host_budget=5).check_device(here, "cpu")
    with pytest.raises(
        TenfoldError, match=r"stages\.2\.offload\.device_budget is set.*folders on fast disks in offload"
    ):
        OffloadConfig(device_budget=5).check_device(key_of(2, {"device_budget": 5}), "cpu")
    OffloadConfig(device_budget=5).check_device(here, "cuda")
    OffloadConfig(device_budget=5, disk=["/a"]).check_device(here, "cpu")


def test_adafactors_state_is_kept_as_it_is(read):
    assert read('optim.state = "int8"').optim.state == "int8"
    with pytest.raises(TenfoldError, match=r'state = "bf16".*name = "adafactor"'):
        read('optim = {name = "adafactor", state = "bf16"}')


def test_an_override_on_the_command_line_is_the_one_in_the_file():
    text = "{device_budget = 5GB, disk = '/a', step_in_backward = True}"
    assert parse_override(text) == {"device_budget": 5 * 10**9, "disk": ["/a"], "step_in_backward": True}


ONE_RANK = {"tensor": 1, "pipeline": 1, "data_replicate": 1, "data_shard": 1, "context": 1}
RULE = '{layers = "all", weights = "disk", gradients = "disk", moments = "disk"}'


@pytest.mark.parametrize(
    ("optimizer", "compiled", "degrees", "told"),
    [
        ("adamw", False, {"pipeline": 4}, r'0.gradients = "disk" lets .* stay: parallel.pipeline_schedule = zbv puts'),
        ("adamw", True, {}, r'placement.0.weights = "disk" lets .* stay: training.compile = true'),
        ("muon", False, {"data_shard": 2}, r'0.weights = "disk" .* optim.name = "muon" .* parallel.data_shard = 2'),
        ("muon", False, {"data_replicate": 2}, r'optim.name = "muon" .* parallel.data_replicate = 2 splits'),
    ],
)
def test_what_has_to_stay_is_not_sent_away(read, optimizer, compiled, degrees, told):
    stay = staying(optimizer, compiled, "zbv", ONE_RANK | degrees)
    offload = read(f'[offload]\ndisk = ["/a"]\nplacement = [{RULE}]').offload
    with pytest.raises(TenfoldError, match=told):
        offload.check_staying("offload.{}".format, 6, stay)
    back = ", ".join(f'{{layers = "all", {kind} = "device"}}' for kind in stay)
    read(f'[offload]\ndisk = ["/a"]\nplacement = [{RULE}, {back}]').offload.check_staying("{}".format, 6, stay)


def test_a_step_in_the_backward_pass_needs_gradients_that_are_whole_in_it(read):
    offload = read("[offload]\ndevice_budget = 5\nstep_in_backward = true\n[optim]\nclip = 0").offload
    with pytest.raises(TenfoldError, match=r"offload.step_in_backward = true uses .* parallel.tensor = 2 adds up"):
        offload.check_staying("offload.{}".format, 6, {}, late(ONE_RANK | {"tensor": 2}))
    shards = ONE_RANK | {"data_shard": 2}
    offload.check_staying("offload.{}".format, 6, staying("adamw", True, "1f1b", shards), late(shards))
