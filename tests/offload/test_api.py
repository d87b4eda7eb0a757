"""`tenfold.offload` on models and loops that know nothing of it, against the same loop without."""

from __future__ import annotations

import os
import shutil
import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

import tenfold
from offload.loops import ALL, TOKENS, Model, assert_same, equal, optimizers_of, train, two
from tenfold.errors import TenfoldError
from tenfold.offload import units


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor", "muon"])
def test_optimizers_accumulation_and_clipping(offload, optimizer, accumulation):
    plain, model = two(Model)
    wanted, mine = optimizers_of(optimizer, plain), optimizers_of(optimizer, model)
    handle = offload(model, mine)
    losses = train(model, mine, 3, accumulation, lambda: handle.clip_grad_norm_(0.1))
    assert losses == train(plain, wanted, 3, accumulation, lambda: clip_grad_norm_(plain.parameters(), 0.1))
    assert_same(plain, wanted, model, mine)
    handle.close()
    assert_same(plain, wanted, model, mine)
    assert not {"step", "zero_grad"} & vars(mine[0]).keys()
    assert train(model, mine, 2) == train(plain, wanted, 2)  # no trace is left


def test_a_budget_is_kept(offload):
    plain, model = two(Model)
    wanted, mine = optimizers_of("adamw", plain), optimizers_of("adamw", model)
    needs = []
    for budget in ("700kB", 450_000, "250kB"):
        handle = offload(model, mine, placement=None, device_budget=budget)
        assert train(model, mine, 2) == train(plain, wanted, 2)
        needs.append(handle.bytes())
        handle.close()
    assert_same(plain, wanted, model, mine)
    assert [each["device"] <= most for each, most in zip(needs, (700_000, 450_000, 250_000), strict=True)] == [True] * 3
    assert 0 < needs[0]["disk"] < needs[1]["disk"] < needs[2]["disk"]


def test_it_goes_on_where_a_loop_was(offload):
    """Weights, gradients and optimizer state that there are already, taken down and brought back in the midst."""
    plain, model = two(Model)
    wanted, mine = optimizers_of("adamw", plain), optimizers_of("adamw", model)
    for each, optimizers in ((plain, wanted), (model, mine)):
        train(each, optimizers, 2)
        each(TOKENS).backward()
    handle = offload(model, mine)
    for each in (plain, model):
        each(TOKENS + 1).backward()
    handle.close()
    assert equal([each.grad for each in plain.parameters()], [each.grad for each in model.parameters()])
    for optimizer in (*wanted, *mine):
        optimizer.step()
    assert_same(plain, wanted, model, mine)


@pytest.mark.parametrize("before", [True, False])
def test_a_schedule_of_the_learning_rate(offload, before):
    plain, model = two(Model)
    wanted, mine = AdamW(plain.parameters(), lr=1e-2), AdamW(model.parameters(), lr=1e-2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if before:
            schedules = [LambdaLR(each, lambda step: 1 / (1 + step)) for each in (wanted, mine)]
        handle = offload(model, mine)
        if not before:
            schedules = [LambdaLR(each, lambda step: 1 / (1 + step)) for each in (wanted, mine)]
        for step in range(4):
            if step == 2:
                handle.close()
            for each, optimizer, schedule in zip((plain, model), (wanted, mine), schedules, strict=True):
                each(TOKENS).backward()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    assert_same(plain, [wanted], model, [mine])


def test_loops_that_clear_gradients_otherwise(offload):
    """Never, by the model, by hand, in part; and those that step twice."""
    plain, model = two(Model)
    wanted, mine = AdamW(plain.parameters(), lr=1e-2), AdamW(model.parameters(), lr=1e-2)
    handle = offload(model, mine)
    clips = (lambda: clip_grad_norm_(plain.parameters(), 0.1), lambda: handle.clip_grad_norm_(0.1))
    for how in ("never", "never", "model", "by hand", "in part", "twice", "model", "never"):
        norms = []
        for each, optimizer, clip in zip((plain, model), (wanted, mine), clips, strict=True):
            each(TOKENS).backward()
            norms.append(clip())
            optimizer.step()
            if how == "twice":
                optimizer.step()
            if how == "model":
                each.zero_grad()
            if how == "by hand":
                for parameter in each.parameters():
                    parameter.grad = None
            if how == "in part":
                for name, parameter in each.named_parameters():
                    if "norm" in name or "experts" in name:
                        parameter.grad = None
        assert torch.equal(*norms), how
    assert_same(plain, [wanted], model, [mine])
    again = [clip() for clip in clips]
    assert again[0] < 0.11
    torch.testing.assert_close(*again)


def test_a_pass_that_does_not_come_to_all_layers(offload):
    class Skipping(Model):
        def forward(self, tokens, skipped=()):
            kept = self.layers
            self.layers = nn.ModuleList(each for number, each in enumerate(kept) if number not in skipped)
            try:
                return super().forward(tokens)
            finally:
                self.layers = kept

    plain, model = two(Skipping)
    wanted, mine = AdamW(plain.parameters(), lr=1e-2), AdamW(model.parameters(), lr=1e-2)
    handle = offload(model, mine)
    clips = (lambda: clip_grad_norm_(plain.parameters(), 0.1), lambda: handle.clip_grad_norm_(0.1))
    for each, optimizer, clip in zip((plain, model), (wanted, mine), clips, strict=True):
        for passes in [[()], [(0, 2), (4,)], [(1,)], [(), (3,)]]:
            for skipped in passes:
                each(TOKENS, skipped).backward()
            clip()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(plain, [wanted], model, [mine])


def test_parameters_of_one_number(offload):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            for layer in self.layers:
                layer.one, layer.none = nn.Parameter(torch.ones(1)), nn.Parameter(torch.tensor(1.0))
                layer.register_forward_hook(lambda layer, _, out: out.tanh() * layer.one + layer.none)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

    plain, model = two(Scaled)
    wanted, mine = AdamW(plain.parameters(), lr=1e-2), AdamW(model.parameters(), lr=1e-2)
    offload(model, mine)
    for each, optimizer in ((plain, wanted), (model, mine)):
        for _ in range(3):
            optimizer.zero_grad()
            each(torch.linspace(-1, 1, 16).view(2, 8)).backward()
            optimizer.step()
    assert_same(plain, [wanted], model, [mine])


def test_updating_in_the_backward_pass(offload):
    plain, model = two(Model)
    wanted, mine = optimizers_of("adamw", plain), optimizers_of("adamw", model)
    rules = [{"layers": "all", "weights": "disk", "moments": "disk"}]
    handle = offload(model, mine, placement=rules, step_in_backward=True)
    assert train(model, mine, 3) == train(plain, wanted, 3)
    assert_same(plain, wanted, model, mine)
    with pytest.raises(TenfoldError, match="step_in_backward=True"):
        handle.clip_grad_norm_(1.0)


def test_a_scaler_of_losses_with_gradients_that_stay(offload):
    plain, model = two(Model)
    wanted, mine = AdamW(plain.parameters(), lr=1e-2), AdamW(model.parameters(), lr=1e-2)
    offload(model, mine, placement=[{"layers": "all", "weights": "disk", "moments": "disk"}])
    for each, optimizer in ((plain, wanted), (model, mine)):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for _ in range(3):
            scaler.scale(each(TOKENS)).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(each.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert_same(plain, [wanted], model, [mine])


def test_running_it_without_gradients(offload):
    plain, model = two(Model)
    wanted, mine = AdamW(plain.parameters(), lr=1e-2), AdamW(model.parameters(), lr=1e-2)
    offload(model, mine)
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with context():
            assert torch.equal(plain(TOKENS), model(TOKENS))
    for each, optimizer in ((plain, wanted), (model, mine)):
        each(TOKENS).backward()
        optimizer.step()
    assert_same(plain, [wanted], model, [mine])


def test_a_disk_that_is_taken_away_is_one_error_and_all_is_let_go(offload, tmp_path):
    model = Model()
    mine = AdamW(model.parameters(), lr=1e-2)
    handle = offload(model, mine)
    shutil.rmtree(next(tmp_path.iterdir()))
    with pytest.raises(TenfoldError, match=r"it was removed|No such file"):
        handle.close()
    assert not [each for each in threading.enumerate() if "disk" in each.name]
    assert not {"step", "zero_grad"} & vars(mine).keys()
    assert not hasattr(model.norm.weight, "offloaded")


@pytest.mark.usefixtures("small_pieces")
def test_as_a_context(tmp_path):
    plain, model = two(Model)
    wanted, mine = AdamW(plain.parameters(), lr=1e-2), AdamW(model.parameters(), lr=1e-2)
    told = []
    with tenfold.offload(model, mine, placement=ALL, disk=[tmp_path], note=told.append) as handle:
        train(model, [mine], 2)
        assert set(handle.stall()) >= {"moments"}
    train(plain, [wanted], 2)
    assert_same(plain, [wanted], model, [mine])
    assert told[-1].startswith("offload: layers 0-4: gradients disk, moments disk, weights disk; ")


def test_nothing_grows_over_200_steps(offload, monkeypatch):
    monkeypatch.setattr(units, "PIECE", 2**22)  # fewer to move, and sooner done
    model = Model()
    mine = optimizers_of("adamw", model)
    handle = offload(model, mine)
    seen = []
    for _ in range(4):
        train(model, mine, 50, 1, lambda: handle.clip_grad_norm_(1.0))
        rss = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        files = len(os.listdir("/proc/self/fd"))
        seen.append((threading.active_count(), files, handle.bytes(), rss))
    assert [each[:-1] for each in seen] == [seen[0][:-1]] * 4
    assert seen[-1][-1] - seen[0][-1] < 2**20


def test_experts_in_a_list_are_not_taken_for_layers(offload):
    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

        def forward(self, x):
            return x + sum(expert(x) for expert in self.experts).tanh()

    model = nn.Module()
    model.blocks = nn.ModuleList(Mixture() for _ in range(2))
    handle = offload(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    assert {name for name, _ in handle.placement.tiers} == {"layers.0", "layers.1"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none")
def test_on_a_gpu_with_host_and_disk(offload):
    plain, model = (each.cuda() for each in two(Model))
    wanted, mine = optimizers_of("adamw", plain), optimizers_of("adamw", model)
    rules = [*ALL, {"layers": "0-2", "weights": "host", "gradients": "host", "moments": "host"}]
    handle = offload(model, mine, placement=rules)
    for each, optimizers, clip in (
        (plain, wanted, lambda: clip_grad_norm_(plain.parameters(), 0.1)),
        (model, mine, lambda: handle.clip_grad_norm_(0.1)),
    ):
        for step in range(3):
            each((TOKENS + step).cuda()).backward()
            each(TOKENS.cuda()).backward()
            clip()
            optimizers[0].step()
            optimizers[0].zero_grad()
    state = model.state_dict()
    assert state["layers.1.experts"].device.type == "cpu"
    assert handle.bytes()["host"] > 0
    model.load_state_dict(state)
    mine[0].load_state_dict(mine[0].state_dict())
    handle.close()
    assert {each.device.type for each in model.parameters()} == {"cuda"}
    assert_same(plain, wanted, model, mine)
