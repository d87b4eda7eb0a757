"""What is masked, and that it hangs on the sample alone; the loss over masked places."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tenfold.config.model import ModelConfig
from tenfold.nn.objective import cut_sequences, loss_sum, make_example

VOCABULARY, MASK = 1000, 999


def encoder_config(**fields):
    return ModelConfig(vocab_size=VOCABULARY, objective="masked", mask_token=MASK, **fields)


def batch_of(count, positions=64, seed=0):
    return torch.randint(0, MASK, (count, positions + 1), generator=torch.Generator().manual_seed(seed))


def test_every_sequence_predicts_its_share_and_reads_the_rest_unchanged():
    batch = batch_of(50)
    example = make_example(batch, encoder_config(), 1, 0)
    assert example.places.shape == example.targets.shape == (50, round(0.15 * 64))
    assert (example.places.diff(dim=1) > 0).all()
    assert torch.equal(example.targets, batch[:, :-1].gather(1, example.places))
    left = torch.ones_like(example.inputs).scatter(1, example.places, 0).bool()
    assert torch.equal(example.inputs[left], batch[:, :-1][left])


@pytest.mark.parametrize(("share", "positions", "count"), [(0.01, 8, 1), (0.5, 8, 4), (0.99, 8, 8), (0.15, 1, 1)])
def test_at_least_one_place_is_predicted(share, positions, count):
    example = make_example(batch_of(3, positions), encoder_config(mask_share=share), 1, 0)
    assert example.places.shape == (3, count)


def test_eight_of_ten_read_the_mask_one_a_drawn_token_one_itself():
    example = make_example(batch_of(4000), encoder_config(), 1, 0)
    read = example.inputs.gather(1, example.places)
    masked, same = read == MASK, read == example.targets
    drawn = read[~masked & ~same]
    assert masked.double().mean() == pytest.approx(0.8, abs=0.005)
    assert same.double().mean() == pytest.approx(0.1, abs=0.005)
    assert len(drawn) / read.numel() == pytest.approx(0.1, abs=0.005)
    # Drawn evenly from the vocabulary: each tenth of it as often as another.
    assert torch.histc(drawn.double(), 10, 0, VOCABULARY).div(len(drawn)).sub(0.1).abs().max() < 0.02


def test_all_positions_are_predicted_equally_often():
    places = make_example(batch_of(4000), encoder_config(), 1, 0).places
    often = torch.bincount(places.flatten(), minlength=64) / 4000
    assert often.sub(10 / 64).abs().max() < 0.03


def test_masks_hang_on_seed_and_sample_alone():
    config, batch = encoder_config(), batch_of(12)
    whole = make_example(batch, config, 1, 100)
    for first, count in ((0, 5), (5, 1), (6, 6)):
        part = make_example(batch[first : first + count], config, 1, 100 + first)
        for mine, theirs in zip(part, whole, strict=True):
            assert torch.equal(mine, theirs[first : first + count])
    other = make_example(batch_of(12, seed=9), config, 1, 100)
    assert torch.equal(other.places, whole.places)
    assert not torch.equal(make_example(batch, config, 2, 100).places, whole.places)
    assert not torch.equal(make_example(batch, config, 1, 112).places, whole.places)
    assert len({tuple(row) for row in whole.places.tolist()}) == 12


def test_ends_of_documents_stay_where_documents_are_masked():
    batch = batch_of(3000, positions=16) % 4  # every fourth token is an end, and drawing four tokens draws it often
    config = ModelConfig(vocab_size=5, objective="masked", mask_token=4, mask_share=0.9, document_end=0)
    example = make_example(batch, config, 1, 0)
    assert torch.equal(example.inputs == 0, batch[:, :-1] == 0)
    without = make_example(batch, config.model_copy(update={"document_end": None}), 1, 0)
    assert not torch.equal(without.inputs == 0, batch[:, :-1] == 0)


def test_micro_batches_are_the_rows_of_the_batch():
    example = make_example(batch_of(7), encoder_config(), 1, 0)
    parts = list(example.split(3))
    assert [len(part.inputs) for part in parts] == [3, 3, 1]
    for index in range(3):
        assert torch.equal(torch.cat([part[index] for part in parts]), example[index])


@pytest.mark.parametrize("chunk", [4, 1000])
def test_the_loss_and_its_gradients_are_torchs_cross_entropy_at_masked_places(tiny_decoder, chunk):
    model = tiny_decoder(objective="masked", mask_token=49, embedding_width=8)
    torch.nn.init.normal_(model.output_bias)
    batch = batch_of(3, 20) % 50
    example = make_example(batch, model.config, 1, 0)
    hidden, _ = model(example.inputs)
    loss_sum(model, hidden, example, chunk).backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    logits = model.logits(model(example.inputs)[0])
    wanted = torch.full_like(example.inputs, -100).scatter(1, example.places, example.targets)
    F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum").backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


def test_one_masked_token_more_changes_no_other_masks_loss(tiny_decoder):
    model = tiny_decoder(objective="masked", mask_token=49)
    example = make_example(batch_of(4, 20) % 50, model.config, 1, 0)
    hidden, _ = model(example.inputs)
    parts = []
    for place in range(example.places.shape[1]):
        one = example._replace(targets=example.targets[:, place, None], places=example.places[:, place, None])
        parts.append(loss_sum(model, hidden, one, 1000))
    torch.testing.assert_close(loss_sum(model, hidden, example, 1000), torch.stack(parts).sum())


def test_cut_samples_keep_every_token_and_every_target_once():
    batch = torch.arange(26).view(2, 13)
    cut = cut_sequences(batch, 4)
    assert cut.tolist() == [list(range(start, start + 5)) for start in (0, 4, 8, 13, 17, 21)]
    whole = make_example(batch, ModelConfig(vocab_size=30), 1, 0)
    pieces = make_example(cut, ModelConfig(vocab_size=30), 1, 0)
    for mine, theirs in zip(pieces[:2], whole[:2], strict=True):
        assert mine.flatten().tolist() == theirs.flatten().tolist()
