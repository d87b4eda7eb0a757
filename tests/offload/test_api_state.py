"""What is saved, copied and refused while a model is offloaded."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import LBFGS, SGD, Adafactor, AdamW
from torch.optim.swa_utils import AveragedModel

import tenfold
from offload.loops import ALL, TOKENS, Model, assert_same, equal, optimizers_of, train, two
from tenfold.errors import TenfoldError


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "sgd"])
def test_state_dicts_go_in_and_out(offload, optimizer, tmp_path_factory):
    """What is saved of an offloaded model is what is saved of a plain one, and each is read by the other."""
    plain, model = two(Model)
    wanted, mine = optimizers_of(optimizer, plain)[0], optimizers_of(optimizer, model)[0]
    fresh = copy.deepcopy(mine.state_dict())
    train(plain, [wanted], 2)
    weights, state = copy.deepcopy(plain.state_dict()), copy.deepcopy(wanted.state_dict())
    handle = offload(model, mine)
    train(model, [mine], 1)
    model.load_state_dict(weights)
    mine.load_state_dict(state)
    assert equal(model.state_dict(), weights)
    assert equal(mine.state_dict(), state)
    saved = model.state_dict()
    train(plain, [wanted], 2)
    train(model, [mine], 2)
    assert_same(plain, [wanted], model, [mine])
    away = [name for name in weights if "layers" in name]
    assert all(torch.equal(saved[name], weights[name]) for name in away)  # copies, not what is in use
    assert equal(model.layers[1].state_dict(), plain.layers[1].state_dict())
    one = {"layers.2.experts": torch.zeros_like(model.layers[2].experts)}
    for each in (plain, model):
        each.load_state_dict(one, strict=False)
    assert_same(plain, [wanted], model, [mine])
    mine.load_state_dict(fresh)  # of before the first step: it begins anew
    again = optimizers_of(optimizer, plain)[0]
    train(plain, [again], 1)
    train(model, [mine], 1)
    handle.close()
    assert_same(plain, [again], model, [mine])


def test_state_that_does_not_fit_is_refused(offload):
    model = Model()
    mine = AdamW(model.parameters())
    other = AdamW(model.parameters(), amsgrad=True)
    train(model, [other], 1)
    state = other.state_dict()
    offload(model, mine)
    for entry in state["state"].values():
        del entry["exp_avg_sq"]
    with pytest.raises(TenfoldError, match="its exp_avg_sq is not there, and this optimizer"):
        mine.load_state_dict(state)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        mine.load_state_dict({"state": {}, "param_groups": []})
    with pytest.raises(RuntimeError, match=r"size mismatch for layers\.0\.experts"):
        model.load_state_dict({"layers.0.experts": torch.zeros(2)}, strict=False)


def test_what_layers_share_is_one_tensor_in_a_state_dict(offload):
    torch.manual_seed(1)
    model = Model()
    tenfold.share(model.layers)
    mine = AdamW(model.parameters(), lr=1e-2)
    tenfold.divide_updates(model.layers, mine)
    plain = copy.deepcopy(model)
    wanted = AdamW(plain.parameters(), lr=1e-2)
    tenfold.divide_updates(plain.layers, wanted)
    handle = offload(model, mine)
    assert train(model, [mine], 2) == train(plain, [wanted], 2)
    state = model.state_dict()
    assert state["layers.0.experts"] is state["layers.4.experts"]
    for change in (lambda: tenfold.share(model.layers[:2]), lambda: tenfold.delink(model.layers, mine)):
        with pytest.raises(TenfoldError, match=r"layer 0: .* is offloaded: close\(\) what tenfold.offload gave"):
            change()
    handle.close()
    for each, optimizer in ((plain, wanted), (model, mine)):
        tenfold.delink(each.layers, optimizer)
    offload(model, mine)
    assert train(model, [mine], 2) == train(plain, [wanted], 2)
    assert_same(plain, [wanted], model, [mine])


def test_whoever_reads_a_gradient_that_is_away_hears_of_it(offload):
    model = Model()
    mine = AdamW(model.parameters(), lr=1e-2)
    offload(model, mine)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(TOKENS)).backward()
    readers = [
        lambda: clip_grad_norm_(model.parameters(), 1.0),
        lambda: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0),
        lambda: model.layers[0].experts.grad.norm().item(),
        lambda: SGD(model.parameters(), lr=1e-2).step(),
        lambda: model.zero_grad(set_to_none=False),
        lambda: scaler.step(mine),
    ]
    for reads in readers:
        with pytest.raises(TenfoldError, match=r"the gradient of .* is below the device, and .* asks for it"):
            reads()


def test_copies_and_moves_are_refused_while_it_is_offloaded(offload, tmp_path_factory):
    model = Model()
    mine = AdamW(model.parameters(), lr=1e-2)
    handle = offload(model, mine)
    copies = [copy.deepcopy, AveragedModel, lambda each: torch.save(each, tmp_path_factory.mktemp("saved") / "x")]
    for makes in (*copies, lambda each: copy.deepcopy(each.layers[1])):
        with pytest.raises(TenfoldError, match="cannot be copied or pickled while it is offloaded"):
            makes(model)
    with pytest.raises(TenfoldError, match=r"cannot go from torch\.float32 on cpu to torch\.bfloat16 on cpu"):
        model.bfloat16()
    with pytest.raises(TenfoldError, match="assign=True"):
        model.load_state_dict(model.state_dict(), assign=True)
    model.to("cpu").float()
    with pytest.raises(TenfoldError, match="a closure cannot be given"):
        mine.step(lambda: None)
    with pytest.raises(TenfoldError, match="is offloaded already"):
        offload(model, mine)
    handle.close()
    copy.deepcopy(model).bfloat16()
    with pytest.raises(TenfoldError, match="was closed"):
        handle.clip_grad_norm_(1.0)


def compiled(model):
    model.layers[2].compile()
    return model


WRONG = {
    "no layers": ({"model": lambda: nn.Sequential(nn.Linear(4, 4))}, "no layers were found: Sequential has no"),
    "nothing": ({"placement": None}, "say what is to leave"),
    "unknown tier": ({"placement": [{"layers": "all", "moments": "tape"}]}, "moments = 'tape'"),
    "unknown kind": ({"placement": [{"layers": "all", "momentum": "disk"}]}, "momentum"),
    "unknown layers": ({"placement": [{"layers": "7", "moments": "disk"}]}, "'7' names layer 7"),
    "host": ({"placement": [{"layers": "all", "moments": "host"}]}, 'moments = "host".*RAM is the device'),
    "host budget": ({"host_budget": "1GiB"}, "host_budget is for pinned RAM beside an accelerator"),
    "no folder": ({"disk": ()}, "needs a folder: set disk"),
    "missing folder": ({"disk": "/nowhere/at/all"}, "/nowhere/at/all"),
    "both": ({"device_budget": "1GiB"}, "device_budget and placement exclude each other"),
    "small budget": (
        {"placement": None, "device_budget": 4096},
        r"device_budget allows 4,096 bytes.*at least [\d,]+ on",
    ),
    "no bytes": ({"placement": None, "device_budget": "much"}, "'much' as bytes"),
    "negative": ({"other_bytes": -1}, "other_bytes: cannot read -1 as bytes"),
    "norm": ({"norm_type": 1.0}, "norm_type = 1.0"),
    "activations": ({"placement": [{"layers": "0", "activations": "disk"}]}, "give activations_bytes"),
    "layers of others": ({"layers": Model().layers}, "layers: number 0, Layer, is no module of the model"),
    "optimizer of others": ({"optimizer": lambda _: AdamW(Model().parameters())}, "trains no parameter of this"),
    "some of them": ({"optimizer": lambda each: AdamW(each.layers.parameters())}, "embedding.weight is trained by no"),
    "compiled": ({"model": lambda: compiled(Model())}, "Layer is compiled"),
    "no optimizer": ({"optimizer": lambda _: "adam"}, "found str"),
    "another optimizer": ({"optimizer": lambda each: LBFGS(each.parameters())}, "LBFGS is not known to update"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_and_nothing_changes(case, tmp_path):
    how, message = copy.copy(WRONG[case][0]), WRONG[case][1]
    model = how.pop("model", Model)()
    before = copy.deepcopy(model.state_dict())
    optimizer = how.pop("optimizer", lambda each: Adafactor(each.parameters()))(model)
    with pytest.raises(TenfoldError, match=message):
        tenfold.offload(model, optimizer, **{"placement": ALL, "disk": tmp_path, **how})
    assert equal(model.state_dict(), before)
    assert not getattr(optimizer, "state", None)
    assert threading.active_count() == len([each for each in threading.enumerate() if "disk" not in each.name])
    copy.deepcopy(model)
