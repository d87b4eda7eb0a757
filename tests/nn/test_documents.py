"""Documents inside sequences: each as if it stood alone."""

from __future__ import annotations

import pytest
import torch

from tenfold.nn.documents import attend_within, document_mask, documents_of
from tenfold.nn.loss import cross_entropy_sum

END = 7

ROWS = [
    [1, 2, END, 3, 4, 5, END, 6, 8, 9, 1, 2],  # ends inside a document
    [END, 1, END, END, 2, 3, 4, 5, 6, 8, 9, END],  # empty documents, and an end at both edges
    [1, 2, 3, 4, 5, 6, 8, 9, 1, 2, 3, 4],  # one document
]


def cut(row: list[int]) -> list[list[int]]:
    """The documents of a row, each with the token that ends it."""
    documents: list[list[int]] = [[]]
    for token in row:
        documents[-1].append(token)
        if token == END:
            documents.append([])
    return [document for document in documents if document]


def test_documents_begin_with_a_sequence_and_after_each_end() -> None:
    found = documents_of(torch.tensor(ROWS), END)
    starts = [0]
    for row in ROWS:
        for document in cut(row):
            starts.append(starts[-1] + len(document))
    assert found.starts.tolist() == starts
    assert found.positions.tolist() == [[place for part in cut(row) for place in range(len(part))] for row in ROWS]


def model_of(tiny_decoder, shape, recompute="none"):
    fields = {
        "rotary": {"positions": "rotary", "heads": 4, "kv_heads": 2, "qk_norm": True},
        "learned": {"positions": "learned", "bias": True, "norm": "layernorm"},
        "moe": {"moe": {"experts": 4, "prototypes": 2}},
        "encoder": {"positions": "learned", "objective": "masked", "mask_token": 49},
    }[shape]
    masked = tiny_decoder("sandwich", document_end=END, recompute=recompute, **fields)
    plain = tiny_decoder("sandwich", **fields)
    return masked, plain


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def check_alone(masked, plain):
    """Logits and gradients of whole rows under the mask, and of every document in a forward pass of its own."""
    tokens = torch.tensor(ROWS)
    targets = torch.randint(0, 50, tokens.shape, generator=torch.Generator().manual_seed(0))
    hidden, _ = masked(tokens)
    loss = cross_entropy_sum(hidden, masked.output_weight, targets, 50)
    loss.backward()
    total = torch.zeros((), dtype=torch.float64)
    for row, wanted, whole in zip(ROWS, targets, hidden, strict=True):
        start = 0
        for document in cut(row):
            stop = start + len(document)
            alone, _ = plain(torch.tensor([document]))
            torch.testing.assert_close(whole[start:stop], alone[0], rtol=1e-10, atol=1e-10)
            total = total + cross_entropy_sum(alone, plain.output_weight, wanted[None, start:stop], 50)
            start = stop
    total.backward()
    torch.testing.assert_close(loss, total, rtol=1e-10, atol=1e-10)
    expected = gradients(plain)
    for name, gradient in gradients(masked).items():
        if gradient is None:  # an encoder's head, which is not asked here
            assert expected[name] is None
            continue
        torch.testing.assert_close(gradient, expected[name], rtol=1e-8, atol=1e-10, msg=name)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("shape", ["rotary", "learned", "moe", "encoder"])
def test_each_document_is_as_if_it_stood_alone(tiny_decoder, shape, recompute):
    check_alone(*model_of(tiny_decoder, shape, recompute))


def test_without_the_mask_a_document_sees_those_before_it(tiny_decoder):
    masked, plain = model_of(tiny_decoder, "rotary")
    tokens = torch.tensor(ROWS[:1])
    whole, other = masked(tokens)[0], plain(tokens)[0]
    torch.testing.assert_close(whole[:, :3], other[:, :3])
    assert not torch.allclose(whole[:, 3:], other[:, 3:])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_attention_by_document_equals_attention_under_the_mask(sample, causal, dtype):
    tokens = torch.tensor(ROWS)
    starts = documents_of(tokens, END).starts
    document = (tokens == END).cumsum(1) - (tokens == END).int()
    expected_mask = document[:, :, None] == document[:, None, :]
    if causal:
        expected_mask &= torch.ones(12, 12, dtype=torch.bool).tril()
    mask = document_mask(starts, 3, 12, causal)
    assert torch.equal(mask[:, 0], expected_mask)
    q, k, v = (sample(3, 12, 2, 8, seed=seed, dtype=dtype).transpose(1, 2).requires_grad_() for seed in range(3))
    weights = sample(3, 2, 12, 8, seed=9, dtype=dtype)
    mine = attend_within(q, k, v, starts, causal)
    found = torch.autograd.grad((mine * weights).sum(), (q, k, v))
    scores = (q.double() @ k.double().transpose(2, 3) / 8**0.5).masked_fill(~mask, -torch.inf)
    plain = scores.softmax(-1) @ v.double()
    expected = torch.autograd.grad((plain * weights).sum(), (q, k, v))
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(mine.double(), plain, rtol=tolerance, atol=tolerance)
    for mine_grad, plain_grad in zip(found, expected, strict=True):
        torch.testing.assert_close(mine_grad.double(), plain_grad.double(), rtol=tolerance, atol=tolerance)


def test_the_operator_keeps_what_pytorch_asks_of_one(sample):
    """Fake tensors, autograd and tracing agree with the real thing."""
    starts = documents_of(torch.tensor(ROWS), END).starts
    q, k, v = (sample(3, 12, 2, 8, seed=seed).transpose(1, 2).requires_grad_() for seed in range(3))
    torch.library.opcheck(torch.ops.tenfold.document_attention.default, (q, k, v, starts, True))


@pytest.mark.slow
def test_compiled_blocks_do_the_same(tiny_decoder):
    masked, plain = model_of(tiny_decoder, "rotary")
    for block in masked.layers:
        block.compile()
    check_alone(masked, plain)
