"""Relaxed sharing: layers share matrices and each adds a low-rank difference; it begins and ends without a trace."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tenfold.config.run import OptimConfig
from tenfold.errors import TenfoldError
from tenfold.nn.counting import count
from tenfold.nn.init import initialize
from tenfold.sharing.delinking import delink
from tenfold.sharing.patterns import Pattern
from tenfold.sharing.similarity import layer_similarity
from tenfold.sharing.tying import PARTS, Sharing, holders, tables, tie, tied_pattern, uses
from tenfold.training.optimizers import build_optimizers, materialize, state_tensors

TOKENS = torch.arange(18).view(2, 9) * 7 % 50
MOE = {"experts": 4, "prototypes": 2, "ffn": 8, "bias_rate": 0.01}
ALL, NONE = Pattern.parse("all", 4), Pattern.parse("none", 4)
OPTIMIZERS = ["adamw", "adafactor", "muon"]


def output(model):
    with torch.no_grad():
        return model.logits(model(TOKENS[:, :-1])[0])


def step(model, optimizers, times=1):
    for _ in range(times):
        logits = model.logits(model(TOKENS[:, :-1])[0])
        F.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
        for parameter, layers in uses(model.layers).items():
            if parameter.grad is not None:
                parameter.grad /= layers
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def relax(model, optimizers, sharing, moments="rescale"):
    delink(model.layers, optimizers, sharing, moments)
    materialize(optimizers)


@pytest.fixture
def trained(tiny_decoder):
    """A model that shares all, and its optimizers, after two steps."""

    def build(name="adamw", sharing="all", dtype=torch.float64, **fields):
        model = tiny_decoder(sharing, dtype=dtype, **fields)
        optimizers = build_optimizers(model, OptimConfig(name=name, lr=0.01, weight_decay=0.1))
        step(model, optimizers, 2)
        return model, optimizers

    return build


@pytest.mark.parametrize("moe", [{}, MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_function_is_the_same_when_differences_begin_and_when_they_are_folded(trained, name, dtype, moe):
    model, optimizers = trained(name, dtype=dtype, moe=moe)
    before = output(model)
    relax(model, optimizers, Sharing(ALL, rank=3))
    assert torch.equal(output(model), before)
    step(model, optimizers, 3)
    before = output(model)
    delink(model.layers, optimizers, Sharing(NONE))
    assert torch.equal(output(model), before)  # the sums are made as they were, so no bit differs
    assert all(holder.rank == 0 for column in tables(model.layers).values() for holder in column)
    assert not any("left" in key or "right" in key for key in dict(model.named_parameters()))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_folded_run_stands_in_no_optimizer_and_trains_on_as_one_built_free(trained, name):
    model, optimizers = trained(name, moe=MOE)
    relax(model, optimizers, Sharing(ALL, rank=3))
    step(model, optimizers, 2)
    delink(model.layers, optimizers, Sharing(NONE), "copy")
    twin, twins = trained(name, "none", moe=MOE)
    weights, state = dict(model.named_parameters()), state_tensors(model, optimizers)
    with torch.no_grad():
        for key, parameter in twin.named_parameters():
            parameter.copy_(weights[key])
        other = state_tensors(twin, twins)
        assert other.keys() == state.keys()
        for key, value in other.items():
            value.copy_(state[key])
    step(model, optimizers, 2)
    step(twin, twins, 2)
    for key, parameter in twin.named_parameters():
        assert torch.equal(parameter, weights[key]), key


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_differences_are_trained_in_the_group_of_their_matrix_from_a_state_of_zero(trained, tiny_decoder, name):
    model, optimizers = trained(name, moe=MOE)
    state = {key: value.clone() for key, value in state_tensors(model, optimizers).items()}
    relax(model, optimizers, Sharing(ALL, rank=2), "copy")
    now = state_tensors(model, optimizers)
    for key, value in state.items():
        assert torch.equal(now[key], value), key
    new = [key for key in now if "_left/" in key or "_right/" in key]
    assert new
    assert not any(now[key].any() for key in new)
    fresh = tiny_decoder("none", moe=MOE)
    tie(fresh.layers, Sharing(ALL, rank=2))
    fresh_optimizers = build_optimizers(fresh, OptimConfig(name=name, lr=0.01, weight_decay=0.1))
    assert state_tensors(fresh, fresh_optimizers).keys() == now.keys()

    def groups(model, optimizers):
        names = {parameter: key for key, parameter in model.named_parameters()}
        return {
            (names[parameter], type(optimizer).__name__, group["weight_decay"])
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    assert groups(model, optimizers) == groups(fresh, fresh_optimizers)


def test_the_shared_matrix_trains_on_the_mean_over_its_layers_and_each_difference_on_its_own(tiny_decoder):
    """Against a free model whose layers' weights are W + A B, made with torch functions from leaves of its own."""
    model = tiny_decoder("none", moe=MOE)
    tie(model.layers, Sharing(ALL, rank=3))
    initialize(model, 3)
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("_left"):
                parameter.copy_(torch.randn(parameter.shape, generator=chance, dtype=torch.float64) * 0.3)
    free = tiny_decoder("none", moe=MOE)
    leaves = {key: value.detach().clone().requires_grad_() for key, value in model.named_parameters()}
    values = {}
    for key, _ in free.named_parameters():
        first = ".".join(["layers", "0", *key.split(".")[2:]]) if key.startswith("layers.") else key
        base = leaves[key] if key in leaves else leaves[first]
        low_rank = f"{key}_left" in leaves
        assert low_rank == (key.startswith("layers.") and base.dim() > 1), key
        values[key] = base + torch.matmul(leaves[f"{key}_left"], leaves[f"{key}_right"]) if low_rank else base
    hidden, _ = torch.func.functional_call(free, values, (TOKENS[:, :-1],))
    loss = F.cross_entropy((hidden @ values["embedding.weight"].T)[..., :50].flatten(0, 1), TOKENS[:, 1:].flatten())
    mine = F.cross_entropy(model.logits(model(TOKENS[:, :-1])[0]).flatten(0, 1), TOKENS[:, 1:].flatten())
    assert mine.item() == pytest.approx(loss.item(), rel=1e-12)
    loss.backward()
    mine.backward()
    counts = uses(model.layers)
    for key, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, leaves[key].grad, rtol=1e-9, atol=1e-12, msg=key)
            matrix = key.startswith("layers.") and not key.endswith(("_left", "_right")) and parameter.dim() > 1
            assert counts.get(parameter, 1) == (4 if matrix else 1), key


def test_at_full_rank_a_shared_matrix_and_differences_are_any_free_layers(tiny_decoder):
    free, model = tiny_decoder("none", seed=5), tiny_decoder("none")
    tie(model.layers, Sharing(ALL, rank=16))
    with torch.no_grad():
        theirs = tables(free.layers)
        for name, column in tables(model.layers).items():
            for mine, other in zip(column, theirs[name], strict=True):
                if not mine.rank:
                    mine.parameter.copy_(other.parameter)
                    continue
                u, s, v = torch.linalg.svd(other.parameter - mine.parameter, full_matrices=False)
                getattr(mine.module, f"{mine.attribute}_left").copy_(u * s)
                getattr(mine.module, f"{mine.attribute}_right").copy_(v)
        for name in ("embedding", "norm"):
            getattr(model, name).load_state_dict(getattr(free, name).state_dict())
    torch.testing.assert_close(output(model), output(free), rtol=1e-12, atol=1e-12)


def test_rank_zero_is_plain_sharing(trained):
    model, optimizers = trained()
    held = list(model.parameters())
    delink(model.layers, optimizers, Sharing(ALL, rank=0))
    assert all(mine is theirs for mine, theirs in zip(model.parameters(), held, strict=True))
    assert Sharing(ALL, rank=0) == Sharing(ALL) != Sharing(ALL, rank=1)
    assert len({Sharing(ALL, rank=0), Sharing(ALL), Sharing(ALL, rank=1)}) == 2


@pytest.mark.parametrize("sharing", ["sandwich", [0, 0, 1, 1], "all"])
@pytest.mark.parametrize("parts", [PARTS, ("attention",), ("experts", "router")])
def test_matrices_that_are_shared_have_differences_vectors_are_free_and_the_rest_is_untouched(
    tiny_decoder, sharing, parts
):
    model = tiny_decoder("none", moe=MOE)
    pattern = Pattern.parse(sharing, 4)
    tie(model.layers, Sharing(pattern, parts, rank=2))
    plain = tiny_decoder(sharing, parts=parts, moe=MOE)
    for name, column in tables(plain.layers).items():
        shared, mine = tied_pattern(column), tables(model.layers)[name]
        matrix = column[0].parameter.dim() > 1
        assert tied_pattern(mine) == (shared if matrix else NONE)
        assert [holder.rank for holder in mine] == [
            2 if matrix and shared.uses(block) > 1 else 0 for block in shared.blocks
        ]


def test_a_chain_keeps_differences_where_layers_still_share_and_folds_the_rest(trained):
    model, optimizers = trained(moe=MOE)
    for sharing in (
        Sharing(ALL, rank=2),
        Sharing(Pattern([0, 0, 1, 2]), rank=2),
        Sharing(Pattern([0, 0, 1, 2]), rank=3),
        Sharing(NONE),
    ):
        before = output(model)
        relax(model, optimizers, sharing)
        torch.testing.assert_close(output(model), before, rtol=1e-12, atol=1e-12)
        names = dict(model.named_parameters())
        told = {p for o in optimizers for g in o.param_groups for p in g["params"]}
        assert told == {parameter for parameter in names.values() if parameter.requires_grad}
        assert sum(len(optimizer.state) for optimizer in optimizers) == len(told)
        step(model, optimizers, 2)
    assert [holder.rank for holder in tables(model.layers)["attention.wq.weight"]] == [0] * 4


def test_layers_that_differ_cannot_share_a_block_without_differences_again(trained):
    relaxed = Sharing(ALL, rank=2)
    pairs = Pattern([0, 0, 1, 1])
    for after in (Sharing(pairs), Sharing(ALL), Sharing(pairs, rank=1), Sharing(ALL, ("ffn",), rank=1)):
        with pytest.raises(TenfoldError, match=r"stages\.1: .*differences of rank 2.*keep rank = 2 or more"):
            after.check_refines(relaxed, "stages.1")
    for after in (Sharing(NONE), Sharing(pairs, rank=2), Sharing(pairs, rank=3), Sharing(ALL, ("ffn",), rank=2)):
        after.check_refines(relaxed, "here")
    model, optimizers = trained()
    relax(model, optimizers, relaxed)
    before, names = output(model), list(dict(model.named_parameters()))
    with pytest.raises(TenfoldError, match=r"delinking .*differences of rank 2"):
        delink(model.layers, optimizers, Sharing(pairs, rank=1))
    assert torch.equal(output(model), before)
    assert list(dict(model.named_parameters())) == names
    with pytest.raises(TenfoldError, match="low-rank differences"):
        tie(model.layers, Sharing(ALL))


def test_a_rank_that_nothing_can_use_is_refused_with_the_largest_that_is(tiny_decoder):
    model = tiny_decoder("none")
    with pytest.raises(TenfoldError, match=r"rank = 17 is more than any shared matrix can use: at 16"):
        tie(model.layers, Sharing(ALL, rank=17))
    for sharing in (Sharing(NONE, rank=2), Sharing(ALL, ("norms",), rank=2)):
        with pytest.raises(TenfoldError, match=r"rank = 2 .*leave it out"):
            tie(model.layers, sharing)
    tie(tiny_decoder("none", moe=MOE).layers, Sharing(ALL, rank=16))  # experts are 16 x 8: theirs is the most they use


def test_a_manifest_keeps_the_rank_and_an_older_one_has_none():
    assert Sharing.load(Sharing(ALL, rank=4).dump()) == Sharing(ALL, rank=4)
    assert Sharing.load({"pattern": [0, 0, 0, 0]}) == Sharing(ALL)
    assert str(Sharing(ALL, rank=4)) == "(0,0,0,0) + rank 4"


@pytest.mark.parametrize("moe", [{}, MOE], ids=["dense", "moe"])
def test_counts_are_those_of_the_free_model_but_for_what_is_stored(tiny_decoder, moe):
    model, plain, free = tiny_decoder("none", moe=moe), tiny_decoder("all", moe=moe), tiny_decoder("none", moe=moe)
    tie(model.layers, Sharing(ALL, rank=2))
    mine, theirs = count(model, 8), count(free, 8)
    assert (mine.total, mine.active, mine.expert, mine.flops_per_token) == (
        theirs.total,
        theirs.active,
        theirs.expert,
        theirs.flops_per_token,
    )
    more = 0
    for name, column in tables(free.layers).items():
        shape = tuple(column[0].parameter.shape)
        if len(shape) == 1:
            more += 3 * shape[0]
        else:
            assert min(shape[-2:]) >= 2, name
            more += 4 * 2 * (shape[-2] + shape[-1]) * (shape[0] if len(shape) == 3 else 1)
    assert mine.stored == count(plain, 8).stored + more


def test_similarity_is_of_what_layers_compute_with(trained):
    model, optimizers = trained(moe=MOE, dtype=torch.float32)
    relax(model, optimizers, Sharing(ALL, rank=2))
    parts = [layer.ffn for layer in model.layers]
    assert all(value > 0.99999 for row in layer_similarity(parts) for value in row)
    step(model, optimizers, 3)
    found = layer_similarity(parts)
    delink(model.layers, optimizers, Sharing(NONE))
    assert found == layer_similarity(parts)
    assert found[0][3] < 1


def test_recomputation_gives_the_same_gradients(tiny_decoder):
    gradients = []
    for recompute in ("none", "selective", "full"):
        model = tiny_decoder("none", recompute=recompute, moe=MOE)
        tie(model.layers, Sharing(ALL, rank=3))
        initialize(model, 3)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if key.endswith("_left"):
                    parameter.fill_(0.1)
        model(TOKENS)[0].square().sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    assert all(torch.equal(one, each) for one, *others in zip(*gradients, strict=True) for each in others)


def test_layers_of_another_library_are_relaxed_and_freed_by_the_same_means():
    """PyTorch's own encoder layers: their attention reads weights by name and multiplies on its own."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True) for _ in range(3))
    layers.double()
    pattern, free = Pattern.parse("all", 3), Pattern.parse("none", 3)
    tie(layers, Sharing(pattern))
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-2)
    x = torch.randn(2, 5, 16, dtype=torch.float64)

    def run(times=0):
        for _ in range(times):
            y = x
            for layer in layers:
                y = layer(y)
            (y - 1).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        y = x  # with gradients: without, F.linear goes another way for a weight that is a parameter
        for layer in layers:
            y = layer(y)
        return y

    before = run(2)
    delink(layers, [optimizer], Sharing(pattern, rank=4))
    assert torch.equal(run(), before)
    before = run(3)
    assert holders(layers[1])["self_attn.in_proj_weight"].rank == 4
    assert not torch.equal(layers[0].self_attn.in_proj_weight, layers[1].self_attn.in_proj_weight)
    twin = copy.deepcopy(layers)
    delink(layers, [optimizer], Sharing(free))
    assert torch.equal(run(), before)
    assert len(optimizer.param_groups[0]["params"]) == len(list(layers.parameters())) == len(optimizer.state)
    for mine, theirs in zip(layers, twin, strict=True):
        torch.testing.assert_close(mine.linear1.weight, theirs.linear1.weight, rtol=0, atol=1e-14)
    run(1)
