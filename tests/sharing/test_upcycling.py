"""Experts freed from a shared set: the function stays to rounding, tokens spread, state follows the formulas."""

from __future__ import annotations

import pytest
import torch

from tenfold.config.run import OptimConfig
from tenfold.errors import TenfoldError
from tenfold.nn.loss import cross_entropy_sum
from tenfold.nn.moe import LOADS, MixtureOfExperts
from tenfold.sharing.delinking import delink
from tenfold.sharing.patterns import Pattern
from tenfold.sharing.tying import Sharing, tables, tie, tied_pattern, uses
from tenfold.sharing.upcycling import tolerance
from tenfold.training.optimizers import build_optimizers, materialize, state_tensors

TOKENS = torch.randint(50, (6, 17), generator=torch.Generator().manual_seed(0))
OPTIMIZERS = ["adamw", "adafactor", "muon"]
ALL, NONE = Pattern.parse("all", 2), Pattern.parse("none", 2)
CHAINS = {
    "dense shared, dense, mixture": [Sharing(ALL, experts="layer"), Sharing(NONE, experts="layer"), Sharing(NONE)],
    "dense shared, mixture shared, mixture": [Sharing(ALL, experts="prototype"), Sharing(ALL), Sharing(NONE)],
    "layer, prototype, free": [Sharing(NONE, experts=kind) for kind in ("layer", "prototype", "free")],
    "all at once": [Sharing(ALL, experts="layer"), Sharing(NONE)],
    "experts shared among layers": [
        Sharing(ALL, ("experts", "router"), experts="prototype"),
        Sharing(ALL, ("experts", "router")),
        Sharing(ALL, ("router",)),
    ],
}


@pytest.fixture
def build(tiny_decoder):
    """A model that shares, and its optimizers."""

    def build(sharing, name="adamw", steps=0, dtype=torch.float64, **moe):
        moe = {"experts": 8, "ffn": 12, "bias_rate": 0.01, **moe}
        model = tiny_decoder(layers=sharing.pattern.layers, dtype=dtype, moe=moe)
        tie(model.layers, sharing)
        optimizers = build_optimizers(model, OptimConfig(name=name, lr=0.01))
        for _ in range(steps):
            step(model, optimizers)
        return model, optimizers

    return build


def step(model, optimizers):
    hidden, _ = model(TOKENS[:, :-1])
    (cross_entropy_sum(hidden, model.output_weight, TOKENS[:, 1:], model.vocab_size) / TOKENS.numel()).backward()
    for parameter, count in uses(model.layers).items():
        if parameter.grad is not None:
            parameter.grad /= count
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def look(model):
    hidden, statistics = model(TOKENS)
    return model.logits(hidden), statistics[:, LOADS:]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("prototypes", "top_k"), [(1, 1), (1, 2), (2, 2), (4, 1)])
@pytest.mark.parametrize("chain", CHAINS)
def test_the_function_is_the_same_to_rounding_and_tokens_spread(build, chain, prototypes, top_k, dtype):
    first, *others = CHAINS[chain]
    model, optimizers = build(first, steps=2, dtype=dtype, prototypes=prototypes, top_k=top_k, shared_experts=1)
    expected, loads = look(model)
    assert not loads.any()
    bound = tolerance(expected, len(model.layers))
    assert bound < (1e-12 if dtype == torch.float64 else 2e-3) * expected.abs().max()
    for after in others:
        freed = model.layers[0].ffn.router is None and after.experts == "free"
        before, _ = look(model)
        delink(model.layers, optimizers, after)
        found, loads = look(model)
        torch.testing.assert_close(found, expected, rtol=0, atol=bound)
        if freed:
            # Of 8 experts none has all tokens of its prototype, and not all choices tie.
            shares = loads.unflatten(1, (prototypes, -1)) / TOKENS.numel()
            assert shares.amax() < (0.9 if 8 // prototypes > top_k else 1.01)
            assert (loads > 0).sum(1).min() >= 4
        elif after.experts == "free":
            assert torch.equal(found, before)  # layers alone: to the last bit
    assert len(model.layers[0].ffn.experts.up) == 8
    for name, column in tables(model.layers).items():
        shared = after.of("router") if "router" in name or "bias" in name else after.of("experts")
        if ".experts." in name or "router" in name or "balance_bias" in name:
            assert tied_pattern(column) == shared, name


@pytest.mark.parametrize("kind", ["layer", "prototype"])
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("moments", ["rescale", "copy", "reset"])
def test_an_experts_state_is_what_its_own_gradients_would_have_made_of_it(build, kind, top_k, moments, monkeypatch):
    """Every expert sees the same tokens: copies of them, dealt out by hand. So its mean gradient is known exactly."""
    size, hidden = 4, 16
    (model, (optimizer,)) = build(Sharing(Pattern([0]), experts=kind), prototypes=2, top_k=top_k)
    moe = model.layers[0].ffn
    generator = torch.Generator().manual_seed(2)
    x, direction = (torch.randn(6, hidden, generator=generator, dtype=torch.float64).repeat(size, 1) for _ in range(2))

    def gradient():
        optimizer.zero_grad()
        (moe(x[None])[0] * direction).sum().backward()
        return {name: parameter.grad.clone() for name, parameter in moe.experts.named_parameters()}

    shared = gradient()
    for name, parameter in moe.experts.named_parameters():  # constant gradients for very long: no noise
        optimizer.state[parameter]["exp_avg"].copy_(shared[name])
        optimizer.state[parameter]["exp_avg_sq"].copy_(shared[name] ** 2)
        optimizer.state[parameter]["step"].fill_(10**6)
    optimizer.zero_grad()
    delink(model.layers, [optimizer], Sharing(Pattern([0])), moments)
    materialize([optimizer])

    def dealt(self, probabilities_NZP):
        """Copy j of the tokens goes to experts j, ..., j + k - 1 of each prototype."""
        copy_N1 = torch.arange(size).repeat_interleave(6)[:, None]
        local_NK = (copy_N1 + torch.arange(top_k)) % size
        return torch.cat((local_NK, local_NK + size), dim=1)

    monkeypatch.setattr(MixtureOfExperts, "choose", dealt)
    freed = gradient()
    assert freed.keys() == {"gate", "up", "down"}
    for name, parameter in moe.experts.named_parameters():
        state, parent = optimizer.state[parameter], shared[name].repeat_interleave(8 // len(shared[name]), 0)
        expected = {"rescale": freed[name], "copy": parent, "reset": torch.zeros_like(parent)}[moments]
        torch.testing.assert_close(state["exp_avg"], expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(state["exp_avg_sq"], expected**2, rtol=1e-9, atol=1e-12)
        assert state["step"] == (0 if moments == "reset" else 10**6)
    state = optimizer.state[moe.router.weight]
    assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert not any(value.any() for value in state.values())


@pytest.mark.parametrize("top_k", [1, 2])
def test_where_gradients_are_noise_the_second_moment_grows_as_fewer_tokens_want_it(build, top_k, monkeypatch):
    """AdamW at rate 0 on random tokens: the freed experts' moments beside those of a mixture that never shared."""

    def dealt(self, probabilities_NZP):
        tokens = len(probabilities_NZP)
        return (torch.arange(tokens)[:, None] * top_k + torch.arange(top_k)) % 8

    def train(model, optimizer, seed):
        generator = torch.Generator().manual_seed(seed)
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 0.0
        for _ in range(120):
            x, direction = (torch.randn(1, 64, 16, generator=generator, dtype=torch.float64) for _ in range(2))
            (model.layers[0].ffn(x)[0] * direction).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    monkeypatch.setattr(MixtureOfExperts, "choose", dealt)
    model, (optimizer,) = build(Sharing(Pattern([0]), experts="layer"), top_k=top_k)
    train(model, optimizer, 1)
    delink(model.layers, [optimizer], Sharing(Pattern([0])), "rescale")
    names = {parameter: name for name, parameter in model.layers[0].ffn.experts.named_parameters()}
    moved = {name: optimizer.state[parameter]["exp_avg_sq"].clone() for parameter, name in names.items()}
    free_optimizer = torch.optim.AdamW([{"params": list(names)}, {"params": []}], betas=(0.9, 0.95))
    train(model, free_optimizer, 2)
    for parameter, name in names.items():
        own = free_optimizer.state[parameter]["exp_avg_sq"]
        assert moved[name].mean().item() == pytest.approx(own.mean().item(), rel=0.15), name


@pytest.mark.parametrize("moments", ["copy", "rescale", "reset"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_groups_and_state_are_those_of_a_mixture_built_free(build, name, moments):
    model, optimizers = build(Sharing(ALL, experts="layer"), name, steps=2, dtype=torch.float32)
    delink(model.layers, optimizers, Sharing(NONE), moments)
    materialize(optimizers)
    fresh, fresh_optimizers = build(Sharing(NONE), name, dtype=torch.float32)

    def groups(model, optimizers):
        names = {parameter: key for key, parameter in model.named_parameters()}
        return sorted(
            (names[parameter], type(optimizer).__name__, group["weight_decay"], group["lr"])
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        )

    assert groups(model, optimizers) == groups(fresh, fresh_optimizers)
    mine, theirs = state_tensors(model, optimizers), state_tensors(fresh, fresh_optimizers)
    assert {key: value.shape for key, value in mine.items()} == {key: value.shape for key, value in theirs.items()}
    for key, value in mine.items():
        if ".router." in key:
            assert not value.any(), key
        elif ".experts." in key and key.endswith("/step"):
            assert value == (0 if moments == "reset" else 2)
    places = [value.untyped_storage().data_ptr() for value in (*model.parameters(), *mine.values())]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_after_some_steps_experts_and_routers_differ(build, name):
    model, optimizers = build(Sharing(ALL, experts="prototype"), name, steps=2, dtype=torch.float32, prototypes=2)
    delink(model.layers, optimizers, Sharing(NONE))
    for _ in range(4):
        step(model, optimizers)
    for layer in model.layers:
        _, loads = look(model)
        assert (loads > 0).sum() > 8
        for weights in layer.ffn.experts.parameters():
            assert len({tuple(expert.flatten().tolist()) for expert in weights}) == 8
    assert not torch.equal(model.layers[0].ffn.router.weight, model.layers[1].ffn.router.weight)


def test_adafactors_second_moment_is_multiplied_by_the_square_of_the_scale_times_q(build):
    model, optimizers = build(Sharing(ALL, experts="prototype"), "adafactor", 2, torch.float32, prototypes=2, top_k=2)
    before = {key: value.clone() for key, value in state_tensors(model, optimizers).items()}
    delink(model.layers, optimizers, Sharing(ALL), "rescale")
    # P = 4, k = 2: f = 1/2, p = 1/4, w = 2, q = 2.
    for key, value in state_tensors(model, optimizers).items():
        if ".experts." in key and value.dim():
            scale = 1 / 8 if ".down/" in key else 1 / 4
            expected = before[key].repeat_interleave(4, 0) * scale**2 * 2
            torch.testing.assert_close(value, expected)


def test_what_is_coarser_is_refused_with_both_and_nothing_changes(build):
    model, optimizers = build(Sharing(ALL, experts="prototype"), prototypes=2)
    held = list(model.parameters())
    with pytest.raises(TenfoldError, match='experts = "layer" does not refine experts = "prototype"'):
        delink(model.layers, optimizers, Sharing(NONE, experts="layer"))
    assert all(mine is theirs for mine, theirs in zip(model.parameters(), held, strict=True))
    delink(model.layers, optimizers, Sharing(ALL))
    with pytest.raises(TenfoldError, match='experts = "layer" does not refine experts = "free"'):
        delink(model.layers, optimizers, Sharing(ALL, experts="layer"))
    with pytest.raises(TenfoldError, match='here: experts = "layer"'):
        Sharing(ALL, experts="layer").check_refines(Sharing(ALL), "here")


def test_a_state_that_is_no_stack_of_the_sets_states_is_refused_by_name(build):
    model, (optimizer,) = build(Sharing(NONE, experts="layer"))
    optimizer.state[model.layers[0].ffn.experts.up]["exp_avg"] = torch.zeros(7)
    held = list(model.parameters())
    with pytest.raises(TenfoldError, match="cannot divide the optimizer state 'exp_avg' among experts"):
        delink(model.layers, [optimizer], Sharing(NONE))
    assert all(mine is theirs for mine, theirs in zip(model.parameters(), held, strict=True))


def test_of_one_prototype_layer_and_prototype_are_the_same_and_nothing_is_done(build):
    model, optimizers = build(Sharing(ALL, experts="layer"), steps=1)
    held = list(model.parameters())
    delink(model.layers, optimizers, Sharing(ALL, experts="prototype"), "reset")
    delink(model.layers, optimizers, Sharing(ALL, experts="layer"), "reset")
    assert all(mine is theirs for mine, theirs in zip(model.parameters(), held, strict=True))
    assert optimizers[0].state[model.layers[0].ffn.experts.up]["step"] == 1


def test_layers_without_a_mixture_have_no_experts_to_share(tiny_decoder):
    with pytest.raises(TenfoldError, match="have no mixture of experts"):
        tie(tiny_decoder().layers, Sharing(Pattern.parse("all", 4), experts="layer"))


def test_a_sharing_of_experts_is_dumped_loaded_compared_and_shown():
    sharing = Sharing(ALL, ("ffn", "experts"), experts="prototype")
    assert Sharing.load(sharing.dump()) == sharing != Sharing(ALL, ("ffn", "experts"))
    assert Sharing.load({"pattern": [0, 0]}) == Sharing(ALL)
    assert str(sharing) == "(0,0) of ffn, experts, experts by prototype"
    assert len({sharing, Sharing.load(sharing.dump()), Sharing(ALL, ("ffn", "experts"))}) == 2


def test_routers_are_a_function_of_their_name_alone(build):
    routers = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model, optimizers = build(Sharing(NONE, experts="layer"), steps=seed)
        delink(model.layers, optimizers, Sharing(NONE))
        routers.append([layer.ffn.router.weight for layer in model.layers])
    assert all(torch.equal(one, other) for one, other in zip(*routers, strict=True))
    assert not torch.equal(*routers[0])


def test_a_relaxed_sharing_of_layers_is_folded_before_its_experts_are_freed(build):
    relaxed = Sharing(ALL, rank=2, experts="prototype")
    model, optimizers = build(relaxed, steps=3, prototypes=2)
    expected, _ = look(model)
    with pytest.raises(TenfoldError, match="while layers share them with differences of rank 2"):
        delink(model.layers, optimizers, Sharing(ALL, rank=2))
    delink(model.layers, optimizers, Sharing(NONE))
    found, _ = look(model)
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance(expected, 2))
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    assert trained == {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def test_an_optimizer_made_of_named_parameters_calls_routers_by_their_names(build):
    model, _ = build(Sharing(NONE, experts="layer"))
    optimizer = torch.optim.SGD([(n, p) for n, p in model.named_parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    delink(model.layers, [optimizer], Sharing(NONE))
    names = {parameter: name for name, parameter in model.named_parameters()}
    (group,) = optimizer.param_groups
    assert group["param_names"] == [names[parameter] for parameter in group["params"]]
    assert sum("router" in name for name in group["param_names"]) == 2
