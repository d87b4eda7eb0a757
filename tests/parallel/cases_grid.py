"""What a grid of tensor ranks sends. Run by `test_grid.py`."""

from __future__ import annotations

from collections import Counter

import torch

from parallel.cases_tensor import (
    BATCH,
    CHUNK,
    LENGTH,
    SHAPES,
    example_of,
    loss_of,
    single_precision,
    split_model,
    whole_model,
)
from tenfold.evaluation.generation import generate_batch
from tenfold.nn.objective import loss_sum
from tenfold.parallel.traffic import Collectives


def counted_collectives() -> list[Counter[str]]:
    """Calls of the layers and embedding, the loss, the backward pass, and of a pass without gradients, with logits."""
    shape = {"layers": 3, "heads": 4, "ffn": 14}
    model, _ = split_model(shape, whole_model(shape), grid=True)
    example = example_of(model.config)
    found = []
    with Collectives() as seen:
        hidden = model(example.inputs)[0]
    assert hidden.shape == (BATCH // 2, LENGTH // 2, 20)
    blocks = [parameter for name, parameter in model.layers[0].named_parameters() if parameter.dim() == 2]
    sent = [size for name, size in seen.calls if name == "broadcast"]
    assert sorted(sent) == sorted(3 * 2 * [block.numel() for block in blocks])
    assert sum(map(torch.numel, blocks)) == (4 * 16 * 20 + 3 * 14 * 20) // 4
    assert {size for name, size in seen.calls if name == "all_gather_into_tensor"} == {hidden.numel()}
    found.append(seen.counts)
    with Collectives() as seen:
        loss = loss_sum(model, hidden, example, CHUNK)
    assert max(size for name, size in seen.calls if name == "all_reduce") == 2 * CHUNK
    found.append(seen.counts)
    with Collectives() as seen:
        loss.backward()
    found.append(seen.counts)
    with Collectives() as seen, torch.no_grad():
        model.logits(model(example.inputs)[0])
    found.append(seen.counts)
    return found


def rounded_and_written() -> None:
    """fp32 and bf16, and text from a cache of this rank's key heads alone."""
    single_precision(["gpt2, biases, learned positions", "encoder"], grid=True)
    for name in ("grouped, fewer key heads than ranks", "documents, learned positions"):
        shape = SHAPES[name]
        whole = whole_model(shape)
        model, _ = split_model(shape, whole, grid=True)
        assert model.new_cache(2, 4)._keys[0].shape[1] < whole.config.key_heads
        ours, theirs = (list(generate_batch(each, [[5, 1, 3, 8], [2], [9] * 20], 8, 1.0)) for each in (model, whole))
        assert ours == theirs


def compiled() -> None:
    """Layers compiled as training does it."""
    shape = {"dtype": torch.float32, "bias": True}
    whole = whole_model(shape)
    model, splits = split_model(shape, whole, grid=True)
    for layer in model.layers:
        layer.compile()
    example = example_of(whole.config)
    loss_of(whole, example).backward()
    loss_of(model, example).backward()
    of_whole = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        if len(splits[name].tensor_copies) == 1:
            theirs = splits[name].take(of_whole[name].grad)
            assert (parameter.grad - theirs).norm() < 1e-5 * theirs.norm() + 1e-4, name
