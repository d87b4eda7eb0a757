"""Stages under Lightning; stopped and resumed anywhere the weights are the same to the last bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import tenfold
from tenfold.errors import TenfoldError
from tenfold.sharing.tying import tables, tied_pattern

pl = pytest.importorskip("lightning.pytorch")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

from tenfold.integrations.lightning import SharingCallback  # noqa: E402

STAGES = [("30%", "all"), (4, {"groups": 2}), ("100%", "none")]  # of 6 steps: 2, 2, 2


class Module(pl.LightningModule):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.seen = []

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x

    def training_step(self, batch, _):
        return (self(batch) - batch.flip(-1)).square().mean()

    def validation_step(self, batch, _):
        self.log("validation", self(batch).square().mean())

    def on_before_optimizer_step(self, optimizer):
        (pattern,) = {tied_pattern(column) for column in tables(self.layers).values()}
        self.seen.append(pattern.stored_blocks)
        assert {p for group in optimizer.param_groups for p in group["params"]} == set(self.parameters())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


# A step is an epoch, since Lightning begins a broken epoch's data anew.
DATA = torch.linspace(-1, 1, 4 * 8).view(4, 8)


def fit(module, folder, callback, resume=None, **more):
    saving = pl.callbacks.ModelCheckpoint(
        dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1, save_on_train_epoch_end=False
    )
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[callback, saving], default_root_dir=folder, accumulate_grad_batches=2,
        **{"max_steps": 6, **more},
    )  # fmt: skip
    trainer.fit(module, DataLoader(DATA, batch_size=2), ckpt_path=resume)
    return trainer


def equal(mine, theirs):
    mine, theirs = mine.state_dict(), theirs.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder, module = tmp_path_factory.mktemp("run"), Module()
    trainer = fit(module, folder, SharingCallback("layers", STAGES))
    return folder, module, trainer


def test_stages_follow_one_another(uninterrupted):
    assert uninterrupted[1].seen == [1, 1, 2, 2, 4, 4]


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
def test_a_resumed_run_ends_with_the_same_weights_and_state_to_the_last_bit(uninterrupted, tmp_path, step):
    folder, module, trainer = uninterrupted
    again = Module(seed=1)
    resumed = fit(again, tmp_path, SharingCallback("layers", STAGES), resume=folder / f"step={step}.ckpt")
    assert again.seen == [1, 1, 2, 2, 4, 4][step:]
    assert equal(again, module)
    mine, theirs = (one.optimizers[0].state_dict()["state"] for one in (resumed, trainer))
    for number, state in theirs.items():
        assert all(torch.equal(value, mine[number][key]) for key, value in state.items())


def test_the_run_is_a_loop_of_ones_own_with_share_and_delink(uninterrupted):
    module = Module()
    tenfold.share(module.layers)
    (optimizer,), (schedule,) = module.configure_optimizers()
    tenfold.divide_updates(module.layers, optimizer)
    for step in range(6):
        for batch in DATA.split(2):
            (module.training_step(batch, 0) / 2).backward()
        optimizer.step()
        schedule["scheduler"].step()
        optimizer.zero_grad()
        for end, pattern in ((2, {"groups": 2}), (4, "none")):
            if step + 1 == end:
                tenfold.delink(module.layers, optimizer, pattern)
    assert equal(module, uninterrupted[1])


def test_a_run_counted_in_epochs(tmp_path):
    module = Module()
    fit(module, tmp_path, SharingCallback("layers", [("50%", "all"), ("100%", "none")]), max_steps=-1,
        max_epochs=6)  # fmt: skip
    assert module.seen == [1, 1, 1, 4, 4, 4]


def test_a_checkpoint_of_any_stage_is_evaluated_as_it_was(uninterrupted, tmp_path):
    folder = uninterrupted[0]
    for step in (1, 3, 5):
        callback = SharingCallback("layers", STAGES)
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, callbacks=[callback],
            default_root_dir=tmp_path,
        )  # fmt: skip
        module, by_hand = Module(seed=1), Module(seed=2)
        (found,) = trainer.validate(
            module, DataLoader(DATA, batch_size=4), ckpt_path=folder / f"step={step}.ckpt", verbose=False
        )
        by_hand.load_state_dict(torch.load(folder / f"step={step}.ckpt", weights_only=False)["state_dict"])
        assert equal(module, by_hand)
        assert found["validation"] == pytest.approx(by_hand(DATA).square().mean().item(), rel=1e-6)


def test_a_run_without_end_has_no_share_of_it(tmp_path):
    with pytest.raises(TenfoldError, match="needs max_steps or max_epochs"):
        fit(Module(), tmp_path, SharingCallback("layers", STAGES), max_steps=-1, max_epochs=-1)


def test_a_checkpoint_made_without_the_callback_is_refused(tmp_path):
    fit(Module(), tmp_path, pl.Callback(), max_steps=1)
    with pytest.raises(TenfoldError, match="made without SharingCallback"):
        fit(Module(), tmp_path, SharingCallback("layers", STAGES), resume=tmp_path / "step=1.ckpt")
