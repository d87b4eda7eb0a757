"""The mixture of experts against a plain loop over tokens in float64: outputs, gradients, capacity, losses, routing."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tenfold.nn.attend import Context
from tenfold.nn.decoder import Block
from tenfold.nn.moe import BALANCE, DROPPED, LOADS, Z_LOSS, MixtureOfExperts

HIDDEN = 8


@pytest.fixture
def make(tiny_config):
    """A randomized mixture in float64, or of another dtype; keywords are those of [model.moe]."""

    def build(activation="gelu", dtype=torch.float64, hidden=HIDDEN, ffn=6, **moe):
        config = tiny_config(hidden=hidden, activation=activation, moe={"experts": 8, "ffn": ffn, **moe})
        return randomize(MixtureOfExperts(config), dtype)

    return build


def randomize(module, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    module = module.to(dtype)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype) * 0.5
    return module


def tokens(batch=2, positions=5, dtype=torch.float64, seed=1, width=HIDDEN):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, positions, width, generator=generator, dtype=torch.float64).to(dtype)


def gelu(x):
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def expert_of(moe, index, x):
    """One expert on one token."""
    inner = x @ moe.experts.up[index]
    if moe.experts.gate is None:
        return gelu(inner) @ moe.experts.down[index]
    gate = x @ moe.experts.gate[index]
    return (gate / (1 + torch.exp(-gate)) * inner) @ moe.experts.down[index]


def loop(moe, x_BTD, capacity=None):
    """y of every token, the tokens per expert, and the dropped (sequence, position, expert), one token at a time."""
    config = moe.config
    size = config.experts // config.prototypes
    chosen = [0] * config.experts
    dropped = []
    out = torch.zeros_like(x_BTD)
    for b in range(x_BTD.shape[0]):
        taken = [0] * config.experts
        for t in range(x_BTD.shape[1]):
            x = x_BTD[b, t]
            y = torch.zeros_like(x)
            for z in range(config.prototypes):
                scores = torch.exp(torch.stack([moe.router.weight[z * size + i] @ x for i in range(size)]))
                p = scores / scores.sum()
                for i in sorted(range(size), key=lambda i: -p[i].item())[: config.top_k]:
                    expert = z * size + i
                    chosen[expert] += 1
                    if capacity is not None and taken[expert] >= capacity:
                        dropped.append((b, t, expert))
                        continue
                    taken[expert] += 1
                    y = y + p[i] * expert_of(moe, expert, x)
            if moe.shared is not None:
                up = moe.shared.up.weight @ x
                if moe.shared.gate is None:
                    inner = gelu(up)
                else:
                    gate = moe.shared.gate.weight @ x
                    inner = gate / (1 + torch.exp(-gate)) * up
                y = y + moe.shared.down.weight @ inner
            out[b, t] = y
    return out, chosen, dropped


def gradients(moe, x, y):
    """Of a fixed random function of y: for the input and every trained parameter, by name."""
    weights = tokens(*x.shape[:2], seed=9, dtype=y.dtype)
    names, parameters = zip(*((n, p) for n, p in moe.named_parameters() if p.requires_grad), strict=True)
    found = torch.autograd.grad((y * weights).sum(), (x, *parameters))
    return dict(zip(("input", *names), found, strict=True))


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize(("prototypes", "top_k"), [(1, 1), (1, 2), (2, 1), (4, 2)])
@pytest.mark.parametrize("shared", [0, 2])
def test_output_and_every_gradient_equal_a_loop_over_tokens(make, activation, prototypes, top_k, shared):
    moe = make(activation, prototypes=prototypes, top_k=top_k, shared_experts=shared)
    x = tokens().requires_grad_()
    y, statistics = moe(x)
    expected, chosen, _ = loop(moe, x)
    torch.testing.assert_close(y, expected)
    assert statistics[LOADS:].tolist() == chosen
    assert statistics[DROPPED] == 0
    found, wanted = gradients(moe, x, y), gradients(moe, x, expected)
    assert set(found) >= {"input", "router.weight", "experts.up", "experts.down"}
    torch.testing.assert_close(found, wanted)


def steer(moe, choices):
    """A router that sends a token whose largest coordinate is i to expert choices[i]."""
    moe.router.weight.data.zero_()
    for coordinate, expert in enumerate(choices):
        moe.router.weight.data[expert, coordinate] += 3.0


@pytest.mark.parametrize(
    "used", [[2, 3, 4, 5, 6, 7], [0, 1, 2, 5, 6, 7], [0, 1, 2, 3, 4, 5], [4], [0], [7]],
    ids=["none at the start", "none in the middle", "none at the end", "all on one", "all on first", "all on last"],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
def test_experts_without_tokens_change_nothing(make, used, dtype):
    moe = make("swiglu", ffn=8, dtype=dtype)
    steer(moe, [used[i % len(used)] for i in range(HIDDEN)])
    x = torch.eye(HIDDEN, dtype=dtype)[torch.arange(12) % HIDDEN].view(2, 6, HIDDEN) + 0.1 * tokens(2, 6, dtype)
    x = x.detach().requires_grad_()
    y, statistics = moe(x)
    assert [expert for expert in range(8) if statistics[LOADS + expert]] == used
    expected, _, _ = loop(moe, x)
    torch.testing.assert_close(y, expected)
    found = gradients(moe, x, y)
    torch.testing.assert_close(found, gradients(moe, x, expected), rtol=1e-5, atol=1e-5)
    assert all(found["experts.up"][expert].any() == (expert in used) for expert in range(8))


@pytest.mark.parametrize(
    ("prototypes", "top_k", "capacity", "factor", "limit"),
    [
        (1, 1, "k", 1.0, 2),  # 12 positions / 8 experts = 1.5, rounded up
        (1, 2, "k", 1.25, 4),  # 2 * 1.5 * 1.25 = 3.75
        (1, 2, "one", 1.25, 2),  # 1.5 * 1.25 = 1.875
        (2, 1, "one", 1.25, 2),  # the fair share is over all experts: as with one prototype
        (2, 1, "k", 0.5, 2),  # 12 / 4 experts of a prototype * 0.5 = 1.5
        (4, 2, "k", 0.25, 3),  # 2 * 12 / 2 * 0.25
    ],
)
def test_capacity_drops_exactly_the_last_comers_of_each_sequence(make, prototypes, top_k, capacity, factor, limit):
    moe = make(prototypes=prototypes, top_k=top_k, capacity=capacity, capacity_factor=factor)
    x = tokens(3, 12).requires_grad_()
    y, statistics = moe(x)
    expected, chosen, dropped = loop(moe, x, limit)
    assert dropped, "the case was meant to drop tokens"
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(gradients(moe, x, y), gradients(moe, x, expected))
    assert statistics[DROPPED] == len(dropped)
    assert statistics[LOADS:].tolist() == chosen  # the loads are the router's wish, drops included


def test_dropped_tokens_pass_by_the_residual_alone(tiny_config):
    moe = {"experts": 4, "ffn": 6, "capacity": "one", "capacity_factor": 1.0}
    block = randomize(Block(tiny_config(hidden=HIDDEN, positions="learned", moe=moe)))
    steer(block.ffn, [2] * HIDDEN)  # with inputs whose sum is positive, every token goes to expert 2
    block.ffn_norm.weight.data.fill_(1.0)
    x = tokens(2, 8).abs() + 1
    block.attention.wo.weight.data.zero_()
    y, statistics = block(x, Context(None))
    assert statistics[LOADS:].tolist() == [0, 0, 16, 0]
    assert statistics[DROPPED] == 12
    assert torch.equal(y[:, 2:], x[:, 2:])  # capacity 8 / 4 = 2: the first two of each sequence are taken
    assert (y[:, :2] != x[:, :2]).all()


def test_out_of_training_no_token_is_dropped(make):
    moe = make(capacity="one", capacity_factor=0.5)
    x = tokens(2, 12)
    assert moe(x)[1][DROPPED] > 0
    y, statistics = moe.eval()(x)
    assert statistics[DROPPED] == 0
    torch.testing.assert_close(y, loop(moe, x)[0])


@pytest.mark.parametrize("capacity", ["dropless", "k", "one"])
def test_nothing_depends_on_how_the_batch_is_cut_into_micro_batches(make, capacity):
    moe = make("swiglu", prototypes=2, capacity=capacity, capacity_factor=0.7)
    x = tokens(4, 6)

    def run(size):
        moe.zero_grad()
        outputs, sums = [], 0
        for part in x.split(size):
            y, statistics = moe(part)
            sums = sums + statistics.detach().double()
            (y.square().sum() + 0.3 * statistics[BALANCE] + 0.2 * statistics[Z_LOSS]).backward()
            outputs.append(y.detach())
        return torch.cat(outputs), sums, [p.grad.clone() for p in moe.parameters()]

    torch.testing.assert_close(run(1), run(4), rtol=1e-6, atol=1e-6)


def test_the_balance_loss_is_one_per_token_when_choices_and_probabilities_are_even(make):
    moe = make(prototypes=2)  # four experts in each
    moe.router.weight.data.zero_()
    for z in range(2):
        for i in range(4):
            moe.router.weight.data[4 * z + i, i] = 2.0
    x = torch.eye(HIDDEN, dtype=torch.float64)[:4].expand(3, 4, HIDDEN)
    assert moe(x)[1][BALANCE].item() == pytest.approx(12)


def test_the_balance_loss_is_the_number_of_experts_per_token_when_one_takes_all(make):
    moe = make()
    moe.router.weight.data.zero_()
    moe.router.weight.data[5] = 100.0
    assert moe(tokens(2, 3).abs())[1][BALANCE].item() == pytest.approx(6 * 8)


@pytest.mark.parametrize(("prototypes", "top_k"), [(1, 1), (1, 2), (2, 1), (4, 2)])
def test_balance_and_z_loss_equal_loops_over_sequences_and_tokens(make, prototypes, top_k):
    moe = make(prototypes=prototypes, top_k=top_k)
    x = tokens(3, 7)
    size = 8 // prototypes
    balance = z_loss = 0.0
    for sequence in x:
        for z in range(prototypes):
            counts, mean = [0] * size, [0.0] * size
            for token in sequence:
                exps = [math.exp((moe.router.weight[z * size + i] @ token).item()) for i in range(size)]
                z_loss += math.log(sum(exps)) ** 2 / prototypes
                for i in range(size):
                    mean[i] += exps[i] / sum(exps) / len(sequence)
                for i in sorted(range(size), key=lambda i: -exps[i])[:top_k]:
                    counts[i] += 1
            share = [count / (len(sequence) * top_k) for count in counts]
            each = size * sum(f * p for f, p in zip(share, mean, strict=True))
            balance += each * len(sequence) / prototypes
    statistics = moe(x)[1]
    assert statistics[BALANCE].item() == pytest.approx(balance, rel=1e-6)
    assert statistics[Z_LOSS].item() == pytest.approx(z_loss, rel=1e-6)


def test_the_balance_loss_pushes_probability_away_from_the_crowded_expert(make):
    moe = make()
    moe.router.weight.data[:, 0] = 0
    moe.router.weight.data[5] = 0.5  # positive inputs: expert 5 is the favourite
    x = tokens().abs()
    before = moe.route(x.flatten(0, 1))[0][:, 0, 5].mean()
    moe(x)[1][BALANCE].backward()
    moe.router.weight.data -= 0.01 * moe.router.weight.grad
    assert moe.route(x.flatten(0, 1))[0][:, 0, 5].mean() < before


def test_the_balance_bias_changes_the_choice_but_not_the_gates(make):
    moe = make(bias_rate=0.1)
    x = tokens()
    moe.balance_bias.data[6] = 10.0
    y, statistics = moe(x)
    assert statistics[LOADS:].tolist() == [0, 0, 0, 0, 0, 0, 10, 0]
    for b in range(2):
        for t in range(5):
            p = torch.softmax(moe.router.weight @ x[b, t], 0)  # without the bias
            torch.testing.assert_close(y[b, t], p[6] * expert_of(moe, 6, x[b, t]))


def test_the_balance_bias_is_added_to_probabilities_and_not_to_logits(make):
    moe = make(experts=2, bias_rate=0.1)
    moe.router.weight.data = torch.tensor([[math.log(0.6 / 0.4)], [0.0]]).double().expand(2, HIDDEN) / HIDDEN
    moe.balance_bias.data[1] = 0.3  # 0.6 against 0.4 + 0.3; as logits 0.405 against 0.3
    assert moe(torch.ones(1, 1, HIDDEN, dtype=torch.float64))[1][LOADS:].tolist() == [0, 1]


def test_the_balance_bias_is_moved_by_no_gradient(make):
    moe = make(bias_rate=0.1)
    moe(tokens())[0].sum().backward()
    assert moe.balance_bias.grad is None
    assert not moe.balance_bias.requires_grad


def test_routing_is_in_fp32_when_activations_are_bf16(make):
    moe = make(dtype=torch.float32, prototypes=2)
    x = tokens(1, 4, torch.bfloat16)
    # Two experts of a prototype apart by less than bf16 can tell.
    moe.router.weight.data[1] = moe.router.weight.data[0] * (1 + 1e-5)
    probabilities, logits = moe.route(x.flatten(0, 1))
    choice = moe.choose(probabilities)
    expected = x.flatten(0, 1).double() @ moe.router.weight.double().t()
    assert probabilities.dtype == logits.dtype == torch.float32
    torch.testing.assert_close(logits.flatten(1).double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(choice[:, 0], expected[:, :4].argmax(1))


def test_bf16_activations_give_bf16_output_near_the_exact_one(make):
    moe = make(dtype=torch.float32)
    x = tokens(1, 4, torch.bfloat16)
    y, statistics = moe(x)
    assert (y.dtype, statistics.dtype) == (torch.bfloat16, torch.float32)
    expected, _, _ = loop(moe.double(), x.double())
    torch.testing.assert_close(y.double(), expected, rtol=0.05, atol=0.05)


class Calls(TorchDispatchMode):
    """Counts calls of operations by name."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().removeprefix("aten::")
        self.counts[name] = self.counts.get(name, 0) + 1
        return function(*args, **(kwargs or {}))


def run_model(model, x, between=lambda: None):
    """Gradients of a step; `between` runs after the forward pass."""
    model.zero_grad()
    hidden, statistics = model(x)
    loss = hidden.square().sum() + 0.1 * statistics[:, BALANCE].sum()
    between()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


MOE = {"experts": 8, "ffn": 8, "prototypes": 2, "top_k": 2}


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("fields", [{"capacity": "k"}, {"shared_experts": 1}, {"norm_position": "post"}], ids=str)
@pytest.mark.parametrize("sharing", ["none", "all"])
def test_recompute_gives_the_same_gradients_to_the_last_bit(tiny_decoder, fields, sharing, mode):
    model = {key: fields[key] for key in fields if key == "norm_position"}
    moe = {**MOE, "capacity_factor": 0.6, **{key: fields[key] for key in fields if key not in model}}
    x = torch.arange(12).view(2, 6)
    plain = run_model(tiny_decoder(sharing, moe=moe, **model), x)
    again = run_model(tiny_decoder(sharing, recompute=mode, moe=moe, **model), x)
    assert plain.keys() == again.keys()
    assert all(torch.equal(plain[name], again[name]) for name in plain)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recompute_of_ties_uses_the_experts_of_the_forward_pass(tiny_decoder, mode):
    def tied(recompute):
        model = tiny_decoder(recompute=recompute, moe=MOE)
        for block in model.layers:
            block.ffn.router.weight.data[1:4] = block.ffn.router.weight.data[0]
        return model

    x = torch.arange(12).view(2, 6)
    plain, again = run_model(tied("none"), x), run_model(tied(mode), x)
    assert all(torch.equal(plain[name], again[name]) for name in plain)


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_recompute_never_routes_again_even_if_the_router_would_choose_otherwise(tiny_decoder, compiled, mode):
    model = tiny_decoder(recompute=mode, layers=1, moe={"experts": 8, "ffn": 8})
    x = torch.arange(12).view(2, 6)
    with torch.no_grad():
        _, statistics = model(x)

    @torch.no_grad()
    def perturb():
        for block in model.layers:
            block.ffn.router.weight.data.copy_(block.ffn.router.weight.roll(1, 0))

    for block in model.layers if compiled else ():
        block.compile(backend="aot_eager_decomp_partition", fullgraph=True)
    found = run_model(model, x, perturb)
    for layer, loads in enumerate(statistics[:, LOADS:]):
        used = loads > 0
        assert used.any()
        assert not used.all()
        gradient = found[f"layers.{layer}.ffn.experts.down"]
        assert torch.equal(gradient.flatten(1).any(1), used), "the backward pass used other experts than the forward"


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_compiled_blocks_give_the_gradients_of_plain_ones(tiny_decoder, recompute):
    x = torch.arange(12).view(2, 6)
    model = tiny_decoder(recompute=recompute, layers=1, moe={**MOE, "bias_rate": 0.1, "shared_experts": 1})
    plain = run_model(model, x)
    for block in model.layers:
        block.compile(backend="aot_eager_decomp_partition", fullgraph=True)
    torch.testing.assert_close(run_model(model, x), plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_with_recompute_experts_are_chosen_once_for_each_layer_and_step(tiny_decoder, mode):
    model = tiny_decoder(recompute=mode, moe=MOE)
    with Calls() as calls:
        run_model(model, torch.arange(12).view(2, 6))
    assert calls.counts["tenfold::choose"] == 4
    assert calls.counts["tenfold::experts"] == (4 if mode == "selective" else 8)
    assert calls.counts["_scaled_dot_product_flash_attention_for_cpu"] == 8  # the rest did run twice


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("sets", [1, 2])
def test_experts_that_share_are_a_dense_layer_of_every_set_without_a_router(make, activation, sets):
    moe = make(activation, prototypes=2, top_k=2, shared_experts=1, bias_rate=0.1, capacity="one", balance_loss=0.1)
    first = [parameter.detach().clone() for parameter in moe.experts.parameters()]
    moe.share(sets)
    assert all(torch.equal(p, old[:sets]) for p, old in zip(moe.experts.parameters(), first, strict=True))
    assert not any("router" in name or "balance" in name for name, _ in moe.named_parameters())
    x = tokens().requires_grad_()
    y, statistics = moe(x, [])
    expected = moe.shared(x) + torch.stack(
        [torch.stack([sum(expert_of(moe, s, token) for s in range(sets)) for token in row]) for row in x]
    )
    torch.testing.assert_close(y, expected)
    assert statistics.shape == (LOADS + 8,)
    assert not statistics.any()
    wanted = (x, *moe.parameters())
    for mine, theirs in zip(
        torch.autograd.grad(y.square().sum(), wanted), torch.autograd.grad(expected.square().sum(), wanted), strict=True
    ):
        torch.testing.assert_close(mine, theirs)
