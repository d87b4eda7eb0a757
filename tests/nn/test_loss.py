"""The chunked cross-entropy against torch's own, in float64, value and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tenfold.nn.loss import IGNORE, cross_entropy_sum

TOKENS, WIDTH, VOCAB, PADDED = 13, 8, 11, 16


def example(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(PADDED, WIDTH, generator=generator, dtype=dtype, requires_grad=True)
    targets = torch.randint(VOCAB, (TOKENS,), generator=generator)
    targets[3] = targets[7] = IGNORE
    return hidden, weight, targets


def reference(hidden, weight, targets):
    return F.cross_entropy(hidden @ weight[:VOCAB].t(), targets, ignore_index=IGNORE, reduction="sum")


@pytest.mark.parametrize("chunk", [1, 2, 5, TOKENS, 100])
def test_value_and_both_gradients_equal_torchs_for_any_chunk(chunk):
    hidden, weight, targets = example()
    ours = cross_entropy_sum(hidden, weight, targets, VOCAB, chunk)
    theirs = reference(hidden, weight, targets)
    torch.testing.assert_close(ours, theirs)
    found = torch.autograd.grad(3 * ours, (hidden, weight))
    torch.testing.assert_close(found, torch.autograd.grad(3 * theirs, (hidden, weight)))


def test_it_takes_batches_of_sequences_as_they_are():
    hidden, weight, targets = example()
    shaped = cross_entropy_sum(hidden[:12].view(3, 4, WIDTH), weight, targets[:12].view(3, 4), VOCAB, 5)
    torch.testing.assert_close(shaped, reference(hidden[:12], weight, targets[:12]))


def test_an_ignored_token_gets_no_gradient():
    hidden, weight, targets = example()
    cross_entropy_sum(hidden, weight, targets, VOCAB, 4).backward()
    ignored = targets == IGNORE
    assert not hidden.grad[ignored].any()
    assert hidden.grad[~ignored].any(1).all()


def test_when_all_tokens_are_ignored_loss_and_gradients_are_zero():
    hidden, weight, targets = example()
    loss = cross_entropy_sum(hidden, weight, torch.full_like(targets, IGNORE), VOCAB, 4)
    loss.backward()
    assert loss == 0
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_rows_that_pad_the_vocabulary_get_no_gradient_whatever_they_hold():
    hidden, weight, targets = example()
    with torch.no_grad():
        weight[VOCAB:] = 50 * hidden[0]  # would win every prediction if it counted
    cross_entropy_sum(hidden, weight, targets, VOCAB, 4).backward()
    assert not weight.grad[VOCAB:].any()
    assert weight.grad[:VOCAB].any(1).all()


def test_probabilities_add_up_to_one_over_the_real_vocabulary():
    hidden, weight, _ = example()
    total = sum(
        torch.exp(-cross_entropy_sum(hidden[:1], weight, torch.tensor([token]), VOCAB)).item() for token in range(VOCAB)
    )
    assert total == pytest.approx(1, abs=1e-12)


def test_a_loss_of_very_large_logits_is_finite():
    hidden, weight, targets = example()
    loss = cross_entropy_sum(hidden * 1e4, weight, targets, VOCAB, 4)
    torch.testing.assert_close(loss, reference(hidden * 1e4, weight, targets))


def test_bf16_hidden_states_give_an_fp32_loss_near_the_exact_one():
    hidden, weight, targets = example(torch.float32)
    ours = cross_entropy_sum(hidden.bfloat16(), weight, targets, VOCAB, 4)
    assert ours.dtype == torch.float32
    assert ours.item() == pytest.approx(reference(hidden, weight, targets).item(), rel=0.02)


def test_without_gradients_none_are_computed():
    hidden, weight, targets = example()
    hidden, weight = hidden.detach(), weight.detach()
    with Recorder() as recorder:
        cross_entropy_sum(hidden, weight, targets, VOCAB, 4)
    assert not any(shape == (PADDED, WIDTH) for shape in recorder.shapes)


class Recorder(TorchDispatchMode):
    """The shape of every tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and "t.default" not in str(function):
            self.shapes.append(tuple(out.shape))
        return out


@pytest.mark.parametrize("chunk", [2, 7])
def test_never_more_than_one_chunk_of_logits_exists(chunk):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 4, generator=generator, requires_grad=True)
    weight = torch.randn(512, 4, generator=generator, requires_grad=True)
    targets = torch.randint(500, (64,), generator=generator)
    with Recorder() as recorder:
        cross_entropy_sum(hidden, weight, targets, 500, chunk).backward()
    logits = [shape for shape in recorder.shapes if len(shape) == 2 and shape[1] in (500, 512)]
    assert max(shape[0] for shape in logits) == chunk
    assert max(torch.Size(shape).numel() for shape in recorder.shapes) == max(chunk * 512, 512 * 4)
