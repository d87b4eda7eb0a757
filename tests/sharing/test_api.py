"""`tenfold.share` and `tenfold.delink`: what they take, what they refuse, and the optimizer that goes along."""

from __future__ import annotations

import copy
import io
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, AdamW

import tenfold
from tenfold.errors import TenfoldError
from tenfold.sharing.patterns import Pattern
from tenfold.sharing.tying import holders, tables, tied_pattern

X = torch.linspace(-1, 1, 48).view(8, 6)


class Model(nn.Module):
    """Embedding-like input, four alike layers, a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inlet = nn.Linear(6, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(4)
        )
        self.outlet = nn.Linear(8, 1)

    def forward(self, x):
        x = self.inlet(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.outlet(x)


def train(model, *optimizers, steps=3):
    for _ in range(steps):
        model(X).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def patterns(layers):
    return {tied_pattern(column) for column in tables(layers).values()}


def order(model, optimizer):
    """For each group, the names of its parameters in their order."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]


def groups(model):
    """Matrices with weight decay, the rest without: as training scripts have it."""
    return [
        {"params": [p for p in model.parameters() if p.dim() == 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]


def test_importing_tenfold_does_not_import_pytorch():
    code = "import sys, tenfold; assert 'torch' not in sys.modules; tenfold.share; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_tenfold_does_not_have_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'shard'"):
        tenfold.shard  # noqa: B018


@pytest.mark.parametrize(
    ("pattern", "blocks"),
    [
        ("all", [0, 0, 0, 0]),
        ({"groups": 2}, [0, 0, 1, 1]),
        ({"cycle": 2}, [0, 1, 0, 1]),
        ("sandwich", [0, 1, 1, 2]),
        ([3, 1, 1, 3], [0, 1, 1, 0]),
        ((0, 0, 0, 1), [0, 0, 0, 1]),
        (Pattern([0, 1, 1, 0]), [0, 1, 1, 0]),
    ],
)
def test_patterns_are_those_of_run_files(pattern, blocks):
    model = Model()
    tenfold.share(model.layers, pattern)
    assert patterns(model.layers) == {Pattern(blocks)}


def test_any_sequence_of_layers_will_do():
    model = Model()
    tenfold.share(list(model.layers)[1:])
    assert patterns(model.layers) == {Pattern([0, 1, 1, 1])}
    sequential = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    tenfold.share(sequential)
    assert len(list(sequential.parameters())) == 2


def test_parts_may_be_shared_one_after_another_and_freed_one_after_another():
    model = Model()
    tenfold.share(model.layers, {"groups": 2}, parts=("norms",))
    tenfold.share(model.layers, parts="3.*")
    columns = {name: tied_pattern(column) for name, column in tables(model.layers).items()}
    assert columns["0.weight"] == columns["0.bias"] == Pattern([0, 0, 1, 1])
    assert columns["1.weight"] == Pattern(range(4))
    assert columns["3.weight"] == Pattern([0, 0, 0, 0])
    tenfold.delink(model.layers, pattern="all", parts="3.*")
    columns = {name: tied_pattern(column) for name, column in tables(model.layers).items()}
    assert columns["0.weight"] == Pattern(range(4))
    assert columns["3.weight"] == Pattern([0, 0, 0, 0])


@pytest.mark.parametrize("make", [AdamW, lambda p: SGD(p, 0.1, momentum=0.9), Adafactor], ids=["adamw", "sgd", "ada"])
def test_an_optimizer_that_existed_before_becomes_one_made_afterwards(make):
    model = Model()
    optimizer = make(groups(model))
    train(model, optimizer)
    tenfold.share(model.layers, "sandwich", optimizer=optimizer)
    assert order(model, optimizer) == order(model, make(groups(model)))
    assert set(optimizer.state) == set(model.parameters())
    tenfold.delink(model.layers, optimizer)
    assert order(model, optimizer) == order(model, make(groups(model)))
    assert set(optimizer.state) == set(model.parameters())


@pytest.mark.parametrize("parts", [("ffn", "norms"), ("norms",), ("1.*",)])
@pytest.mark.parametrize("after", ["none", {"groups": 2}])
def test_a_saved_optimizer_fits_one_made_for_the_delinked_model(parts, after):
    model = Model()
    tenfold.share(model.layers, parts=parts)
    optimizer = AdamW(groups(model))
    train(model, optimizer)
    tenfold.delink(model.layers, optimizer, after, parts=parts)
    train(model, optimizer, steps=1)

    twin = Model()
    tenfold.share(twin.layers, parts=parts)
    tenfold.delink(twin.layers, pattern=after, parts=parts)
    twin.load_state_dict(model.state_dict())
    theirs = AdamW(groups(twin))
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer)
    train(twin, theirs)
    assert all(torch.equal(mine, other) for mine, other in zip(model.parameters(), twin.parameters(), strict=True))


def test_several_optimizers_follow():
    model = Model()
    matrices = [p for p in model.layers.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if not any(p is one for one in matrices)]
    optimizers = [torch.optim.Muon(matrices), AdamW(rest)]
    train(model, *optimizers)
    tenfold.share(model.layers, optimizer=optimizers)
    train(model, *optimizers)
    tenfold.delink(model.layers, optimizers)
    train(model, *optimizers)
    held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    assert len(held) == len(set(held))
    assert set(held) == set(model.parameters())


def test_names_in_an_optimizer_go_along():
    model = Model()
    optimizer = AdamW(model.named_parameters())
    train(model, optimizer)
    tenfold.share(model.layers, "sandwich", optimizer=optimizer)
    (group,) = optimizer.param_groups
    assert group["param_names"] == [name for name, _ in model.named_parameters()]
    tenfold.delink(model.layers, optimizer)
    assert group["param_names"] == [name for name, _ in model.named_parameters()]


def test_layers_that_share_may_differ_by_a_low_rank_until_they_are_free():
    model = Model()
    tenfold.share(model.layers)
    optimizer = AdamW(model.named_parameters())
    train(model, optimizer)
    (group,) = optimizer.param_groups
    before = model(X)
    tenfold.delink(model.layers, optimizer, "all", rank=3)
    assert torch.equal(model(X), before)
    assert group["param_names"] == [name for name, _ in model.named_parameters()]
    with pytest.raises(TenfoldError, match="low-rank differences"):
        tenfold.share(model.layers, optimizer=optimizer)

    # The mean gradient for the matrix, and for each difference its layer's own.
    weight, layer = model.layers[0][1]._parameters["weight"], model.layers[2][1]
    gradients = []

    def note(_, inputs, output):
        output.register_hook(lambda gradient: gradients.append((gradient, inputs[0])))

    handles = [one[1].register_forward_hook(note) for one in model.layers]
    model(X).square().mean().backward()
    each = [grad.T @ x for grad, x in gradients]  # from the last layer to the first
    torch.testing.assert_close(weight.grad, torch.stack(each).mean(0))
    torch.testing.assert_close(layer.weight_left.grad, each[1] @ layer.weight_right.T)
    for handle in handles:
        handle.remove()
    optimizer.zero_grad()

    train(model, optimizer)
    assert set(optimizer.state) == set(model.parameters())
    before = model(X)
    tenfold.delink(model.layers, optimizer)
    assert torch.equal(model(X), before)
    assert patterns(model.layers) == {Pattern(range(4))}
    assert group["param_names"] == [name for name, _ in model.named_parameters()]
    assert set(optimizer.state) == set(model.parameters())
    train(model, optimizer)
    with pytest.raises(TenfoldError, match="rank = -1"):
        tenfold.delink(model.layers, rank=-1)


def test_a_parameter_that_nobody_trains_stays_untrained():
    model = Model()
    tenfold.share(model.layers)
    optimizer = AdamW(model.outlet.parameters())
    tenfold.delink(model.layers, optimizer)
    assert order(model, optimizer) == [["outlet.weight", "outlet.bias"]]


def unchanged(model, before):
    return all(mine is theirs for mine, theirs in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("none", "shares nothing"),
        ([0, 1, 2, 3], "shares nothing"),
        ("some", "cannot read 'some' as a sharing pattern"),
        ({"groups": 0}, "cannot read"),
        ({"groups": 3}, "does not divide"),
        ([0, 0, 0], "names 3 layers, but the model has 4"),
        (Pattern([0, 0]), "for 2 layers, not 4"),
        (7, "cannot read 7"),
    ],
)
def test_patterns_that_make_no_sense_are_refused(pattern, message):
    model = Model()
    before = list(model.parameters())
    with pytest.raises(TenfoldError, match=message):
        tenfold.share(model.layers, pattern)
    assert unchanged(model, before)


def test_what_is_not_a_list_of_layers_is_refused():
    model = Model()
    with pytest.raises(TenfoldError, match=r"expected the list of a model's layers .* found Model"):
        tenfold.share(model)
    with pytest.raises(TenfoldError, match=r"layer 1 is no nn.Module but str"):
        tenfold.share([model.layers[0], "layer"])
    with pytest.raises(TenfoldError, match="no layers"):
        tenfold.share(nn.ModuleList())
    with pytest.raises(TenfoldError, match="no parameters"):
        tenfold.share([nn.ReLU(), nn.ReLU()])
    layer = nn.Linear(2, 2)
    with pytest.raises(TenfoldError, match="stands twice"):
        tenfold.share([layer, layer])
    with pytest.raises(TenfoldError, match="nothing of 'router'"):
        tenfold.share(model.layers, parts=("router",))
    with pytest.raises(TenfoldError, match=r"parts is empty, which shares nothing"):
        tenfold.share(model.layers, parts=())
    with pytest.raises(TenfoldError, match=r"parts = None: name some of attention"):
        tenfold.share(model.layers, parts=None)
    with pytest.raises(TenfoldError, match=r"expected an optimizer .* found str"):
        tenfold.share(model.layers, optimizer="adamw")
    with pytest.raises(TenfoldError, match=r"expected an optimizer .* found int"):
        tenfold.delink(model.layers, 5)
    with pytest.raises(TenfoldError, match=r"moments = 'scale' is unknown; it is one of copy, rescale, reset"):
        tenfold.delink(model.layers, moments="scale")


@pytest.mark.parametrize("rank", [-1, 1.5, "2", True, None])
def test_a_rank_that_is_no_whole_number_is_refused_and_nothing_changes(rank):
    model = Model()
    tenfold.share(model.layers)
    before = list(model.parameters())
    with pytest.raises(TenfoldError, match=r"rank = .*a whole number"):
        tenfold.delink(model.layers, pattern="all", rank=rank)
    assert unchanged(model, before)


def test_a_model_with_low_rank_differences_is_copied_and_pickled():
    model = Model()
    tenfold.share(model.layers)
    tenfold.delink(model.layers, pattern="all", rank=1)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(0.1 * number)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        for mine, theirs in zip(model.layers, other.layers, strict=True):
            assert type(mine) is type(theirs)
            for name, holder in holders(mine).items():
                again = holders(theirs)[name]
                assert again.rank == holder.rank
                assert torch.equal(getattr(again.module, again.attribute), getattr(holder.module, holder.attribute))
        tenfold.delink(other.layers)
        assert all(holder.rank == 0 for layer in other.layers for holder in holders(layer).values())
        assert any(holder.rank for layer in model.layers for holder in holders(layer).values())


def test_layers_that_are_not_alike_are_refused_and_nothing_changes():
    for change in ("dtype", "requires_grad", "device"):
        model = Model()
        if change == "dtype":
            model.layers[2][1].double()
        elif change == "device":
            model.layers[2][1].to("meta")
        else:
            model.layers[2][1].requires_grad_(False)
        before = list(model.parameters())
        with pytest.raises(TenfoldError, match=rf"layers 0 and 2 are not alike: {change} of 1\.weight"):
            tenfold.share(model.layers)
        assert unchanged(model, before)
    model = Model()
    model.layers[3][1] = nn.Linear(8, 9)
    with pytest.raises(TenfoldError, match=r"layers 0 and 3 are not alike"):
        tenfold.share(model.layers)


def test_a_parameter_that_stands_twice_in_a_layer_is_refused():
    layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
    layers[1][1].weight = layers[1][0].weight
    with pytest.raises(TenfoldError, match=r"layer 1 holds one parameter under two names, 0\.weight and 1\.weight"):
        tenfold.share(layers)


def test_sharing_less_than_is_shared_is_delinking():
    model = Model()
    tenfold.share(model.layers)
    with pytest.raises(TenfoldError, match=r"shared by \(0,0,0,0\) already, and \(0,0,1,1\) shares less"):
        tenfold.share(model.layers, {"groups": 2})


def test_gradients_must_be_cleared_first_and_nothing_changes():
    model = Model()
    optimizer = AdamW(model.parameters())
    model(X).sum().backward()
    before = list(model.parameters())
    with pytest.raises(TenfoldError, match="has a gradient; clear gradients"):
        tenfold.share(model.layers, optimizer=optimizer)
    assert unchanged(model, before)
    optimizer.zero_grad()
    tenfold.share(model.layers, optimizer=optimizer)
    model(X).sum().backward()
    before = list(model.parameters())
    with pytest.raises(TenfoldError, match=r"has a gradient; clear gradients \(optimizer.zero_grad\(\)\)"):
        tenfold.delink(model.layers, optimizer)
    assert unchanged(model, before)


def test_an_optimizer_that_trains_only_what_is_let_go_is_refused():
    model = Model()
    optimizer = AdamW(model.layers[3].parameters())
    with pytest.raises(TenfoldError, match="trains a parameter that is let go"):
        tenfold.share(model.layers, optimizer=optimizer)
    assert len(optimizer.param_groups[0]["params"]) == len(holders(model.layers[3]))


def test_freeing_in_another_way_than_was_shared_is_refused():
    model = Model()
    tenfold.share(model.layers, {"groups": 2})
    with pytest.raises(TenfoldError, match=r"\(0,1,0,1\) does not refine \(0,0,1,1\)"):
        tenfold.delink(model.layers, pattern={"cycle": 2})


@pytest.fixture
def one_process(tmp_path):
    """A process group of this process alone."""
    dist = pytest.importorskip("torch.distributed")
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_sharded_parameters_are_refused():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = Model(), init_device_mesh("cpu", (1,))
    tenfold.share(model.layers, {"groups": 2})
    free = Model()
    for layer in free.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(list(model.layers), mesh=mesh)
    for refused in (lambda: tenfold.share(free.layers), lambda: tenfold.delink(model.layers)):
        with pytest.raises(TenfoldError, match=r"layer 0: 0\.weight is sharded \(FSDP or DTensor\)"):
            refused()


@pytest.mark.usefixtures("one_process")
def test_distributed_data_parallel_sees_the_mean_and_is_made_anew_after_delinking():
    from torch.nn.parallel import DistributedDataParallel

    def gradients(wrap):
        model = Model()
        tenfold.share(model.layers, "sandwich")
        found = []
        for pattern in ("sandwich", "none"):
            tenfold.delink(model.layers, pattern=pattern)
            wrap(model)(X).square().mean().backward()
            found += [parameter.grad.clone() for parameter in model.parameters()]
            model.zero_grad()
        return found

    for mine, theirs in zip(gradients(DistributedDataParallel), gradients(lambda model: model), strict=True):
        torch.testing.assert_close(mine, theirs)
