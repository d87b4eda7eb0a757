"""The training step against plain references."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tenfold.config.model import ModelConfig
from tenfold.config.run import OptimConfig, RunConfig, TrainingConfig
from tenfold.errors import TenfoldError
from tenfold.nn.decoder import Decoder
from tenfold.nn.init import initialize
from tenfold.nn.loss import IGNORE
from tenfold.sharing.patterns import Pattern
from tenfold.sharing.tying import Sharing, tie
from tenfold.training.optimizers import build_optimizers
from tenfold.training.step import train_step

VOCABULARY = 50


def config_of(micro: int = 0, moe: bool = False, clip: float = 0.0, name: str = "adamw") -> RunConfig:
    extra = {"moe": {"experts": 4, "prototypes": 2, "balance_loss": 0.05, "z_loss": 0.01}} if moe else {}
    model = ModelConfig(
        layers=4, hidden=16, heads=2, ffn=32, activation="gelu", vocab_size=VOCABULARY, vocab_multiple=8, **extra
    )
    return RunConfig(
        model=model,
        training=TrainingConfig(steps=10, batch_size=8, micro_batch_size=micro, precision="fp32"),
        optim=OptimConfig(name=name, lr=1e-2, clip=clip, weight_decay=0.1),
    )


def model_of(config: RunConfig, sharing: str) -> Decoder:
    model = Decoder(config.model, 16)
    tie(model.layers, Sharing(Pattern.parse(sharing, 4)))
    initialize(model, 1)
    return model


def batch_of(seed: int = 0, ragged: bool = False) -> Tensor:
    batch = torch.randint(0, VOCABULARY, (8, 13), generator=torch.Generator().manual_seed(seed))
    if ragged:  # sequences of different lengths: what follows is neither read as a target nor counted
        for row, length in enumerate((13, 3, 7, 12, 5, 13, 2, 9)):
            batch[row, length:] = IGNORE
    return batch


def gradients_of(model: Decoder, config: RunConfig, batch: Tensor) -> dict[str, Tensor]:
    """The gradients that a step hands to the optimizer."""
    caught: dict[str, Tensor] = {}

    class Catch(torch.optim.SGD):
        def step(self, closure=None):
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    caught[name] = parameter.grad.clone()

    train_step(model, [Catch(model.parameters(), lr=1.0)], batch, 1, 1e-2, config)
    return caught


@pytest.mark.parametrize("micro", [1, 2, 4])
@pytest.mark.parametrize("moe", [False, True])
def test_gradients_do_not_depend_on_how_the_batch_is_cut(micro: int, moe: bool) -> None:
    whole = gradients_of(model_of(config_of(moe=moe), "all"), config_of(moe=moe), batch_of())
    cut = gradients_of(model_of(config_of(moe=moe), "all"), config_of(micro, moe=moe), batch_of())
    for name, gradient in whole.items():
        torch.testing.assert_close(cut[name], gradient, rtol=1e-4, atol=1e-6)


def test_a_step_equals_a_plain_loop_over_torch_functions() -> None:
    config = config_of(clip=0.5)
    model = model_of(config, "none")
    plain = copy.deepcopy(model)
    names = [name for name, _ in plain.named_parameters()]
    decayed = [p for n, p in plain.named_parameters() if n.startswith("layers") and p.dim() == 2]
    others = [p for n, p in plain.named_parameters() if not (n.startswith("layers") and p.dim() == 2)]
    reference = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2, betas=(0.9, 0.95)
    )
    optimizers = build_optimizers(model, config.optim)
    for step in range(3):
        batch = batch_of(step)
        result = train_step(model, optimizers, batch, step + 1, 1e-2, config)
        logits = plain.logits(plain(batch[:, :-1])[0])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        reference.step()
        reference.zero_grad()
        assert result.loss == pytest.approx(loss.item(), rel=1e-6)
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    for name, mine, theirs in zip(names, model.parameters(), plain.parameters(), strict=True):
        # A rate of 1e-2, and gradients near zero, whose sign one CPU's sums have otherwise than another's.
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=5e-6, msg=name)


def test_a_shared_block_trains_on_the_mean_of_its_layers_gradients() -> None:
    config = config_of(moe=True)
    shared = model_of(config, "all")
    free = Decoder(config.model, 16)
    for target, source in zip(free.layers, shared.layers, strict=True):
        target.load_state_dict(source.state_dict())
    free.embedding.load_state_dict(shared.embedding.state_dict())
    free.norm.load_state_dict(shared.norm.state_dict())
    mine = gradients_of(shared, config, batch_of())
    each = gradients_of(free, config, batch_of())
    for name, gradient in mine.items():
        if name.startswith("layers.0."):
            leaf = name.removeprefix("layers.0.")
            mean = torch.stack([each[f"layers.{layer}.{leaf}"] for layer in range(4)]).mean(0)
            torch.testing.assert_close(gradient, mean, rtol=1e-4, atol=1e-6, msg=name)
        else:
            torch.testing.assert_close(gradient, each[name], rtol=1e-4, atol=1e-6, msg=name)


def test_the_norm_counts_a_shared_block_once() -> None:
    config = config_of()
    model = model_of(config, "all")
    caught = gradients_of(model, config, batch_of())
    again = train_step(model_of(config, "all"), build_optimizers(model, config.optim), batch_of(), 1, 1e-2, config)
    by_hand = sum(float(gradient.double().square().sum()) for gradient in caught.values()) ** 0.5
    assert again.grad_norm == pytest.approx(by_hand, rel=1e-5)


@pytest.mark.parametrize("micro", [0, 1, 2])
def test_the_loss_is_a_sum_over_valid_tokens_divided_by_their_count(micro: int) -> None:
    config = config_of(micro)
    model, batch = model_of(config, "none"), batch_of(ragged=True)
    # A masked place is read as token 0; it comes after all that counts, so nothing that counts sees it.
    model.register_forward_pre_hook(lambda _, arguments: (arguments[0].clamp(min=0),))
    reference = copy.deepcopy(model).double()
    reference.dtype = torch.float64
    logits = reference.logits(reference(batch[:, :-1])[0])
    every = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="none", ignore_index=IGNORE)
    expected = every.sum() / (batch[:, 1:] != IGNORE).sum()
    result = train_step(model, build_optimizers(model, config.optim), batch, 1, 1e-2, config)
    assert result.loss == pytest.approx(expected.item(), rel=1e-5)


def test_a_step_that_is_not_finite_changes_nothing_and_is_named() -> None:
    config = config_of()
    model = model_of(config, "none")
    optimizers = build_optimizers(model, config.optim)
    train_step(model, optimizers, batch_of(), 1, 1e-2, config)
    with torch.no_grad():
        model.layers[2].attention.wo.weight[0, 0] = torch.inf
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    moments = copy.deepcopy(list(optimizers[0].state.values()))
    with pytest.raises(TenfoldError, match=r"step 2: loss nan.*layers\."):
        train_step(model, optimizers, batch_of(), 2, 1e-2, config)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name
        assert parameter.grad is None
    for state, former in zip(optimizers[0].state.values(), moments, strict=True):
        assert all(torch.equal(state[key], former[key]) for key in state)


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon"])
def test_every_optimizer_learns_a_repeated_batch(name: str) -> None:
    config = config_of(moe=True, name=name, clip=1.0)
    model = model_of(config, "all")
    optimizers = build_optimizers(model, config.optim)
    # Adafactor moves by a share of each weight's size, so it wants a larger rate.
    rate = 0.1 if name == "adafactor" else 1e-2
    losses = [train_step(model, optimizers, batch_of(), step, rate, config).loss for step in range(1, 16)]
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("micro", [0, 1, 4])
def test_a_step_on_cut_samples_is_a_step_on_their_pieces(micro: int) -> None:
    batch = batch_of()
    pieces = torch.stack([row[start : start + 5] for row in batch for start in (0, 4, 8)])
    cut_model, plain = model_of(config_of(micro), "none"), model_of(config_of(), "none")
    found = train_step(
        cut_model, build_optimizers(cut_model, config_of().optim), batch, 1, 1e-2, config_of(micro), 0, 3
    )
    wanted = train_step(plain, build_optimizers(plain, config_of().optim), pieces, 1, 1e-2, config_of())
    assert found.loss == pytest.approx(wanted.loss, rel=1e-6)
    assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-5)
    assert found.tokens == wanted.tokens == batch[:, 1:].numel()
