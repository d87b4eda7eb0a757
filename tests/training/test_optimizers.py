"""Optimizers: groups by name, state from the first moment, steps equal to torch's own."""

from __future__ import annotations

import pytest
import torch
from torch.optim import AdamW, Muon
from torch.utils._python_dispatch import TorchDispatchMode

from tenfold.config.run import OptimConfig
from tenfold.errors import TenfoldError
from tenfold.training.adafactor import Adafactor
from tenfold.training.optimizers import (
    build_optimizers,
    load_state_tensors,
    materialize,
    set_learning_rate,
    state_tensors,
)

NAMES = ["adamw", "adafactor", "muon"]
FULL = {
    "norm": "layernorm",
    "bias": True,
    "qk_norm": True,
    "positions": "learned",
    "tie_embeddings": False,
    "moe": {"experts": 4, "ffn": 8, "shared_experts": 1, "bias_rate": 0.1},
}


@pytest.fixture
def make(tiny_decoder):
    def build(name, sharing="sandwich", **fields):
        model = tiny_decoder(sharing, dtype=torch.float32, **{**FULL, **fields})
        # What is shared steps as if it were not: dividing updates has tests of its own.
        config = OptimConfig(name=name, lr=0.01, weight_decay=0.1, divide_shared=False)
        return model, build_optimizers(model, config)

    return build


def set_gradients(parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def snapshot(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", NAMES)
def test_state_exists_before_the_first_step_and_is_zero(make, name):
    model, optimizers = make(name)
    state = state_tensors(model, optimizers)
    assert {key.partition("/")[0] for key in state} == {
        key for key, parameter in model.named_parameters() if parameter.requires_grad
    }
    assert not any(value.any() for value in state.values())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_the_first_step_allocates_no_state(make, name):
    model, optimizers = make(name)
    before = {key: value.data_ptr() for key, value in state_tensors(model, optimizers).items()}
    set_gradients([p for p in model.parameters() if p.requires_grad], 1)
    for optimizer in optimizers:
        optimizer.step()
    assert {key: value.data_ptr() for key, value in state_tensors(model, optimizers).items()} == before


class Made(TorchDispatchMode):
    """Elements of all tensors that operations make."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.elements += out.numel()
        return out


@pytest.mark.parametrize("name", NAMES)
def test_the_first_step_makes_no_more_tensors_than_the_second(make, name):
    model, optimizers = make(name)
    made = []
    for number in (1, 2):
        set_gradients([p for p in model.parameters() if p.requires_grad], number)
        with Made() as mode:
            for optimizer in optimizers:
                optimizer.step()
        made.append(mode.elements)
    assert made[0] == made[1]


@pytest.mark.parametrize("name", NAMES)
def test_making_the_state_leaves_weights_and_rates_unchanged(make, name):
    model, optimizers = make(name)
    before = snapshot(model)
    materialize(optimizers)
    assert all(torch.equal(before[key], parameter) for key, parameter in model.named_parameters())
    assert {group["lr"] for optimizer in optimizers for group in optimizer.param_groups} == {0.01}


def memberships(model, optimizers):
    names = {parameter: key for key, parameter in model.named_parameters()}
    return {
        names[parameter]: (type(optimizer), group["weight_decay"])
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


@pytest.mark.parametrize(("name", "kind"), [("adamw", AdamW), ("adafactor", Adafactor), ("muon", AdamW)])
def test_decay_is_on_matrices_and_not_on_embeddings_norms_and_biases(make, name, kind):
    found = memberships(*make(name))
    matrix = (Muon, 0.1) if name == "muon" else (kind, 0.1)
    expected = {
        "embedding.weight": (kind, 0.0),
        "positions.weight": (kind, 0.0),
        "norm.weight": (kind, 0.0),
        "norm.bias": (kind, 0.0),
        "head.weight": (kind, 0.1),
    }
    for layer in (0, 1, 3):  # the first layers of the three blocks of a sandwich
        for leaf in ("attention.wq", "attention.wk", "attention.wv", "attention.wo", "ffn.shared.up"):
            expected[f"layers.{layer}.{leaf}.weight"] = matrix
            expected[f"layers.{layer}.{leaf}.bias"] = (kind, 0.0)
        for leaf in ("gate", "down"):
            expected[f"layers.{layer}.ffn.shared.{leaf}.weight"] = matrix
            expected[f"layers.{layer}.ffn.shared.{leaf}.bias"] = (kind, 0.0)
        for leaf in ("attention_norm", "ffn_norm"):
            expected[f"layers.{layer}.{leaf}.weight"] = expected[f"layers.{layer}.{leaf}.bias"] = (kind, 0.0)
        for leaf in ("q_norm", "k_norm"):
            expected[f"layers.{layer}.attention.{leaf}.weight"] = (kind, 0.0)
        expected[f"layers.{layer}.ffn.router.weight"] = (kind, 0.1)
        for leaf in ("gate", "up", "down"):
            expected[f"layers.{layer}.ffn.experts.{leaf}"] = (kind, 0.1)
    assert found == expected


@pytest.mark.parametrize("name", NAMES)
def test_every_trained_parameter_is_in_exactly_one_group(make, name):
    model, optimizers = make(name)
    listed = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    assert len(listed) == len(set(listed))
    assert set(listed) == {parameter for parameter in model.parameters() if parameter.requires_grad}


def test_muon_has_two_dimensional_matrices_of_layers_only(make):
    model, optimizers = make("muon")
    names = [key for key, (kind, _) in memberships(model, optimizers).items() if kind is Muon]
    shapes = dict(model.named_parameters())
    assert names
    assert all(key.startswith("layers.") and shapes[key].dim() == 2 and "router" not in key for key in names)


def fresh_of_torch(name, model, optimizers):
    """Torch's own optimizers with no state, over the same parameters in the same groups."""
    built = []
    for optimizer in optimizers:
        groups = [{"params": g["params"], "weight_decay": g["weight_decay"]} for g in optimizer.param_groups]
        if isinstance(optimizer, Muon):
            built.append(Muon(groups, lr=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw"))
        elif isinstance(optimizer, Adafactor):
            built.append(Adafactor(groups, lr=0.01))
        else:
            built.append(AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8, fused=True))
    return built


@pytest.mark.parametrize("name", NAMES)
def test_steps_equal_those_of_torchs_own_fresh_optimizer_to_the_last_bit(make, name):
    results = []
    for fresh in (False, True):
        model, optimizers = make(name)
        if fresh:
            optimizers = fresh_of_torch(name, model, optimizers)
        for number in range(3):
            set_gradients([p for _, p in model.named_parameters() if p.requires_grad], number)
            for optimizer in optimizers:
                optimizer.step()
        results.append(snapshot(model))
    ours, theirs = results
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_adamws_step_follows_its_formula(make):
    model, optimizers = make("adamw")
    weight = dict(model.named_parameters())["layers.0.attention.wq.weight"]
    w = weight.detach().double().clone()
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for number in range(1, 4):
        set_gradients([p for p in model.parameters() if p.requires_grad], number)
        g = weight.grad.double()
        optimizers[0].step()
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
        w = w - 0.01 * 0.1 * w - 0.01 * (m / (1 - 0.9**number)) / ((v / (1 - 0.95**number)).sqrt() + 1e-8)
    torch.testing.assert_close(weight.detach().double(), w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_rate_set_is_the_rate_of_every_group(make, name):
    _, optimizers = make(name)
    set_learning_rate(optimizers, 0.5)
    assert {group["lr"] for optimizer in optimizers for group in optimizer.param_groups} == {0.5}


@pytest.mark.parametrize("name", NAMES)
def test_training_goes_on_to_the_last_bit_from_saved_state(make, name):
    model, optimizers = make(name)
    trained = [p for _, p in model.named_parameters() if p.requires_grad]
    twin, twin_optimizers = make(name)
    for number in range(2):
        set_gradients(trained, number)
        for optimizer in optimizers:
            optimizer.step()
    saved = {key: value.clone() for key, value in state_tensors(model, optimizers).items()}
    twin.load_state_dict(model.state_dict())
    load_state_tensors(twin, twin_optimizers, saved)
    for each, each_optimizers in ((model, optimizers), (twin, twin_optimizers)):
        set_gradients([p for _, p in each.named_parameters() if p.requires_grad], 9)
        for optimizer in each_optimizers:
            optimizer.step()
    assert all(torch.equal(value, snapshot(twin)[key]) for key, value in snapshot(model).items())


@pytest.mark.parametrize("change", ["missing", "left over", "misshapen"])
def test_state_that_does_not_fit_is_refused_by_name(make, change):
    model, optimizers = make("adamw")
    saved = {key: value.clone() for key, value in state_tensors(model, optimizers).items()}
    key = "layers.1.attention.wo.weight/exp_avg"
    if change == "missing":
        del saved[key]
    elif change == "left over":
        key = "layers.2.attention.wo.weight/exp_avg"
        saved[key] = torch.zeros(16, 16)
    else:
        saved[key] = torch.zeros(16, 8)
    with pytest.raises(TenfoldError, match=key):
        load_state_tensors(model, optimizers, saved)
