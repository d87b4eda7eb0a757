"""What a grid of tensor ranks sends. Run by `test_grid.py`."""

from __future__ import annotations

from collections import Counter

import torch

from parallel.cases_tensor import SHAPES, counted_behind, single_precision
from parallel.split_models import BATCH, LENGTH, example_of, split_model, whole_model
from tenfold.evaluation.generation import generate_batch
from tenfold.parallel.mesh import Degrees
from tenfold.parallel.traffic import Collectives

GRID = Degrees(tensor=4, grid=True)


def counted_collectives() -> list[Counter[str]]:
    """Calls of the layers and embedding, the loss, the backward pass, and of a pass without gradients, with logits."""
    shape = {"layers": 3, "heads": 4, "ffn": 14}
    model, _ = split_model(shape, whole_model(shape), GRID)
    example = example_of(model.config)
    with Collectives() as seen:
        hidden = model(example.inputs)[0]
    assert hidden.shape == (BATCH // 2, LENGTH // 2, 20)
    blocks = [parameter for name, parameter in model.layers[0].named_parameters() if parameter.dim() == 2]
    sent = [size for name, size in seen.calls if name == "broadcast"]
    assert sorted(sent) == sorted(3 * 2 * [block.numel() for block in blocks])
    assert sum(map(torch.numel, blocks)) == (4 * 16 * 20 + 3 * 14 * 20) // 4
    assert {size for name, size in seen.calls if name == "all_gather_into_tensor"} == {hidden.numel()}
    _, found = counted_behind(model, hidden, example)
    return [seen.counts, *found]


def rounded_and_written() -> None:
    """fp32 and bf16, and text from a cache of this rank's key heads alone."""
    single_precision(GRID, ["gpt2, biases, learned positions", "encoder"])
    for name in ("grouped, fewer key heads than ranks", "documents, learned positions"):
        shape = SHAPES[name]
        whole = whole_model(shape)
        model, _ = split_model(shape, whole, GRID)
        assert model.new_cache(2, 4)._keys[0].shape[1] < whole.config.key_heads
        ours, theirs = (list(generate_batch(each, [[5, 1, 3, 8], [2], [9] * 20], 8, 1.0)) for each in (model, whole))
        assert ours == theirs
