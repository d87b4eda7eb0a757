"""Training with moments in fewer bits, against PyTorch's optimizers whose state is coded by definition after a step."""

import pytest
import torch

from offload import codecs
from offload.loops import LAYERS, Model, optimizers_of, train
from offload.memory_tier import MemoryTier
from tenfold.offload import units
from tenfold.offload.engine import Offload
from tenfold.offload.moments import Inventory
from tenfold.offload.parts import parts_of
from tenfold.sharing.patterns import Pattern
from tenfold.sharing.tying import Sharing, tie

SEED = 11
PLACES = {
    "device": lambda unit, kind: "device",
    "disk": lambda unit, kind: "disk" if kind == "moments" else "device",
    "all below": lambda unit, kind: "disk" if unit.layers or kind != "weights" else "device",
    "some": lambda unit, kind: "disk" if kind == "moments" and unit.layers and unit.layers[0] % 2 else "device",
}


pytestmark = pytest.mark.usefixtures("small_pieces")


def model_of(pattern):
    torch.manual_seed(1)
    model = Model()
    tie(model.layers, Sharing(Pattern(pattern)))
    return model


def offloaded(model, optimizers, form, place="device", **options):
    inventory = Inventory(model, model.layers, optimizers, form=form, seed=SEED)
    return Offload(inventory, PLACES[place], {"disk": MemoryTier(delay=2)}, **options)


def code_state(model, optimizers, form, step):
    """Replace the state of large parameters by what would be kept of it."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if value.dim() and parameter.numel() >= 4096:
                    name = f"{SEED}/{step}/{names[parameter]}/{key}"
                    coded = codecs.bf16(value, name) if form == "bf16" else codecs.int8(value, key != "exp_avg_sq")
                    value.copy_(coded)


def after_each_step(optimizers, call):
    """Have `call` called with the number of the step when all optimizers have made it."""
    inner, step = optimizers[-1].step, 0

    def stepped():
        nonlocal step
        inner()
        call(step)
        step += 1

    optimizers[-1].step = stepped


def before_each_step(optimizers, call, first=0):
    inner, step = optimizers[0].step, first

    def stepped():
        nonlocal step
        call(step)
        step += 1
        inner()

    optimizers[0].step = stepped


def state_of(offload):
    """Weights and optimizer state by name, on the device."""
    found = {}
    for name, parameter in offload.inventory.model.named_parameters():
        found[name] = offload.tensor_of(name, parameter.data).detach().clone()
        for optimizer in offload.inventory.optimizers:
            for key, value in optimizer.state.get(parameter, {}).items():
                found[f"{name}/{key}"] = offload.tensor_of(f"{name}/{key}", value).clone()
    return found


@pytest.mark.parametrize("pattern", [range(LAYERS), [0, 0, 1, 1, 0]], ids=["none", "groups"])
@pytest.mark.parametrize("form", ["bf16", "int8"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_step_is_the_optimizers_own_on_state_that_was_coded(optimizer, form, pattern):
    plain = model_of(pattern)
    wanted = optimizers_of(optimizer, plain)
    after_each_step(wanted, lambda step: code_state(plain, wanted, form, step))
    losses = train(plain, wanted, 3)
    for place in PLACES:
        model = model_of(pattern)
        mine = optimizers_of(optimizer, model)
        offload = offloaded(model, mine, form, place)
        assert train(model, mine, 3) == losses, place
        got = state_of(offload)
        for name, parameter in plain.named_parameters():
            assert torch.equal(got[name], parameter), (name, place)
            for key, value in wanted[0].state[parameter].items():
                assert torch.equal(got[f"{name}/{key}"], value), (name, key, place)


@pytest.mark.parametrize("form", ["bf16", "int8"])
def test_optimizers_of_whole_matrices_are_coded_too(form, monkeypatch):
    monkeypatch.setattr("tenfold.offload.codec.SMALL", 1024)  # Muon's matrices in this model are smaller
    model = model_of(range(LAYERS))
    mine = optimizers_of("muon", model)
    offload = offloaded(model, mine, form)
    train(model, mine, 3)
    buffer = state_of(offload)["layers.0.up.weight/momentum_buffer"]
    if form == "bf16":
        assert torch.equal(buffer, buffer.bfloat16().float())
    else:
        assert torch.equal(buffer, codecs.int8(buffer, signed=True))
    assert buffer.abs().max() > 0


@pytest.mark.parametrize("form", ["bf16", "int8"])
@pytest.mark.parametrize("place", ["device", "all below"])
def test_a_run_that_goes_on_from_decoded_state_is_one_that_did_not_stop(form, place):
    model = model_of(range(LAYERS))
    mine = optimizers_of("adamw", model)
    before_each_step(mine, (whole := offloaded(model, mine, form, place)).begin_step)
    losses = train(model, mine, 4)
    at_end = state_of(whole)

    model = model_of(range(LAYERS))
    mine = optimizers_of("adamw", model)
    offload = offloaded(model, mine, form, place)
    assert train(model, mine, 2) == losses[:2]
    saved = state_of(offload)

    model = Model()
    mine = optimizers_of("adamw", model)
    other = offloaded(model, mine, form, "some")
    for name, parameter in model.named_parameters():
        with other.filling(name, parameter.data) as memory:
            memory.copy_(saved[name])
        for key, value in mine[0].state[parameter].items():
            with other.filling(f"{name}/{key}", value) as memory:
                memory.copy_(saved[f"{name}/{key}"])
    assert all(torch.equal(saved[name], value) for name, value in state_of(other).items())
    for name, value in continued(model, mine, other).items():
        assert torch.equal(at_end[name], value), name


def continued(model, optimizers, offload):
    """The state after steps 2 and 3 on their batches."""
    generator = torch.Generator().manual_seed(5)
    for step in range(4):
        tokens = torch.randint(61, (2, 9), generator=generator)
        if step >= 2:
            offload.begin_step(step)
            model(tokens).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return state_of(offload)


def test_bytes_that_are_kept(monkeypatch):
    monkeypatch.setattr(units, "PIECE", 2**18)  # in smaller ones whole pages count
    found = {}
    for form in ("fp32", "bf16", "int8"):
        model = torch.nn.Sequential(torch.nn.Linear(512, 512, bias=False))
        optimizers = [torch.optim.AdamW(model.parameters(), fused=True)]
        inventory = Inventory(model, list(model), optimizers, form=form)
        (part,) = parts_of(inventory, lambda _: ())
        tier = MemoryTier()
        offload = Offload(inventory, PLACES["disk"], {"disk": tier})
        found[form] = part.bytes["moments"] / 512**2
        assert tier.held == part.bytes["moments"]
        assert inventory.open_size == (0 if form == "fp32" else 8 * 512**2)
        model(torch.randn(3, 512)).sum().backward()
        optimizers[0].step()
        assert tier.bytes_written == part.bytes["moments"]
        offload.close()
    assert found == {"fp32": 8, "bf16": 4, "int8": 2 * (1 + 4 / 256)}


@pytest.mark.parametrize("place", ["device", "some"])
def test_what_goes_below_between_stages_is_what_was_there(place):
    model = model_of(range(LAYERS))
    mine = optimizers_of("adamw", model)
    offload = offloaded(model, mine, "int8", place)
    train(model, mine, 2)
    before = state_of(offload)
    offload.put_all_away(tier := MemoryTier())
    after = state_of(offload)
    assert tier.bytes_written > 0
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_step_in_the_backward_pass_is_the_same():
    losses = []
    for in_backward in (False, True):
        model = model_of([0, 0, 1, 1, 1])
        mine = optimizers_of("adamw", model)
        offload = offloaded(model, mine, "bf16", "disk", step_in_backward=in_backward)
        losses.append((train(model, mine, 3), state_of(offload)))
    assert losses[0][0] == losses[1][0]
    assert all(torch.equal(losses[0][1][name], losses[1][1][name]) for name in losses[0][1])
