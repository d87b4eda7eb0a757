"""Context ranks: attention over sequences that several ranks split, equal to that of one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ranks import on_ranks
from tenfold.nn.documents import document_mask
from tenfold.parallel.blocks import _plain, _plain_backward, attend_block, attend_block_backward
from tenfold.parallel.zigzag import Part, own_chunks, parts_of, parts_within

CASES = "parallel.cases_context"


def seen_by(ranks: int, rank: int, batch: int, whole: int, parts: list[list[Part]]) -> torch.Tensor:
    """How often each query of a rank sees each key, [B, T, T], by place in the whole sequence."""
    seen = torch.zeros(batch, whole, whole, dtype=torch.int64)
    places = torch.arange(whole)[None]
    mine = own_chunks(places, ranks, rank)[0]
    for other, of_rank in enumerate(parts):
        theirs = own_chunks(places, ranks, other)[0]
        for part in of_rank:
            shape = (len(mine[part.queries]), len(theirs[part.keys]))
            block = torch.ones(shape, dtype=torch.int64)
            assert not part.causal or shape[0] == shape[1]
            block = block.tril() if part.causal else block
            for row in range(batch)[part.rows]:
                seen[row, mine[part.queries][:, None], theirs[part.keys]] += block
    return seen


def everything(ranks: int, batch: int, length: int, causal: bool, starts: list[int] | None) -> torch.Tensor:
    """What all ranks see together."""
    whole = ranks * length
    total = torch.zeros(batch, whole, whole, dtype=torch.int64)
    for rank in range(ranks):
        here = (ranks, rank, batch, length)
        parts = parts_of(*here, causal) if starts is None else parts_within(*here, starts, causal)
        total += seen_by(ranks, rank, batch, whole, parts)
    return total


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_query_sees_each_of_its_keys_once_and_the_work_is_even(ranks, causal):
    whole = 4 * ranks
    expected = torch.ones(whole, whole, dtype=torch.int64)
    expected = expected.tril() if causal else expected
    assert torch.equal(everything(ranks, 2, 4, causal, None), expected.expand(2, -1, -1))
    for rank in range(ranks):
        parts = parts_of(ranks, rank, 1, 4, causal)
        work = [len(range(4)[p.queries]) * len(range(4)[p.keys]) / (1 + p.causal) for each in parts for p in each]
        assert sum(work) == whole**2 / ranks / (1 + causal)


@given(st.integers(2, 4), st.integers(1, 3), st.booleans(), st.lists(st.integers(1, 10**6), max_size=20), st.booleans())
@settings(max_examples=60)
def test_documents_that_end_anywhere_are_seen_whole_and_no_other(ranks, half, causal, ends, batched):
    batch, length = 3 if batched else 1, 2 * half
    whole = ranks * length
    starts = sorted({end % (batch * whole) for end in ends} | {row * whole for row in range(batch + 1)})
    mask = document_mask(torch.tensor(starts, dtype=torch.int32), batch, whole, causal)
    assert torch.equal(everything(ranks, batch, length, causal, starts), mask[:, 0].long())


def test_where_documents_are_short_most_blocks_are_skipped():
    starts = list(range(0, 64 + 1, 8))  # a document for each chunk
    for rank in range(4):
        parts = parts_within(4, rank, 1, 16, starts, True)
        assert [len(each) for each in parts] == [2 if other == rank else 0 for other in range(4)]


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize(("queries", "causal"), [(9, False), (7, True)])
def test_without_a_kernel_attention_to_a_block_is_the_same(monkeypatch, queries, causal, key_heads):
    monkeypatch.setattr("tenfold.parallel.blocks.PIECE", 4)
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(2, heads, length, 8, generator=generator, dtype=torch.float64)
        for heads, length in ((4, queries), (key_heads, 7), (key_heads, 7), (4, queries))
    )
    out, lse = attend_block(q, k, v, causal)
    mine_out, mine_lse = _plain(q, k, v, causal)
    torch.testing.assert_close((mine_out, mine_lse), (out, lse), rtol=1e-12, atol=1e-12)
    expected = attend_block_backward(grad, q, k, v, out, lse, causal)
    grad_q, grad_k, grad_v = _plain_backward(grad, q, k, v, out, lse, causal)
    group = (key_heads, 4 // key_heads)
    found = (grad_q, *(x.unflatten(1, group).sum(2) for x in (grad_k, grad_v)))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none")
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("causal", [True, False])
def test_the_kernel_for_cuda_attends_to_a_block_as_plain_products_do(causal, key_heads):
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(2, length, heads, 64, generator=generator).to("cuda", torch.bfloat16).transpose(1, 2)
        for heads, length in ((4, 200), (key_heads, 200), (key_heads, 200), (4, 200))
    )
    k, v = (x if causal else x[:, :, :70] for x in (k, v))
    out, lse = attend_block(q, k, v, causal)
    plain_out, plain_lse = _plain(*(x.double() for x in (q, k, v)), causal)
    torch.testing.assert_close(out.double(), plain_out, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.double(), plain_lse, rtol=1e-3, atol=1e-3)
    found = attend_block_backward(grad, q, k, v, out, lse, causal)
    expected = attend_block_backward(*(x.double() for x in (grad, q, k, v)), plain_out, plain_lse, causal)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_attention_over_the_ring_is_that_of_whole_sequences(ranks):
    on_ranks(ranks, f"{CASES}:attention")


SHAPES = ["llama", "gpt", "documents", "learned documents", "mixture", "encoder", "encoder of documents"]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_model_on_context_ranks_is_that_of_one_rank(ranks):
    on_ranks(ranks, f"{CASES}:models", torch.float64, 1e-10, ["none"], SHAPES)


def test_recompute_changes_nothing_on_context_ranks():
    on_ranks(2, f"{CASES}:models", torch.float64, 1e-10, ["selective", "full"], ["llama", "documents", "mixture"])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_a_model_of_narrow_numbers_on_context_ranks_is_near(dtype, tolerance):
    on_ranks(2, f"{CASES}:models", dtype, tolerance, ["none"], ["llama", "learned documents"])


def test_the_operator_keeps_what_pytorch_asks_of_one():
    on_ranks(2, f"{CASES}:operator")


@pytest.mark.slow
def test_compiled_blocks_on_context_ranks_do_the_same():
    on_ranks(2, f"{CASES}:compiled")
