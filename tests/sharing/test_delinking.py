"""Delinking: the function stays, state follows, every layer is free afterwards, and never two models exist."""

from __future__ import annotations

import math

import pytest
import torch

from tenfold.config.run import OptimConfig
from tenfold.errors import TenfoldError
from tenfold.nn.loss import cross_entropy_sum
from tenfold.sharing import delinking
from tenfold.sharing.delinking import carried, delink
from tenfold.sharing.patterns import Pattern
from tenfold.sharing.tying import Sharing, tables, tied_pattern, uses
from tenfold.training.optimizers import build_optimizers, state_tensors

LAYERS = 4
TOKENS = torch.arange(18).view(2, 9) * 7 % 50
MOE = {"experts": 4, "prototypes": 2, "ffn": 8, "bias_rate": 0.01}
CHAINS = {
    "all to none": ["all", "none"],
    "one to groups to none": ["all", {"groups": 2}, "none"],
    "one to 4 to 8": [[0] * 8, {"groups": 4}, "none"],
    "cycle to none": [{"cycle": 2}, "none"],
    "sandwich to none": ["sandwich", "none"],
    "all to cycle to none": ["all", {"cycle": 2}, "none"],
    "one layer leaves": ["all", [0, 1, 0, 0]],
}
OPTIMIZERS = ["adamw", "adafactor", "muon"]


def chain_of(name):
    layers = 8 if name.endswith("8") else LAYERS
    return layers, [Pattern.parse(spec, layers) for spec in CHAINS[name]]


def step(model, optimizers):
    """One step on the mean gradient, as training does it."""
    hidden, _ = model(TOKENS[:, :-1])
    loss = cross_entropy_sum(hidden, model.output_weight, TOKENS[:, 1:], model.vocab_size) / 16
    loss.backward()
    for parameter, count in uses(model.layers).items():
        if parameter.grad is not None:
            parameter.grad /= count
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@pytest.fixture
def trained(tiny_decoder):
    """A model and its optimizers after three steps; fp32, as training has it."""

    def build(sharing, name="adamw", steps=3, **fields):
        model = tiny_decoder(sharing, dtype=torch.float32, **fields)
        optimizers = build_optimizers(model, OptimConfig(name=name, lr=0.01, weight_decay=0.1))
        for _ in range(steps):
            step(model, optimizers)
        for name, parameter in model.named_parameters():
            if name.endswith("balance_bias"):
                parameter += torch.linspace(-0.1, 0.1, len(parameter))
        return model, optimizers

    return build


def state_of(model, optimizers):
    return {name: value.clone() for name, value in state_tensors(model, optimizers).items()}


@pytest.mark.parametrize("moe", [{}, MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("chain", CHAINS)
def test_logits_are_equal_to_the_last_bit_before_and_after(trained, chain, moe):
    layers, patterns = chain_of(chain)
    model, optimizers = trained(patterns[0].blocks, layers=layers, moe=moe)
    before, statistics = model(TOKENS)
    expected = model.logits(before)
    for new in patterns[1:]:
        delink(model.layers, optimizers, Sharing(new))
        hidden, now = model(TOKENS)
        assert torch.equal(model.logits(hidden), expected)
        assert torch.equal(now, statistics)
    assert all(tied_pattern(column) == patterns[-1] for column in tables(model.layers).values())


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("moe", [{}, MOE], ids=["dense", "moe"])
def test_every_freed_layer_gets_its_parents_weights_and_with_copy_its_parents_state(trained, name, moe):
    before, after = Pattern([0, 1, 1, 0]), Pattern([0, 1, 2, 3])
    model, optimizers = trained(before.blocks, name, moe=moe)
    weights, state = dict(model.named_parameters()), state_of(model, optimizers)
    weights = {key: value.detach().clone() for key, value in weights.items()}
    delink(model.layers, optimizers, Sharing(after), "copy")
    parent = {"0": "0", "1": "1", "2": "1", "3": "0"}

    def origin(key):
        head, layer, *rest = key.split(".")
        return key if head != "layers" else ".".join((head, parent[layer], *rest))

    now = dict(model.named_parameters())
    assert len(now) > len(weights)
    assert all(torch.equal(now[key], weights[origin(key)]) for key in now)
    moved = state_of(model, optimizers)
    assert len(moved) > len(state)
    assert all(torch.equal(moved[key], state[origin(key)]) for key in moved)
    trained_weights = {key for key, value in now.items() if value.requires_grad}
    assert {key.partition("/")[0] for key in moved} == trained_weights


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_reset_makes_the_state_of_freed_layers_zero_and_leaves_that_of_others(trained, name):
    before, after = Pattern([0, 1, 1, 2]), Pattern([0, 1, 2, 3])
    model, optimizers = trained(before.blocks, name)
    state = state_of(model, optimizers)
    delink(model.layers, optimizers, Sharing(after), "reset")
    for key, value in state_of(model, optimizers).items():
        if key.startswith(("layers.1.", "layers.2.")):
            assert not value.any(), key
        else:
            assert torch.equal(value, state[key]), key


def rescaled_by_hand(m, v, step, q, beta1=0.9, beta2=0.95):
    """The second moment of the module's docstring, one number at a time."""
    m_hat, v_hat = m / (1 - beta1**step), v / (1 - beta2**step)
    return (v_hat + (q - 1) * max(v_hat - m_hat**2, 0.0)) * (1 - beta2**step)


@pytest.mark.parametrize(
    ("before", "after", "q"),
    [
        ([0, 0, 0, 0], [0, 1, 2, 3], [4, 4, 4, 4]),
        ([0, 0, 0, 0], [0, 0, 1, 1], [2, 2]),
        ([0, 0, 0, 0], [0, 1, 1, 1], [4, 4 / 3]),
        ([0, 1, 0, 1], [0, 1, 2, 3], [2, 2, 2, 2]),
        ([0, 1, 1, 2], [0, 1, 2, 3], [1, 2, 2, 1]),
    ],
)
def test_rescale_of_adamw_follows_the_formula_for_every_block_exactly_once(trained, before, after, q):
    before, after = Pattern(before), Pattern(after)
    model, optimizers = trained(before.blocks)
    state = state_of(model, optimizers)
    delink(model.layers, optimizers, Sharing(after), "rescale")
    now = state_of(model, optimizers)
    for block, factor in enumerate(q):
        layer = after.first_layer(block)
        parent = before.first_layer(before.blocks[layer])
        for leaf in ("attention.wq.weight", "ffn.down.weight", "ffn_norm.weight"):
            old, new = f"layers.{parent}.{leaf}", f"layers.{layer}.{leaf}"
            assert torch.equal(now[f"{new}/exp_avg"], state[f"{old}/exp_avg"])
            assert now[f"{new}/step"] == state[f"{old}/step"] == 3
            moments = zip(
                state[f"{old}/exp_avg"].flatten().tolist(), state[f"{old}/exp_avg_sq"].flatten().tolist(), strict=True
            )
            expected = torch.tensor([rescaled_by_hand(m, v, 3, factor) for m, v in moments])
            torch.testing.assert_close(now[f"{new}/exp_avg_sq"].flatten(), expected, rtol=1e-4, atol=1e-12)
            if factor > 1:
                assert not torch.equal(now[f"{new}/exp_avg_sq"], state[f"{old}/exp_avg_sq"])


@pytest.mark.parametrize(("name", "second"), [("adafactor", {"row_var", "col_var", "variance"}), ("muon", set())])
def test_rescale_multiplies_every_second_moment_of_adafactor_and_none_of_muon(trained, name, second):
    before, after = Pattern.parse("all", 4), Pattern([0, 1, 1, 1])
    model, optimizers = trained(before.blocks, name)
    state = state_of(model, optimizers)
    delink(model.layers, optimizers, Sharing(after), "rescale")
    seen = set()
    for key, value in state_of(model, optimizers).items():
        if not key.startswith("layers."):
            assert torch.equal(value, state[key]), key
            continue
        leaf = key.rpartition("/")[2]
        if name == "muon" and leaf != "momentum_buffer":
            continue  # the vectors are AdamW's
        seen.add(leaf)
        factor = (4 if key.startswith("layers.0.") else 4 / 3) if leaf in second else 1
        torch.testing.assert_close(value, state[key.replace("layers.1.", "layers.0.")] * factor, msg=key)
    assert seen == ({*second, "step"} if name == "adafactor" else {"momentum_buffer"})


def test_a_state_that_nobody_can_rescale_is_refused_by_name_and_nothing_changes(tiny_decoder):
    model = tiny_decoder("all")
    optimizer = torch.optim.Adadelta(model.parameters())
    step(model, [optimizer])
    held = list(model.parameters())
    with pytest.raises(TenfoldError, match="square_avg"):
        delink(model.layers, [optimizer], Sharing(Pattern.parse("none", 4)))
    assert all(mine is theirs for mine, theirs in zip(model.parameters(), held, strict=True))


def test_rescale_before_the_first_step_changes_nothing(trained):
    model, optimizers = trained("all", steps=0)
    delink(model.layers, optimizers, Sharing(Pattern.parse("none", 4)), "rescale")
    assert not any(value.any() for value in state_of(model, optimizers).values())


@pytest.mark.parametrize("signal", [0.0, 0.3, 3.0], ids=["noise alone", "mostly noise", "mostly signal"])
def test_a_rescaled_second_moment_is_near_that_of_a_layer_that_was_always_free(signal):
    """AdamW's moments on the mean of r gradients with independent noise, in float64, over 4000 coordinates."""
    generator = torch.Generator().manual_seed(0)
    r, steps, beta1, beta2 = 8, 200, 0.9, 0.95
    mean = {"exp_avg": torch.zeros(4000).double(), "exp_avg_sq": torch.zeros(4000).double()}
    single = torch.zeros(4000).double()
    for _ in range(steps):
        gradients = signal + torch.randn(r, 4000, generator=generator, dtype=torch.float64)
        mean["exp_avg"] = beta1 * mean["exp_avg"] + (1 - beta1) * gradients.mean(0)
        mean["exp_avg_sq"] = beta2 * mean["exp_avg_sq"] + (1 - beta2) * gradients.mean(0) ** 2
        single = beta2 * single + (1 - beta2) * gradients[0] ** 2
    state = {**mean, "step": torch.tensor(float(steps))}
    found = carried(state, {"betas": (beta1, beta2)}, "rescale", float(r))["exp_avg_sq"]
    assert found.mean().item() == pytest.approx(single.mean().item(), rel=0.1)
    copied = carried(state, {"betas": (beta1, beta2)}, "copy", float(r))["exp_avg_sq"]
    if signal < 1:
        assert copied.mean() < 0.3 * single.mean()  # what a copy would have been


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("moments", ["copy", "rescale", "reset"])
def test_optimizer_groups_hold_every_parameter_once_and_keep_its_weight_decay(trained, name, moments):
    before, after = Pattern.parse("all", 4), Pattern.parse("none", 4)
    model, optimizers = trained(before.blocks, name, moe=MOE)
    delink(model.layers, optimizers, Sharing(after), moments)
    fresh_model, fresh_optimizers = trained(after.blocks, name, steps=0, moe=MOE)

    def groups(model, optimizers):
        names = {parameter: key for key, parameter in model.named_parameters()}
        return sorted(
            (names[parameter], type(optimizer).__name__, group["weight_decay"])
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        )

    assert groups(model, optimizers) == groups(fresh_model, fresh_optimizers)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("moments", ["copy", "rescale", "reset"])
def test_no_two_layers_share_storage_of_weights_or_state_afterwards(trained, name, moments):
    before, after = Pattern.parse("all", 4), Pattern.parse("none", 4)
    model, optimizers = trained(before.blocks, name)
    delink(model.layers, optimizers, Sharing(after), moments)
    places = [p.untyped_storage().data_ptr() for p in model.parameters()]
    places += [value.untyped_storage().data_ptr() for value in state_tensors(model, optimizers).values()]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("moe", [{}, MOE], ids=["dense", "moe"])
def test_after_one_more_step_no_two_layers_are_equal(trained, name, moe):
    before, after = Pattern.parse("all", 4), Pattern.parse("none", 4)
    model, optimizers = trained(before.blocks, name, moe=moe)
    delink(model.layers, optimizers, Sharing(after))
    step(model, optimizers)
    for leaf in ("attention.wq.weight", "attention.wo.weight", "ffn_norm.weight"):
        values = [dict(block.named_parameters())[leaf] for block in model.layers]
        for i in range(4):
            assert all(not torch.equal(values[i], values[j]) for j in range(i)), leaf


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_delinked_model_trains_exactly_as_one_built_free_from_its_weights_and_state(trained, name):
    before, after = Pattern.parse("all", 4), Pattern.parse("none", 4)
    model, optimizers = trained(before.blocks, name)
    delink(model.layers, optimizers, Sharing(after))
    twin, twin_optimizers = trained(after.blocks, name, steps=0)
    with torch.no_grad():
        source = dict(model.named_parameters())
        for key, parameter in twin.named_parameters():
            parameter.copy_(source[key])
        state = state_of(model, optimizers)
        for key, value in state_tensors(twin, twin_optimizers).items():
            value.copy_(state[key])
    for _ in range(2):
        step(model, optimizers)
        step(twin, twin_optimizers)
    assert all(torch.equal(p, source[key]) for key, p in model.named_parameters())
    twins = dict(twin.named_parameters())
    assert all(torch.equal(p, twins[key]) for key, p in model.named_parameters())


def test_what_is_not_a_refinement_is_refused_with_both_patterns_and_nothing_changes(trained):
    before, after = Pattern([0, 0, 1, 1]), Pattern([0, 1, 0, 1])
    model, optimizers = trained(before.blocks)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    state, held = state_of(model, optimizers), list(model.parameters())
    with pytest.raises(TenfoldError, match=r"\(0,1,0,1\) does not refine \(0,0,1,1\)"):
        delink(model.layers, optimizers, Sharing(after))
    assert all(mine is theirs for mine, theirs in zip(model.parameters(), held, strict=True))
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    now = state_of(model, optimizers)
    assert now.keys() == state.keys()
    assert all(torch.equal(now[key], state[key]) for key in now)


def test_delinking_to_the_same_pattern_changes_nothing(trained):
    pattern = Pattern([0, 0, 1, 1])
    model, optimizers = trained(pattern.blocks)
    held, state = list(model.parameters()), state_of(model, optimizers)
    delink(model.layers, optimizers, Sharing(pattern))
    assert all(mine is theirs for mine, theirs in zip(model.parameters(), held, strict=True))
    assert all(torch.equal(value, state[key]) for key, value in state_of(model, optimizers).items())


@pytest.mark.parametrize(("before", "after"), [("all", "none"), ({"cycle": 2}, "none"), ("all", {"groups": 2})])
def test_only_what_a_new_block_needs_is_new_and_the_rest_keeps_its_memory(trained, before, after):
    before, after = Pattern.parse(before, 4), Pattern.parse(after, 4)
    model, optimizers = trained(before.blocks)
    old = set(model.parameters())
    delink(model.layers, optimizers, Sharing(after))
    now = set(model.parameters())
    in_a_layer = len(list(model.layers[0].parameters()))
    assert old <= now
    assert len(now - old) == (after.stored_blocks - before.stored_blocks) * in_a_layer


def test_a_state_is_never_more_than_one_parameter_ahead_of_what_stays(trained, monkeypatch):
    """Every parameter's state is carried once: the new layers', and the kept one's in place of the old."""
    before, after = Pattern.parse("all", 4), Pattern.parse("none", 4)
    model, optimizers = trained(before.blocks)
    calls = []
    real = delinking.carried
    monkeypatch.setattr(delinking, "carried", lambda *args: calls.append(1) or real(*args))
    delink(model.layers, optimizers, Sharing(after))
    in_a_block = len(list(model.layers[0].parameters()))
    assert len(calls) == 4 * in_a_block
    assert sum(len(optimizer.state) for optimizer in optimizers) == len(list(model.parameters()))


def test_the_rescaled_formula_by_hand_is_the_one_of_uncorrelated_noise():
    # A gradient of pure noise: m is 0, and the variance of one layer is q times that of the mean.
    assert rescaled_by_hand(0.0, 0.5, 10, 4) == pytest.approx(2.0)
    # A gradient without noise: m^2 = v, and nothing changes.
    m_hat = 0.3
    m, v = m_hat * (1 - 0.9**10), m_hat**2 * (1 - 0.95**10)
    assert math.isclose(rescaled_by_hand(m, v, 10, 4), v, rel_tol=1e-9)
