"""Parts by arithmetic are those that offload cuts of a model that was built."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tenfold.config.load import build
from tenfold.config.offload import PlacementRule
from tenfold.config.run import RunConfig
from tenfold.offload import experts, units
from tenfold.offload.moments import Inventory
from tenfold.offload.parts import parts_of
from tenfold.offload.units import Entry
from tenfold.planning.holdings import Holdings
from tenfold.planning.parts import by_rules, ends_of, evenly, state_of
from tenfold.planning.stages import plan_stages
from tenfold.planning.terms import Candidate
from tenfold.training.optimizers import build_optimizers
from tenfold.training.setup import build_model

MODELS: dict[str, dict[str, Any]] = {
    "dense": {"layers": 4, "hidden": 48, "heads": 3, "ffn": 72, "positions": "learned", "bias": True},
    "mixture": {
        "layers": 4,
        "hidden": 32,
        "heads": 4,
        "kv_heads": 2,
        "ffn": 40,
        "tie_embeddings": False,
        "moe": {"experts": 4, "prototypes": 2, "ffn": 24, "shared_experts": 1, "bias_rate": 0.01},
    },
    "many experts": {
        "layers": 4,
        "hidden": 32,
        "heads": 4,
        "ffn": 40,
        "moe": {"experts": 24, "prototypes": 2, "ffn": 32},
    },
    "experts of no page": {  # eight of these fill three
        "layers": 4,
        "hidden": 16,
        "heads": 2,
        "ffn": 24,
        "activation": "gelu",
        "moe": {"experts": 72, "ffn": 24, "shared_experts": 1},
    },
    "encoder": {
        "layers": 4,
        "hidden": 24,
        "heads": 2,
        "ffn": 30,
        "objective": "masked",
        "mask_token": 3,
        "norm_position": "post",
        "embedding_width": 12,
        "embedding_norm": True,
    },
}
SHARINGS: dict[str, dict[str, Any]] = {
    "none": {"sharing": "none"},
    "all": {"sharing": "all"},
    "cycle": {"sharing": {"cycle": 2}},
    "sandwich": {"sharing": "sandwich"},
    "attention alone": {"sharing": "all", "parts": ["attention"]},
    "rank 2": {"sharing": "all", "rank": 2},
}
OPTIMIZERS = [("adamw", form) for form in ("fp32", "bf16", "int8")]
OPTIMIZERS += [("adafactor", "fp32"), ("muon", "fp32"), ("muon", "int8")]
MIXTURES = ["mixture", "many experts", "experts of no page"]
CASES = [(model, sharing) for model in MODELS for sharing in SHARINGS if model not in MIXTURES[1:]]
CASES += [("mixture", "experts by prototype")]
LOTS = [(model, sharing) for model in MIXTURES for sharing in ("none", "all", "attention alone")]
LOTS += [("many experts", "experts by prototype"), ("many experts", "cycle")]


def run_of(model: str, sharing: str, optimizer: str = "adamw", state: str = "fp32") -> RunConfig:
    stage = SHARINGS.get(sharing) or {"sharing": "all", "experts": "prototype"}
    raw = {
        "model": {"vocab_size": 90, **MODELS[model]},
        "data": {"sequence_length": 16},
        "training": {"steps": 3, "precision": "fp32", "device": "cpu"},
        "optim": {"name": optimizer, "state": state},
        "stages": [stage],
    }
    return build(RunConfig, raw, "run.toml")


@pytest.mark.parametrize(("optimizer", "form"), OPTIMIZERS, ids=lambda each: each)
@pytest.mark.parametrize(("model", "sharing"), CASES, ids=lambda each: each)
def test_parts_are_those_of_a_built_model(
    model: str, sharing: str, optimizer: str, form: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_of(model, sharing, optimizer, form)
    (stage,) = plan_stages(config)
    real = build_model(config, stage.sharing, torch.device("cpu"))
    optimizers = build_optimizers(real, config.optim)
    activations = {layer: 1000 + layer for layer in range(4)}
    for piece in (1000, 2**22):  # parameters that are cut, and many in one piece
        monkeypatch.setattr(units, "PIECE", piece)
        inventory = Inventory(real, list(real.layers), optimizers, form=form)
        want = parts_of(inventory, lambda unit: ends_of(unit.name), list(activations.values()))
        found = state_of(Holdings(config, stage.sharing, Candidate()).most(), config.optim, activations)
        assert list(found.parts) == want
        assert found.open_size == inventory.open_size
    states = itertools.chain.from_iterable(each.state.values() for each in optimizers)
    kept = sum(value.nbytes for state in states for value in state.values() if value.dim())
    assert found.moments == kept
    assert found.largest == max(each.nbytes for each in real.parameters())
    assert found.frozen == sum(each.nbytes for each in real.parameters() if not each.requires_grad)


def entry_of(config: RunConfig) -> Any:
    """Stacks of experts are the tensors of three dimensions."""

    def entry(name: str, parameter: Any) -> Entry:
        each = config.model.moe.experts // len(parameter) if parameter.dim() == 3 else 0
        rows = [range(row * each, (row + 1) * each) for row in range(len(parameter))] if each else []
        return Entry(name, parameter, parameter, experts=rows)

    return entry


RULES = [
    {"layers": "0-2", "experts": "0-7", "moments": "disk"},
    {"layers": "1", "experts": "16-23, 0", "gradients": "disk"},
    {"layers": "all", "weights": "disk"},
]


@pytest.mark.parametrize(("optimizer", "form"), [OPTIMIZERS[0], *OPTIMIZERS[2:]], ids=lambda each: each)
@pytest.mark.parametrize(("model", "sharing"), LOTS, ids=lambda each: each)
def test_lots_of_experts_are_those_of_a_built_model(
    model: str, sharing: str, optimizer: str, form: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_of(model, sharing, optimizer, form)
    (stage,) = plan_stages(config)
    real = build_model(config, stage.sharing, torch.device("cpu"))
    optimizers, layers = build_optimizers(real, config.optim), list(real.layers)
    activations, apart = {layer: 1000 + layer for layer in range(4)}, 0
    held = Holdings(config, stage.sharing, Candidate()).most()
    cases: list[tuple[Any, Any]] = [(experts.evenly, evenly())]
    if model == "many experts":
        rules = [PlacementRule.model_validate(rule) for rule in RULES]
        cases.append((experts.by_rules(rules, 4, 24, str), by_rules(rules, 4, 24)))
    for (real_lots, lots), piece in itertools.product(cases, (1000, 2500, 2**22)):
        monkeypatch.setattr(units, "PIECE", piece)
        inventory = Inventory(real, layers, optimizers, entry_of(config), form=form, lots=real_lots)
        want = parts_of(inventory, lambda unit: ends_of(unit.name), list(activations.values()))
        found = state_of(held, config.optim, activations, lots)
        assert list(found.parts) == want
        assert found.open_size == inventory.open_size
        apart = max(apart, sum(bool(part.experts) for part in want))
    assert (apart > 1) == (model != "mixture" and optimizer != "adafactor")
